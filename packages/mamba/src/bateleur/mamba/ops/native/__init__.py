"""Forms in C of what a recurrent layer does on a CPU, in float32 or bfloat16 with float32 states: a decode step's, and
the recurrence over prompts.

Prompts go token by token as decodes do, so the bits of a state do not depend on where a prompt was cut.

Each function has the signature of an operator, and returns `UNSUPPORTED` for arguments that it does not take: then
the operator has torch's form.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MOST_TOKENS = 16
MOST_STATE = 1 << 16
"""Tokens of a row, and entries of a head's state that fit on a stack."""
_MOST_WIDTH = 1 << 12
"""Numbers that a token brings to a head."""
_DTYPES = (torch.float32, torch.bfloat16)


def takes(max_query_len: int, activations: Sequence[Tensor | None], exact: Sequence[Tensor] = ()) -> bool:
    """Whether rows of so many tokens are computed here: activations all float32 or all bfloat16, what is
    `exact` float32, their last axes dense.
    """
    first = activations[0]
    assert first is not None
    dtype = first.dtype
    if dtype not in _DTYPES:
        return False
    for each in activations:
        if each is not None and (each.dtype != dtype or each.stride(-1) != 1):
            return False
    for each in exact:
        if each.dtype != torch.float32 or each.stride(-1) != 1:
            return False
    return 1 <= max_query_len <= MOST_TOKENS


def addresses(query_start_loc: Tensor, *slots: Tensor) -> bool:
    """Whether starts and slots are of the integers that the kernels read."""
    return query_start_loc.dtype == torch.int32 and all(each.dtype == torch.int64 for each in slots)


def fits(channels: int, size: int) -> bool:
    """Whether a head's state (channels, size) fits on a stack, and what tokens bring, widened."""
    return channels * size <= MOST_STATE and channels + 2 * size <= _MOST_WIDTH


def takes_state(ssm_state: Tensor, x: Tensor, B: Tensor, C: Tensor, *by_head: Tensor) -> bool:
    """Whether slots, what each token brings, and numbers (..., H), have the form that the kernel reads."""
    _, heads, channels, size = ssm_state.shape
    if (
        not fits(channels, size)
        or x.shape[1:] != (heads, channels)
        or B.shape[2] != size
        or B.shape != C.shape
        or heads % B.shape[1]
    ):
        return False
    slots = ssm_state.stride()[1:] == (channels * size, size, 1)
    dense = all(each.stride(1) == each.shape[2] for each in (x, B, C))
    return slots and dense and all(each.shape[-1] == heads for each in by_head)


def apart_by_chunks(slots: int, read: Tensor, chunk_write: Tensor, chunk_row: Tensor) -> bool:
    """Whether rows, computed in any order, write no slot that another one reads.

    Raises IndexError for a slot that is outside those `slots`.
    """
    reads, writes = read.tolist(), chunk_write.tolist()
    used = set(reads).union(writes)
    if min(used) < 0 or max(used) >= slots:
        raise IndexError(
            f"read, chunk_write: slots {min(used)} to {max(used)} are not all of the {slots} there are"
        )
    shared = set(reads).intersection(writes) - {0}
    if not shared or len(reads) == 1:
        return True
    pairs = {(slot, row) for row, slot in enumerate(reads) if slot in shared}
    pairs.update((slot, row) for slot, row in zip(writes, chunk_row.tolist(), strict=True) if slot in shared)
    return len(pairs) == len(shared)


def misplaced(row: int, slots: int, tokens: int) -> IndexError:
    """What a row that C refuses is told."""
    return IndexError(
        f"read, write, query_start_loc: row {row} names a slot outside the {slots} there are, or not 0 to "
        f"{MOST_TOKENS} of the {tokens} tokens"
    )


def dense(*tensors: Tensor) -> list[Tensor]:
    """The same numbers, each beside the next."""
    return [each if each.is_contiguous() else each.contiguous() for each in tensors]
