"""Conversations as a fleet of replicas meets them: who comes when, what it says, how long it thinks.

Sessions come at random, each with one of a few system prompts of very unequal popularity; a session is a number of
turns, and every turn's prompt is all that was said before and something new. Lengths and pauses are drawn from the
distributions that published traces of chats are usually described by: geometric turns, log-normal lengths, exponential
pauses. The numbers are a user's to choose and no measurement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What users do. Times are seconds, lengths tokens."""

    sessions_per_s: float
    """Over the whole fleet."""
    system_prompts: int = 50
    popularity: float = 1.1
    """Exponent of their ranks: 0 is equal popularity."""
    system_tokens: int = 300
    """Median length of a system prompt."""
    user_tokens: int = 40
    output_tokens: int = 16
    spread: float = 0.6
    """Of the logarithm of all three lengths."""
    turns: float = 5.0
    """On average, one at least."""
    think_s: float = 5.0
    longest: int = 2048
    """Tokens of a conversation; it ends before it would be longer."""


@dataclass(slots=True, eq=False)
class Session:
    """A conversation: `history` is what its next turn's prompt begins with."""

    number: int
    history: list[int]
    turns_left: int
    traffic: Traffic
    rng: np.random.Generator

    def turn(self) -> tuple[list[int], int] | None:
        """The next prompt, and how many tokens answer it; None when the conversation is over."""
        if not self.turns_left:
            return None
        self.turns_left -= 1
        said = self.rng.integers(1, _TOKENS, _length(self.rng, self.traffic.user_tokens, self.traffic.spread))
        prompt = self.history + said.tolist()
        answer = _length(self.rng, self.traffic.output_tokens, self.traffic.spread)
        return None if len(prompt) + answer > self.traffic.longest else (prompt, answer)

    def pause(self) -> float:
        """Seconds until the user has read the answer and written on."""
        return float(self.rng.exponential(self.traffic.think_s))


_TOKENS = 1 << 30
"""Ids are drawn from so many, that no two texts are equal by chance."""


def sessions(traffic: Traffic, seed: int) -> Iterator[tuple[float, Session]]:
    """When each session begins, and the session, without an end."""
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
