"""What a check says of a recurrence that breaks the contract."""

from __future__ import annotations

from bateleur.metadata.conformance.errors import ConformanceError, Violation


def broken(what: str, part: str = "") -> ConformanceError:
    """To be raised inside a part by what it finds. part: where it belongs, if that is not the part that is running."""
    return ConformanceError("the recurrence", [Violation(part, what)])
