"""What the lengths of a step's rows say of them, on the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bateleur.metadata import CommonAttentionMetadata


def require_order(first: int, prompt: npt.NDArray[np.bool_], continues: npt.NDArray[np.bool_]) -> None:
    """Of the rows from `first` on, those past their prompts lead.

    Dummy batches, whose rows have any lengths, are of one kind throughout.
    """
    late = np.logical_or.accumulate(prompt) & ~prompt & continues
    if late.any():
        raise ValueError(
            f"common: row {first + int(late.argmax())} is past its prompt, and row "
            f"{first + int(prompt.argmax())} before it is not; rows past their prompts come first"
        )


def continues_one_token_each(common: CommonAttentionMetadata) -> bool:
    """Whether the batch says so as a whole: the steady case, decided without looking at each row's length."""
    if common.max_query_len != 1 or not common.num_actual_reqs:
        return False
    return bool(np.minimum.reduce(common.seq_len_bound.upper[: common.num_actual_reqs]) > 1)
