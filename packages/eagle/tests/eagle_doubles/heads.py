"""A tiny draft head in float64: what it computes from scratch, over a whole sequence, is the oracle for what a drafter
computes step by step over paged caches.

Legend for shapes: T tokens, R rows, V vocabulary, Hd width of the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bateleur.eagle.conformance.toy_engine import ToyLayer, ToyTarget, weights
from bateleur.eagle.drafter import TargetNeeds
from bateleur.eagle.heads.spec import Attend


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
        make = weights(seed, device)
        self.spec: Any = ToySpec(needs, hidden_size, num_layers, target.vocab_size, max_positions)
        num_features = len(needs.taps) + needs.hidden
        self.fc = make(num_features * target.width, hidden_size)
        self.embedding = make(target.vocab_size, hidden_size) * target.vocab_size**0.5
        self.position_embedding = make(max_positions, hidden_size) * max_positions**0.5
        self.layers = [ToyLayer(2 * hidden_size, hidden_size, make) for _ in range(num_layers)]
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
        x = self.embedding.index_select(0, ids) + self.position_embedding.index_select(0, positions)
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
