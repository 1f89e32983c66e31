"""The protocol of metadata builders: from the common batch to what one backend's kernels want."""

from collections.abc import Iterable, Mapping
from enum import Enum, IntEnum
from typing import Any, Protocol, TypeVar

from bateleur.metadata.common_attention_metadata import CommonAttentionMetadata
from bateleur.metadata.fields import FIELDS
from bateleur.metadata.signature import Signature

M = TypeVar("M")


class BuildPhase(Enum):
    """Why metadata is being built."""

    RUN = "run"
    WARMUP = "warmup"
    CAPTURE = "capture"


class GraphSupport(IntEnum):
    """Which batches a backend's metadata can be captured for; each value includes the smaller ones."""

    NEVER = 0
    SINGLE_TOKEN = 1
    UNIFORM = 2
    ALWAYS = 3


class AttentionMetadataBuilder(Protocol[M]):
    """Turns a staged batch into one backend's metadata.

    ``build`` never writes to the batch: what a backend needs in padded rows it declares (``seq_len_fill``)
    and the stager applies. It reads no field outside ``reads``, does not synchronise with the device, and has
    no loop over requests.
    """

    @property
    def reads(self) -> frozenset[str]:
        """Fields that ``build`` or its kernels read; checked once, by :func:`check_reads`."""

    @property
    def seq_len_fill(self) -> int:
        """Value the backend needs in ``seq_lens`` of padded rows, 0 or 1."""

    @property
    def graph_support(self) -> GraphSupport:
        """Which batches may be captured."""

    def build(self, common: CommonAttentionMetadata, group: int, phase: BuildPhase = BuildPhase.RUN) -> M:
        """Metadata for KV-cache group ``group`` of ``common``: a new object each time.

        What a builder keeps between steps it keeps in buffers of its own, at addresses that never change.
        """

    def signature(self, meta: M) -> Signature:
        """The host scalars of ``meta`` that kernels read, with their roles. No side effect."""

    def addresses(self) -> Mapping[str, int]:
        """Data pointer of every buffer the builder owns, by name; empty if it owns none."""


def check_reads(builder: AttentionMetadataBuilder[Any], available: Iterable[str] = FIELDS.keys()) -> None:
    """Refuse a builder, when it is wired, that reads a field nobody stages.

    Raises:
        ValueError: a field in ``builder.reads`` is not in ``available``, or the fill is neither 0 nor 1.
    """
    missing = sorted(builder.reads - frozenset(available))
    if missing:
        raise ValueError(
            f"reads: {type(builder).__name__} needs {', '.join(missing)}, which no batch carries"
        )
    if builder.seq_len_fill not in (0, 1):
        raise ValueError(
            f"seq_len_fill: {type(builder).__name__} declares {builder.seq_len_fill}; must be 0 or 1"
        )
