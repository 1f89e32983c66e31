"""C forms of the causal convolution; decodes and prefills give the same bits. See `conv.c`."""

from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from bateleur.mamba.ops.native import chunks_are_independent, contiguous, index_error, is_indexed, takes
from bateleur.metadata.dispatch import UNSUPPORTED, Unsupported
from bateleur.metadata.native import kernels, pointers

MOST_TAPS = 8
"""Maximum number of taps."""
_ACTIVATIONS = ("silu", "none")
_SIGNATURES = (
    ("conv", "=" + "plpppll" + "pppp" + "p" + "llll" + "iii"),
    ("conv_prompts", "=" + "plpppl" + "pl" + "ppppp" + "p" + "llll" + "iii"),
)
_kernels = cache(partial(kernels, Path(__file__).parent / "conv.c", _SIGNATURES))


def fits(x: Tensor, weight: Tensor, windows: Tensor, entries: int) -> bool:
    """Return whether tap and channel counts are supported, and windows contiguous with at least `entries` tokens."""
    channels, taps = weight.shape
    if not weight.is_contiguous() or taps > MOST_TAPS or x.shape[1] != channels:
        return False
    return windows.stride(1) == windows.shape[2] == channels and windows.shape[1] >= entries


def causal_conv1d_update(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, query_start_loc: Tensor, max_query_len: int,
    read: Tensor, offset: Tensor, write: Tensor, activation: str,
) -> Tensor | Unsupported:  # fmt: skip
    """C form of `ops.causal_conv1d_update`: same arguments and result, or `UNSUPPORTED` (see `ops.native`)."""
    room = weight.shape[1] - 2 + max_query_len  # inputs that a row writes to its slot
    floats = takes(max_query_len, (x, weight, bias, conv_state)) and fits(x, weight, conv_state, room)
    integers = is_indexed(query_start_loc, read, offset, write)
    if not (x.shape[0] and read.shape[0] and floats and integers and activation in _ACTIVATIONS):
        return UNSUPPORTED
    (tokens, channels), taps = x.shape, weight.shape[1]
    slides = conv_state.shape[1] >= taps
    y = x.new_empty(tokens, channels)
    rows = contiguous(query_start_loc, read, offset, write)
    wrong = _kernels()["conv"](
        x.data_ptr(), x.stride(0), weight.data_ptr(), None if bias is None else bias.data_ptr(),
        conv_state.data_ptr(), conv_state.stride(0), conv_state.shape[0], rows[0].data_ptr(), rows[1].data_ptr(),
        rows[2].data_ptr() if slides else None, rows[3].data_ptr(), y.data_ptr(),
        tokens, read.shape[0], channels, taps, activation == "silu", x.dtype is torch.float32,
        torch.get_num_threads(),
    )  # fmt: skip
    if wrong > 0:
        raise index_error(wrong - 1, conv_state.shape[0], tokens)
    return UNSUPPORTED if wrong else y


def causal_conv1d_varlen(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, request_conv: Tensor | None,
    query_start_loc: Tensor, read: Tensor, chunk_start_loc: Tensor, chunk_row: Tensor, chunk_write: Tensor,
    request_conv_write: Tensor | None, activation: str,
) -> Tensor | Unsupported:  # fmt: skip
    """C form of `ops.causal_conv1d_varlen`: same arguments and result, or `UNSUPPORTED` (see `ops.native`)."""
    del query_start_loc
    keep, places = weight.shape[1] - 1, contiguous(read, chunk_start_loc, chunk_row, chunk_write)
    windows: tuple[int | None, ...] = (None, 0, None)
    if request_conv is not None and request_conv_write is not None:
        if request_conv_write.dtype != torch.int64 or not fits(x, weight, request_conv, keep):
            return UNSUPPORTED
        places += contiguous(request_conv_write)
        windows = request_conv.data_ptr(), request_conv.stride(0), places[4].data_ptr()
    floats = takes(1, (x, weight, bias, conv_state, request_conv)) and fits(x, weight, conv_state, keep)
    integers = chunk_row.dtype == torch.int32 and is_indexed(chunk_start_loc, read, chunk_write)
    if not (len(chunk_row) and floats and integers and activation in _ACTIVATIONS):
        return UNSUPPORTED
    if not chunks_are_independent(conv_state.shape[0], read, chunk_write, chunk_row):
        return UNSUPPORTED
    (tokens, channels), taps = x.shape, weight.shape[1]
    y = x.new_empty(tokens, channels)
    wrong = _kernels()["conv_prompts"](
        x.data_ptr(), x.stride(0), weight.data_ptr(), None if bias is None else bias.data_ptr(),
        conv_state.data_ptr(), conv_state.stride(0), *windows[:2], *pointers(*places[:4]), windows[2], y.data_ptr(),
        tokens, chunk_row.shape[0], channels, taps, activation == "silu", x.dtype is torch.float32,
        torch.get_num_threads(),
    )  # fmt: skip
    if wrong:
        raise IndexError(f"chunk_start_loc: chunk {wrong - 1} has tokens outside of [0, {tokens - 1}]")
    return y
