"""Types of what users pass: a ValueError that names argument, value and rule."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from numbers import Integral, Real
from os import PathLike
from typing import TypeVar

E = TypeVar("E", bound=Enum)


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


def require_unicode(**arguments: str) -> None:
    """Refuse text that no file can hold: with half of a surrogate pair, as JSON and shells can write it."""
    for name, text in arguments.items():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half, at = text[error.start], error.start
            raise ValueError(f"{name} holds {half!r} at position {at}, half of a surrogate pair") from error


def require_paths(**arguments: object) -> None:
    """Refuse what cannot name a folder; None passes."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, str | PathLike):
            raise ValueError(f"{name} is {value!r}; it must be the path of a folder")


def require_one_of(names: Sequence[str | None], **arguments: object) -> None:
    """Refuse what is none of `names`, and no member of an enumeration that is called so."""
    for name, value in arguments.items():
        spelled = (value.name, value.value) if isinstance(value, Enum) else (value,)
        if not any(isinstance(each, str | None) and each in names for each in spelled):
            known = ", ".join(each for each in names if each is not None)
            raise ValueError(f"{name} is {value!r}; it must be one of {known}")


def member_of(kind: type[E], spelled: E | str) -> E:
    """The member of an enumeration that a user spelled by its name or value, which `require_one_of` has checked."""
    if isinstance(spelled, kind):
        return spelled
    return next(each for each in kind if spelled in (each.name, each.value))
