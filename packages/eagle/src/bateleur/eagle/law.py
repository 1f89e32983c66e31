"""What a row of logits is drawn from, and the whole of it, for rules that look at more than a draw.

Legend for shapes: N rows of logits, S of them that are truncated, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.eagle.rules import tempered

TEMPERATURE, LOG_MIN_P, TOP_K, TOP_P = range(4)
"""Columns of a law."""


@dataclass(frozen=True, slots=True)
class Law:
    """softmax(logits / temperature) of N rows, where min_p, top_k and top_p have left tokens, in this order.

    min_p leaves logits of at least that of the best plus log(min_p); top_k the largest so many, all of them where it
    is 0 or at least V; top_p the largest until their mass reaches that part of what the others have left. Of equal
    logits the lowest ids stay.

    host: (N, 4) float32, a row of each: temperature (0 takes the argmax, whatever the others are), log(min_p) or
        -inf, top_k, top_p in (0, 1]. values: the same on the device of the logits.
    chosen: `truncated` on that device, for those who sent it beforehand; None where it is to be sent when asked for.

    `ValueError` unless the shapes and dtypes are those.
    """

    host: NDArray[np.float32]
    values: Tensor
    chosen: Tensor | None = None

    def __post_init__(self) -> None:
        if self.host.dtype != np.float32 or self.host.ndim != 2 or self.host.shape[1] != 4:
            raise ValueError(f"host must be float32 (N, 4), got {self.host.dtype} {self.host.shape}")
        if self.values.dtype != torch.float32 or tuple(self.values.shape) != self.host.shape:
            raise ValueError(
                f"values must be float32 {self.host.shape} as host, "
                f"got {self.values.dtype} {tuple(self.values.shape)}"
            )

    def __len__(self) -> int:
        return len(self.host)

    @property
    def temperature(self) -> Tensor:
        """(N,) float32 on the device."""
        return self.values[:, TEMPERATURE]

    @property
    def greedy(self) -> bool:
        """Whether every row takes its argmax, as the host knows."""
        return not self.host[:, TEMPERATURE].any()

    def truncated(self, vocab_size: int) -> NDArray[np.int64]:
        """Rows that top_k or top_p concern, as the host knows."""
        top_k = self.host[:, TOP_K]
        cut = ((top_k > 0) & (top_k < vocab_size)) | (self.host[:, TOP_P] < 1)
        return np.flatnonzero(cut & (self.host[:, TEMPERATURE] > 0))

    def apply(self, logits: Tensor) -> Tensor:
        """The whole law: (N, V) float32, a copy, divided by the temperature in rows that draw, -inf where min_p, top_k
        or top_p drop a token. NaN stays NaN. `logits` are (N, V) float32.
        """
        # Greedy rows divide by 1, and x / 1 is x: the same bits as without them.
        logits = tempered(logits, self.temperature)
        if (self.host[:, LOG_MIN_P] > -np.inf).any():
            threshold = logits.amax(dim=-1, keepdim=True) + self.values[:, LOG_MIN_P, None]
            logits.masked_fill_(logits < threshold, -torch.inf)
        chosen = self.truncated(logits.shape[1])
        if chosen.size:
            self._truncate_(logits, chosen)
        return logits

    def _truncate_(self, logits: Tensor, chosen: NDArray[np.int64]) -> None:
        """top_k, then top_p over what top_k left, for the chosen rows."""
        index, size = None, logits.shape[1]
        if len(chosen) < len(self):
            index = torch.from_numpy(chosen).to(logits.device) if self.chosen is None else self.chosen
        part_SV = logits if index is None else logits.index_select(0, index)
        table = self.values if index is None else self.values.index_select(0, index)
        top_k, top_p = table[:, TOP_K].long(), table[:, TOP_P]
        top_k = top_k.where((top_k > 0) & (top_k < size), size)
        # Where every row has a small top_k, nothing below the largest of them matters.
        host_k = self.host[chosen, TOP_K]
        top_SN = _descending(part_SV, int(np.where(host_k > 0, host_k, size).max()))
        keep_S = top_k
        if (self.host[chosen, TOP_P] < 1).any():
            keep_S = torch.where(top_p < 1, _nucleus_size(top_SN, top_k, top_p), top_k)
        _keep_top_(part_SV, keep_S, top_SN.gather(1, keep_S.unsqueeze(1) - 1))
        if index is not None:
            logits.index_copy_(0, index, part_SV)


def _descending(logits_SV: Tensor, num: int) -> Tensor:
    """Return the `num` largest values of every row, (S, num), largest first."""
    if num < logits_SV.shape[1]:
        return logits_SV.topk(num, dim=-1).values
    if logits_SV.is_cpu:  # numpy sorts values alone, six times faster than torch sorts pairs
        return torch.from_numpy(np.sort(logits_SV.neg().numpy(), axis=-1)).neg_()
    return logits_SV.sort(dim=-1, descending=True).values


def _nucleus_size(top_SN: Tensor, top_k_S: Tensor, top_p_S: Tensor) -> Tensor:
    """Return how many of the top_k largest it takes to reach top_p of their mass, (S,) int64, at least 1.

    Mass is exp(logit - max) in units of 2^-40, summed as integers: the sum is exact, so it does not depend on
    the order of summation, and with it on the device, the memory layout or how many values were sorted.
    """
    mass_SN = (top_SN - top_SN[:, :1]).exp_().double().mul_(2.0**40).long()
    rank_N = torch.arange(top_SN.shape[1], device=top_SN.device)
    mass_SN.masked_fill_(rank_N >= top_k_S.unsqueeze(1), 0)
    sum_SN = mass_SN.cumsum(dim=-1)
    limit_S1 = sum_SN[:, -1:].double() * top_p_S.unsqueeze(1)
    # What counts is the mass before a token, so the token that crosses the limit stays.
    before_SN = sum_SN - mass_SN
    size_S = (before_SN.double() < limit_S1).sum(dim=-1)
    return torch.minimum(size_S.clamp_(min=1), top_k_S)


def _keep_top_(logits_SV: Tensor, keep_S: Tensor, least_S1: Tensor) -> None:
    """Mask all but the `keep` largest of every row, in place; `least` is the smallest value that stays.

    A NaN compares false with everything and stays, for the draw to find it.
    """
    tied_SV = logits_SV == least_S1
    above_S1 = (logits_SV > least_S1).sum(dim=-1, keepdim=True)
    surplus_SV = tied_SV.cumsum(dim=-1) > keep_S.unsqueeze(1) - above_S1
    drop_SV = (logits_SV < least_S1).logical_or_(tied_SV.logical_and_(surplus_SV))
    logits_SV.masked_fill_(drop_SV, -torch.inf)
