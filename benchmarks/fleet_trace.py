"""Generates conversations for `fleet.py`: arrival times, lengths of prompts and answers, and pauses.

Sessions arrive at random. Each has one of a few system prompts of very unequal popularity and a number of turns; the
prompt of a turn is the whole conversation so far plus new tokens. Distributions follow published traces of chats:
geometric numbers of turns, log-normal lengths, exponential pauses. The parameters are assumptions, not measurements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Parameters of the conversations. Times are in seconds, lengths in tokens."""

    sessions_per_s: float
    """Arrival rate of the whole fleet."""
    system_prompts: int = 50
    popularity: float = 1.1
    """Zipf exponent of the system prompts; 0 is equal popularity."""
    system_tokens: int = 300
    """Median length of a system prompt."""
    user_tokens: int = 40
    output_tokens: int = 16
    spread: float = 0.6
    """Standard deviation of the logarithm of all three lengths."""
    turns: float = 5.0
    """Mean number of turns, at least 1."""
    think_s: float = 5.0
    longest: int = 2048
    """Most tokens of a conversation; it ends before it would exceed them."""


@dataclass(slots=True, eq=False)
class Session:
    """A conversation. `history` is the beginning of its next prompt."""

    number: int
    history: list[int]
    turns_left: int
    traffic: Traffic
    rng: np.random.Generator

    def turn(self) -> tuple[list[int], int] | None:
        """The next prompt and the number of output tokens; None when the conversation is over."""
        if not self.turns_left:
            return None
        self.turns_left -= 1
        said = self.rng.integers(1, _TOKENS, _length(self.rng, self.traffic.user_tokens, self.traffic.spread))
        prompt = self.history + said.tolist()
        answer = _length(self.rng, self.traffic.output_tokens, self.traffic.spread)
        return None if len(prompt) + answer > self.traffic.longest else (prompt, answer)

    def pause(self) -> float:
        """Seconds until the user sends the next message."""
        return float(self.rng.exponential(self.traffic.think_s))


_TOKENS = 1 << 30
"""Token ids are drawn from this range, so that no two texts are equal by chance."""


def sessions(traffic: Traffic, seed: int) -> Iterator[tuple[float, Session]]:
    """Yield the start time and the session, without end."""
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, traffic.system_prompts + 1) ** traffic.popularity
    prompts = [
        rng.integers(1, _TOKENS, _length(rng, traffic.system_tokens, traffic.spread)).tolist()
        for _ in range(traffic.system_prompts)
    ]
    now, number, seeds = 0.0, 0, np.random.SeedSequence(seed)
    while True:
        now += float(rng.exponential(1.0 / traffic.sessions_per_s))
        which = int(rng.choice(len(prompts), p=weights / weights.sum()))
        own = np.random.default_rng(seeds.spawn(1)[0])
        turns = int(own.geometric(1.0 / traffic.turns))
        yield now, Session(number, list(prompts[which]), turns, traffic, own)
        number += 1


def _length(rng: np.random.Generator, median: int, spread: float) -> int:
    return max(1, round(float(median * np.exp(spread * rng.standard_normal()))))
