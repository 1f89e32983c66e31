"""Validation of drafters and draft policies that users pass, and of the values that they return."""

# Shape letters: R rows of a step, K draft tokens at most.

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.eagle import Drafter, TargetNeeds
from bateleur.runner.utils.arguments import refuse, shown


def check_drafter(drafter: Drafter, num_drafts: int, num_layers: int) -> None:
    """Raise ValueError if the drafter has another number of drafts, or needs outputs that the target does not have."""
    k, needs = drafter.num_speculative_tokens, drafter.needs
    if type(k) is not int or k != num_drafts:
        refuse("drafter.num_speculative_tokens", k, f"num_speculative_tokens = {num_drafts}")
    if not isinstance(needs, TargetNeeds):
        refuse("drafter.needs", needs, "a bateleur.eagle.TargetNeeds")
    if max(needs.taps, default=0) > num_layers:
        rule = f"boundaries of a model of {num_layers} layers, 0 to {num_layers}"
        refuse("drafter.needs.taps", needs.taps, rule)


def checked_drafts(drafts: Any, rows: Tensor, num_drafts: int, vocab_size: int) -> Tensor:
    """Return the proposal `drafts` of a drafter for `rows` (R,), with -1 in place of invalid token ids.

    Raises ValueError unless it is a tensor (R, K) int64 on the device of `rows`. Ids are replaced instead of refused,
    because a check would be a host-device sync.
    """
    shape = (len(rows), num_drafts)
    if not isinstance(drafts, Tensor):
        given = f"a {type(drafts).__name__}"
    else:
        given = f"{tuple(drafts.shape)} {drafts.dtype} on {drafts.device}"
        if drafts.shape == shape and drafts.dtype == torch.int64 and drafts.device == rows.device:
            return drafts.where((drafts >= 0) & (drafts < vocab_size), -1)
    raise ValueError(f"drafter proposed {given}; it must be a tensor {shape} torch.int64 on {rows.device}")


def checked_lengths(lengths: Any, most: NDArray[np.int32], num_drafts: int) -> NDArray[np.int32]:
    """Return the draft lengths of a policy, limited to `most` (R,), the drafts that each request can have.

    Raises ValueError for anything but one integer from 0 to `num_drafts` for each of R requests.
    """
    given = np.asarray(lengths)
    wrong = given.shape != most.shape or given.dtype.kind != "i"
    if wrong or (given.size and not (given.min() >= 0 and given.max() <= num_drafts)):
        rule = f"it must be {len(most)} integers in [0, {num_drafts}]"
        raise ValueError(f"draft_policy gave {shown(lengths)}; {rule}")
    kept: NDArray[np.int32] = np.minimum(given, most).astype(np.int32)
    return kept
