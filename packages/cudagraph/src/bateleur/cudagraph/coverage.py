"""What a plan covers, before anyone pays for capturing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bateleur.cudagraph.decision import Decision, Why
from bateleur.cudagraph.descriptor import BatchExecutionDescriptor


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring batch sizes, first .. last requests, that run alike; descriptor None is a gap (eager)."""

    first: int
    last: int
    descriptor: BatchExecutionDescriptor | None
    why: Why

    @property
    def num_reqs(self) -> int:
        """How many batch sizes the span holds."""
        return self.last - self.first + 1


@dataclass(frozen=True, slots=True)
class Coverage:
    """What batches of 1, 2, ... requests with `query_len` tokens each run on.

    spans: in order, without holes. mean_waste, worst_waste: padded tokens over all tokens run, in [0, 1), over
    the sizes that run on a graph; 0 if none does.
    """

    query_len: int
    spans: tuple[Span, ...]
    mean_waste: float
    worst_waste: float

    @classmethod
    def of(cls, query_len: int, decisions: Sequence[Decision]) -> Coverage:
        """Summarise the decisions for 1, 2, ... requests."""
        spans: list[Span] = []
        for num_reqs, decision in enumerate(decisions, start=1):
            first = num_reqs
            if spans and (spans[-1].descriptor, spans[-1].why) == (decision.descriptor, decision.why):
                first = spans.pop().first
            spans.append(Span(first, num_reqs, decision.descriptor, decision.why))
        wastes = [d.pad_tokens / d.descriptor.num_tokens for d in decisions if d.descriptor is not None]
        mean, worst = (sum(wastes) / len(wastes), max(wastes)) if wastes else (0.0, 0.0)
        return cls(query_len, tuple(spans), mean, worst)

    @property
    def gaps(self) -> tuple[Span, ...]:
        """The spans that run eagerly."""
        return tuple(span for span in self.spans if span.descriptor is None)

    def table(self) -> str:
        """Return the spans as text, a line each, and the padding waste."""
        total = self.spans[-1].last
        missing = sum(span.num_reqs for span in self.gaps)
        lines = [f"{'requests':>12}  runs on"]
        for span in self.spans:
            size = str(span.first) if span.first == span.last else f"{span.first}-{span.last}"
            lines.append(f"{size:>12}  {span.why if span.descriptor is None else span.descriptor}")
        lines.append(
            f"{total - missing} of {total} sizes at {self.query_len} tokens per request on a graph; "
            f"padding {self.mean_waste:.1%} on average, {self.worst_waste:.1%} at worst"
        )
        return "\n".join(lines)
