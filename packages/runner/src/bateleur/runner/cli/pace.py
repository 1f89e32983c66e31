"""How fast an engine was, in a line."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bateleur.runner.llm import LLM


class Pace:
    """Tokens a second from the first token on: what comes before it warms up, or reads a prompt."""

    def __init__(self, llm: LLM) -> None:
        self._stats = llm.get_metrics()
        self._began = 0.0
        self._first = 0

    def tick(self) -> None:
        """A step has ended."""
        if not self._first and self._stats.num_emitted_tokens:
            self._first, self._began = self._stats.num_emitted_tokens, time.perf_counter()

    def line(self) -> str:
        """What became of it all; to be called when the last step has ended."""
        stats = self._stats
        count = stats.num_emitted_tokens
        parts = [f"{count} tokens"]
        if count > self._first:
            rate = (count - self._first) / (time.perf_counter() - self._began)
            parts.append(f"{rate:.1f} tokens/s")
        parts.append(f"{stats.tokens_per_step:.2f} tokens per step")
        if rates := [f"{rate:.2f}" for rate in stats.acceptance_per_position if rate == rate]:
            parts.append(f"drafts accepted {' '.join(rates)}")
        return ", ".join(parts)
