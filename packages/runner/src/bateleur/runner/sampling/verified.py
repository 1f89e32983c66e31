"""What a step emits."""

# Shape letters: S rows that draw, L rows of logits, K drafts at most, J = 1 + K.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bateleur.runner.sampling.logprobs import Logprobs
from bateleur.runner.sampling.step_index import StepIndex


@dataclass(frozen=True, slots=True)
class Verified:
    """What a step emits, for the S rows that draw; on the device but for `drawing` and `first_logits`."""

    drawing: NDArray[np.int64]
    """(S,) which rows of the plan draw."""
    first_logits: NDArray[np.int64]
    """(S,) the row of `logprobs` of the first token; those of the next follow."""
    token_ids: Tensor
    """(S, J) int64, -1 behind the last; on a CPU perhaps (S, 1) of a step without drafts."""
    num_emitted: Tensor
    """(S,) int64 in [1, J]; less by one where `bad`."""
    bad: Tensor
    """(S,) bool: behind these tokens the logits held a NaN or left no token."""
    empty: Tensor | None
    """(S,) bool, those of them in which every token was forbidden; None where nothing forbids any."""
    drafts: Tensor
    """(S, K) int64 that were tested, -1 where there was none; (S, 0) where nobody had any."""
    logprobs: Logprobs | None
    """(L, ...), if a row of this step asked for them."""
    packed: Tensor | None = None
    """(S, 2 + J + K) int64: counts, what is bad, tokens and drafts, where these are views of it."""

    @classmethod
    def of_packed(cls, packed: Tensor, width: int, index: StepIndex) -> Verified:
        """As `CapturedSampler.record` left it, of rows that all draw; `width` is J."""
        tokens, drafts = packed[:, 2 : 2 + width], packed[:, 2 + width :]
        drawing, first = index.drawing, index.first_S
        return cls(drawing, first, tokens, packed[:, 0], packed[:, 1], None, drafts, None, packed)
