"""What `explain` found, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from operator import mul
from typing import Any

from torch import Tensor

_GAIN = 0.02
"""More accepted drafts a step than this, and this share of them, are worth naming."""
_SIGMAS = 3.0
"""By how many standard errors a difference is no chance."""
_COLLAPSE, _FEW = 0.6, 10
"""A position accepting less than this share of the one before it has collapsed, if it was not reached but few times."""
_AGREE = 0.93
"""Of tokens per step, that two ways of running the same head must have in common: roundings differ."""
_OUTSIDE = 0.05
"""Share of the target's tokens outside the draft vocabulary that is worth naming."""

ENGINE, EAGER, ALONE, ORACLE = "engine", "without graphs", "head alone", "all drafts right"


@dataclass(frozen=True, slots=True)
class Run:
    """Drafts of one run: by position, how often one was reached and accepted.

    name: the head in the `ENGINE`, there `EAGER`, and `ALONE` along recorded texts; `ORACLE` is a drafter that knows
        the text, in the engine.
    """

    name: str
    temperature: float
    reached: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def acceptance(self) -> tuple[float, ...]:
        """By position: how often a draft was accepted when all before it were. NaN where none was reached."""
        pairs = zip(self.accepted, self.reached, strict=True)
        return tuple(kept / tried if tried else math.nan for kept, tried in pairs)

    @property
    def tokens_per_step(self) -> float:
        """Of endless texts with this acceptance; the end of real ones cuts a step short."""
        rates = (0.0 if math.isnan(rate) else rate for rate in self.acceptance)
        return 1.0 + float(sum(accumulate(rates, mul)))


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of the checkpoint: how many drafts are accepted at each place of the target's own texts.

    cause: what is wrong if it is clearly better than the declared one.
    tokens_per_step: were every place the beginning of a step. from_tokens_alone: with features in random order.
    better, uses_features: whether that is more than as declared, and than from tokens alone; clearly, not by chance.
    """

    name: str
    cause: str
    tokens_per_step: float
    from_tokens_alone: float
    better: bool
    uses_features: bool

    @classmethod
    def of(cls, name: str, cause: str, accepted: Tensor, declared: Tensor, shuffled: Tensor) -> Reading:
        """From drafts accepted at P places, (P,) each: of this reading, as declared, and with shuffled features."""
        tokens, alone = 1 + float(accepted.mean()), 1 + float(shuffled.mean())
        return cls(name, cause, tokens, alone, _clearly(accepted, declared), _clearly(accepted, shuffled))


def _clearly(accepted: Tensor, other: Tensor) -> bool:
    gain = (accepted - other).double()
    mean, least = float(gain.mean()), _GAIN * max(1.0, float(other.mean()))
    return mean >= least and mean >= _SIGMAS * float(gain.std()) / math.sqrt(len(gain))


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What was measured, and why acceptance is what it is.

    readings: first as declared; drafts drawn at temperature 0.8, along texts of all temperatures.
    vocabulary_share: of the target's tokens, those that the head could draft: no acceptance is above it.
    causes: of "bookkeeping", "features", "norm", "vocabulary" and "rollout" those found, most likely first; empty
        where nothing is wrong.
    conclusions: the same in sentences, at least one.
    """

    draft: str
    kind: str
    num_speculative_tokens: int
    runs: tuple[Run, ...]
    readings: tuple[Reading, ...]
    draft_vocab_size: int
    vocab_size: int
    vocabulary_share: float
    causes: tuple[str, ...] = ()
    conclusions: tuple[str, ...] = ()

    def run(self, name: str, temperature: float = 0.0) -> Run | None:
        """One of the runs, if there was such a one."""
        return next((run for run in self.runs if (run.name, run.temperature) == (name, temperature)), None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; what is not known is None."""
        found = asdict(self)
        for run, told in zip(self.runs, found["runs"], strict=True):
            told["acceptance"] = [None if math.isnan(rate) else rate for rate in run.acceptance]
            told["tokens_per_step"] = run.tokens_per_step
        return found

    def table(self) -> str:
        """The same as lines of text for a terminal."""
        lines = [
            self.draft,
            f"{self.kind} head, {self.num_speculative_tokens} drafts a step, {self.draft_vocab_size:,} of "
            f"{self.vocab_size:,} tokens: {self.vocabulary_share:.1%} of what the target said",
            "",
            f"{'':<50}{'tokens/step':>12}  accepted when reached, by position",
        ]
        for run in self.runs:
            name, rates = f"{run.name}, temperature {run.temperature:g}", [f"{r:.2f}" for r in run.acceptance]
            lines.append(f"{name:<50}{run.tokens_per_step:>12.2f}  {' '.join(rates)}")
        lines += ["", f"{'the checkpoint, read':<50}{'tokens/step':>12}  from tokens alone"]
        for each in self.readings:
            lines.append(f"{each.name:<50}{each.tokens_per_step:>12.2f}{each.from_tokens_alone:>19.2f}")
        return "\n".join([*lines, "", *self.conclusions])


def conclude(facts: Explanation, problems: list[str]) -> Explanation:
    """`facts` with what follows from them and from what went wrong in the engine, most likely cause first."""
    found = [("bookkeeping", problem) for problem in [*problems, *_engine_loses(facts)]]
    declared, share = facts.readings[0], facts.vocabulary_share
    better = [reading for reading in facts.readings if reading.better and reading.uses_features]
    if better:
        best = max(better, key=lambda reading: reading.tokens_per_step)
        text = (
            f"{best.tokens_per_step:.2f} tokens per step are to be expected of the reading {best.name!r}, and "
            f"{declared.tokens_per_step:.2f} as declared: the configuration of the head is wrong there"
        )
        found.append((best.cause, text))
    if 1 - share >= _OUTSIDE:
        text = (
            f"{1 - share:.0%} of the target's tokens are not among the {facts.draft_vocab_size:,} that the head can "
            f"draft, so no acceptance is above {share:.0%}"
        )
        found.append(("vocabulary", text))
    if not better:  # a misread head says nothing of its training
        found += [("rollout", text) for text in _collapses(facts)]
    causes = tuple(dict.fromkeys(cause for cause, _ in found))
    lines = tuple(f"{cause}: {text}" for cause, text in found) or (_nothing(declared),)
    return replace(facts, causes=causes, conclusions=lines)


def _engine_loses(facts: Explanation) -> Iterator[str]:
    """The same head, run in two ways."""
    for run in facts.runs:
        eager = facts.run(EAGER, run.temperature)
        if run.name == ENGINE and eager is not None and run.tokens_per_step < _AGREE * eager.tokens_per_step:
            yield (
                f"at temperature {run.temperature:g} drafts on graphs give {run.tokens_per_step:.2f} tokens per step "
                f"and eager ones {eager.tokens_per_step:.2f}: a graph replays what is no longer true"
            )
    engine, alone = facts.run(ENGINE), facts.run(ALONE)
    if engine is None or alone is None or engine.tokens_per_step >= _AGREE * alone.tokens_per_step:
        return
    first = next(i for i, kept in enumerate(alone.acceptance) if not engine.acceptance[i] >= kept)
    yield (
        f"alone the head gives {alone.tokens_per_step:.2f} tokens per step, in the engine "
        f"{engine.tokens_per_step:.2f}, and falls behind at draft {first + 1}: the "
        f"{'chain' if first else 'first pass'} reads metadata, tokens or keys and values that are not its own"
    )


def _collapses(facts: Explanation) -> Iterator[str]:
    """The first position of the head alone that does."""
    alone = facts.run(ALONE)
    rates, reached = ((), ()) if alone is None else (alone.acceptance, alone.reached)
    for i, (before, this) in enumerate(pairwise(rates), 1):
        if this < _COLLAPSE * before and reached[i] >= _FEW:
            yield (
                f"draft {i + 1} is right {this:.0%} of the time when it is reached, draft {i} {before:.0%}, outside "
                "the engine as well: the head was trained without unrolling, on the target's features only"
            )
            return


def _nothing(declared: Reading) -> str:
    text = (
        f"nothing wrong found: the head is just not better than that, {declared.tokens_per_step:.2f} tokens per step "
        "behind the target's own texts"
    )
    lost = ". The target's features make no difference to it: it is untrained, or made for another target"
    return text if declared.uses_features else text + lost
