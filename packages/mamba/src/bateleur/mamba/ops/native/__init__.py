"""C forms of the convolution, Mamba-2 and the gated norm on a CPU, in float32 or bfloat16, with float32 states.

Prefills are processed token by token, like decodes, so a state has the same bits wherever a prompt is split.

Each function has the signature of its operator. It returns `UNSUPPORTED` for arguments that it does not accept, for
example if a row writes a state slot that another row reads. The operator then uses the torch form.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

MOST_TOKENS = 16
"""Maximum number of tokens of a decode row."""
MOST_STATE = 1 << 16
"""Maximum number of entries of a head's state, which is on the stack."""
_MOST_WIDTH = 1 << 12
"""Maximum number of inputs of a token for one head: x, B and C."""
_DTYPES = (torch.float32, torch.bfloat16)


def takes(max_query_len: int, activations: Sequence[Tensor | None], exact: Sequence[Tensor] = ()) -> bool:
    """Return whether the C forms accept requests of up to `max_query_len` tokens with these tensors.

    Activations must be all float32 or all bfloat16, and `exact` tensors float32; their last dimension contiguous.
    """
    given = [each for each in activations if each is not None]
    return (
        1 <= max_query_len <= MOST_TOKENS
        and given[0].dtype in _DTYPES
        and all(each.dtype == given[0].dtype for each in given)
        and all(each.dtype == torch.float32 for each in exact)
        and all(each.stride(-1) == 1 for each in (*given, *exact))
    )


def is_indexed(query_start_loc: Tensor, *slots: Tensor) -> bool:
    """Return whether `query_start_loc` is int32 and all state slots are int64."""
    return query_start_loc.dtype == torch.int32 and all(each.dtype == torch.int64 for each in slots)


def fits(channels: int, size: int) -> bool:
    """Return whether a head's state (channels, size) and the inputs of a token, as float32, fit on the stack."""
    return channels * size <= MOST_STATE and channels + 2 * size <= _MOST_WIDTH


def chunks_are_independent(slots: int, read: Tensor, chunk_write: Tensor, chunk_row: Tensor) -> bool:
    """Return whether no request writes a state slot that another one reads, so that any order is possible.

    Raises IndexError for a state slot outside [0, slots).
    """
    reads, writes = read.tolist(), chunk_write.tolist()
    used = set(reads).union(writes)
    if min(used) < 0 or max(used) >= slots:
        raise IndexError(
            f"read, chunk_write: slots are in [{min(used)}, {max(used)}]; they must be in [0, {slots - 1}]"
        )
    shared = set(reads).intersection(writes) - {0}
    if not shared or len(reads) == 1:
        return True
    pairs = {(slot, row) for row, slot in enumerate(reads) if slot in shared}
    pairs.update((slot, row) for slot, row in zip(writes, chunk_row.tolist(), strict=True) if slot in shared)
    return len(pairs) == len(shared)


def index_error(row: int, slots: int, tokens: int) -> IndexError:
    """Return the error for request `row`, with a state slot outside [0, slots) or a token outside [0, tokens)."""
    return IndexError(
        f"read, write, query_start_loc: row {row} has a slot outside of [0, {slots - 1}], or not 0 to {MOST_TOKENS} of "
        f"the {tokens} tokens"
    )


def contiguous(*tensors: Tensor) -> list[Tensor]:
    """Return contiguous tensors."""
    return [each.contiguous() for each in tensors]
