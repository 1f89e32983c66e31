"""When a draft pass may use the attention metadata of the target's step: eight rules, one function.

The first pass of a draft runs on the rows of the target's step, so what the target's attention layers were told fits
the draft's as well, and nothing has to be built again. It fits only as long as everything that the metadata says is
true of the draft too, and nothing else would notice: a draft on wrong metadata is a worse draft, and no wrong text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, Protocol

from torch import Tensor

from bateleur.cudagraph import BatchExecutionDescriptor
from bateleur.metadata import AttentionMetadataBuilder, CommonAttentionMetadata, PagedAttentionMetadata


class BorrowError(ValueError):
    """The target's attention metadata does not fit the draft pass; the text names the rules that are broken."""


class TargetState(Protocol):
    """What the states of the target's captures must have for a drafter; a `DraftContext` has it, too."""

    @property
    def batch(self) -> CommonAttentionMetadata:
        """The step as it was staged."""
        ...

    @property
    def attention(self) -> PagedAttentionMetadata | None:
        """What the attention layers of the draft's KV group are told; None for a target without any."""
        ...


@dataclass(frozen=True, slots=True)
class LayerRule:
    """What attention layers assume of their metadata, beyond its tensors.

    block_size: tokens per block of their cache.
    builder: class of the metadata's builder; None where there is nothing to compare.
    causal, sliding_window: which keys a query sees.
    """

    block_size: int
    builder: type[AttentionMetadataBuilder[Any]] | None
    causal: bool = True
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionUse:
    """One side of a loan: the rows of a pass as its attention layers see them. Nothing here is read on the device.

    key: the graph whose padding the pass has; None if it is not padded.
    num_tokens: of the padded pass.
    query_start_loc, seq_lens, slot_mapping, block_table: what the layers read; equal is what is the same memory.
    max_query_len, max_seq_len: host bounds.
    num_decodes: rows that run as decodes; None where the side takes over what the other one says.
    position_offset: of the pass's positions from those of the target's step.
    layers: what the layers assume.
    metadata: the object that the layers are given; None where the side takes over the other one's.
    addresses, generation: for a replay, the buffers' addresses and how often they have been staged; None for a pass
        that runs eagerly, which is given the metadata of its step and bakes nothing.
    """

    key: BatchExecutionDescriptor | None
    num_tokens: int
    query_start_loc: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    max_query_len: int
    max_seq_len: int
    num_decodes: int | None
    position_offset: int
    layers: LayerRule
    metadata: object | None
    addresses: Mapping[str, int] | None = None
    generation: int | None = None

    @classmethod
    def lent(
        cls,
        key: BatchExecutionDescriptor | None,
        metadata: PagedAttentionMetadata,
        layers: LayerRule,
        *,
        addresses: Mapping[str, int] | None = None,
        generation: int | None = None,
    ) -> AttentionUse:
        """The target's side: what its metadata says. `addresses` and `generation` are its producer's, now."""
        return cls(
            key=key,
            num_tokens=metadata.slot_mapping.shape[0],
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            slot_mapping=metadata.slot_mapping,
            block_table=metadata.block_table,
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
            num_decodes=metadata.num_decodes,
            position_offset=0,
            layers=layers,
            metadata=metadata,
            addresses=addresses,
            generation=generation,
        )

    @classmethod
    def needed(
        cls,
        key: BatchExecutionDescriptor | None,
        batch: CommonAttentionMetadata,
        group: int,
        layers: LayerRule,
        *,
        addresses: Mapping[str, int] | None = None,
        generation: int | None = None,
    ) -> AttentionUse:
        """The draft's side: a pass over the rows of `batch` whose layers keep their keys in KV group `group`.

        `addresses` are those that its graph baked, `generation` is that of the step it is about to run.
        """
        return cls(
            key=key,
            num_tokens=batch.num_tokens,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            slot_mapping=batch.slot_mappings[group],
            block_table=batch.block_tables[group],
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            num_decodes=None,
            position_offset=0,
            layers=layers,
            metadata=None,
            addresses=addresses,
            generation=generation,
        )


def borrow_violations(target: AttentionUse, draft: AttentionUse) -> tuple[str, ...]:
    """Name what forbids that `draft` uses the attention metadata of `target`, one text per broken rule; () if nothing.

    B1 the same rows: starts of the queries and the padded tokens. B2 the same lengths, positions and slots. B3 the
    same block table and block size, and layers that see the same keys. B4 the same class of builder. B5 the same graph,
    equal and not only compatible. B6 for a replay: what the graph baked is where the target's producer writes, and
    nothing was staged since. B7 metadata that a forward pass can't use up. B8 the same bounds and the same split.
    """
    return (
        *_rows_and_lengths(target, draft),
        *_layers(target, draft),
        *_graph(target, draft),
        *_host(target, draft),
    )


def require_borrow(target: AttentionUse, draft: AttentionUse) -> None:
    """Raise `BorrowError` for what `borrow_violations` finds."""
    found = borrow_violations(target, draft)
    if found:
        raise BorrowError(f"the target's attention metadata can't be borrowed: {'; '.join(found)}")


def _rows_and_lengths(target: AttentionUse, draft: AttentionUse) -> list[str]:
    found = []
    if not _same(target.query_start_loc, draft.query_start_loc):
        found.append("B1: query_start_loc is not the target's")
    if target.num_tokens != draft.num_tokens:
        found.append(f"B1: {draft.num_tokens} tokens instead of the target's {target.num_tokens}")
    for name in ("seq_lens", "slot_mapping"):
        if not _same(getattr(target, name), getattr(draft, name)):
            found.append(f"B2: {name} is not the target's")
    if target.position_offset != draft.position_offset:
        found.append(
            f"B2: positions lie {draft.position_offset - target.position_offset:+} from the target's"
        )
    return found


def _layers(target: AttentionUse, draft: AttentionUse) -> list[str]:
    found = []
    if not _same(target.block_table, draft.block_table):
        found.append("B3: block_table is not the target's")
    ours, theirs = draft.layers, target.layers
    for name in ("block_size", "causal", "sliding_window"):
        mine, its = getattr(ours, name), getattr(theirs, name)
        if mine != its:
            found.append(f"B3: {name} is {mine}, the target's is {its}")
    if None not in (ours.builder, theirs.builder) and ours.builder is not theirs.builder:
        found.append(f"B4: builder is {_name(ours.builder)}, the target's is {_name(theirs.builder)}")
    return found


def _graph(target: AttentionUse, draft: AttentionUse) -> list[str]:
    found = []
    if target.key != draft.key:
        names = ["no graph" if key is None else str(key) for key in (draft.key, target.key)]
        found.append(f"B5: {names[0]} instead of the target's {names[1]}")
    if draft.generation is not None and draft.generation != target.generation:
        found.append(
            f"B6: staged at generation {draft.generation}, the target's buffers are at {target.generation}"
        )
    now = target.addresses or {}
    for name, address in (draft.addresses or {}).items():
        if now.get(name) != address:
            found.append(f"B6: buffer {name} is not where the graph baked it")
            break
    return found


def _host(target: AttentionUse, draft: AttentionUse) -> list[str]:
    found = []
    if target.metadata is not None and not _is_frozen(target.metadata):
        found.append(
            f"B7: {type(target.metadata).__name__} is not a frozen dataclass, so the target's forward pass may have "
            "used it up"
        )
    if draft.num_decodes not in (None, target.num_decodes):
        found.append(f"B8: {draft.num_decodes} rows are decodes, {target.num_decodes} of the target's are")
    for name in ("max_query_len", "max_seq_len"):
        mine, its = getattr(draft, name), getattr(target, name)
        if mine != its:
            found.append(f"B8: {name} is {mine}, the target's is {its}")
    return found


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape)


def _is_frozen(value: object) -> bool:
    if not is_dataclass(value) or isinstance(value, type):
        return False
    return bool(value.__dataclass_params__.frozen)  # type: ignore[attr-defined]


def _name(builder: type[AttentionMetadataBuilder[Any]] | None) -> str:
    return "None" if builder is None else builder.__name__
