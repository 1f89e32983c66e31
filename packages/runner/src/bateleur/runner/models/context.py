"""What a step tells the layers, and what all layers of one kind share within a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Concatenate, Protocol

from torch import Tensor

from bateleur.mamba import MambaMetadata, MixerRows, Rings
from bateleur.metadata import AttentionBackend, CommonAttentionMetadata, PagedAttentionMetadata


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
    mamba_rows: MixerRows | None
    """The rows of `mamba`, sorted out once for all layers."""

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
        """The context of one step."""
        rows = None if mamba is None else MixerRows.of(mamba)
        return cls(batch, backend, attention, mamba, kv, states, rings, rows)


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
