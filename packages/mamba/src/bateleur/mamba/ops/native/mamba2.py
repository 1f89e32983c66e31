"""C forms of decodes, prefills and the gated norm of Mamba-2. See `mamba2.c`."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bateleur.mamba.ops.native import (
    MOST_STATE,
    chunks_are_independent,
    contiguous,
    fits,
    index_error,
    is_indexed,
    takes,
)
from bateleur.metadata.dispatch import UNSUPPORTED, Unsupported
from bateleur.metadata.native import kernels, pointers

_SIGNATURES = (
    ("update", "=" + "pllplplpplplpp" + "pppl" + "p" + "llllll" + "ffii"),
    ("scan", "plplplpplplpp" + "pppp" + "p" + "llllll" + "ffii"),
    ("gated_norm", "plplpp" + "llll" + "fiiii"),
)
_kernels = cache(partial(kernels, Path(__file__).parent / "mamba2.c", _SIGNATURES))


def takes_layer(
    max_query_len: int, ssm_state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor,
    dt_bias: Tensor,
) -> bool:  # fmt: skip
    """Return whether the C forms accept the states, inputs and parameters of a layer, and there is a token."""
    _, heads, channels, size = ssm_state.shape
    return (
        x.shape[0] > 0
        and takes(max_query_len, (x, dt, B, C), (ssm_state, A, D, dt_bias))
        and fits(channels, size)
        and x.shape[1:] == (heads, channels)
        and B.shape == C.shape
        and B.shape[2] == size
        and heads % B.shape[1] == 0
        and ssm_state.stride()[1:] == (channels * size, size, 1)
        and all(each.stride(1) == each.shape[2] for each in (x, B, C))
        and all(each.shape[-1] == heads for each in (dt, A, D, dt_bias))
    )


def inputs_of(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor) -> tuple[int, ...]:
    """Return the addresses (and token strides) of a layer's inputs and parameters, as arguments of a C function."""
    return (
        x.data_ptr(), x.stride(0), dt.data_ptr(), dt.stride(0), A.data_ptr(), B.data_ptr(), B.stride(0), C.data_ptr(),
        C.stride(0), D.data_ptr(), dt_bias.data_ptr(),
    )  # fmt: skip


def sizes_of(x: Tensor, B: Tensor, num_rows: int, limits: tuple[float, float]) -> tuple[Any, ...]:
    """Return the last arguments of a C function: sizes, limits of step sizes, whether x is float32, and threads."""
    tokens, heads, channels = x.shape
    wide = x.dtype is torch.float32
    return tokens, num_rows, heads, B.shape[1], channels, B.shape[2], *limits, wide, torch.get_num_threads()


def selective_state_update(
    ssm_state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor,
    query_start_loc: Tensor, max_query_len: int, read: Tensor, write: Tensor, dt_min: float, dt_max: float,
) -> Tensor | Unsupported:  # fmt: skip
    """C form of `ops.selective_state_update`: same arguments and result, or `UNSUPPORTED` (see `ops.native`)."""
    inputs = (x, dt, A, B, C, D, dt_bias)
    integers = is_indexed(query_start_loc, read, write) and write.shape[1] >= max_query_len
    if not (read.shape[0] and integers and takes_layer(max_query_len, ssm_state, *inputs)):
        return UNSUPPORTED
    y, rows = x.new_empty(x.shape), contiguous(query_start_loc, read)
    write = write if write.stride(1) == 1 else write.contiguous()
    wrong = _kernels()["update"](
        ssm_state.data_ptr(), ssm_state.stride(0), ssm_state.shape[0], *inputs_of(*inputs), *pointers(*rows),
        write.data_ptr(), write.stride(0), y.data_ptr(), *sizes_of(x, B, read.shape[0], (dt_min, dt_max)),
    )  # fmt: skip
    if wrong > 0:
        raise index_error(wrong - 1, ssm_state.shape[0], x.shape[0])
    return UNSUPPORTED if wrong else y


def ssd_scan_varlen(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, ssm_state: Tensor,
    query_start_loc: Tensor, chunk_start_loc: Tensor, chunk_row: Tensor, row_chunk_loc: Tensor,
    max_chunks_per_row: int, chunk_size: int, read: Tensor, chunk_write: Tensor, dt_min: float, dt_max: float,
) -> Tensor | Unsupported:  # fmt: skip
    """C form of `ops.ssd_scan_varlen`: same arguments and result, or `UNSUPPORTED` (see `ops.native`)."""
    del query_start_loc, max_chunks_per_row, chunk_size
    inputs = (x, dt, A, B, C, D, dt_bias)
    integers = is_indexed(chunk_start_loc, read, chunk_write) and row_chunk_loc.dtype == torch.int32
    if not (read.shape[0] and integers and takes_layer(1, ssm_state, *inputs)):
        return UNSUPPORTED
    if not chunks_are_independent(ssm_state.shape[0], read, chunk_write, chunk_row):
        return UNSUPPORTED
    y, places = x.new_empty(x.shape), contiguous(chunk_start_loc, row_chunk_loc, read, chunk_write)
    _kernels()["scan"](
        ssm_state.data_ptr(), ssm_state.stride(0), *inputs_of(*inputs), *pointers(*places), y.data_ptr(),
        *sizes_of(x, B, read.shape[0], (dt_min, dt_max)),
    )  # fmt: skip
    return y


def gated_rms_norm(
    x: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float, norm_first: bool = False, activation: str = "silu"
) -> Tensor | Unsupported:
    """C form of `ops.gated_rms_norm`: same arguments and result, or `UNSUPPORTED` (see `ops.native`)."""
    tokens, inner = x.shape
    known = inner // groups <= MOST_STATE and weight.is_contiguous() and activation in ("silu", "sigmoid")
    if not (known and takes(1, (x, z, weight))):
        return UNSUPPORTED
    y = x.new_empty(tokens, inner)
    _kernels()["gated_norm"](
        x.data_ptr(), x.stride(0), z.data_ptr(), z.stride(0), weight.data_ptr(), y.data_ptr(),
        tokens, groups, inner // groups, weight.numel(), eps, norm_first, activation == "silu",
        x.dtype is torch.float32, torch.get_num_threads(),
    )  # fmt: skip
    return y
