"""A batch that asks for a graph, the answer, which one or why none, and how often each was given."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from bateleur.cudagraph.descriptor import BatchExecutionDescriptor, Variant


class Why(StrEnum):
    """The reason of a decision. The first three name the kind of graph, the others the constraint that failed.

    IDLE is for an agreement of ranks only, none of which has anything to run.
    """

    DECODE = "decode graph"
    MIXED = "full graph"
    PIECEWISE = "piecewise graph"
    NO_GRAPHS = "eager: the plan has no graphs"
    STATE = "eager: no graphs for batches with a prefill row"
    VARIANT = "eager: no graphs for this variant"
    QUERY_LEN = "eager: no graph for this query length"
    NUM_REQS = "eager: more requests than the largest graph"
    NUM_TOKENS = "eager: more tokens than the largest graph"
    NOT_READY = "eager: the graph is not captured"
    IDLE = "idle: no rank has a batch"


KINDS = (Why.DECODE, Why.MIXED, Why.PIECEWISE)
"""Kinds of graphs, in order of preference."""
_CONSTRAINTS = (Why.STATE, Why.VARIANT, Why.QUERY_LEN, Why.NUM_REQS, Why.NUM_TOKENS, Why.NOT_READY)
NEARNESS = {why: index for index, why in enumerate((Why.NO_GRAPHS, *_CONSTRAINTS))}
"""How near to a graph a batch came that runs eagerly: how many of its constraints it kept, in order."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A batch that wants to run.

    num_reqs, num_tokens: actual sizes, at least 1.
    query_len: tokens per row where all rows have the same number, else None.
    max_query_len: most tokens of a row.
    decode_only: every row is past its prompt. This is the state of the requests, which no shape can tell:
        prefill chunks of equal length look like a decode batch.
    variant: the graph variant needed.

    Raises `ValueError` where the numbers contradict each other.
    """

    num_reqs: int
    num_tokens: int
    query_len: int | None
    max_query_len: int
    decode_only: bool
    variant: Variant = ()

    def __post_init__(self) -> None:
        if not 1 <= self.num_reqs <= self.num_tokens:
            raise ValueError(f"num_reqs={self.num_reqs} must be in [1, num_tokens={self.num_tokens}]")
        if not self.num_tokens <= self.num_reqs * self.max_query_len or self.max_query_len > self.num_tokens:
            raise ValueError(
                f"max_query_len={self.max_query_len} cannot be for {self.num_reqs} requests with "
                f"{self.num_tokens} tokens"
            )
        length = self.query_len
        if length is not None and (length != self.max_query_len or length * self.num_reqs != self.num_tokens):
            raise ValueError(
                f"query_len={length} must equal max_query_len={self.max_query_len}, and times "
                f"num_reqs={self.num_reqs} give num_tokens={self.num_tokens}"
            )


@dataclass(frozen=True, slots=True)
class Decision:
    """What a batch runs on.

    descriptor: the graph's key, None for eager.
    why: the kind of graph, or the constraint that kept the batch from the graph that came nearest.
    pad_tokens, pad_reqs: padding to add before anything is staged; 0 for eager.
    """

    descriptor: BatchExecutionDescriptor | None
    why: Why
    pad_tokens: int = 0
    pad_reqs: int = 0


class DecisionCounter:
    """Counts decisions by reason, and the tokens run and padded on graphs."""

    def __init__(self) -> None:
        self.by_why: Counter[Why] = Counter()
        """How often each reason occurred."""
        self.num_graph_tokens = 0
        """Tokens run on graphs, with padding."""
        self.num_pad_tokens = 0
        """Of these, padding."""

    def count(self, decision: Decision) -> None:
        """Add one decision."""
        self.by_why[decision.why] += 1
        if decision.descriptor is not None:
            self.num_graph_tokens += decision.descriptor.num_tokens
            self.num_pad_tokens += decision.pad_tokens

    @property
    def total(self) -> int:
        """Number of decisions."""
        return self.by_why.total()
