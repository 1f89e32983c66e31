"""Measurements of `explain`, and the conclusions drawn from them."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from operator import mul
from typing import Any, Self

from torch import Tensor

_MIN_GAIN = 0.02  # least difference to report, in accepted drafts per step and as a share of them
_MIN_SIGMAS = 3.0  # least difference to report, in standard errors
_COLLAPSE = 0.6  # a position is reported if its acceptance rate is below this share of the one before,
_MIN_REACHED = 10  # and if at least this many drafts reached it
_AGREEMENT = 0.93  # least ratio of tokens per step for two runs of one head to count as equal, as rounding differs
_MIN_OUTSIDE = 0.05  # least share of the target's tokens outside the draft vocabulary to report

ENGINE, EAGER, ALONE, ORACLE = "engine", "without graphs", "head alone", "all drafts right"
"""Names of runs: the head in the engine, the same without CUDA graphs, the head without an engine on recorded texts,
and the engine with a drafter that knows the texts."""


@dataclass(frozen=True, slots=True)
class Run:
    """Counts of one run: how often the draft at each position was reached and accepted.

    name: `ENGINE`, `EAGER` (the engine without graphs), `ALONE` (the head without the engine) or `ORACLE` (the engine
    with a drafter that knows the texts).
    """

    name: str
    temperature: float
    reached: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Acceptance rate of the drafts that were reached, by position; NaN if none was reached."""
        pairs = zip(self.accepted, self.reached, strict=True)
        return tuple(kept / tried if tried else math.nan for kept, tried in pairs)

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens per step of an infinite text with these rates. The last step of a real text has fewer tokens."""
        return 1.0 + float(sum(accumulate((0.0 if math.isnan(rate) else rate for rate in self.acceptance), mul)))


@dataclass(frozen=True, slots=True)
class ConventionResult:
    """Expected acceptance under one `Convention` (interpretation of the head's checkpoint), over all positions of the
    texts.

    name, cause: see `Convention`. from_tokens_alone: tokens per step if the hidden states that the head reads are
    shuffled. better: whether `tokens_per_step` is significantly higher than under the convention that the checkpoint
    declares. uses_features: whether `tokens_per_step` is significantly higher than `from_tokens_alone`.
    """

    name: str
    cause: str
    tokens_per_step: float
    from_tokens_alone: float
    better: bool
    uses_features: bool

    @classmethod
    def of(cls, name: str, cause: str, accepted: Tensor, declared: Tensor, shuffled: Tensor) -> Self:
        """Create a result from expected numbers of accepted drafts at P positions, (P,) each. accepted: under this
        convention. declared: under the one that the checkpoint declares. shuffled: under this convention, with shuffled
        hidden states.
        """
        tokens, alone = 1 + float(accepted.mean()), 1 + float(shuffled.mean())
        return cls(name, cause, tokens, alone, _exceeds(accepted, declared), _exceeds(accepted, shuffled))


def _exceeds(accepted: Tensor, other: Tensor) -> bool:
    """Return whether the mean of `accepted` is significantly higher than that of `other`."""
    gain = (accepted - other).double()
    mean, least = float(gain.mean()), _MIN_GAIN * max(1.0, float(other.mean()))
    return mean >= least and mean >= _MIN_SIGMAS * float(gain.std()) / math.sqrt(len(gain))


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Measurements and causes of a low acceptance rate.

    kind: "eagle1", "eagle3" or "mtp". conventions: results under each interpretation of the checkpoint, the declared
    one first; drafts are sampled at temperature 0.8. vocabulary_share: share of the target's tokens in the draft
    vocabulary, an upper bound of acceptance rates. conclusions: sentences for the user.

    causes: names of the causes, the most likely one first: "bookkeeping" (an error of the engine), "features" (the
    config names the wrong hidden states of the target, or the wrong order of the head's inputs), "norm" (the config is
    wrong about a hidden state being taken before or after a norm), "vocabulary" (the draft vocabulary lacks tokens of
    the target's texts, or `d2t`, its map to target tokens, is misread), "rollout" (the head was trained on hidden
    states of the target only, not on its own, so later drafts are poor).
    """

    draft: str
    kind: str
    num_speculative_tokens: int
    runs: tuple[Run, ...]
    conventions: tuple[ConventionResult, ...]
    draft_vocab_size: int
    vocab_size: int
    vocabulary_share: float
    causes: tuple[str, ...] = ()
    conclusions: tuple[str, ...] = ()

    def run(self, name: str, temperature: float = 0.0) -> Run | None:
        """Return the run with this name and temperature, or None."""
        return next((run for run in self.runs if (run.name, run.temperature) == (name, temperature)), None)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values; NaN becomes None."""
        fields = asdict(self)
        for run, values in zip(self.runs, fields["runs"], strict=True):
            values["acceptance"] = [None if math.isnan(rate) else rate for rate in run.acceptance]
            values["tokens_per_step"] = run.tokens_per_step
        return fields

    def table(self) -> str:
        """Return the explanation as a table for a terminal."""
        lines = [
            self.draft,
            f"{self.kind} head, {self.num_speculative_tokens} drafts per step, vocabulary {self.draft_vocab_size:,} of "
            f"{self.vocab_size:,} tokens ({self.vocabulary_share:.1%} of the output)",
            "",
            f"{'':<50}{'tokens/step':>12}  acceptance rate by position",
        ]
        for run in self.runs:
            name, rates = f"{run.name}, temperature {run.temperature:g}", [f"{r:.2f}" for r in run.acceptance]
            lines.append(f"{name:<50}{run.tokens_per_step:>12.2f}  {' '.join(rates)}")
        lines += ["", f"{'checkpoint, interpreted':<50}{'tokens/step':>12}  without features"]
        for each in self.conventions:
            lines.append(f"{each.name:<50}{each.tokens_per_step:>12.2f}{each.from_tokens_alone:>19.2f}")
        return "\n".join([*lines, "", *self.conclusions])


def conclude(facts: Explanation, problems: list[str]) -> Explanation:
    """Return `facts` with causes (the most likely first) and conclusions. problems: sentences on engine errors."""
    found = [("bookkeeping", problem) for problem in [*problems, *_engine_problems(facts)]]
    declared, share = facts.conventions[0], facts.vocabulary_share
    better = [each for each in facts.conventions if each.better and each.uses_features]
    if better:
        best = max(better, key=lambda each: each.tokens_per_step)
        text = (
            f"interpreted as {best.name!r} the head gives {best.tokens_per_step:.2f} tokens per step, as declared "
            f"{declared.tokens_per_step:.2f}: correct this in the config of the head"
        )
        found.append((best.cause, text))
    if 1 - share >= _MIN_OUTSIDE:
        text = (
            f"{1 - share:.0%} of the target's tokens are not in the draft vocabulary of {facts.draft_vocab_size:,} "
            f"tokens, so no acceptance rate can exceed {share:.0%}"
        )
        found.append(("vocabulary", text))
    if not better and (text := _rollout_problem(facts)):  # a misinterpreted head does not show how it was trained
        found.append(("rollout", text))
    causes = tuple(dict.fromkeys(cause for cause, _ in found))
    lines = [f"{cause}: {text}" for cause, text in found]
    if not found:
        rate = f"{declared.tokens_per_step:.2f} tokens per step"
        lines = [f"nothing wrong found: the head itself gives {rate} on these texts"]
        if not declared.uses_features:
            reason = "the head is untrained, or belongs to another target"
            lines[0] += f". The target's features make no difference: {reason}"
    return replace(facts, causes=causes, conclusions=tuple(lines))


def _engine_problems(facts: Explanation) -> Iterator[str]:
    """Yield errors of the engine, as sentences. They show as lower acceptance of the head with CUDA graphs than
    without, or in the engine than alone.
    """
    for run in facts.runs:
        eager = facts.run(EAGER, run.temperature)
        if run.name == ENGINE and eager and run.tokens_per_step < _AGREEMENT * eager.tokens_per_step:
            yield (
                f"at temperature {run.temperature:g} CUDA graphs give {run.tokens_per_step:.2f} tokens per step, eager "
                f"steps {eager.tokens_per_step:.2f}: a graph replays stale values"
            )
    engine, alone = facts.run(ENGINE), facts.run(ALONE)
    if engine is None or alone is None or engine.tokens_per_step >= _AGREEMENT * alone.tokens_per_step:
        return
    first = next(i for i, rate in enumerate(alone.acceptance) if not engine.acceptance[i] >= rate)
    yield (
        f"the head gives {alone.tokens_per_step:.2f} tokens per step alone and {engine.tokens_per_step:.2f} in the "
        f"engine, where draft {first + 1} is the first with a lower rate: the engine's {'later' if first else 'first'} "
        "draft pass reads wrong metadata, tokens, keys or values"
    )


def _rollout_problem(facts: Explanation) -> str:
    """Return a text on the first position at which the acceptance rate of the head alone collapses; "" if none."""
    alone = facts.run(ALONE)
    rates, reached = ((), ()) if alone is None else (alone.acceptance, alone.reached)
    for i, (before, this) in enumerate(pairwise(rates), 1):
        if this < _COLLAPSE * before and reached[i] >= _MIN_REACHED:
            rates_of = f"the acceptance rate of draft {i + 1} is {this:.0%} and of draft {i} {before:.0%}"
            reason = "the head was trained on the target's features only, not on its own"
            return f"{rates_of}, also without the engine: {reason}"
    return ""
