"""What a step tells the layers, and what all layers of one kind share within a step."""

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
    """The metadata and the caches of one step. Nothing in it outlives the step but the caches themselves."""

    batch: CommonAttentionMetadata
    backend: AttentionBackend
    attention: PagedAttentionMetadata | None
    """None for a model without attention layers."""
    mamba: MambaMetadata | None
    """None for a model without recurrent layers."""
    kv: Sequence[tuple[Tensor, Tensor]]
    """Keys and values by attention layer, each (num_blocks, block_size, num_kv_heads, head_dim)."""
    states: Sequence[tuple[Tensor, Tensor | None]]
    """Conv windows and states by recurrent layer, as `StatePool.layer` gives them."""
    rings: Sequence[Rings | None]
    """What recurrent layers keep of running requests beside their states; None under SLOTS."""
    adapters: Tensor | None = None
    """(T,) int32: LoRA slot of each token; None without adapters."""
    mamba_batch: MixerBatch | None = field(init=False)
    """The rows of `mamba`, sorted out once for all layers."""

    def __post_init__(self) -> None:
        rows = None if self.mamba is None else MixerBatch.of(self.mamba)
        object.__setattr__(self, "mamba_batch", rows)


@dataclass(frozen=True, slots=True)
class LayerStep:
    """What all layers of one forward pass share."""

    execution: Execution[StepContext]
    """The step. Attention and recurrent layers hand `eager` what depends on its metadata."""
    rotary: tuple[tuple[Tensor, Tensor], ...]
    """Cosines and signed sines of this step's positions, (T, 1, rotary_dim) each, by distinct rotary embedding."""
    ranks: Ranks = field(default=ALONE, kw_only=True)
    """Who runs these layers together: each branch returns this rank's part of a sum."""
    work: tuple[Tensor | None, ...] = field(default=(), kw_only=True)
    """Work list of each attention layer, see `AttentionBackend.build_work_list`; () if the backend minds loose
    bounds."""

    adapters: Tensor | None = field(default=None, kw_only=True)
    """See `StepContext.adapters`."""

    @property
    def fuses_rotary(self) -> bool:
        """Whether `attend` rotates queries and keys by itself."""
        return self.execution.state.backend.fuses_rotary

    @property
    def fuses_norm(self) -> bool:
        """Whether `attend` normalises queries and keys by itself, before it rotates them."""
        return self.execution.state.backend.fuses_norm

    def attend(self, run: Callable[..., Tensor], index: int, *tensors: Tensor) -> Tensor:
        """What attention layer `index` returns for queries, keys and values: `run(context, *tensors)` of the step.

        Kernels that take any batch under any bound are captured with the pieces around them, and get `work`.
        """
        if self.execution.state.backend.tolerates_loose_bounds:
            return run(self.execution.state, *tensors, work=self.work[index])
        return self.execution.eager(run, *tensors)
