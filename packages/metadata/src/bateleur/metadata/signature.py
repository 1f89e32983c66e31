"""Host scalars that a CUDA graph freezes, each with the rule that a replay must satisfy."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    """Rule between a host scalar at capture and the same scalar of a batch that replays the graph.

    BOUND: at most the captured value. FLOOR: at least the captured value. LAYOUT (a stride, width or offset): equal to
    it. CONTROL (a value that selects a branch or kernel): equal to it, and the graph key must contain it.
    """

    BOUND = "bound"
    """Sizes a launch, grid or workspace: the captured value must be at least the batch's."""
    FLOOR = "floor"
    """Kernels rely on at least this value: the captured value must be at most the batch's."""
    LAYOUT = "layout"
    """A stride, width or offset: must be equal."""
    CONTROL = "control"
    """Selected a branch or kernel: must be equal, and belongs to the graph key."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Host scalars of one batch: (name, role, value) each. Values of roles BOUND and FLOOR must be comparable."""

    items: tuple[tuple[str, Role, Hashable], ...] = ()

    @classmethod
    def join(cls, **parts: Signature) -> Signature:
        """Join the signatures of several builders. Names become ``part.name``."""
        items = ((f"{part}.{name}", role, value) for part, s in parts.items() for name, role, value in s.items)
        return cls(tuple(items))

    def admits(self, runtime: Signature) -> str | None:
        """Return why a batch with signature ``runtime`` may not replay this capture, or None if it may.

        The text names the scalar, its role and both values.
        """
        captured, offered = ({name: (role, value) for name, role, value in each.items} for each in (self, runtime))
        if captured.keys() != offered.keys():
            return f"{min(captured.keys() ^ offered.keys())} is in only one of the two signatures"
        for name, (role, value) in captured.items():
            other_role, other = offered[name]
            if role is not other_role:
                return f"{name} was captured as {role.value} and offered as {other_role.value}"
            if role is Role.BOUND and value < other:  # type: ignore[operator]
                return f"{name} is {other}, above the captured bound {value}"
            if role is Role.FLOOR and value > other:  # type: ignore[operator]
                return f"{name} is {other}, below the captured floor {value}"
            if role in (Role.LAYOUT, Role.CONTROL) and value != other:
                return f"{name} is {other}, but {role.value} {value} was captured"
        return None
