"""One dispatch decision for all data-parallel ranks.

Data-parallel ranks whose layers communicate must all replay the same graph, or must all run eagerly. Each rank
computes the decision itself by `dispatch_jointly`, from the same input of all ranks.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import torch
import torch.distributed as dist

from bateleur.cudagraph.batch_descriptor import BatchExecutionDescriptor, UnpaddedBatch, Variant
from bateleur.cudagraph.dispatcher import NUM_CONSTRAINTS_MET, CudagraphDispatcher, DispatchDecision, DispatchReason

NO_COMMON_VARIANT: Variant = ("no common variant",)
"""Variant of a joint batch whose ranks need different variants. No graph has this variant."""

_WORD_BITS = 62  # an int64 with more bits of the key mask could be negative


@dataclass(frozen=True, slots=True)
class RankStep:
    """The input of one rank to the joint dispatch of a step: its batch (None: no request) and its captured keys.

    ``ready`` None means all keys. A rank without a request replays the graph too, on a dummy batch, so its keys count.
    """

    batch: UnpaddedBatch | None
    ready: Container[BatchExecutionDescriptor] | None = None


@dataclass(frozen=True, slots=True)
class JointDispatch:
    """The dispatch decision of one step, equal on all ranks.

    Attributes:
        batch: the largest number of requests, tokens and tokens per request of any rank. Only ranks with requests
            count. None: no rank has a request, so no rank runs.
        descriptor, reason: as in `DispatchDecision`.
        rank: the rank that `reason` is about, because its own batch fits no graph or because it has not captured the
            common graph. None if several ranks together cause eager execution, or if all ranks run on a graph.
    """

    batch: UnpaddedBatch | None
    descriptor: BatchExecutionDescriptor | None
    reason: DispatchReason
    rank: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the graph, padding included. Without a graph, the largest number of tokens of a rank; 0 if idle."""
        sized = self.descriptor or self.batch
        return 0 if sized is None else sized.num_tokens

    def decision_for(self, batch: UnpaddedBatch | None) -> DispatchDecision:
        """Return the decision with the padding that the `batch` of one rank needs. None: the rank has no request.

        Raises ValueError if the batch is larger than the joint batch, so it was not part of the joint dispatch.
        """
        num_reqs, num_tokens = (0, 0) if batch is None else (batch.num_reqs, batch.num_tokens)
        most_reqs, most_tokens = (0, 0) if self.batch is None else (self.batch.num_reqs, self.batch.num_tokens)
        if num_reqs > most_reqs or num_tokens > most_tokens:
            raise ValueError(
                f"batch of {num_reqs} requests and {num_tokens} tokens exceeds the joint batch of {most_reqs} requests "
                f"and {most_tokens} tokens; pass the batch that this rank gave to the joint dispatch"
            )
        key = self.descriptor
        if key is None:
            return DispatchDecision(None, self.reason)
        pad_reqs = 0 if key.num_reqs is None else key.num_reqs - num_reqs
        return DispatchDecision(key, self.reason, key.num_tokens - num_tokens, pad_reqs)

    def __str__(self) -> str:
        if self.descriptor is not None:
            return f"all ranks: {self.descriptor}"
        return f"{'all ranks' if self.rank is None else f'rank {self.rank}'}: {self.reason}"


class DispatchCoordinator(Protocol):
    """Exchanges the input of all ranks, and makes the joint decision."""

    def coordinate(self, own_step: RankStep) -> JointDispatch:
        """Return the dispatch decision for all ranks. Every rank must call it with its input once per step."""


def dispatch_jointly(steps: Sequence[RankStep], dispatcher: CudagraphDispatcher) -> JointDispatch:
    """Choose one graph for all ranks, or eager execution for all ranks, from the `steps` of every rank, by rank.

    The graph fits the largest batch and is captured on every rank. It is a decode graph only if every rank with a
    request has a decode batch with the same number of tokens per request.
    """
    if not steps:
        raise ValueError("steps=(): must have one item per rank")
    batches = [step.batch for step in steps if step.batch is not None]
    if not batches:
        return JointDispatch(None, None, DispatchReason.IDLE)
    joint = _join(batches)
    limits = [step.ready for step in steps if step.ready is not None]
    ready = frozenset(key for key in dispatcher.keys if all(key in each for each in limits)) if limits else None
    decision = dispatcher.dispatch(joint, ready)
    if decision.descriptor is not None:
        return JointDispatch(joint, decision.descriptor, decision.reason)
    rank, reason = _rank_without_graph(steps, joint, decision.reason, dispatcher)
    return JointDispatch(joint, None, reason, rank)


def _join(batches: Sequence[UnpaddedBatch]) -> UnpaddedBatch:
    """Return one batch with the largest sizes of `batches`. It fits a graph only if each of `batches` fits it."""
    query_lens, variants = {batch.query_len for batch in batches}, {batch.variant for batch in batches}
    return UnpaddedBatch(
        num_reqs=max(batch.num_reqs for batch in batches),
        num_tokens=max(batch.num_tokens for batch in batches),
        query_len=query_lens.pop() if len(query_lens) == 1 else None,
        max_query_len=max(batch.max_query_len for batch in batches),
        decode_only=all(batch.decode_only for batch in batches),
        variant=variants.pop() if len(variants) == 1 else NO_COMMON_VARIANT,
    )


def _rank_without_graph(
    steps: Sequence[RankStep], joint: UnpaddedBatch, reason: DispatchReason, dispatcher: CudagraphDispatcher
) -> tuple[int | None, DispatchReason]:
    """Return the rank that makes the `joint` batch run eagerly, and the constraint that this rank violates.

    The own batch of this rank fits no graph, or the rank has not captured the graph of the joint batch. If this holds
    for several ranks, return the one whose constraint is checked first. If it holds for none, return (None, `reason`).

    reason: why the joint batch runs eagerly.
    """
    found: list[tuple[int, int | None, DispatchReason]] = []
    for rank, step in enumerate(steps):
        not_captured = reason is DispatchReason.NOT_CAPTURED
        batch, ready = (joint, step.ready) if not_captured else (step.batch, None)
        if batch is not None and (own := dispatcher.dispatch(batch, ready)).descriptor is None:
            found.append((NUM_CONSTRAINTS_MET[own.reason], rank, own.reason))
    _, first, own_reason = min(found, default=(0, None, reason))
    return first, own_reason


class RankStepCodec:
    """Encodes `RankStep` objects as integer vectors of one ``length``, for one dispatcher.

    Layout: num_reqs (0: no batch), num_tokens, query_len (0: not uniform), max_query_len, decode_only, index of the
    variant in the dispatcher (-1: not in it), and words of 62 bits with one bit per key: whether the key is captured.
    ``fingerprint``: hash of the dispatcher, in [0, 2**56), equal on all machines.
    """

    def __init__(self, dispatcher: CudagraphDispatcher) -> None:
        self._dispatcher = dispatcher
        self._variants = dispatcher.variants
        self._all_ready = (1 << len(dispatcher.keys)) - 1
        self.length = 6 + -(-len(dispatcher.keys) // _WORD_BITS)
        text = repr((dispatcher.mode, dispatcher.variants, dispatcher.keys)).encode()
        self.fingerprint = int.from_bytes(blake2b(text, digest_size=7).digest(), "big")

    def encode(self, step: RankStep) -> list[int]:
        """Return `step` as `length` integers in [-1, 2**62)."""
        keys, batch, mask = self._dispatcher.keys, step.batch, self._all_ready
        if step.ready is not None:
            mask = sum(1 << bit for bit, key in enumerate(keys) if key in step.ready)
        words = [mask >> shift & (1 << _WORD_BITS) - 1 for shift in range(0, len(keys), _WORD_BITS)]
        if batch is None:
            return [0] * 6 + words
        variant = self._variants.index(batch.variant) if batch.variant in self._variants else -1
        sizes = [batch.num_reqs, batch.num_tokens, batch.query_len or 0, batch.max_query_len]
        return [*sizes, int(batch.decode_only), variant, *words]

    def decode(self, vector: Sequence[int]) -> RankStep:
        """Return the encoded `RankStep`. A variant without graphs becomes `NO_COMMON_VARIANT`, which no graph has."""
        num_reqs, num_tokens, query_len, max_query_len, decode_only, variant, *words = vector
        mask = sum(word << index * _WORD_BITS for index, word in enumerate(words))
        ready = None
        if mask != self._all_ready:
            ready = frozenset(key for bit, key in enumerate(self._dispatcher.keys) if mask >> bit & 1)
        if num_reqs == 0:
            return RankStep(None, ready)
        name = NO_COMMON_VARIANT if variant < 0 else self._variants[variant]
        batch = UnpaddedBatch(num_reqs, num_tokens, query_len or None, max_query_len, bool(decode_only), name)
        return RankStep(batch, ready)


class LocalCoordinator:
    """Makes the dispatch decision of a single rank, without communication."""

    def __init__(self, dispatcher: CudagraphDispatcher) -> None:
        self._dispatcher = dispatcher

    def coordinate(self, own_step: RankStep) -> JointDispatch:
        """Return the dispatch decision for this rank alone."""
        return dispatch_jointly((own_step,), self._dispatcher)


class TorchDistCoordinator:
    """Makes one dispatch decision for all ranks of a `torch.distributed` group, by one all-gather of a few integers.

    The host waits for the result, because the padding of the step depends on it. With a GPU group, it also waits for
    earlier work on the current stream. All ranks must create the coordinator together: it compares their dispatchers.

    group: None for the default group. dispatcher: if it differs between ranks, all ranks raise ValueError. device:
    device of the int64 buffers, which are allocated once.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, dispatcher: CudagraphDispatcher, device: torch.device | str = "cpu"
    ) -> None:
        self._group, self._dispatcher, self._codec = group, dispatcher, RankStepCodec(dispatcher)
        world = dist.get_world_size(group)
        fingerprints = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
        dist.all_gather(fingerprints, torch.full_like(fingerprints[0], self._codec.fingerprint), group=group)
        others = [rank for rank, each in enumerate(fingerprints) if int(each) != int(fingerprints[0])]
        if others:
            raise ValueError(
                f"dispatcher must be equal on all ranks, but rank {others[0]} differs from rank 0; "
                "make it from the same arguments on every rank"
            )
        self._staging = torch.zeros(self._codec.length, dtype=torch.int64)
        self._staging_values = self._staging.numpy()
        self._mine = self._staging.to(device)  # on CPU this is `_staging` itself
        self._all = torch.zeros(world, self._codec.length, dtype=torch.int64, device=device)
        self._rows = list(self._all)

    def coordinate(self, own_step: RankStep) -> JointDispatch:
        """Return the dispatch decision for all ranks. Every rank of the group must call it once per step."""
        self._staging_values[:] = self._codec.encode(own_step)
        if self._mine is not self._staging:
            self._mine.copy_(self._staging)
        dist.all_gather(self._rows, self._mine, group=self._group)
        return dispatch_jointly([self._codec.decode(row) for row in self._all.tolist()], self._dispatcher)
