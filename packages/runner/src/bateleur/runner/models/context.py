"""What a step tells the layers, and what all layers of one kind share within a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Concatenate, Protocol

from torch import Tensor

from bateleur.mamba import MambaMetadata, Prompts, ReplayPlan, Rings, SlotPlan
from bateleur.metadata import AttentionBackend, CommonAttentionMetadata, PagedAttentionMetadata


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The leading rows of a step that advance an existing state, as the update operators take them."""

    num_tokens: int
    """Tokens of the decode rows; with no prefill row after them, the padded tail belongs to them as well."""
    query_start_loc: Tensor
    max_query_len: int
    plan: SlotPlan | ReplayPlan
    """Of these rows; its kind chooses the operators."""
    request_row: Tensor | None
    """(D,) rows of the rings; None under SLOTS without drafts."""


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The rows that follow, as the varlen operators take them; offsets start at their first token."""

    prompts: Prompts
    conv_read: Tensor
    ssm_read: Tensor
    live_write: Tensor | None
    """(Pf,) rows of the live conv windows; None under SLOTS, which has none."""
    chunk_size: int


@dataclass(frozen=True, slots=True)
class StepContext:
    """The metadata and the caches of one step. Nothing in it outlives the step but the caches themselves."""

    batch: CommonAttentionMetadata
    backend: AttentionBackend
    attention: PagedAttentionMetadata | None
    """None for a model without attention layers."""
    mamba: MambaMetadata | None
    """None for a model without Mamba layers."""
    kv: Sequence[tuple[Tensor, Tensor]]
    """Keys and values by attention layer, each (num_blocks, block_size, num_kv_heads, head_dim)."""
    states: Sequence[tuple[Tensor, Tensor]]
    """Conv and SSM states by Mamba layer: (slots, w-1+K, conv_dim) and (slots, H, P, N)."""
    rings: Sequence[Rings | None]
    """What Mamba layers keep of running requests beside their states; None under SLOTS."""
    decode: DecodeRows | None
    """The rows of `mamba` that continue a state; None if there are none."""
    prefill: PrefillRows | None
    """The other rows of `mamba`; None if there are none."""

    @classmethod
    def of(
        cls,
        batch: CommonAttentionMetadata,
        backend: AttentionBackend,
        attention: PagedAttentionMetadata | None,
        mamba: MambaMetadata | None,
        kv: Sequence[tuple[Tensor, Tensor]],
        states: Sequence[tuple[Tensor, Tensor]],
        rings: Sequence[Rings | None],
    ) -> StepContext:
        """The context of one step, with the Mamba rows sorted out once for all layers."""
        decode = None if mamba is None else decode_rows(mamba)
        prefill = None if mamba is None else prefill_rows(mamba)
        return cls(batch, backend, attention, mamba, kv, states, rings, decode, prefill)


class Eager(Protocol):
    """Runs `fn(context, *tensors)`; in a piecewise graph between two captured pieces, with the context of the replay.

    Attention and Mamba layers hand it what depends on the batch's metadata. `bateleur.cudagraph.Execution.eager`.
    """

    def __call__(self, fn: Callable[Concatenate[StepContext, ...], Tensor], *tensors: Tensor) -> Tensor:
        """The result of `fn`."""
        ...


@dataclass(frozen=True, slots=True)
class LayerStep:
    """What all layers of one forward pass share."""

    eager: Eager
    rotary: tuple[tuple[Tensor, Tensor], ...]
    """Cosines and signed sines of this step's positions, (T, 1, rotary_dim) each, by distinct rotary embedding."""
    fuses_rotary: bool
    """Whether the attention backend rotates queries and keys itself."""


def decode_rows(meta: MambaMetadata) -> DecodeRows | None:
    """The decode rows of a step; None if there are none."""
    rows = meta.num_decodes
    if rows == 0:
        return None
    plan, loc, request_row = meta.plan, meta.query_start_loc, meta.request_row
    if meta.num_prefills:  # else it is the whole batch, padded rows included: nothing needs slicing
        plan, loc = _part(plan, 0, rows), loc[: rows + 1]
        request_row = None if request_row is None else request_row[:rows]
    return DecodeRows(meta.num_decode_tokens, loc, meta.max_query_len, plan, request_row)


def prefill_rows(meta: MambaMetadata) -> PrefillRows | None:
    """The prefill rows of a step; None if there are none."""
    if meta.num_prefills == 0:
        return None
    first, end = meta.num_decodes, meta.num_decodes + meta.num_prefills
    plan = _part(meta.plan, first, end)
    if isinstance(plan, SlotPlan):
        return PrefillRows(meta.prompts, plan.conv_read, plan.ssm_read, None, meta.chunk_size)
    assert meta.request_row is not None
    return PrefillRows(meta.prompts, plan.slot, plan.slot, meta.request_row[first:end], meta.chunk_size)


def _part(plan: SlotPlan | ReplayPlan, first: int, end: int) -> SlotPlan | ReplayPlan:
    """Some rows of a plan, as views."""
    return type(plan)(*(getattr(plan, field.name)[first:end] for field in fields(plan)))
