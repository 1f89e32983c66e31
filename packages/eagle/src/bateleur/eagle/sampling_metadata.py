"""Penalties, temperature and truncation (min_p, top_k, top_p) of every logit row.

Legend for shapes: N logit rows, M rows of the request table, K draft tokens at most, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.library import Library

from bateleur.eagle.rules import apply_temperature
from bateleur.eagle.vocab_shard import VocabShard
from bateleur.metadata.dispatch import Implementations, define_op, load

TEMPERATURE, LOG_MIN_P, TOP_K, TOP_P = range(4)
"""Columns of `SamplingMetadata.values`."""
_ANYTHING = np.array([1.0, -1.0, 1.0, 0.5], dtype=np.float32)
"""A row that samples with min_p, top_k and top_p: no computation may be skipped for it."""
_WHOLE = np.array([1.0, -np.inf, 0.0, 1.0], dtype=np.float32)
"""A row that samples from all tokens."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of N logit rows, applied before temperature and truncation. All tensors are on the device of the
    logits.

    values: (N, 3) float32: repetition, frequency and presence penalty. The logit of a token of the prompt or output
        is divided by repetition (above 0), or multiplied if it is negative. frequency is subtracted once for each
        time that the token was generated, presence once if it was. Values 1, 0, 0 change no bit.
    owners: (N,) int64, row of the request table for each logit row.
    counts: (M, V) int32, how often each token was generated.
    prompts: (M, V) bool, whether a token is in the prompt.
    before: (N, K) int64, drafts before a logit row, which count as generated; -1 where there is none. None without
        drafts.

    Raises `ValueError` for other shapes or dtypes.
    """

    values: Tensor
    owners: Tensor
    counts: Tensor
    prompts: Tensor
    before: Tensor | None = None

    def __post_init__(self) -> None:
        num = len(self.owners)
        for name, dtype, shape in (
            ("values", torch.float32, (num, 3)),
            ("owners", torch.int64, (num,)),
            ("counts", torch.int32, tuple(self.counts.shape)),
            ("prompts", torch.bool, tuple(self.counts.shape)),
        ):
            value: Tensor = getattr(self, name)
            if value.dtype != dtype or tuple(value.shape) != shape or not value.is_contiguous():
                raise ValueError(f"{name}={value.dtype} {tuple(value.shape)}: must be contiguous {dtype} {shape}")
        if self.before is not None and (self.before.dtype != torch.int64 or len(self.before) != num):
            raise ValueError(f"before={self.before.dtype} {tuple(self.before.shape)}: must be int64 with {num} rows")

    def apply(self, logits: Tensor) -> Tensor:
        """Return penalised logits (N, V) float32, a copy."""
        repetition, frequency, presence = self.values.split(1, dim=1)
        counts_NV = self.counts.index_select(0, self.owners)
        if self.before is not None:
            counts_NV.scatter_add_(1, self.before.clamp_min(0), self.before.ge(0).to(counts_NV.dtype))
        used_NV = counts_NV > 0
        seen_NV = self.prompts.index_select(0, self.owners).logical_or_(used_NV)
        factor_NV = torch.where(logits > 0, 1.0 / repetition, repetition)
        penalised_NV = torch.where(seen_NV, logits * factor_NV, logits.float())
        return penalised_NV.sub_(frequency * counts_NV).sub_(presence * used_NV)


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """Sampling parameters of N logit rows: a row is sampled from softmax(logits / temperature) after truncation.

    Truncation applies min_p, then top_k, then top_p. min_p keeps logits of at least the largest one plus log(min_p).
    top_k keeps the k largest logits, or all if k is 0 or at least V. top_p keeps the largest logits whose probability
    mass reaches top_p of the mass that the other two kept. Of equal logits the lowest token ids are kept.

    host: (N, 4) float32: temperature (0 takes the argmax and ignores the rest), log(min_p) or -inf, top_k, top_p in
        (0, 1].
    values: the same numbers on the device of the logits.
    penalties: applied to the logits before temperature and truncation.

    Raises `ValueError` for other shapes or dtypes.
    """

    host: NDArray[np.float32]
    values: Tensor
    penalties: Penalties | None = None

    def __post_init__(self) -> None:
        if self.host.dtype != np.float32 or self.host.ndim != 2 or self.host.shape[1] != 4:
            raise ValueError(f"host={self.host.dtype} {self.host.shape}: must be float32 (N, 4)")
        if self.values.dtype != torch.float32 or tuple(self.values.shape) != self.host.shape:
            raise ValueError(
                f"values={self.values.dtype} {tuple(self.values.shape)}: must be float32 {self.host.shape}, like host"
            )
        if self.penalties is not None and len(self.penalties.owners) != len(self.host):
            raise ValueError(
                f"penalties.owners has {len(self.penalties.owners)} rows: must be {len(self.host)}, as many as host"
            )

    @classmethod
    def unknown(cls, values: Tensor, *, truncates: bool = True) -> SamplingMetadata:
        """Return metadata for a CUDA graph, where only the device knows `values` (N, 4): no computation is skipped,
        except truncation if `truncates` is False.
        """
        return cls(np.tile(_ANYTHING if truncates else _WHOLE, (len(values), 1)), values)

    def __len__(self) -> int:
        return len(self.host)

    @property
    def temperature(self) -> Tensor:
        """Temperature of each row, (N,) float32 on the device."""
        return self.values[:, TEMPERATURE]

    @property
    def greedy(self) -> bool:
        """Whether every row takes its argmax, as known on the host."""
        return not self.host[:, TEMPERATURE].any()

    def truncated(self, vocab_size: int) -> NDArray[np.int64]:
        """Indices of rows for which top_k or top_p may drop tokens, as known on the host."""
        top_k = self.host[:, TOP_K]
        cut = ((top_k > 0) & (top_k < vocab_size)) | (self.host[:, TOP_P] < 1)
        return np.flatnonzero(cut & (self.host[:, TEMPERATURE] > 0))

    def truncates(self, vocab_size: int) -> bool:
        """Whether any row may drop a token, as known on the host."""
        return bool((self.host[:, LOG_MIN_P] > -np.inf).any()) or len(self.truncated(vocab_size)) > 0

    def apply(self, logits: Tensor, shard: VocabShard | None = None) -> Tensor:
        """Return processed logits (N, V) float32, a copy: penalised, divided by the temperature, -inf for dropped
        tokens.

        logits: (N, V) float32, of the whole vocabulary or of `shard`. Greedy rows are not divided. A row with NaN or
            +inf keeps all tokens.
        """
        logits, metadata = self.penalised(logits)
        # Greedy rows divide by 1, which changes no bit.
        scaled_NV = apply_temperature(logits, self.temperature)
        least_N, last_N = metadata.thresholds(logits, shard)
        if least_N is not None and last_N is not None:
            mask_truncated_(scaled_NV, least_N.unsqueeze(1), last_N.unsqueeze(1))
        return scaled_NV

    def penalised(self, logits: Tensor) -> tuple[Tensor, SamplingMetadata]:
        """Return the logits after penalties, and metadata without penalties."""
        if self.penalties is None:
            return logits, self
        return self.penalties.apply(logits), SamplingMetadata(self.host, self.values)

    def thresholds(self, logits: Tensor, shard: VocabShard | None = None) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return the truncation thresholds of penalised logits, see `truncation_thresholds` and `shard_thresholds`.

        They are the smallest kept logit after the temperature, (N,) float32, and the last kept index equal to it,
        (N,) int32. None for both if no row may drop a token.
        """
        if not self.truncates(logits.shape[1] if shard is None else shard.vocab_size):
            return None, None
        if shard is None:
            return TRUNCATION.on(logits)(logits.float(), self.values)
        found: tuple[Tensor, Tensor] = load("bateleur.eagle.shard_truncation:shard_thresholds")(logits, self, shard)
        return found


def mask_truncated_(scaled_NV: Tensor, least_N1: Tensor, last_N1: Tensor) -> None:
    """Set tokens below the threshold `least` to -inf, in place, and equal ones at a higher index than `last`."""
    lane_V = torch.arange(scaled_NV.shape[1], device=scaled_NV.device)
    drop_NV = (scaled_NV == least_N1).logical_and_(lane_V > last_N1)
    scaled_NV.masked_fill_(drop_NV.logical_or_(scaled_NV < least_N1), -torch.inf)


def thresholds_by_sort(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the truncation threshold of every row: the smallest kept logit (after the temperature), (N,) float32,
    and the last kept token id equal to it, (N,) int32.

    They are -inf and V in a greedy row, and in a row without a finite maximum.

    logits: (N, V) float32. values: (N, 4) float32, see `SamplingMetadata`.
    """
    size, scaled_NV = logits.shape[1], apply_temperature(logits, values[:, TEMPERATURE])
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


def _fake(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return values.new_empty(len(logits)), values.new_empty(len(logits), dtype=torch.int32)


_library = Library("bateleur", "FRAGMENT")
truncation_thresholds = define_op(
    _library, thresholds_by_sort, Implementations(thresholds_by_sort), mutates=(), fake=_fake, name="truncate_rows"
)
"""`thresholds_by_sort` as a torch operator, so that a recorded graph holds what numpy sorts."""
TRUNCATION = Implementations(truncation_thresholds, triton="bateleur.eagle.kernels.truncation:truncation_thresholds")


def _descending(logits_NV: Tensor) -> Tensor:
    if logits_NV.is_cpu:  # numpy sorts values alone, six times as fast as torch, which sorts pairs
        return torch.from_numpy(np.sort(logits_NV.neg().numpy(), axis=-1)).neg_()
    return logits_NV.sort(dim=-1, descending=True).values


def _nucleus_size(top_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor) -> Tensor:
    """Return how many of the top_k largest tokens reach top_p of their mass, (N,) int64, at least 1.

    Mass is exp(logit - max) in units of 2^-40, summed as integers. The sum is exact, so it does not depend on the
    order of summation, the device, the memory layout or the number of sorted values.

    top_NV: logits after the temperature, the largest first.
    """
    mass_NV = (top_NV - top_NV[:, :1]).exp_().double().mul_(2.0**40).long()
    rank_V = torch.arange(top_NV.shape[1], device=top_NV.device)
    mass_NV.masked_fill_(rank_V >= top_k_N.unsqueeze(1), 0)
    sum_NV = mass_NV.cumsum(dim=-1)
    limit_N1 = sum_NV[:, -1:].double() * top_p_N.unsqueeze(1)
    # The mass before a token is compared, so the token that crosses the limit is kept.
    size_N = ((sum_NV - mass_NV).double() < limit_N1).sum(dim=-1)
    return torch.minimum(size_N.clamp_(min=1), top_k_N)
