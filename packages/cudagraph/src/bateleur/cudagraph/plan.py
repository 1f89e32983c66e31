"""Which graphs exist, which one a batch runs on, and what they cover. Pure: nothing here is captured or staged."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from sys import maxsize
from types import MappingProxyType

from bateleur.cudagraph.decision import KINDS, NEARNESS, Ask, Decision, Why
from bateleur.cudagraph.descriptor import BatchExecutionDescriptor, Variant
from bateleur.cudagraph.modes import CudaGraphMode


@dataclass(frozen=True, slots=True)
class _Chain:
    """Keys of one kind, variant and exact query length, smallest first.

    Along a chain every limit grows, so its last key satisfies all that any other of its keys does, and more.

    sizes: `num_tokens` of each key, for bisection.
    """

    kind: Why
    keys: tuple[BatchExecutionDescriptor, ...]
    sizes: tuple[int, ...]


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
        wastes = [d.pad_tokens / d.descriptor.num_tokens for d in decisions if d.descriptor is not None] or [
            0.0
        ]
        return cls(query_len, tuple(spans), sum(wastes) / len(wastes), max(wastes))

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


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """The graphs of one model; make it with `CapturePlan.make`.

    mode: the policy. keys: every descriptor in capture order. FULL keys come before PIECEWISE keys, because decode
    graphs matter most if memory or time runs out. Within a mode the largest key comes first, so that smaller keys
    reuse its memory.
    """

    mode: CudaGraphMode
    keys: tuple[BatchExecutionDescriptor, ...]
    _chains: Mapping[Variant, tuple[_Chain, ...]] = field(repr=False, compare=False)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The variants the plan was made for."""
        return tuple(self._chains)

    @classmethod
    def make(
        cls,
        mode: CudaGraphMode,
        sizes: Iterable[int],
        *,
        max_num_reqs: int | None = None,
        max_num_tokens: int | None = None,
        query_lens: Sequence[int] = (1,),
        variants: Sequence[Variant] = ((),),
    ) -> CapturePlan:
        """Lay out the graphs for token counts `sizes`.

        max_num_reqs, max_num_tokens: the engine's limits; None means that `sizes` is the only limit.
        query_lens: exact lengths of uniform decode rows, such as 1 and 1 + num_spec. Each size is rounded up to
            whole rows per length, and cut at the limits, never dropped there.
        Raises `ValueError` for a number below 1.
        """
        sizes, limits = set(sizes), [n for n in (max_num_reqs, max_num_tokens) if n is not None]
        least = min((*sizes, *query_lens, *limits), default=1)
        if least < 1:
            raise ValueError(f"sizes, limits and query lengths must be at least 1, got {least}")
        most_reqs, most_tokens = (maxsize if n is None else n for n in (max_num_reqs, max_num_tokens))
        shapes = {key for size in sizes for key in _keys(mode, size, most_reqs, most_tokens, query_lens)}
        chains = {variant: _chains(replace(key, variant=variant) for key in shapes) for variant in variants}
        keys = [key for many in chains.values() for chain in many for key in chain.keys]
        return cls(mode, tuple(sorted(keys, reverse=True)), MappingProxyType(chains))

    def decide(self, ask: Ask, ready: Container[BatchExecutionDescriptor] | None = None) -> Decision:
        """Choose the graph for a batch, or eager with the reason.

        Decode graphs come before the others, FULL before PIECEWISE, then the smallest that holds the batch.
        ready: the keys that may be used (those captured so far); None means all.
        """
        why = Why.NO_GRAPHS
        # Where no graph has the variant, any other one's chains tell what else would have kept the batch eager.
        for chain in self._chains.get(ask.variant) or next(iter(self._chains.values()), ()):
            failed = _failed(chain.keys[-1], ask)
            if failed is None:
                for key in chain.keys[bisect_left(chain.sizes, ask.num_tokens) :]:
                    if (ready is None or key in ready) and _failed(key, ask) is None:
                        pad_reqs = 0 if key.num_reqs is None else key.num_reqs - ask.num_reqs
                        return Decision(key, chain.kind, key.num_tokens - ask.num_tokens, pad_reqs)
                failed = Why.NOT_READY
            if NEARNESS[failed] > NEARNESS[why]:
                why = failed
        return Decision(None, why)

    def coverage(self, max_reqs: int, query_len: int, *, decode_only: bool = True) -> Coverage:
        """Tell what uniform batches of 1 .. max_reqs requests with `query_len` tokens each would run on."""
        if max_reqs < 1 or query_len < 1:
            raise ValueError(f"max_reqs={max_reqs} and query_len={query_len} must be at least 1")
        asks = (Ask(n, n * query_len, query_len, query_len, decode_only) for n in range(1, max_reqs + 1))
        return Coverage.of(query_len, [self.decide(ask) for ask in asks])


def _keys(
    mode: CudaGraphMode, size: int, most_reqs: int, most_tokens: int, query_lens: Iterable[int]
) -> Iterable[BatchExecutionDescriptor]:
    """The descriptors that one size stands for, within the engine's limits."""
    full, tokens = CudaGraphMode.FULL, min(size, most_tokens)
    for length in query_lens if mode.decode is full else ():
        rows = min(-(-size // length), most_reqs, most_tokens // length)
        if rows:
            yield BatchExecutionDescriptor(full, rows * length, rows, length, length)
    if mode.mixed is full:
        yield BatchExecutionDescriptor(full, tokens, min(tokens, most_reqs), None, tokens)
    elif mode.mixed is CudaGraphMode.PIECEWISE:
        yield BatchExecutionDescriptor(CudaGraphMode.PIECEWISE, tokens)


def _chains(keys: Iterable[BatchExecutionDescriptor]) -> tuple[_Chain, ...]:
    """The chains of one variant in order of preference; none is empty."""
    found: dict[tuple[int, int], list[BatchExecutionDescriptor]] = {}
    for key in sorted(keys):
        found.setdefault((KINDS.index(_kind(key)), key.uniform_query_len or 0), []).append(key)
    return tuple(
        _Chain(KINDS[kind], tuple(found[kind, length]), tuple(key.num_tokens for key in found[kind, length]))
        for kind, length in sorted(found)
    )


def _kind(key: BatchExecutionDescriptor) -> Why:
    if key.mode is CudaGraphMode.PIECEWISE:
        return Why.PIECEWISE
    return Why.MIXED if key.uniform_query_len is None else Why.DECODE


def _failed(key: BatchExecutionDescriptor, ask: Ask) -> Why | None:
    """Return the first constraint of a key that the batch violates, None if the key can serve it once captured."""
    if key.uniform_query_len is not None and not ask.decode_only:
        return Why.STATE
    if key.variant != ask.variant:
        return Why.VARIANT
    if key.uniform_query_len not in (None, ask.query_len):
        return Why.QUERY_LEN
    if key.num_reqs is not None and ask.num_reqs > key.num_reqs:
        return Why.NUM_REQS
    if ask.num_tokens > key.num_tokens:
        return Why.NUM_TOKENS
    return None
