"""What a model is called in bodies and replies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bateleur.runner.utils.arguments import refuse, shown

SHIPPED = "bateleur"
"""The model that comes with the package."""


def served_names(model: Path | None, given: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of a model: those that were given, else those of its folder; replies have the first."""
    if given:
        return tuple(given)
    return (SHIPPED,) if model is None else (model.resolve().name, str(model))


def require_served(name: str | None, names: Sequence[str]) -> None:
    """Raise ValueError if a body asks for another model than the one there is; silent means that one."""
    if name is not None and name not in names:
        known = ", ".join(map(shown, names))
        refuse("model", name, f"absent or one of {known}; --served-model-name says what else it is called")
