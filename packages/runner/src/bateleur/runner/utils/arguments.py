"""What users pass, checked: a ValueError that names argument, value and rule, and else the value in its own type.

A check takes the name of an argument and its value.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

Check: TypeAlias = Callable[[str, Any], Any]

E = TypeVar("E", bound=Enum)

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80
_REPR.maxlist = _REPR.maxtuple = _REPR.maxarray = _REPR.maxset = _REPR.maxdict = 8
TEXTS_AND_BYTES = (str, bytes, bytearray, memoryview)
"""Sequences that nobody means as a list."""


def shown(value: object) -> str:
    """The value on one line of moderate length, whatever it is."""
    try:
        return " ".join(_REPR.repr(value).splitlines())
    except Exception:  # the value's own code, or a number of too many digits
        return f"a value of type {type(value).__name__}"


def listed(names: Iterable[str]) -> str:
    """Names that somebody else has chosen, on one line of moderate length, however many they are."""
    ordered = sorted(names)
    return ", ".join([*map(shown, ordered[:8]), *["..."] * (len(ordered) > 8)])


def refuse(name: str, value: object, rule: str) -> NoReturn:
    """Raise the ValueError of every check."""
    raise ValueError(f"{name} is {shown(value)}; it must be {rule}")


@dataclass(frozen=True, slots=True)
class Integer:
    """An integer of at least `low` and at most `high`; a bool is none."""

    low: float = -math.inf
    high: float = math.inf
    why: str = ""
    """Ends the rule."""
    rule: str = ""
    """In place of what follows from the bounds."""

    def __call__(self, name: str, value: object) -> int:
        """Returns an int. Raises ValueError for anything else."""
        if isinstance(value, Integral) and not isinstance(value, bool):
            number = int(value)
            if self.low <= number <= self.high:
                return number
        bounds = "" if self.low == -math.inf else f" >= {self.low}"
        if self.high != math.inf:
            bounds = f" in [{self.low}, {self.high}]"
        refuse(name, value, (self.rule or f"an integer{bounds}") + self.why)


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number of at least `low` and at most `high`; with `above` greater than `low`."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False

    def __call__(self, name: str, value: object) -> float:
        """Returns a float. Raises ValueError for anything else."""
        if isinstance(value, Real) and not isinstance(value, bool):
            number = _as_float(value)
            least = self.low < number if self.above else self.low <= number
            if math.isfinite(number) and least and number <= self.high:
                return number
        bounds = "" if self.low == -math.inf else f" {'>' if self.above else '>='} {self.low:g}"
        if self.high != math.inf:
            bounds = f" in {'(' if self.above else '['}{self.low:g}, {self.high:g}]"
        refuse(name, value, f"a finite number{bounds}")


def flag(name: str, value: object) -> bool:
    """True or False; not the text "false", which counts as true."""
    if not isinstance(value, bool):
        refuse(name, value, "True or False")
    return value


def text(name: str, value: object) -> str:
    """Text that is not empty, and that a file can hold."""
    if not isinstance(value, str) or not value:
        refuse(name, value, "text that is not empty")
    require_unicode(name, value)
    return value


def folder(name: str, value: object) -> str:
    """The path of a folder, which need not exist."""
    path = fspath(value) if isinstance(value, PathLike) else value
    if not isinstance(path, str) or not path:
        refuse(name, value, "the path of a folder")
    return path


def file(name: str, value: object) -> Path:
    """The path of a file, which need not exist."""
    path = fspath(value) if isinstance(value, PathLike) else value
    if not isinstance(path, str) or not path or "\0" in path:
        refuse(name, value, "the path of a file")
    return Path(path)


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of some names, or a member of an enumeration that is called so; what is passed is returned as it is."""

    names: tuple[str, ...]

    def __call__(self, name: str, value: Any) -> Any:
        """Raises ValueError for anything else."""
        spelled = (value.name, value.value) if isinstance(value, Enum) else (value,)
        if not any(isinstance(each, str) and each in self.names for each in spelled):
            refuse(name, value, f"one of {', '.join(self.names)}")
        return value


@dataclass(frozen=True, slots=True)
class Several:
    """A sequence whose entries pass a check, as a tuple. `rule`: what it is in words."""

    each: Check
    rule: str

    def __call__(self, name: str, value: object) -> tuple[Any, ...]:
        """Raises ValueError that names the entry, or the whole where it is no sequence."""
        if not isinstance(value, Sequence) or isinstance(value, TEXTS_AND_BYTES):
            refuse(name, value, self.rule)
        return tuple(self.each(f"{name}[{i}]", entry) for i, entry in enumerate(value))


def maybe(check: Check) -> Check:
    """None passes as well."""
    return lambda name, value: None if value is None else check(name, value)


def require_unicode(name: str, value: str) -> None:
    """Refuse text that no file can hold: with half of a surrogate pair, as JSON and shells can write it."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half, at = value[error.start], error.start
        raise ValueError(f"{name} holds {half!r} at position {at}, half of a surrogate pair") from error


def member_of(kind: type[E], spelled: E | str) -> E:
    """The member of an enumeration that a user spelled by its name or value, which `OneOf` has checked."""
    if isinstance(spelled, kind):
        return spelled
    return next(each for each in kind if spelled in (each.name, each.value))


def _as_float(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:  # an int beyond float's range: as good as infinite
        return math.inf
