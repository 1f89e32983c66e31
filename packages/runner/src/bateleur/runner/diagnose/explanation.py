"""What `explain` found, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

_CLEARLY = 1.1
"""What is better must give this many times as many right drafts."""
_SIGMAS = 3.0
"""And by this many standard errors more."""
_COLLAPSE = 0.6
"""A position accepting less than this share of the one before it has collapsed."""
_AGREE = 0.93
"""Of tokens per step, that two ways of running the same head must have in common: roundings differ."""
_OUTSIDE = 0.05
"""Share of the target's tokens outside the draft vocabulary that is worth naming."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Drafts of one run: by position, how often one was reached and accepted."""

    temperature: float
    tokens_per_step: float
    reached: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def acceptance(self) -> tuple[float, ...]:
        """By position: how often a draft was accepted when all before it were. NaN where none was reached."""
        pairs = zip(self.accepted, self.reached, strict=True)
        return tuple(kept / tried if tried else math.nan for kept, tried in pairs)

    @property
    def expected(self) -> float:
        """Tokens per step of endless texts with this acceptance; the end of real ones cuts a run short."""
        total, survival = 1.0, 1.0
        for rate in self.acceptance:
            survival *= 0.0 if math.isnan(rate) else rate
            total += survival
        return total


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of the checkpoint: how many first drafts it gets right behind the target's own text."""

    name: str
    cause: str
    """What is wrong if it is clearly better than the declared one."""
    num_right: int
    num_total: int
    gain: float
    """Standard errors by which it beats the declared reading, place by place."""
    use: float
    """Standard errors by which it beats itself with the features in random order: what it makes of them."""

    @property
    def accuracy(self) -> float:
        """Share of right drafts."""
        return self.num_right / self.num_total

    def beats(self, declared: Reading) -> bool:
        """Whether it is clearly better, and not by chance: a head that says the same everywhere is sometimes right."""
        enough = self.accuracy >= _CLEARLY * declared.accuracy
        return enough and self.gain >= _SIGMAS and self.use >= _SIGMAS


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What was measured, and why acceptance is what it is.

    causes: of "bookkeeping", "features", "norm", "vocabulary" and "rollout" those found, most likely first; empty
        where nothing is wrong.
    conclusions: the same in sentences, at least one.
    """

    draft: str
    num_speculative_tokens: int
    kind: str = ""
    num_texts: int = 0
    measured: tuple[Measured, ...] = ()
    """In the engine, by temperature."""
    measured_eager: tuple[Measured, ...] = ()
    """The same without graphs; empty where there are none."""
    alone: Measured | None = None
    """The head's chains outside the engine, along the target's text of temperature 0."""
    alone_recycled: Measured | None = None
    """The same, fed its own state from the other side of its last norm; None where it has no choice."""
    oracle_tokens_per_step: tuple[tuple[float, float], ...] = ()
    """(temperature, tokens per step) of a drafter that knows the text; must be K + 1."""
    readings: tuple[Reading, ...] = ()
    """First the declared one."""
    shuffled_accuracy: float = math.nan
    """First drafts that the declared reading gets right from the tokens alone."""
    draft_vocab_size: int = 0
    vocab_size: int = 0
    vocabulary_share: float = math.nan
    """Share of the target's tokens that the head could draft: no acceptance is above it."""
    causes: tuple[str, ...] = ()
    conclusions: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON; what is not known is None."""
        runs = {"measured": self.measured, "measured_eager": self.measured_eager}
        single = {"alone": self.alone, "alone_recycled": self.alone_recycled}
        made = asdict(self)
        made |= {name: [_run(run) for run in each] for name, each in runs.items()}
        made |= {name: None if run is None else _run(run) for name, run in single.items()}
        made["readings"] = [asdict(reading) | {"accuracy": reading.accuracy} for reading in self.readings]
        known: dict[str, Any] = _without_nan(made)
        return known

    def table(self) -> str:
        """The same as lines of text for a terminal."""
        return "\n".join([*self._measurements(), *self.conclusions])

    def _measurements(self) -> Iterator[str]:
        yield f"{self.draft}"
        if self.alone is None:
            yield ""
            return
        yield f"{self.kind} head, {self.num_speculative_tokens} drafts a step, {self.num_texts} texts"
        yield ""
        yield f"{'':<34}{'tokens/step':>12}  accepted when reached, by position"
        for where, runs in (("engine", self.measured), ("without graphs", self.measured_eager)):
            for run in runs:
                yield _line(f"{where}, temperature {run.temperature:g}", run)
        yield _line("head alone, temperature 0", self.alone)
        for temperature, tokens in self.oracle_tokens_per_step:
            name = f"all drafts right, temperature {temperature:g}"
            yield f"{name:<34}{tokens:>12.2f}  {self.num_speculative_tokens + 1} if nothing is lost"
        yield ""
        yield f"{'first drafts that are right':<52}{'of':>8}{self.readings[0].num_total:>8,}"
        for reading in self.readings:
            yield f"  {reading.name:<58}{reading.accuracy:>8.3f}"
        yield f"  {'as declared, features in random order':<58}{self.shuffled_accuracy:>8.3f}"
        yield ""
        yield (
            f"draft vocabulary: {self.draft_vocab_size:,} of {self.vocab_size:,} tokens, "
            f"{self.vocabulary_share:.1%} of what the target said"
        )
        yield ""


def conclude(facts: Explanation, problems: list[str]) -> Explanation:
    """`facts` with what follows from them and from what went wrong in the engine, most likely cause first."""
    found = [("bookkeeping", problem) for problem in [*problems, *_engine_loses(facts)]]
    found += [*_misread(facts), *_outside(facts), *_collapses(facts)]
    causes = tuple(dict.fromkeys(cause for cause, _ in found))
    lines = tuple(f"{cause}: {text}" for cause, text in found) or (_nothing(facts),)
    return replace(facts, causes=causes, conclusions=lines)


def _engine_loses(facts: Explanation) -> Iterator[str]:
    """The same head, run in two ways."""
    for graph, eager in zip(facts.measured, facts.measured_eager, strict=False):
        if graph.expected < _AGREE * eager.expected:
            yield (
                f"at temperature {graph.temperature:g} drafts on graphs give {graph.expected:.2f} tokens per step and "
                f"eager ones {eager.expected:.2f}: a graph replays what is no longer true"
            )
    engine, alone = facts.measured[0], facts.alone
    if alone is None or engine.expected >= _AGREE * alone.expected:
        return
    for i in range(facts.num_speculative_tokens):
        if _below(_at(engine, i), _at(alone, i), _AGREE):
            yield (
                f"alone the head gives {alone.expected:.2f} tokens per step, in the engine {engine.expected:.2f}, and "
                f"falls behind at draft {i + 1}: the {'chain' if i else 'first pass'} reads metadata, tokens or keys "
                "and values that are not its own"
            )
            return


def _misread(facts: Explanation) -> Iterator[tuple[str, str]]:
    declared = facts.readings[0]
    better = [reading for reading in facts.readings[1:] if reading.beats(declared)]
    if better:
        best = max(better, key=lambda reading: reading.num_right)
        yield (
            best.cause,
            f"{best.accuracy:.0%} of first drafts are right if {_as_condition(best)}, and {declared.accuracy:.0%} as "
            "declared; the configuration of the head is wrong there",
        )
    if facts.alone is not None and facts.alone_recycled is not None and _recycles_wrong(facts):
        later, others = _rate(_later(facts.alone)), _rate(_later(facts.alone_recycled))
        yield (
            "norm",
            f"{others:.0%} of later drafts are right if a draft step is fed the other side of the head's last norm, "
            f"and {later:.0%} as declared; norm_output is wrong",
        )


def _recycles_wrong(facts: Explanation) -> bool:
    this, other = facts.alone, facts.alone_recycled
    return this is not None and other is not None and _below(_later(this), _later(other), 1 / _CLEARLY)


def _as_condition(reading: Reading) -> str:
    return {
        "features": f"the head is fed other boundaries of the target ({reading.name})",
        "norm": f"a norm is where it was not declared ({reading.name})",
    }.get(reading.cause, reading.name)


def _outside(facts: Explanation) -> Iterator[tuple[str, str]]:
    outside = 1 - facts.vocabulary_share
    if outside >= _OUTSIDE:
        yield (
            "vocabulary",
            f"{outside:.0%} of the target's tokens are not among the {facts.draft_vocab_size:,} that the head can "
            f"draft, so no acceptance is above {facts.vocabulary_share:.0%}",
        )


def _collapses(facts: Explanation) -> Iterator[tuple[str, str]]:
    alone = facts.alone
    if alone is None or _recycles_wrong(facts):
        return
    for i in range(1, facts.num_speculative_tokens):
        this, before = _at(alone, i), _at(alone, i - 1)
        if _below(this, before, _COLLAPSE):
            yield (
                "rollout",
                f"draft {i + 1} is right {_rate(this):.0%} of the time when it is reached, draft {i} "
                f"{_rate(before):.0%}, outside the engine as well: the head was trained without unrolling, on the "
                "target's features only",
            )
            return


def _nothing(facts: Explanation) -> str:
    declared = facts.readings[0]
    text = (
        f"nothing wrong found: the head is just not better than that, {declared.accuracy:.0%} of its first drafts are "
        "right behind the target's own text"
    )
    if declared.use < _SIGMAS:
        text += (
            ". The target's features make no difference to it: it is untrained, or made for another target"
        )
    return text


_Drafts = tuple[int, int]
"""How many were accepted, and reached."""


def _at(run: Measured, position: int) -> _Drafts:
    return run.accepted[position], run.reached[position]


def _later(run: Measured) -> _Drafts:
    """Those behind the first ones."""
    return sum(run.accepted[1:]), sum(run.reached[1:])


def _rate(drafts: _Drafts) -> float:
    return drafts[0] / drafts[1]


def _below(drafts: _Drafts, others: _Drafts, share: float) -> bool:
    """Whether they are accepted less often than this share of the others' rate, and not by chance."""
    (kept, tried), (kept_others, tried_others) = drafts, others
    if not tried or not tried_others or _rate(drafts) >= share * _rate(others):
        return False
    both = (kept + kept_others) / (tried + tried_others)
    error = math.sqrt(both * (1 - both) * (1 / tried + 1 / tried_others))
    return _rate(others) - _rate(drafts) >= _SIGMAS * error


def _line(name: str, run: Measured) -> str:
    return f"{name:<34}{run.tokens_per_step:>12.2f}  " + " ".join(f"{rate:.2f}" for rate in run.acceptance)


def _run(run: Measured) -> dict[str, Any]:
    return asdict(run) | {"acceptance": list(run.acceptance)}


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value
