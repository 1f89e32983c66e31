"""Protocol of attention metadata builders: from the common batch to the metadata of one backend."""

from collections.abc import Iterable, Mapping
from enum import Enum, IntEnum
from typing import Any, Protocol, TypeVar

from bateleur.metadata.common_attention_metadata import CommonAttentionMetadata
from bateleur.metadata.fields import FIELDS
from bateleur.metadata.signature import Signature

M = TypeVar("M")


class BuildPhase(Enum):
    """Why metadata is built: to run a step, or to capture a graph."""

    RUN = "run"
    WARMUP = "warmup"
    CAPTURE = "capture"


class GraphSupport(IntEnum):
    """Batches that a backend can be captured for in a CUDA graph, like vLLM's ``AttentionCGSupport``. A larger value
    includes all smaller ones.
    """

    NEVER = 0
    SINGLE_TOKEN = 1
    UNIFORM = 2
    ALWAYS = 3


class AttentionMetadataBuilder(Protocol[M]):
    """Builds one backend's metadata from a staged batch.

    ``build`` must not write to the batch, read fields outside ``reads``, wait for the device, or loop over requests. If
    its kernels need a value in ``seq_lens`` of padded rows, it declares ``seq_len_fill``.
    """

    @property
    def reads(self) -> frozenset[str]:
        """Names of the batch fields that ``build`` or its kernels read. :func:`check_reads` checks the names."""

    @property
    def seq_len_fill(self) -> int:
        """Value of ``seq_lens`` for padding requests, 0 or 1."""

    @property
    def graph_support(self) -> GraphSupport:
        """Batches that this builder's backend can be captured for."""

    def build(self, common: CommonAttentionMetadata, group: int, phase: BuildPhase = BuildPhase.RUN) -> M:
        """Return new metadata for KV-cache group ``group`` of ``common``.

        State that outlives a step must be in buffers of the builder, at fixed addresses.
        """

    def signature(self, meta: M) -> Signature:
        """Return the host scalars of ``meta`` that kernels read, each with its :class:`Role`: how it may differ
        between capture and replay. Must have no side effect.
        """

    def addresses(self) -> Mapping[str, int]:
        """Return the data pointer of every buffer that the builder owns, by name."""


def check_reads(builder: AttentionMetadataBuilder[Any], available: Iterable[str] = FIELDS.keys()) -> None:
    """Raise ValueError if ``reads`` has a field that is not ``available``, or ``seq_len_fill`` is not 0 or 1."""
    missing = sorted(builder.reads - frozenset(available))
    if missing:
        raise ValueError(f"reads: {type(builder).__name__} needs {', '.join(missing)}, which no batch carries")
    if builder.seq_len_fill not in (0, 1):
        raise ValueError(f"seq_len_fill: {type(builder).__name__} declares {builder.seq_len_fill}; must be 0 or 1")
