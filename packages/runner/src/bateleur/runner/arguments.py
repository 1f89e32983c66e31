"""Types of what users pass: a ValueError that names argument, value and rule."""

from __future__ import annotations

from numbers import Integral, Real
from os import PathLike


def require_integers(**arguments: object) -> None:
    """Refuse what is no integer."""
    for name, value in arguments.items():
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; it must be an integer")


def require_integers_or_none(**arguments: object) -> None:
    """Refuse what is neither an integer nor None."""
    require_integers(**{name: value for name, value in arguments.items() if value is not None})


def require_numbers(**arguments: object) -> None:
    """Refuse what is no real number."""
    for name, value in arguments.items():
        if not isinstance(value, Real) or isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; it must be a number")


def require_bools(**arguments: object) -> None:
    """Refuse what is neither True nor False, such as the text "false", which counts as true."""
    for name, value in arguments.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; it must be True or False")


def require_paths(**arguments: object) -> None:
    """Refuse what cannot name a folder; None passes."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, str | PathLike):
            raise ValueError(f"{name} is {value!r}; it must be the path of a folder")
