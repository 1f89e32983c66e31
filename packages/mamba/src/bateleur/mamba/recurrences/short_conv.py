"""A short convolution without a recurrence: the conv window is the only state."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from bateleur.mamba.metadata import MambaMetadata
from bateleur.mamba.ops import fold_window
from bateleur.mamba.prefill_chunks import PrefillChunks
from bateleur.mamba.recurrence import FoldBatch, Recurrence, State, Tensors, TensorSpec
from bateleur.mamba.spec import at_least


@dataclass(frozen=True, slots=True)
class ShortConv(Recurrence):
    """y = conv(x), without state, gates, parameters or ring. Source: LFM2, arXiv 2511.23404.

    The gates before and after the convolution belong to the layer. Rejected draft tokens are undone in the conv window.

    Raises ValueError as `Recurrence` does.
    """

    conv_activation: ClassVar[str] = "none"

    channels: int
    """C: channels of the convolution."""

    def __post_init__(self) -> None:
        """Validate the fields."""
        at_least("channels", self.channels, 1)
        Recurrence.__post_init__(self)

    @property
    def conv_dim(self) -> int:
        """C."""
        return self.channels

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Empty."""
        return ()

    @property
    def output_shape(self) -> tuple[int, ...]:
        """(C,)."""
        return (self.channels,)

    @property
    def gates(self) -> tuple[TensorSpec, ...]:
        """Empty."""
        return ()

    @property
    def parameters(self) -> tuple[TensorSpec, ...]:
        """Empty."""
        return ()

    @property
    def ring_entry(self) -> tuple[TensorSpec, ...]:
        """Empty."""
        return ()

    def scan(
        self,
        params: Tensors,
        channels: Tensor,
        gates: Tensors,
        state: State,
        chunks: PrefillChunks,
        chunk_size: int,
        read: Tensor,
    ) -> Tensor:
        """Return the convolved channels."""
        return channels

    def update(self, params: Tensors, channels: Tensor, gates: Tensors, state: State, rows: MambaMetadata) -> Tensor:
        """Return the convolved channels."""
        return channels

    def replay(
        self, params: Tensors, channels: Tensor, gates: Tensors, state: State, ring: Tensors, rows: MambaMetadata
    ) -> Tensor:
        """Return the convolved channels."""
        return channels

    def fold(
        self, params: Tensors, conv: Tensor, state: State, request_conv: Tensor, ring: Tensors, at: FoldBatch
    ) -> None:
        """Run `fold_window`."""
        fold_window(conv, request_conv, at.ring_row, at.dst, at.page_offset)
