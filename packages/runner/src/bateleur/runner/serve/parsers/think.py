"""How a model marks its reasoning: between <think> and </think>."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Think:
    """Reasoning at the beginning of an answer."""

    BEGIN: ClassVar[str] = "<think>"
    END: ClassVar[str] = "</think>"

    opened: bool = False
    """The prompt ends within the reasoning, so that the answer begins there."""
