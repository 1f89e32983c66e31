"""What layers read of a step, and what all layers of one kind share within it."""

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
    """Metadata and caches of one step."""

    batch: CommonAttentionMetadata
    backend: AttentionBackend
    attention: PagedAttentionMetadata | None
    """None for a model without attention layers."""
    mamba: MambaMetadata | None
    """None for a model without recurrent layers."""
    kv: Sequence[tuple[Tensor, Tensor]]
    """Keys and values by attention layer, (num_blocks, block_size, num_kv_heads, head_dim) each."""
    states: Sequence[tuple[Tensor, Tensor | None]]
    """Convolution windows and states by recurrent layer, see `StatePool.layer`."""
    rings: Sequence[Rings | None]
    """Rings and live windows by recurrent layer; None under SLOTS."""
    adapters: Tensor | None = None
    """(T,) int32: LoRA slot of each token; None without adapters."""
    mamba_batch: MixerBatch | None = field(init=False)
    """The rows of `mamba`, prepared once for all layers."""

    def __post_init__(self) -> None:
        rows = None if self.mamba is None else MixerBatch.of(self.mamba)
        object.__setattr__(self, "mamba_batch", rows)


@dataclass(frozen=True, slots=True)
class LayerStep:
    """What all layers of one forward pass share."""

    execution: Execution[StepContext]
    """The step. Attention and recurrent layers pass work that depends on its metadata to `eager`."""
    rotary: tuple[tuple[Tensor, Tensor], ...]
    """Cosines and signed sines of the positions, (T, 1, rotary_dim) each, by distinct rotary embedding."""
    ranks: Ranks = field(default=ALONE, kw_only=True)
    """Ranks that run these layers; each branch returns this rank's part of a sum."""
    work: tuple[Tensor | None, ...] = field(default=(), kw_only=True)
    """Work list of each attention layer, see `AttentionBackend.build_work_list`; () unless the backend tolerates loose
    bounds."""

    adapters: Tensor | None = field(default=None, kw_only=True)
    """See `StepContext.adapters`."""

    @property
    def fuses_rotary(self) -> bool:
        """Whether `attend` rotates queries and keys."""
        return self.execution.state.backend.fuses_rotary

    @property
    def fuses_norm(self) -> bool:
        """Whether `attend` normalises queries and keys before it rotates them."""
        return self.execution.state.backend.fuses_norm

    def attend(self, run: Callable[..., Tensor], index: int, *tensors: Tensor) -> Tensor:
        """Return `run(context, *tensors)`, the attention of layer `index`.

        Backends that tolerate loose bounds are captured with the pieces around them, and get `work`.
        """
        if self.execution.state.backend.tolerates_loose_bounds:
            return run(self.execution.state, *tensors, work=self.work[index])
        return self.execution.eager(run, *tensors)
