"""C forms of decodes, prefills and the gated norm of Mamba-2. See `mamba2.c`."""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from bateleur.mamba.ops.native import (
    MOST_STATE,
    chunks_are_independent,
    contiguous,
    index_error,
    is_indexed,
    takes,
    takes_state,
)
from bateleur.metadata.dispatch import UNSUPPORTED, Unsupported
from bateleur.metadata.native import Kernel, kernels

_SIGNATURES = (
    ("update", "=" + "pllplplpplplpp" + "pppl" + "p" + "llllll" + "ffii"),
    ("scan", "plplplpplplpp" + "pppp" + "p" + "llllll" + "ffii"),
    ("gated_norm", "plplpp" + "llll" + "fiiii"),
)


def selective_state_update(
    ssm_state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    read: Tensor,
    write: Tensor,
    dt_min: float,
    dt_max: float,
) -> Tensor | Unsupported:
    """Run Mamba-2 decodes in C, or return `UNSUPPORTED`, for example if a row writes a slot that another reads."""
    floats = takes(max_query_len, (x, dt, B, C), (ssm_state, A, D, dt_bias))
    floats = floats and takes_state(ssm_state, x, B, C, dt, A, D, dt_bias)
    integers = is_indexed(query_start_loc, read, write) and write.shape[1] >= max_query_len
    if not (x.shape[0] and read.shape[0] and floats and integers):
        return UNSUPPORTED
    _, heads, channels, size = ssm_state.shape
    y = x.new_empty(x.shape)
    starts, reads = contiguous(query_start_loc, read)
    if write.stride(1) != 1:
        write = write.contiguous()
    wrong = _kernels()["update"](
        ssm_state.data_ptr(), ssm_state.stride(0), ssm_state.shape[0], x.data_ptr(), x.stride(0),
        dt.data_ptr(), dt.stride(0), A.data_ptr(), B.data_ptr(), B.stride(0), C.data_ptr(), C.stride(0),
        D.data_ptr(), dt_bias.data_ptr(), starts.data_ptr(), reads.data_ptr(), write.data_ptr(), write.stride(0),
        y.data_ptr(), x.shape[0], read.shape[0], heads, B.shape[1], channels, size, dt_min, dt_max,
        x.dtype is torch.float32, torch.get_num_threads(),
    )  # fmt: skip
    if wrong < 0:
        return UNSUPPORTED
    if wrong:
        raise index_error(wrong - 1, ssm_state.shape[0], x.shape[0])
    return y


def ssd_scan_varlen(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    query_start_loc: Tensor,
    chunk_start_loc: Tensor,
    chunk_row: Tensor,
    row_chunk_loc: Tensor,
    max_chunks_per_row: int,
    chunk_size: int,
    read: Tensor,
    chunk_write: Tensor,
    dt_min: float,
    dt_max: float,
) -> Tensor | Unsupported:
    """Run Mamba-2 prefills in C, or return `UNSUPPORTED`, for example if a row writes a slot that another reads."""
    del query_start_loc, max_chunks_per_row, chunk_size
    floats = takes(1, (x, dt, B, C), (ssm_state, A, D, dt_bias))
    floats = floats and takes_state(ssm_state, x, B, C, dt, A, D, dt_bias)
    integers = is_indexed(chunk_start_loc, read, chunk_write) and row_chunk_loc.dtype == torch.int32
    if not (x.shape[0] and read.shape[0] and floats and integers):
        return UNSUPPORTED
    if not chunks_are_independent(ssm_state.shape[0], read, chunk_write, chunk_row):
        return UNSUPPORTED
    _, heads, channels, size = ssm_state.shape
    y = x.new_empty(x.shape)
    places = contiguous(chunk_start_loc, row_chunk_loc, read, chunk_write)
    _kernels()["scan"](
        ssm_state.data_ptr(), ssm_state.stride(0), x.data_ptr(), x.stride(0), dt.data_ptr(), dt.stride(0),
        A.data_ptr(), B.data_ptr(), B.stride(0), C.data_ptr(), C.stride(0), D.data_ptr(), dt_bias.data_ptr(),
        *(each.data_ptr() for each in places), y.data_ptr(),
        x.shape[0], read.shape[0], heads, B.shape[1], channels, size, dt_min, dt_max,
        x.dtype is torch.float32, torch.get_num_threads(),
    )  # fmt: skip
    return y


def gated_rms_norm(
    x: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float, norm_first: bool = False, activation: str = "silu"
) -> Tensor | Unsupported:
    """Compute the gated RMS norm in C, or return `UNSUPPORTED` for arguments that C does not support."""
    tokens, inner = x.shape
    fits = inner // groups <= MOST_STATE and weight.is_contiguous() and activation in ("silu", "sigmoid")
    if not fits or not takes(1, (x, z, weight)):
        return UNSUPPORTED
    y = x.new_empty(tokens, inner)
    _kernels()["gated_norm"](
        x.data_ptr(), x.stride(0), z.data_ptr(), z.stride(0), weight.data_ptr(), y.data_ptr(),
        tokens, groups, inner // groups, weight.numel(), eps, norm_first, activation == "silu",
        x.dtype is torch.float32, torch.get_num_threads(),
    )  # fmt: skip
    return y


@cache
def _kernels() -> dict[str, Kernel]:
    return dict(kernels(Path(__file__).parent / "mamba2.c", _SIGNATURES))
