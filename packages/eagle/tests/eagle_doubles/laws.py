"""Laws that truncate in all ways, and logits that make it hard."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from bateleur.eagle import Keys, SamplingMetadata

INF, NAN = math.inf, math.nan
Row: TypeAlias = tuple[float, float, float, float]
"""temperature, min_p, top_k, top_p."""

SAMPLINGS: list[Row] = [
    (0, 0, 0, 1),
    (0, 0, 3, 0.5),
    (1, 0, 0, 1),
    (0.7, 0, 0, 1),
    (30, 0, 0, 1),
    (1e-3, 0, 0, 1),
    (1, 0.1, 0, 1),
    (0.9, 1, 0, 1),
    (1, 0, 1, 1),
    (0.8, 0, 50, 1),
    (1.3, 0, 400, 0.8),
    (1, 0, 0, 0.9),
    (0.6, 0, 0, 0.5),
    (1, 0, 0, 1e-30),
    (1, 0, 0, 0.9999),
    (1, 0, 0, 1 - 2**-24),
    (1, 0.02, 20, 0.95),
    (1, 0.02, 0, 0.95),
    (1, 0, 10**6, 1),
    (2, 0, 9_000, 0.97),
]
HOSTILE: dict[str, Callable[[Tensor], Tensor]] = {
    "as they are": lambda x: x,
    "ties": lambda x: x.round(),
    "all equal": lambda x: torch.full_like(x, -7.5),
    "one token": lambda x: torch.full_like(x, -INF).index_fill_(1, torch.tensor([x.shape[1] - 1]), 3.0),
    "a few tokens": lambda x: x.masked_fill(torch.arange(x.shape[1]) % 37 != 5, -INF),
    "huge": lambda x: x * 1e30,
    "beyond float32": lambda x: x * 3e38,
    "several best ones, next to no temperature": lambda x: x.clamp_max(2).mul(4).round() * 1e10,
    "tiny": lambda x: x * 1e-42,
    "an infinite one": lambda x: x.index_fill(1, torch.tensor([5, x.shape[1] - 2]), INF),
    "two levels": lambda x: (x > 1).float() * 11,
    "both zeros": lambda x: x.clamp_min(0) * (1 - 2 * (torch.arange(x.shape[1]) % 2)),
    "far below": lambda x: x - 5e4,
}


def metadata_of(*rows: Row, device: torch.device | str = "cpu") -> SamplingMetadata:
    """A law of rows."""
    with np.errstate(divide="ignore"):
        table = np.array([(t, np.log(np.float64(m)), k, p) for t, m, k, p in rows], np.float32)
    return SamplingMetadata(table, torch.from_numpy(table).to(device))


def keys_of(num: int, seed: int = 0) -> Keys:
    """Any names."""
    generator = torch.Generator().manual_seed(seed)
    return Keys(torch.randint(-(2**62), 2**62, (num,), generator=generator), torch.arange(num) * 3)


def normal(num: int, size: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Logits without a favourite."""
    return torch.randn(num, size, generator=torch.Generator().manual_seed(seed)) * scale


def likely(num: int, size: int, seed: int = 0) -> Tensor:
    """As of a language model: the r-th most likely token has probability about r^-1.5."""
    ranked = -1.5 * torch.log(torch.arange(1.0, size + 1)) + normal(num, size, 0.3, seed)
    order = torch.randn(num, size, generator=torch.Generator().manual_seed(seed + 1)).argsort(1)
    return ranked.gather(1, order) + 20


def left_by(logits: Tensor, least: Tensor, last: Tensor, temperature: Tensor) -> Tensor:
    """(N, V) bool: what a cut leaves, -inf aside."""
    scaled = logits / temperature.where(temperature > 0, 1.0).unsqueeze(1)
    lane, least, last = torch.arange(logits.shape[1], device=logits.device), least[:, None], last[:, None]
    return ((scaled > least) | ((scaled == least) & (lane <= last))) & (scaled > -INF)


def left_by_a_sort(logits: Tensor, metadata: Row) -> set[int]:
    """Tokens of a row (V,) that stay, by a sort in float64."""
    temperature, min_p, top_k, top_p = metadata
    x = (logits / torch.tensor(temperature)).double()
    x = x.masked_fill((x - x.max()).exp() < min_p, -INF)
    order = x.argsort(descending=True, stable=True)[: int(top_k) or None]
    mass = (x[order] - x.max()).exp()
    before = mass.cumsum(0) - mass
    if top_p < 1:
        order = order[before < top_p * mass.sum()]
    return {int(i) for i in order if x[i] > -INF}
