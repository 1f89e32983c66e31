"""Split of a batch into decodes and prefills, from the state of its rows (requests). Arguments are (R,) host arrays.

Lengths alone are not enough: a prompt of one token has the shape of a decode, but no state to continue from.
"""

from dataclasses import dataclass

import numpy as np

from bateleur.metadata.seq_len_bound import BoolArray, I32Array


@dataclass(frozen=True, slots=True)
class RowSplit:
    """Numbers of leading decode rows and following prefill rows, and their tokens. Rows without tokens do not count."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


def decode_like(query_lens: I32Array, is_prefilling: BoolArray, num_computed_tokens: I32Array) -> BoolArray:
    """Return (R,) bool: whether a request is past its prompt, or computes one token over existing context."""
    for name, array in (("is_prefilling", is_prefilling), ("num_computed_tokens", num_computed_tokens)):
        if array.shape != query_lens.shape:
            raise ValueError(f"{name}: has shape {array.shape}, but query_lens has {query_lens.shape}")
    result: BoolArray = ~is_prefilling | ((query_lens == 1) & (num_computed_tokens > 0))
    return result


def uniform_query_len(query_lens: I32Array, is_prefilling: BoolArray, num_computed_tokens: I32Array) -> int | None:
    """Return the query length if it is the same for all rows with tokens, and all are `decode_like`; else None."""
    used = query_lens > 0
    if not used.any() or not decode_like(query_lens, is_prefilling, num_computed_tokens)[used].all():
        return None
    lengths = query_lens[used]
    return int(lengths[0]) if (lengths == lengths[0]).all() else None


def split_decodes_and_prefills(
    query_lens: I32Array,
    is_prefilling: BoolArray,
    num_computed_tokens: I32Array,
    *,
    threshold: int = 1,
    uniform: bool = False,
    treat_short_extends_as_decodes: bool = False,
) -> RowSplit:
    """Split a batch at its first row that cannot run as a decode. Decodes come first, padded rows last.

    Args:
        threshold: longest query of a decode, ``1 + drafts`` for verification.
        uniform: all decodes must have the same query length. If all rows with tokens are decodes, padded rows count as
            decodes, so that the number equals that of a graph capture.
        treat_short_extends_as_decodes: a row within its prompt counts as a decode if it has context and at most
            ``threshold`` tokens. Use it for attention. Recurrent layers need False: such a row then counts as a decode
            only if it has one token. A row without context is always a prefill.
    """
    if threshold < 1:
        raise ValueError(f"threshold: {threshold} must be at least 1")
    used = query_lens > 0
    decodes = decode_like(query_lens, is_prefilling, num_computed_tokens)
    if treat_short_extends_as_decodes:
        decodes |= num_computed_tokens > 0
    decodes &= (query_lens <= threshold) & used
    if uniform and len(query_lens):
        decodes &= query_lens == query_lens[0]
    num_decodes = len(decodes) if decodes.all() else int(decodes.argmin())
    num_prefills = int(np.count_nonzero(used[num_decodes:]))
    tokens = int(query_lens[:num_decodes].sum()), int(query_lens[num_decodes:].sum())
    return RowSplit(len(used) if uniform and not num_prefills else num_decodes, num_prefills, *tokens)
