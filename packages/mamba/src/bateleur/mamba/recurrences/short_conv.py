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

    The gates before and after the convolution belong to the layer. The conv window undoes rejected draft tokens.

    Raises ValueError as `Recurrence` does.
    """

    conv_activation: ClassVar[str] = "none"

    channels: int
    """C: channels of the convolution."""

    def __post_init__(self) -> None:
        """Validate the fields; raises ValueError."""
        at_least("channels", self.channels, 1)
        Recurrence.__post_init__(self)

    @property
    def conv_dim(self) -> int:
        """Channels C of the convolution."""
        return self.channels

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of the state: (), because the conv window is the only state."""
        return ()

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the output of one token, (C,)."""
        return (self.channels,)

    @property
    def gates(self) -> tuple[TensorSpec, ...]:
        """Inputs of one token besides the channels: none."""
        return ()

    @property
    def parameters(self) -> tuple[TensorSpec, ...]:
        """Parameters besides the convolution's: none."""
        return ()

    @property
    def ring_entry(self) -> tuple[TensorSpec, ...]:
        """Tensors of a ring entry: none."""
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
        """Return the convolved channels of the prefills unchanged, because there is no recurrence."""
        return channels

    def update(self, params: Tensors, channels: Tensor, gates: Tensors, state: State, rows: MambaMetadata) -> Tensor:
        """Return the convolved channels of the decodes unchanged, because there is no recurrence."""
        return channels

    def replay(
        self, params: Tensors, channels: Tensor, gates: Tensors, state: State, ring: Tensors, rows: MambaMetadata
    ) -> Tensor:
        """Return the convolved channels of the decodes unchanged, because there is no recurrence."""
        return channels

    def fold(
        self, params: Tensors, conv: Tensor, state: State, request_conv: Tensor, ring: Tensors, batch: FoldBatch
    ) -> None:
        """Copy conv windows of running requests to state slots, in several layers at once."""
        fold_window(conv, request_conv, batch.ring_row, batch.dst, batch.page_offset)
