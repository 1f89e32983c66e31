"""Metadata and caches of a step for the layers, and values that all layers of one kind share within a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bateleur.cudagraph.execution import Execution
from bateleur.mamba import MambaMetadata, MixerBatch, Rings
from bateleur.metadata import AttentionBackend, CommonAttentionMetadata, PagedAttentionMetadata
from bateleur.runner.distributed.ranks import ALONE, Ranks


@dataclass(frozen=True, slots=True)
class StepContext:
    """Metadata and caches of one step, read by all layers.

    `kv` has the keys and values of each attention layer, `states` the convolution window and the state of each
    recurrent layer. Under state policy FOLD, states are not written at every step; `rings` then has the recurrence's
    inputs for the tokens since the last written state. `mamba_batch` is `mamba`, split into decodes and prefills once
    for all recurrent layers. `adapters` has the LoRA slot of each token.
    """

    batch: CommonAttentionMetadata
    backend: AttentionBackend
    attention: PagedAttentionMetadata | None
    """None for a model without attention layers."""
    mamba: MambaMetadata | None
    """None for a model without recurrent layers."""
    kv: Sequence[tuple[Tensor, Tensor]]
    """Keys and values by attention layer, (num_blocks, block_size, num_kv_heads, head_dim) each."""
    states: Sequence[tuple[Tensor, Tensor | None]]
    """Convolution windows and states by recurrent layer, as `StatePool.layer` returns them."""
    rings: Sequence[Rings | None]
    """Rings and conv windows by recurrent layer; None if states are written at every step."""
    adapters: Tensor | None = None
    """(T,) int32: LoRA slot of each token; None without adapters."""
    mamba_batch: MixerBatch | None = field(init=False)
    """None for a model without recurrent layers."""

    def __post_init__(self) -> None:
        rows = None if self.mamba is None else MixerBatch.of(self.mamba)
        object.__setattr__(self, "mamba_batch", rows)


@dataclass(frozen=True, slots=True)
class LayerStep:
    """Arguments that all layers of one forward pass share.

    They are the step, cosines and sines of its positions for each rotary embedding (`rotary`), tensor-parallel ranks,
    for each attention layer the list of its kernel's tasks (`work`), and LoRA slots of the tokens (`adapters`).
    """

    execution: Execution[StepContext]
    """The step. Attention and recurrent layers pass functions that depend on its metadata to `eager`."""
    rotary: tuple[tuple[Tensor, Tensor], ...]
    """Cosines and sines of the positions, (T, 1, rotary_dim) each, by distinct rotary embedding; see `RopeTable.at`."""
    ranks: Ranks = field(default=ALONE, kw_only=True)
    """Ranks that run these layers; each branch returns this rank's part of a sum."""
    work: tuple[Tensor | None, ...] = field(default=(), kw_only=True)
    """Work list of each attention layer, see `AttentionBackend.build_work_list`; () unless the backend accepts upper
    bounds in place of exact lengths.
    """

    adapters: Tensor | None = field(default=None, kw_only=True)
    """See `StepContext.adapters`."""

    @property
    def fuses_rotary(self) -> bool:
        """Whether the attention backend rotates queries and keys (RoPE) in its own kernel."""
        return self.execution.state.backend.fuses_rotary

    @property
    def fuses_norm(self) -> bool:
        """Whether the attention backend normalises queries and keys in its own kernel, before it rotates them."""
        return self.execution.state.backend.fuses_norm

    def attend(self, run: Callable[..., Tensor], index: int, *tensors: Tensor) -> Tensor:
        """Return `run(context, *tensors)` for the step's `StepContext`: the attention of attention layer `index`.

        If the backend accepts upper bounds in place of exact lengths, `run` is captured in the CUDA graph, and
        gets the layer's work list as `work`. Otherwise it runs eagerly, between the pieces of a piecewise CUDA graph.
        """
        if self.execution.state.backend.tolerates_loose_bounds:
            return run(self.execution.state, *tensors, work=self.work[index])
        return self.execution.eager(run, *tensors)
