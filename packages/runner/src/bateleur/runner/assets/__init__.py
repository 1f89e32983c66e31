"""The shipped model, which comes with this package, and the draft head made for it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


def shipped_model() -> Path:
    """Return the folder of the shipped model."""
    return _HERE / "model"


def shipped_draft() -> Path:
    """Return the folder of the shipped draft head."""
    return _HERE / "draft"


def default_drafts(options: Mapping[str, Any], *, alone: bool = False) -> dict[str, str]:
    """Return the options for the draft head of the shipped model; {} for another model, or if `options` choose a draft.

    alone: whether the engine runs one request at a time. Else `draft_policy` "auto" adapts drafts to measured times.
    """
    if "draft" in options or options.get("model") is not None or options.get("num_speculative_tokens") == 0:
        return {}
    depends = options.get("speculative_rule", "coupled") != "coupled"
    chosen = alone or "draft_policy" in options or depends
    return {"draft": "auto"} if chosen else {"draft": "auto", "draft_policy": "auto"}
