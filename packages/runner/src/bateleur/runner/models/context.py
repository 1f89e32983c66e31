"""What a step tells the layers, and what all layers of one kind share within a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Concatenate, Protocol

from torch import Tensor

from bateleur.mamba import MambaMetadata
from bateleur.metadata import AttentionBackend, CommonAttentionMetadata, PagedAttentionMetadata


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The leading rows of a step that advance an existing state, as the update operators take them."""

    num_tokens: int
    """Tokens of the decode rows; with no prefill row after them, the padded tail belongs to them as well."""
    query_start_loc: Tensor
    max_query_len: int
    conv_read: Tensor
    conv_offset: Tensor
    conv_write: Tensor
    ssm_read: Tensor
    ssm_write: Tensor


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The rows that follow, as the varlen operators take them; offsets start at their first token."""

    query_start_loc: Tensor
    conv_read: Tensor
    ssm_read: Tensor
    chunk_start_loc: Tensor
    chunk_row: Tensor
    chunk_write: Tensor
    row_chunk_loc: Tensor
    max_chunks_per_row: int
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
    ) -> StepContext:
        """The context of one step, with the Mamba rows sorted out once for all layers."""
        decode = None if mamba is None else decode_rows(mamba)
        prefill = None if mamba is None else prefill_rows(mamba)
        return cls(batch, backend, attention, mamba, kv, states, decode, prefill)


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
    plan = meta.plan
    if meta.num_prefills == 0:
        # The whole batch, padded rows included: nothing needs slicing.
        return DecodeRows(
            num_tokens=meta.num_decode_tokens,
            query_start_loc=meta.query_start_loc,
            max_query_len=meta.max_query_len,
            conv_read=plan.conv_read,
            conv_offset=plan.conv_offset,
            conv_write=plan.conv_write,
            ssm_read=plan.ssm_read,
            ssm_write=plan.ssm_write,
        )
    return DecodeRows(
        num_tokens=meta.num_decode_tokens,
        query_start_loc=meta.query_start_loc[: rows + 1],
        max_query_len=meta.max_query_len,
        conv_read=plan.conv_read[:rows],
        conv_offset=plan.conv_offset[:rows],
        conv_write=plan.conv_write[:rows],
        ssm_read=plan.ssm_read[:rows],
        ssm_write=plan.ssm_write[:rows],
    )


def prefill_rows(meta: MambaMetadata) -> PrefillRows | None:
    """The prefill rows of a step; None if there are none."""
    if meta.num_prefills == 0:
        return None
    first, end = meta.num_decodes, meta.num_decodes + meta.num_prefills
    plan = meta.plan
    return PrefillRows(
        query_start_loc=meta.query_start_loc_p,
        conv_read=plan.conv_read[first:end],
        ssm_read=plan.ssm_read[first:end],
        chunk_start_loc=meta.chunk_start_loc,
        chunk_row=meta.chunk_row,
        chunk_write=meta.chunk_write,
        row_chunk_loc=meta.row_chunk_loc,
        max_chunks_per_row=meta.max_chunks_per_row,
        chunk_size=meta.chunk_size,
    )
