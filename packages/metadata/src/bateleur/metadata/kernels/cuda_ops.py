"""CUDA implementations of the paged-attention operators: argument checks and kernel launches."""

import torch
from torch import Tensor

from bateleur.metadata.backends._launch_config import ENTRY_SIZE, work_shape
from bateleur.metadata.backends._torch_ops import check_sizes, norm_spans_all_heads
from bateleur.metadata.kernels import attention, write_kv
from bateleur.metadata.kernels.work_list import attention_work


def rotate_and_write_kv(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
    cos: Tensor | None, sin: Tensor | None, q_norm: Tensor | None = None, k_norm: Tensor | None = None,
    eps: float = 0.0, kv_scales: Tensor | None = None,
) -> None:  # fmt: skip
    """Apply RMS norms and rotary embedding, store ``k`` and ``v``. Same arguments as ``ops.rotate_and_write_kv``."""
    _check_layout(k_cache, v_cache, q=q, k=k, v=v)
    if not slot_mapping.shape[0] == q.shape[0] == k.shape[0] or k.shape != v.shape:
        raise ValueError(
            f"slot_mapping: has {slot_mapping.shape[0]} slots for {q.shape[0]} queries, keys {tuple(k.shape)} "
            f"and values {tuple(v.shape)}"
        )
    if cos is not None and (sin is None or cos.stride() != sin.stride() or cos.stride(-1) != 1):
        raise ValueError("sin: must come with cos and have its strides, lanes adjacent")
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    rotary_dim = 0 if cos is None else cos.shape[2]
    if cos is None or sin is None:
        cos = sin = q  # placeholders that the kernel does not read
    norm = 0
    if q_norm is not None and k_norm is not None:
        norm = 2 if norm_spans_all_heads(q, k, q_norm, k_norm) else 1
    options = write_kv.tile_options(num_heads, num_kv_heads, head_dim, rotary_dim, norm)
    write_kv.write_kernel[(num_tokens, options["Q_TILES"] + options["K_TILES"])](
        q, k, v, k_cache, v_cache, slot_mapping, cos, sin, q_norm if norm else q, k_norm if norm else k,
        q if kv_scales is None else kv_scales,
        q.stride(0), k.stride(0), v.stride(0), cos.stride(0), *k_cache.stride()[:3], eps,
        HEADS=num_heads, KV_HEADS=num_kv_heads, BLOCK_SIZE=k_cache.shape[1],
        HEAD_DIM=head_dim, ROTARY_DIM=rotary_dim, NORM=norm, SCALED=kv_scales is not None, **options,
    )  # fmt: skip


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor,
    num_decodes: int, max_query_len: int, max_seq_len: int, scale: float, sliding_window: int,
    work: Tensor | None = None, sinks: Tensor | None = None, kv_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return paged attention by Triton as ``ops.triton_paged_attention``. work: result of `attention_work`, or None."""
    _check_layout(k_cache, v_cache, q=q)
    check_sizes(q, k_cache, block_table, seq_lens, num_decodes, max_seq_len, sinks)
    if scale <= 0:
        raise ValueError(f"scale: {scale} is not positive")
    num_tokens, num_heads, head_dim = q.shape
    bounds = num_tokens, max_query_len, sliding_window
    shape = work_shape(num_heads, k_cache, seq_lens.shape[0], *bounds, q.dtype)
    if work is None:
        work = attention_work(k_cache, seq_lens, query_start_loc, num_heads, *bounds, q.dtype)
    elif work.dtype != torch.int32 or work.shape != (shape.num_entries, ENTRY_SIZE):
        raise ValueError(
            f"work: has shape {tuple(work.shape)} and dtype {work.dtype}; must be ({shape.num_entries}, {ENTRY_SIZE}) "
            "of int32 for these rows, tokens, heads and dtype of q; make it by attention_work with the same arguments"
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    may_split = max_seq_len > shape.unsplit_keys
    num_lines = shape.num_lines if may_split else 0
    part = torch.empty(num_lines, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(num_lines, dtype=torch.float32, device=q.device)
    sizes = {"GROUP": shape.group, "HEAD_DIM": head_dim, "SINKS": sinks is not None}
    sinks = q if sinks is None else sinks  # a placeholder that the kernels do not read
    for launch in shape.launches:
        attention.attention_kernel[(launch.num_items, shape.num_kv_heads)](
            q, k_cache, v_cache, block_table, work, sinks, out, part, lse, scale * attention.LOG2_E,
            launch.first_item, launch.first_line, num_tokens,
            q.stride(0), *k_cache.stride()[:3], block_table.stride(0),
            q if kv_scales is None else kv_scales, SCALED=kv_scales is not None,
            BLOCK_SIZE=k_cache.shape[1], WINDOW=shape.window, **sizes, **launch.options,
        )  # fmt: skip
    if may_split:
        attention.join_kernel[shape.join_grid](
            part, lse, work, sinks, out, shape.num_items, **sizes, **shape.join_options
        )
    return out


def _check_layout(k_cache: Tensor, v_cache: Tensor, **tokens: Tensor) -> None:
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        raise ValueError(
            f"v_cache: strides {v_cache.stride()} must be those of k_cache, {k_cache.stride()}, lanes adjacent"
        )
    for name, tensor in tokens.items():
        if tensor.stride()[1:] != (tensor.shape[2], 1):
            raise ValueError(f"{name}: strides {tensor.stride()} must have a token's heads adjacent")
