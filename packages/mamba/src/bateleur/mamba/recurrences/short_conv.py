"""A short convolution without a recurrence: the conv window is the only state."""

from dataclasses import dataclass
from typing import ClassVar

from bateleur.mamba.recurrence import Recurrence
from bateleur.mamba.spec import at_least


@dataclass(frozen=True, slots=True)
class ShortConv(Recurrence):
    """y = conv(x), without state, gates, parameters or ring. Source: LFM2, arXiv 2511.23404.

    The gates before and after the convolution belong to the layer. After rejected drafts the conv window is read
    from an earlier entry on.

    Raises ValueError as `Recurrence` does.
    """

    conv_activation: ClassVar[str] = "none"

    channels: int
    """C: channels of the convolution."""

    def __post_init__(self) -> None:
        at_least("channels", self.channels, 1)
        Recurrence.__post_init__(self)

    @property
    def conv_dim(self) -> int:
        """Channels C of the convolution."""
        return self.channels

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the output of one token, (C,)."""
        return (self.channels,)
