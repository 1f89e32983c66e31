"""The model that comes with this package, and the draft head made for it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


def shipped_model() -> Path:
    """The folder of the model."""
    return _HERE / "model"


def shipped_draft() -> Path:
    """The folder of its draft head."""
    return _HERE / "draft"


def default_drafts(options: Mapping[str, Any], *, alone: bool = False) -> dict[str, str]:
    """More of an engine's options, where they name no draft: the shipped model has its head.

    alone: of one request, for which all drafts pay from the first step on. Of several as many are made as pay, unless
    tokens would depend on how many these are.
    """
    if "draft" in options or options.get("model") is not None or options.get("num_speculative_tokens") == 0:
        return {}
    depends = options.get("speculative_rule", "coupled") != "coupled"
    chosen = alone or "draft_policy" in options or depends
    return {"draft": "auto"} if chosen else {"draft": "auto", "draft_policy": "auto"}
