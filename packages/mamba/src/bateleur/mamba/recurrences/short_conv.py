"""A short convolution alone: its window is all the state there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from bateleur.mamba.ops import fold_window
from bateleur.mamba.prompts import Prompts
from bateleur.mamba.recurrence import FoldRows, Recurrence, Tensors, TensorSpec
from bateleur.mamba.spec import at_least
from bateleur.mamba.step_metadata import MambaMetadata


@dataclass(frozen=True, slots=True)
class ShortConv(Recurrence):
    """y = conv(x): nothing decays, and nothing has to be replayed, for the live window holds what drafts may undo.

    Gates in front of the convolution and behind it are the layer's own (LFM2, arXiv 2511.23404). Raises ValueError as
    `Recurrence`.
    """

    conv_activation: ClassVar[str] = "none"

    channels: int
    """C: channels of the convolution."""

    def __post_init__(self) -> None:
        """Check every size."""
        at_least("channels", self.channels, 1)
        Recurrence.__post_init__(self)

    @property
    def conv_dim(self) -> int:
        """C."""
        return self.channels

    @property
    def state_shape(self) -> tuple[int, ...]:
        """None."""
        return ()

    @property
    def output_shape(self) -> tuple[int, ...]:
        """(C,)."""
        return (self.channels,)

    @property
    def gates(self) -> tuple[TensorSpec, ...]:
        """None."""
        return ()

    @property
    def parameters(self) -> tuple[TensorSpec, ...]:
        """None."""
        return ()

    @property
    def ring_entry(self) -> tuple[TensorSpec, ...]:
        """None."""
        return ()

    def scan(
        self,
        params: Tensors,
        channels: Tensor,
        gates: Tensors,
        state: Tensor | None,
        prompts: Prompts,
        chunk_size: int,
        read: Tensor,
    ) -> Tensor:
        """What the convolution made."""
        return channels

    def update(
        self, params: Tensors, channels: Tensor, gates: Tensors, state: Tensor | None, rows: MambaMetadata
    ) -> Tensor:
        """What the convolution made."""
        return channels

    def replay(
        self,
        params: Tensors,
        channels: Tensor,
        gates: Tensors,
        state: Tensor | None,
        ring: Tensors,
        rows: MambaMetadata,
    ) -> Tensor:
        """What the convolution made."""
        return channels

    def fold(
        self, params: Tensors, conv: Tensor, state: Tensor | None, live: Tensor, ring: Tensors, at: FoldRows
    ) -> None:
        """`fold_window`."""
        fold_window(conv, live, at.ring_row, at.dst, at.page_offset)
