"""What attention kernels are told about a batch."""

from bateleur.metadata._memory import DeviceQueue, pinned, upload
from bateleur.metadata.backends import (
    AttentionBackend,
    PagedAttentionBuilder,
    PagedAttentionMetadata,
    get_backend,
)
from bateleur.metadata.batch import BatchShape, CommonAttentionMetadata, field_values
from bateleur.metadata.bounds import InexactBound, SeqLenBound
from bateleur.metadata.buffers import InputBuffers
from bateleur.metadata.builder import AttentionMetadataBuilder, BuildPhase, GraphSupport, check_reads
from bateleur.metadata.fields import FIELDS, NULL_BLOCK, PAD_SLOT, Axis, Field, Pad
from bateleur.metadata.rows import BatchLimits, KVGroup, StepRows
from bateleur.metadata.signature import Role, Signature
from bateleur.metadata.split import RowSplit, decode_like, split_decodes_and_prefills, uniform_query_len
from bateleur.metadata.tables import BlockTable, spread
from bateleur.metadata.validate import BatchInvariant, validate

__all__ = [
    "FIELDS",
    "NULL_BLOCK",
    "PAD_SLOT",
    "AttentionBackend",
    "AttentionMetadataBuilder",
    "Axis",
    "BatchInvariant",
    "BatchLimits",
    "BatchShape",
    "BlockTable",
    "BuildPhase",
    "CommonAttentionMetadata",
    "DeviceQueue",
    "Field",
    "GraphSupport",
    "InexactBound",
    "InputBuffers",
    "KVGroup",
    "Pad",
    "PagedAttentionBuilder",
    "PagedAttentionMetadata",
    "Role",
    "RowSplit",
    "SeqLenBound",
    "Signature",
    "StepRows",
    "check_reads",
    "decode_like",
    "field_values",
    "get_backend",
    "pinned",
    "split_decodes_and_prefills",
    "spread",
    "uniform_query_len",
    "upload",
    "validate",
]
