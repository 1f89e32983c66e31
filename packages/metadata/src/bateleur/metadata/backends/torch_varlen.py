"""Paged attention by ``torch.nn.attention.varlen``, if torch has a kernel that reads block tables.

The interface needs torch 2.13. The kernel depends on the GPU: cuDNN from torch 2.15 on, or FlashAttention 3 or 4 if the
caller activated it. The FlashAttention 2 inside torch does not read block tables.
"""

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bateleur.metadata import ops
from bateleur.metadata.attention_metadata_builder import GraphSupport
from bateleur.metadata.backends.base import (
    AttentionBackend,
    AttentionOptions,
    KVCache,
    LayerConfig,
    PagedAttentionMetadata,
)

_MAX_HEAD_DIM = 256
_PROBE_BLOCK_SIZE = 16


class TorchVarlenBackend(AttentionBackend):
    """Stores keys and values by ``write_kv`` of this package, and calls torch's varlen attention."""

    name = "torch_varlen"
    # Replays of mixed batches have not been verified yet.
    graph_support = GraphSupport.UNIFORM
    supports_sinks = False
    needs_finite_cache = True  # torch does not document NaN in entries after a row's last key
    dtypes = (torch.float16, torch.bfloat16)
    min_capability = (0, 0)
    write = staticmethod(ops.write_kv)

    def missing_requirement(self, config: LayerConfig) -> str | None:
        """Return a reason if the head dimension is not a multiple of 8 up to 256, else None.

        Called by ``unsupported_reason``.
        """
        fits = config.head_dim % 8 == 0 and config.head_dim <= _MAX_HEAD_DIM
        return None if fits else f"head_dim {config.head_dim} is not a multiple of 8 up to {_MAX_HEAD_DIM}"

    def unsupported_reason(self, config: LayerConfig) -> str | None:
        """Return why the backend cannot serve ``config``, or None.

        On CUDA, after all other checks, it runs torch's kernel once, on five tokens.
        """
        if (reason := super().unsupported_reason(config)) is not None:
            return reason
        if _kernel() is None:
            return f"torch {torch.__version__} has no varlen_attn_out with a block table"
        return _probe(config, _active_flash_attention())

    def check(self, kv: KVCache, meta: PagedAttentionMetadata) -> None:
        """Raise ValueError if the block size is no power of two, which cuDNN needs. FlashAttention accepts any size."""
        block_size = kv[0].shape[1]
        if block_size & (block_size - 1) and _active_flash_attention() is None:
            raise ValueError(
                f"kv: has blocks of {block_size} tokens; cuDNN needs a power of two, FlashAttention 3 takes any"
            )

    def attend_cache(self, q: Tensor, kv: KVCache, meta: PagedAttentionMetadata, options: AttentionOptions) -> Tensor:
        """Return attention (T, Hq, D) over the cache."""
        out = torch.zeros_like(q)  # the kernel does not write padded tokens
        if meta.seq_lens.shape[0]:
            kernel: Any = _kernel()
            no_key_starts = None  # lengths of keys come from seqused_k
            kernel(
                out, q, *kv, meta.query_start_loc, no_key_starts, meta.max_query_len, max(meta.max_seq_len, 1),
                scale=options.scale, window_size=((options.sliding_window or 0) - 1, 0), enable_gqa=True,
                seqused_k=meta.seq_lens, block_table=meta.block_table,
            )  # fmt: skip
        return out


@lru_cache(maxsize=1)
def _kernel() -> Any:
    """Return ``varlen_attn_out`` if it accepts block tables, else None."""
    try:
        from torch.nn.attention.varlen import varlen_attn_out
    except ImportError:
        return None
    parameters = inspect.signature(varlen_attn_out).parameters
    return varlen_attn_out if {"block_table", "seqused_k", "enable_gqa"} <= parameters.keys() else None


def _active_flash_attention() -> str | None:
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    name: str | None = None if current is None else current()
    return name


@lru_cache(maxsize=64)
def _probe(config: LayerConfig, active: str | None) -> str | None:
    """Run torch's kernel on two requests with two blocks each; return why it fails, or None.

    Values are 1 in the blocks of the table and 2 elsewhere, so that a kernel that ignores the table is detected.
    ``active``: name of the active FlashAttention version; None: cuDNN is used. The kernel is run once for each
    combination of arguments; further calls return the cached result.
    """
    size, (head_dim, dtype, device, sliding_window, *_) = _PROBE_BLOCK_SIZE, config
    keys = torch.zeros(8, size, 1, head_dim, dtype=dtype, device=device)
    values = torch.full_like(keys, 2)
    table = torch.tensor([[7, 6], [5, 4]], dtype=torch.int32, device=device)
    values[4:] = 1
    meta = PagedAttentionMetadata(
        query_start_loc=torch.tensor([0, 1, 4], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([size + 1, size + 3], dtype=torch.int32, device=device),
        block_table=table,
        slot_mapping=torch.full((5,), -1, dtype=torch.int64, device=device),
        num_decodes=1,
        max_query_len=3,
        max_seq_len=2 * size,
    )
    q = torch.zeros(5, 2, head_dim, dtype=dtype, device=device)
    try:
        out = TorchVarlenBackend().attend_cache(q, (keys, values), meta, AttentionOptions(1.0, sliding_window))
        right = bool((out[:4] == 1).all()) and bool((out[4:] == 0).all())
    except (RuntimeError, ValueError) as error:
        lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
        return f"torch {torch.__version__} refuses block tables here: {'; '.join(lines) or type(error).__name__}"
    return None if right else f"torch {torch.__version__} does not follow block tables here"
