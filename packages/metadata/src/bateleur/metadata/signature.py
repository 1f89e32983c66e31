"""Host scalars that reach a captured region, each with the rule a replay must keep.

A graph freezes every host number it was captured with. Whether a later batch may still replay it depends on what
the number was for, so each one carries its role.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    """What a captured host scalar must be in relation to the batch that replays it."""

    BOUND = "bound"
    """Sizes a launch, grid or workspace: at least the batch's."""
    FLOOR = "floor"
    """What at least so many rows keep, and kernels rely on: at most the batch's."""
    LAYOUT = "layout"
    """A stride, width or offset: equal."""
    CONTROL = "control"
    """Chose a branch or a kernel: equal, and therefore part of the key."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The named host scalars of one batch with their roles. BOUND and FLOOR values are comparable numbers."""

    items: tuple[tuple[str, Role, Hashable], ...] = ()

    @classmethod
    def join(cls, **parts: Signature) -> Signature:
        """One signature of several builders' ones; names become ``part.name``."""
        items = (
            (f"{part}.{name}", role, value) for part, s in parts.items() for name, role, value in s.items
        )
        return cls(tuple(items))

    def admits(self, runtime: Signature) -> str | None:
        """Why a batch with signature ``runtime`` may not replay what was captured with this one; None if it may.

        The text names the scalar, its role and both values.
        """
        captured, offered = (
            {name: (role, value) for name, role, value in each.items} for each in (self, runtime)
        )
        if captured.keys() != offered.keys():
            odd = sorted(captured.keys() ^ offered.keys())
            return f"{odd[0]} is in only one of the two signatures"
        for name, (role, value) in captured.items():
            other_role, other = offered[name]
            if role is not other_role:
                return f"{name} was captured as {role.value} and offered as {other_role.value}"
            if role is Role.BOUND:
                if value < other:  # type: ignore[operator]
                    return f"{name} is {other}, above the captured bound {value}"
            elif role is Role.FLOOR:
                if value > other:  # type: ignore[operator]
                    return f"{name} is {other}, below the captured floor {value}"
            elif value != other:
                return f"{name} is {other}, but {role.value} {value} was captured"
        return None
