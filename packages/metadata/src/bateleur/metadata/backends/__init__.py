"""Paged-attention backends: a builder and a kernel each, chosen by a capability query."""

from bateleur.metadata.backends.base import AttentionBackend, PagedAttentionBuilder, PagedAttentionMetadata
from bateleur.metadata.backends.registry import get_backend, names

__all__ = ["AttentionBackend", "PagedAttentionBuilder", "PagedAttentionMetadata", "get_backend", "names"]
