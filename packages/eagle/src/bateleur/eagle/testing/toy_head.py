"""A tiny dense target and a tiny draft head, in float64, that reach attention through one callable.

What they compute from scratch, over a whole sequence, is the oracle for what a drafter computes step by step over
paged caches.

Legend for shapes: T tokens, R rows, V vocabulary, W width of the target, Hd width of the head, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bateleur.eagle.drafter import TargetNeeds

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q (T, H, D), k (T, Hkv, D), v) -> (T, H, D)."""

DTYPE = torch.float64
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 4


class DenseAttend:
    """Causal attention over one whole sequence without a cache; keeps keys and values by layer."""

    def __init__(self) -> None:
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend, and remember."""
        self.kv[layer] = (k, v)
        group = q.shape[1] // k.shape[1]
        wide_k, wide_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", q, wide_k) * q.shape[-1] ** -0.5
        future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return torch.einsum("hts,shd->thd", weights, wide_v)


class _Layer:
    """x + attention, then x + tanh."""

    def __init__(self, width_in: int, width: int, make: Callable[..., Tensor]) -> None:
        self.q = make(width_in, NUM_HEADS * HEAD_DIM)
        self.kv = make(width_in, 2 * NUM_KV_HEADS * HEAD_DIM)
        self.o = make(NUM_HEADS * HEAD_DIM, width)
        self.mlp = make(width, width)

    def __call__(self, index: int, x: Tensor, residual: Tensor, attend: Attend) -> Tensor:
        q = (x @ self.q).view(len(x), NUM_HEADS, HEAD_DIM)
        k, v = (x @ self.kv).view(len(x), 2, NUM_KV_HEADS, HEAD_DIM).unbind(1)
        h = residual + attend(index, q, k, v).flatten(1) @ self.o
        return h + torch.tanh(h @ self.mlp)


def _weights(seed: int, device: torch.device | str) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=DTYPE).mul_(1.5 * shape[0] ** -0.5).to(device)

    return make


class ToyTarget:
    """A decoder of `num_layers` layers with a table of `max_positions` positions; a position beyond it fails."""

    def __init__(
        self,
        vocab_size: int = 19,
        width: int = 16,
        num_layers: int = 2,
        max_positions: int = 64,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        make = _weights(seed, device)
        self.num_layers, self.width, self.vocab_size = num_layers, width, vocab_size
        self.embedding = make(vocab_size, width) * vocab_size**0.5
        self.place = make(max_positions, width) * max_positions**0.5
        self.layers = [_Layer(width, width, make) for _ in range(num_layers)]
        self.head = make(width, vocab_size) * 2

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, ...]:
        """Boundaries 0 .. num_layers, each (T, W), and the final hidden state after the norm (T, W)."""
        x = self.embedding.index_select(0, ids) + self.place.index_select(0, positions)
        boundaries = [x]
        for index, layer in enumerate(self.layers):
            x = layer(index, x, x, attend)
            boundaries.append(x)
        return (*boundaries, torch.tanh(x))

    def logits(self, hidden: Tensor) -> Tensor:
        """(T, V) float32."""
        return (hidden @ self.head).float()

    def features(self, outputs: Sequence[Tensor], needs: TargetNeeds) -> tuple[Tensor, ...]:
        """What a drafter with `needs` is shown of what `forward` returned."""
        taps = tuple(outputs[tap] for tap in needs.taps)
        return (*taps, outputs[-1]) if needs.hidden else taps


@dataclass(frozen=True)
class ToySpec:
    """What a drafter reads of a head's spec."""

    needs: TargetNeeds
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_positions: int | None = None
    sliding_window: int | None = None


class ToyHead:
    """A head in the shape of EAGLE-3: fused taps, a layer over (embedding, hidden), its own vocabulary.

    target_ids: target id of each draft id, or None for the target's own vocabulary.
    """

    def __init__(
        self,
        target: ToyTarget,
        needs: TargetNeeds = TargetNeeds(taps=(1, 2), hidden=True),  # noqa: B008 (frozen)
        hidden_size: int = 12,
        num_layers: int = 1,
        target_ids: Sequence[int] | None = None,
        max_positions: int = 64,
        seed: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        make = _weights(seed, device)
        self.spec: Any = ToySpec(needs, hidden_size, num_layers, target.vocab_size, max_positions)
        num_features = len(needs.taps) + needs.hidden
        self.fc = make(num_features * target.width, hidden_size)
        self.embedding = make(target.vocab_size, hidden_size) * target.vocab_size**0.5
        self.place = make(max_positions, hidden_size) * max_positions**0.5
        self.layers = [_Layer(2 * hidden_size, hidden_size, make) for _ in range(num_layers)]
        self.target_ids = None if target_ids is None else torch.tensor(target_ids, device=device)
        self.head = make(hidden_size, target.vocab_size if target_ids is None else len(target_ids)) * 2

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """(T, Hd)."""
        return torch.cat(tuple(features), dim=-1) @ self.fc

    def reserve_positions(self, num_positions: int) -> None:
        """Nothing to do."""

    def forward(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(T, Hd) for the logits, (T, Hd) for the next draft step."""
        x = self.embedding.index_select(0, ids) + self.place.index_select(0, positions)
        for index, layer in enumerate(self.layers):
            hidden = layer(index, torch.cat((x, hidden), -1), hidden, attend)
        hidden = hidden if rows is None else hidden.index_select(0, rows)
        return torch.tanh(hidden), hidden

    def logits(self, h: Tensor) -> Tensor:
        """(R, Vd) float32."""
        return (h @ self.head).float()


class MarkovHead:
    """A head whose logits are those of `table` (V, V), by the token it is fed: no attention decides, yet KV is kept."""

    def __init__(self, table: Tensor) -> None:
        self.spec: Any = ToySpec(TargetNeeds(hidden=True), 2, 1, len(table))
        self.target_ids: Tensor | None = None
        self._table = table

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """(T, 2): nothing but the right number of rows."""
        return features[0][:, :2]

    def reserve_positions(self, num_positions: int) -> None:
        """Nothing to do."""

    def forward(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The logits themselves, and what was fed."""
        if rows is not None:
            ids, hidden = ids.index_select(0, rows), hidden.index_select(0, rows)
        return self._table.index_select(0, ids), hidden

    def logits(self, h: Tensor) -> Tensor:
        """As they are."""
        return h
