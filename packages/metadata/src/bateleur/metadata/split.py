"""Which rows of a batch run as decodes: pure functions of state, not of shape alone.

A prompt of one token has the shape of a decode and is none: its row has no state to continue from. So no
function here can be asked without the state of the rows. Arguments are (R,) host arrays, in batch order.
"""

from dataclasses import dataclass

import numpy as np

from bateleur.metadata.seq_len_bound import BoolArray, I32Array


@dataclass(frozen=True, slots=True)
class RowSplit:
    """Leading decode rows, then prefill rows, with the tokens of each. Rows without tokens are in neither,
    except that :func:`split_decodes_and_prefills` with ``uniform`` counts them as decodes."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


def decode_like(query_lens: I32Array, is_prefilling: BoolArray, num_computed_tokens: I32Array) -> BoolArray:
    """Rows (R,) past their prompt, or computing exactly one new token over existing context."""
    for name, array in (("is_prefilling", is_prefilling), ("num_computed_tokens", num_computed_tokens)):
        if array.shape != query_lens.shape:
            raise ValueError(f"{name}: has shape {array.shape}, but query_lens has {query_lens.shape}")
    result: BoolArray = ~is_prefilling | ((query_lens == 1) & (num_computed_tokens > 0))
    return result


def uniform_query_len(
    query_lens: I32Array, is_prefilling: BoolArray, num_computed_tokens: I32Array
) -> int | None:
    """The query length all rows share if every one is decode-like, else None; empty rows don't count."""
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
    """Split a batch, ordered decodes first and padding last, at its first row that can't run as a decode.

    Args:
        query_lens, is_prefilling, num_computed_tokens: state of the rows.
        threshold: longest query a decode kernel takes (``1 + drafts`` for a verifying one).
        uniform: decodes must share one query length; and if all rows with tokens are decodes, padded rows
            count as decodes too, so that the number is the captured one.
        treat_short_extends_as_decodes: whether a row that is still in its prompt may run as a decode with up to
            ``threshold`` tokens over existing context (right for attention, whose kernels see queries and keys
            only), or with exactly one (right for recurrent layers, where several tokens of a decode are drafts).
            A row without context is a prefill either way.
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
    num_decode_tokens = int(query_lens[:num_decodes].sum())
    num_prefill_tokens = int(query_lens.sum()) - num_decode_tokens
    if uniform and not num_prefills:
        num_decodes = len(query_lens)
    return RowSplit(num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens)
