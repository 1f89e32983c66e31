"""Repetition, frequency and presence penalties.

Legend for shapes: N logit rows, M rows of the request table, K draft tokens at most, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


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
