"""Errors of the conformance checks."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """One violation: its letter (of a recurrence: the name of the failed check), and a sentence that describes it."""

    letter: str
    text: str

    def __str__(self) -> str:
        return f"[{self.letter}] {self.text}"


class ConformanceError(AssertionError):
    """A builder, backend, drafter or recurrence breaks its interface's contract. ``violations`` has all findings."""

    def __init__(self, subject: str, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        lines = "\n  ".join(str(violation) for violation in self.violations)
        super().__init__(f"{subject} breaks the contract:\n  {lines}")

    @property
    def letters(self) -> tuple[str, ...]:
        """Sorted letters of the violations (of a recurrence: names of the failed checks), each once."""
        return tuple(sorted({violation.letter for violation in self.violations}))
