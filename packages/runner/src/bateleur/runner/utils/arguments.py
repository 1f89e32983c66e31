"""Checks of user arguments: each returns the value, converted to its type, or raises ValueError.

A check is called with the name of the argument and its value. The message names argument, value and rule.
"""

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
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
TEXTS_AND_BYTES = (str, bytes, bytearray, memoryview)  # sequences that do not count as lists


def shown(value: object) -> str:
    """Return a short representation of any value, on one line."""
    try:
        return " ".join(_REPR.repr(value).splitlines())
    except Exception:  # the value's own code, or a number of too many digits
        return f"a value of type {type(value).__name__}"


def listed(names: Iterable[str]) -> str:
    """Return a short list of names given by a user, on one line."""
    ordered = sorted(names)
    return ", ".join([*map(shown, ordered[:8]), *["..."] * (len(ordered) > 8)])


def refuse(name: str, value: object, rule: str) -> NoReturn:
    """Raise ValueError with the message "`name` is `value`; it must be `rule`"."""
    raise ValueError(f"{name} is {shown(value)}; it must be {rule}")


@dataclass(frozen=True, slots=True)
class Integer:
    """Checks for an integer in [low, high]; a bool is not one. rule: what the value must be, for the message; empty for
    a text made from the bounds. why: appended to the rule.
    """

    low: float = -math.inf
    high: float = math.inf
    why: str = ""
    rule: str = ""

    def __call__(self, name: str, value: object) -> int:
        """Return the value as an int. Raises ValueError for anything else."""
        if isinstance(value, Integral) and not isinstance(value, bool) and self.low <= int(value) <= self.high:
            return int(value)
        bounds = "" if self.low == -math.inf else f" >= {self.low}"
        if self.high != math.inf:
            bounds = f" in [{self.low}, {self.high}]"
        refuse(name, value, (self.rule or f"an integer{bounds}") + self.why)


@dataclass(frozen=True, slots=True)
class Number:
    """Checks for a finite number in [low, high], or in (low, high] if `above`."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False

    def __call__(self, name: str, value: object) -> float:
        """Return the value as a float. Raises ValueError for anything else."""
        if isinstance(value, Real) and not isinstance(value, bool):
            with suppress(OverflowError):  # an int beyond the range of float
                number = float(value)
                least = self.low < number if self.above else self.low <= number
                if math.isfinite(number) and least and number <= self.high:
                    return number
        bounds = "" if self.low == -math.inf else f" {'>' if self.above else '>='} {self.low:g}"
        if self.high != math.inf:
            bounds = f" in {'(' if self.above else '['}{self.low:g}, {self.high:g}]"
        refuse(name, value, f"a finite number{bounds}")


def flag(name: str, value: object) -> bool:
    """Return `value`. Raises ValueError if it is not a bool; text such as "false" is refused."""
    if not isinstance(value, bool):
        refuse(name, value, "True or False")
    return value


def text(name: str, value: object) -> str:
    """Return `value`. Raises ValueError if it is not text, is empty, or can't be encoded in UTF-8."""
    if not isinstance(value, str) or not value:
        refuse(name, value, "text that is not empty")
    require_unicode(name, value)
    return value


def mapping(name: str, value: object, rule: str = "an object") -> dict[str, Any]:
    """Return `value`, a mapping with str keys, as a dict. Raises ValueError for anything else.

    rule: what the value must be, for the message.
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        refuse(name, value, rule)
    return dict(value)


def folder(name: str, value: object, kind: str = "folder") -> str:
    """Return `value`, the path of a folder, as str; the folder need not exist. Raises ValueError for anything else.

    kind: word for the folder in the message.
    """
    path = fspath(value) if isinstance(value, PathLike) else value
    if not isinstance(path, str) or not path:
        refuse(name, value, f"the path of a {kind}")
    return path


def file(name: str, value: object) -> Path:
    """Return `value`, the path of a file, as `Path`; the file need not exist. Raises ValueError for anything else."""
    path = folder(name, value, "file")
    return Path(path) if "\0" not in path else refuse(name, value, "the path of a file")


@dataclass(frozen=True, slots=True)
class OneOf:
    """Checks for one of `names`, or an enumeration member with that name or value."""

    names: tuple[str, ...]

    def __call__(self, name: str, value: Any) -> Any:
        """Return `value` unchanged. Raises ValueError for anything else."""
        spelled = (value.name, value.value) if isinstance(value, Enum) else (value,)
        if not any(isinstance(each, str) and each in self.names for each in spelled):
            refuse(name, value, f"one of {', '.join(self.names)}")
        return value


@dataclass(frozen=True, slots=True)
class Several:
    """Checks each entry of a sequence by `each`. rule: description of the sequence for messages."""

    each: Check
    rule: str

    def __call__(self, name: str, value: object) -> tuple[Any, ...]:
        """Return the checked entries as a tuple. Raises ValueError that names the entry or the argument."""
        if not isinstance(value, Sequence) or isinstance(value, TEXTS_AND_BYTES):
            refuse(name, value, self.rule)
        return tuple(self.each(f"{name}[{i}]", entry) for i, entry in enumerate(value))


def maybe(check: Check) -> Check:
    """Return a check that also accepts None."""
    return lambda name, value: None if value is None else check(name, value)


def require_unicode(name: str, value: str) -> None:
    """Raise ValueError for text that can't be encoded in UTF-8, because it has half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half, at = value[error.start], error.start
        raise ValueError(f"{name} holds {half!r} at position {at}, half of a surrogate pair") from error


def member_of(kind: type[E], spelled: E | str) -> E:
    """Return the enumeration member with this name or value, which `OneOf` has checked."""
    if isinstance(spelled, kind):
        return spelled
    return next(each for each in kind if spelled in (each.name, each.value))
