"""What a row of logits is drawn from, and the whole of it, for rules that look at more than a draw.

Legend for shapes: N rows of logits, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.library import Library

from bateleur.eagle import native
from bateleur.eagle.penalties import Penalties
from bateleur.eagle.rules import tempered
from bateleur.metadata.forms import Forms, define, load

if TYPE_CHECKING:
    from bateleur.eagle.part import Part

TEMPERATURE, LOG_MIN_P, TOP_K, TOP_P = range(4)
"""Columns of a law."""
_ANYTHING = np.array([1.0, -1.0, 1.0, 0.5], dtype=np.float32)
"""A row that draws, with a min_p, a top_k and a top_p: whatever the device may find."""
_WHOLE = np.array([1.0, -np.inf, 0.0, 1.0], dtype=np.float32)
"""A row that draws from all tokens."""


@dataclass(frozen=True, slots=True)
class Law:
    """softmax(logits / temperature) of N rows, where min_p, top_k and top_p have left tokens, in this order.

    min_p leaves logits of at least that of the best plus log(min_p); top_k the largest so many, all of them where it
    is 0 or at least V; top_p the largest until their mass reaches that part of what the others have left. Of equal
    logits the lowest ids stay.

    host: (N, 4) float32, a row of each: temperature (0 takes the argmax, whatever the others are), log(min_p) or
        -inf, top_k, top_p in (0, 1]. values: the same on the device of the logits.
    penalties: what is done to the logits before all of this.

    `ValueError` unless the shapes and dtypes are those.
    """

    host: NDArray[np.float32]
    values: Tensor
    penalties: Penalties | None = None

    def __post_init__(self) -> None:
        if self.host.dtype != np.float32 or self.host.ndim != 2 or self.host.shape[1] != 4:
            raise ValueError(f"host must be float32 (N, 4), got {self.host.dtype} {self.host.shape}")
        if self.values.dtype != torch.float32 or tuple(self.values.shape) != self.host.shape:
            raise ValueError(
                f"values must be float32 {self.host.shape} as host, "
                f"got {self.values.dtype} {tuple(self.values.shape)}"
            )
        if self.penalties is not None and len(self.penalties.owners) != len(self.host):
            raise ValueError(
                f"penalties are of {len(self.penalties.owners)} rows, the law of {len(self.host)}; they are as many"
            )

    @classmethod
    def unknown(cls, values: Tensor, *, cuts: bool = True) -> Law:
        """The law of rows whose `values` (N, 4) a graph finds on the device: what the host says of each lets it leave
        out nothing, or without `cuts` no more than truncation, which it knows that none of them asks for.
        """
        return cls(np.tile(_ANYTHING if cuts else _WHOLE, (len(values), 1)), values)

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

    def cuts(self, vocab_size: int) -> bool:
        """Whether any row may have less than its whole vocabulary, as the host knows."""
        return bool((self.host[:, LOG_MIN_P] > -np.inf).any()) or len(self.truncated(vocab_size)) > 0

    def apply(self, logits: Tensor, part: Part | None = None) -> Tensor:
        """The whole law: (N, V) float32, a copy, penalised, divided by the temperature in rows that draw, -inf where
        min_p, top_k or top_p drop a token. `logits` are (N, V) float32, of all tokens or a part. A row that holds NaN
        or +inf keeps all of it.
        """
        if self.penalties is not None:
            logits = self.penalties.apply(logits)
        # Greedy rows divide by 1, and x / 1 is x: the same bits as without them.
        scaled_NV = tempered(logits, self.temperature)
        if self.cuts(logits.shape[1] if part is None else part.vocab_size):
            if part is None:
                least_N, last_N = CUT.on(logits)(logits, self.values)
            else:
                least_N, last_N = load("bateleur.eagle.part_cut:cut_part")(logits, self, part)
            drop_(scaled_NV, least_N.unsqueeze(1), last_N.unsqueeze(1))
        return scaled_NV


def drop_(scaled_NV: Tensor, least_N1: Tensor, last_N1: Tensor) -> None:
    """Give -inf, in place, to what is below the least that stays, or equal to it and behind the last of these."""
    lane_V = torch.arange(scaled_NV.shape[1], device=scaled_NV.device)
    drop_NV = (scaled_NV == least_N1).logical_and_(lane_V > last_N1)
    scaled_NV.masked_fill_(drop_NV.logical_or_(scaled_NV < least_N1), -torch.inf)


def cut(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row the least logit over the temperature that its law keeps, (N,) float32, and the last id that stays of
    those that are equal to it, (N,) int32; -inf and V in a row that is greedy or holds no finite maximum.

    logits: (N, V) float32. values: (N, 4) float32, see `Law`.
    """
    return _cut_rows(logits, values) if logits.is_cpu else by_order(logits, values)


CUT = Forms(cut, triton="bateleur.eagle.kernels.cut:cut")


def by_order(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """`cut` by an order of the vocabulary: the specification, and what runs on a CPU without a compiler."""
    size, scaled_NV = logits.shape[1], tempered(logits, values[:, TEMPERATURE])
    best_N1 = scaled_NV.amax(-1, keepdim=True)
    floor_N1 = best_N1 + values[:, LOG_MIN_P, None]
    top_NV = _descending(scaled_NV.masked_fill(scaled_NV < floor_N1, -torch.inf))
    top_k_N, top_p_N = values[:, TOP_K].long(), values[:, TOP_P]
    top_k_N = top_k_N.where((top_k_N > 0) & (top_k_N < size), size)
    top_k_N = top_k_N.minimum((top_NV > -torch.inf).sum(-1)).clamp_min_(1)
    keep_N1 = torch.where(top_p_N < 1, _nucleus_size(top_NV, top_k_N, top_p_N), top_k_N).unsqueeze(1)
    least_N1 = top_NV.gather(1, keep_N1 - 1)
    rank_N1 = keep_N1 - (scaled_NV > least_N1).sum(-1, keepdim=True)
    last_N = ((scaled_NV == least_N1).cumsum(-1) < rank_N1).sum(-1)
    lawful_N = (values[:, TEMPERATURE] > 0) & best_N1.isfinite().squeeze(1)
    return least_N1.squeeze(1).where(lawful_N, -torch.inf), last_N.where(lawful_N, size).int()


def _on_cpu(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    if not native.takes(logits):
        return by_order(logits, values)
    scaled_NV = tempered(logits, values[:, TEMPERATURE])
    # With the exponentials of torch, whose bits are those of the order.
    part_NV = (scaled_NV - scaled_NV.amax(-1, keepdim=True)).exp_()
    return native.cut_rows(scaled_NV, part_NV, values)


def _fake(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return values.new_empty(len(logits)), values.new_empty(len(logits), dtype=torch.int32)


_library = Library("bateleur", "FRAGMENT")
_cut_rows = define(_library, _on_cpu, Forms(_on_cpu), mutates=(), fake=_fake, name="cut_rows")
"""An operator, so that a recorded graph holds it."""


def _descending(logits_NV: Tensor) -> Tensor:
    """The values of every row, largest first."""
    if logits_NV.is_cpu:  # numpy sorts values alone, six times faster than torch sorts pairs
        return torch.from_numpy(np.sort(logits_NV.neg().numpy(), axis=-1)).neg_()
    return logits_NV.sort(dim=-1, descending=True).values


def _nucleus_size(top_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor) -> Tensor:
    """Return how many of the top_k largest it takes to reach top_p of their mass, (N,) int64, at least 1.

    Mass is exp(logit - max) in units of 2^-40, summed as integers: the sum is exact, so it does not depend on
    the order of summation, and with it on the device, the memory layout or how many values were sorted.
    """
    mass_NV = (top_NV - top_NV[:, :1]).exp_().double().mul_(2.0**40).long()
    rank_V = torch.arange(top_NV.shape[1], device=top_NV.device)
    mass_NV.masked_fill_(rank_V >= top_k_N.unsqueeze(1), 0)
    sum_NV = mass_NV.cumsum(dim=-1)
    limit_N1 = sum_NV[:, -1:].double() * top_p_N.unsqueeze(1)
    # What counts is the mass before a token, so the token that crosses the limit stays.
    before_NV = sum_NV - mass_NV
    size_N = (before_NV.double() < limit_N1).sum(dim=-1)
    return torch.minimum(size_N.clamp_(min=1), top_k_N)
