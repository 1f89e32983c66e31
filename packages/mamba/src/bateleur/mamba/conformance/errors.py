"""What a check says of a recurrence that breaks the contract."""

from __future__ import annotations

from collections.abc import Sequence


class ConformanceError(AssertionError):
    """A recurrence breaks the contract: what was found first in each part, in ``violations``."""

    def __init__(self, subject: str, violations: Sequence[tuple[str, str]]) -> None:
        self.violations = tuple(violations)
        """(part, what is wrong); parts are "declaration", "scan", "update", "replay", "fold" and "schedule"."""
        lines = "\n  ".join(f"[{part}] {what}" for part, what in self.violations)
        super().__init__(f"{subject} breaks the contract:\n  {lines}")

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that are wrong, in the order in which they are checked."""
        return tuple(part for part, _ in self.violations)


class Broken(Exception):
    """Raised inside a part by what it finds; ``part`` where that is not the part that is running."""

    def __init__(self, what: str, part: str | None = None) -> None:
        super().__init__(what)
        self.part = part
