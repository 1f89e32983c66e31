"""Prompt lookup: propose the tokens that followed an earlier occurrence of the last tokens. No model, no head.

The last n tokens of a request are searched in its earlier text, `prompt_lookup_min` <= n <= `prompt_lookup_max`. The
longest match wins, and of equal ones the latest. The tokens after it are the drafts. If the text ends before K drafts,
they repeat from their first token, so that a repeating text has K drafts, too. (Saxena, "Prompt lookup decoding",
2023; the names are vLLM's.)

It runs on the device over its own copy of the tokens. The host gets the emitted tokens only after the proposal is
queued, so a search on the host would delay every step.
"""

# Shape letters: R rows of a step, J = 1 + K, N tokens of the longest suffix, C columns of a tile of the table.

import numpy as np
import torch
from torch import Tensor

from bateleur.eagle.drafter import DraftContext, TargetNeeds
from bateleur.metadata import upload

_PLACES, _PLACES_ON_CPU = 2**21, 2**18
"""Token positions that are searched at once, at about 16 bytes each: they fit the caches of a CPU and fill a GPU."""


class NGramDrafter:
    """Drafter by prompt lookup: proposes the tokens that followed an earlier occurrence of the last tokens.

    Args:
        num_speculative_tokens: K, most drafts of a request.
        max_num_reqs: rows of the engine's request table.
        max_model_len: most tokens of a request, output included.
        device: device of the steps.
        prompt_lookup_min: least number of matching tokens.
        prompt_lookup_max: largest number of matching tokens.

    It stores `token_bytes(max_model_len)` for each row. Raises `ValueError` for numbers below 1, or a minimum above
    the maximum.
    """

    needs = TargetNeeds()

    def __init__(
        self,
        num_speculative_tokens: int,
        max_num_reqs: int,
        max_model_len: int,
        device: torch.device | str,
        *,
        prompt_lookup_min: int = 2,
        prompt_lookup_max: int = 4,
    ) -> None:
        if num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens is {num_speculative_tokens}; with a draft it must be at least 1")
        if not 1 <= prompt_lookup_min <= prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min is {prompt_lookup_min}; it must be at least 1, and at most prompt_lookup_max = "
                f"{prompt_lookup_max}"
            )
        self.num_speculative_tokens = num_speculative_tokens
        self.prompt_lookup_min, self.prompt_lookup_max = prompt_lookup_min, prompt_lookup_max
        self._max_model_len = max_model_len
        # The last column takes entries that are no token.
        self._tokens = torch.zeros((max_num_reqs, max_model_len + 1), dtype=torch.int32, device=device)
        self._columns_J = torch.arange(1 + num_speculative_tokens, device=device)

    @staticmethod
    def token_bytes(max_model_len: int) -> int:
        """Return the bytes that are stored for a request of at most `max_model_len` tokens."""
        return torch.int32.itemsize * (max_model_len + 1)

    def admit(self, row: int, token_ids: list[int]) -> None:
        """Store the tokens `token_ids` of a request that takes row `row` of the request table."""
        ids = upload(np.array(token_ids, np.int32), self._tokens.device)
        self._tokens[row, : len(ids)] = ids

    @torch.no_grad()
    def propose(self, context: DraftContext) -> Tensor:
        """Append the emitted tokens, and return (R, K) int64 drafts for the R requests of the step. No host sync.

        The drafts of a request without a match are -1.
        """
        context.require(self.needs, self.num_speculative_tokens)
        batch, rows = context.batch, context.rows
        length_R1 = (batch.num_computed_tokens[: len(rows)] + context.num_valid + 1).unsqueeze(1)
        is_token_RJ = context.emitted >= 0
        at_RJ = length_R1 - is_token_RJ.sum(1, keepdim=True) + self._columns_J
        at_RJ = at_RJ.where(is_token_RJ, self._max_model_len).clamp_(max=self._max_model_len)
        self._tokens.index_put_((rows.unsqueeze(1), at_RJ), context.emitted.int())
        longest = min(batch.seq_len_bound.max() + 1, self._max_model_len)
        end_R1, found_R1 = self._last_occurrence(rows, length_R1, longest)
        spot_K = self._columns_J[:-1]
        drafts_RK = self._tokens[rows.unsqueeze(1), end_R1 + spot_K % (length_R1 - end_R1)].long()
        return drafts_RK.where(found_R1 & (spot_K < context.num_drafts), -1)

    def _last_occurrence(self, rows: Tensor, length_R1: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Find the latest of the longest earlier occurrences of the last tokens in the text of each of R requests.

        Returns the index after it, (R, 1), and whether there is one, (R, 1) bool. longest: bound of the text lengths.
        """
        most = min(self.prompt_lookup_max, longest - 1)
        back_N = torch.arange(most, device=rows.device)
        suffix_RN = self._tokens[rows.unsqueeze(1), (length_R1 - 1 - back_N).clamp_(min=0)]
        best_R1 = torch.zeros_like(length_R1)
        places = _PLACES_ON_CPU if rows.is_cpu else _PLACES
        width = max(places // max(len(rows), 1), most)
        for first in range(0, longest, width):
            start = max(first - most + 1, 0)  # a match that began in the tile before is counted in full here
            last_C = torch.arange(start, min(first + width, longest), device=rows.device)
            text_RC = self._tokens[:, start : start + len(last_C)].index_select(0, rows)
            num_equal_RC = _num_equal(text_RC, suffix_RN, last_C < length_R1 - 1)
            here_R1 = num_equal_RC.mul_(longest).add_(last_C).amax(1, keepdim=True)
            best_R1 = torch.maximum(best_R1, here_R1)
        found_R1 = best_R1 >= self.prompt_lookup_min * longest
        return (best_R1 % longest + 1).where(found_R1, 0), found_R1


def _num_equal(text_RC: Tensor, suffix_RN: Tensor, counts_RC: Tensor) -> Tensor:
    """Return (R, C) int64: how many of a request's last tokens equal the tokens of `text_RC` up to each position.

    suffix_RN: the last N tokens, newest first. counts_RC: whether a match may end at each of C positions; overwritten.
    """
    num_equal_RC = torch.zeros_like(text_RC, dtype=torch.int64)
    for i in range(suffix_RN.shape[1]):
        counts_RC[:, i:] &= text_RC[:, : text_RC.shape[1] - i] == suffix_RN[:, i : i + 1]
        counts_RC[:, :i] = False
        num_equal_RC += counts_RC
    return num_equal_RC
