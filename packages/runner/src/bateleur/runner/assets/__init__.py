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
    """Return the options of `LLM` that use the shipped draft head: `draft` "auto", and perhaps `draft_policy` "auto".

    Returns {} if `options` name a model, have a `draft`, or set `num_speculative_tokens` to 0.
    alone: whether the engine runs one request at a time. If not, the result has `draft_policy` "auto" (all or no
    drafts, by measured step times), unless `options` have a `draft_policy`, or a `speculative_rule` other than
    "coupled".
    """
    if "draft" in options or options.get("model") is not None or options.get("num_speculative_tokens") == 0:
        return {}
    depends = options.get("speculative_rule", "coupled") != "coupled"
    chosen = alone or "draft_policy" in options or depends
    return {"draft": "auto"} if chosen else {"draft": "auto", "draft_policy": "auto"}
