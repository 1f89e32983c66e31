"""Counters of an engine: what it did and where the host's time went."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from bateleur.eagle import AcceptStats


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine started."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the caches instead, by requests that finished."""
    num_emitted_tokens: int = 0
    num_verify_rows: int = 0
    """Decoding rows over all steps: without speculation, one emitted token each."""
    num_verified_tokens: int = 0
    """Tokens that these emitted; prompts emit their first one beside them."""
    acceptance: AcceptStats | None = None
    """What became of drafts; None without a drafter."""
    num_preemptions: int = 0
    num_finished: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("schedule", "stage", "build", "forward", "sample", "commit", "draft", "emit"), 0.0
        )
    )
    """Host seconds by part of a step; on CPU, forward and sample are the computation itself."""

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a decoding row emits in a step; 1.0 without speculation, and before the first such step."""
        return self.num_verified_tokens / self.num_verify_rows if self.num_verify_rows else 1.0

    @property
    def num_draft_tokens(self) -> int:
        """Drafts that were verified, those behind a rejected one as well."""
        return 0 if self.acceptance is None else self.acceptance.num_drafts

    @property
    def acceptance_per_position(self) -> list[float]:
        """How often draft i was accepted when all before it were; NaN where it was never reached, [] if none are."""
        return [] if self.acceptance is None else self.acceptance.acceptance_per_position.tolist()


class StepClock:
    """Adds the time between laps to `EngineStats.seconds`."""

    def __init__(self, stats: EngineStats) -> None:
        self._seconds = stats.seconds
        self._start = self._last = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds up to the last lap."""
        return self._last - self._start

    def lap(self, part: str) -> None:
        """Book the time since the last lap under `part`."""
        now = time.perf_counter()
        self._seconds[part] += now - self._last
        self._last = now
