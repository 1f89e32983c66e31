"""Attention metadata for paged KV caches: batch staging, metadata builders, attention backends and kernels."""

from bateleur.metadata._memory import DeviceQueue, Fetch, movable, pinned, upload
from bateleur.metadata.attention_metadata_builder import AttentionMetadataBuilder, BuildPhase, GraphSupport, check_reads
from bateleur.metadata.backends import AttentionBackend, PagedAttentionBuilder, PagedAttentionMetadata, get_backend
from bateleur.metadata.block_table import BlockTable, expand_ranges
from bateleur.metadata.common_attention_metadata import BatchShape, CommonAttentionMetadata, field_values
from bateleur.metadata.fields import FIELDS, NULL_BLOCK, PAD_SLOT, Field, LeadingDim, Pad
from bateleur.metadata.input_buffers import InputBuffers
from bateleur.metadata.seq_len_bound import InexactBound, SeqLenBound
from bateleur.metadata.signature import Role, Signature
from bateleur.metadata.split import RowSplit, decode_like, split_decodes_and_prefills, uniform_query_len
from bateleur.metadata.step_inputs import BatchLimits, KVCacheGroup, KVGroup, StepRows
from bateleur.metadata.validate import BatchInvariant, validate

__all__ = [
    "FIELDS", "NULL_BLOCK", "PAD_SLOT", "AttentionBackend", "AttentionMetadataBuilder", "BatchInvariant", "BatchLimits",
    "BatchShape", "BlockTable", "BuildPhase", "CommonAttentionMetadata", "DeviceQueue", "Fetch", "Field",
    "GraphSupport", "InexactBound", "InputBuffers", "KVCacheGroup", "KVGroup", "LeadingDim", "Pad",
    "PagedAttentionBuilder", "PagedAttentionMetadata", "Role", "RowSplit", "SeqLenBound", "Signature", "StepRows",
    "check_reads", "decode_like", "expand_ranges", "field_values", "get_backend", "movable", "pinned",
    "split_decodes_and_prefills", "uniform_query_len", "upload", "validate",
]  # fmt: skip
