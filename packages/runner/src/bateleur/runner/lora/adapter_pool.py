"""LoRA adapters on the device: low-rank matrices of every projection, with one adapter slot for each adapter."""

from collections import Counter
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.runner.checkpoint.names import Names
from bateleur.runner.lora.adapter_file import LowRank
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.lora import LoraWeights
from bateleur.runner.models.sharding import Cut
from bateleur.runner.utils.device import pinned


class AdapterPool:
    """LoRA matrices of up to `num_slots` adapters, in adapter slots 1 to `num_slots`. Slot 0 means no adapter."""

    def __init__(self, model: HybridDecoder, names: Names, num_slots: int, max_rank: int, max_num_tokens: int) -> None:
        """Attach zero matrices to every projection of `model` (this rank's part) that an adapter may change.

        names: see `Checkpoint.names`. num_slots, max_rank: `max_loras`, `max_lora_rank`. A projection has this rank for
        each of its modules (q, k and v). max_num_tokens: number of tokens of the largest step, with padding.
        """
        self.num_slots, self.max_rank = num_slots, max_rank
        self._cuts = model.share.cuts
        num_modules, like = Counter(part.target for part in names.values()), model.embedding
        self.weights: dict[str, LoraWeights] = {}
        """By name of the projection."""
        for name, projection in model.adaptable_projections.items():
            lanes = max_rank * num_modules[name]
            a = like.new_zeros(num_slots + 1, lanes, projection.num_columns)
            b = like.new_zeros(num_slots + 1, projection.num_rows, lanes)
            self.weights[name] = projection.lora = LoraWeights(a, b)
        self.token_slots = torch.zeros(max_num_tokens, dtype=torch.int32, device=model.device)
        """(max_num_tokens,) slot of each token of a step."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the LoRA matrices of all slots."""
        return sum(each.a_ARK.nbytes + each.b_ANR.nbytes for each in self.weights.values())

    def stage(self, num_tokens: int, slots: NDArray[np.int32] | None) -> Tensor:
        """Write the slots of a step's tokens (None: no adapter), 0 for padding. Return the first `num_tokens`."""
        staged = pinned((num_tokens,), torch.int32, self.token_slots.device).zero_()
        if slots is not None:
            staged.numpy()[: len(slots)] = slots
        return self.token_slots[:num_tokens].copy_(staged, non_blocking=True)

    def poison(self) -> None:
        """Set the last adapter slot for all tokens (wrong for most), so that checks find graphs that read old slots."""
        self.token_slots.fill_(self.num_slots)

    def fill(self, slot: int, matrices: Mapping[str, LowRank]) -> None:
        """Write an adapter, see `read_adapter`, to an adapter slot that no running request uses."""
        for name, weights in self.weights.items():
            weights.a_ARK[slot].zero_()
            weights.b_ANR[slot].zero_()
            if name in matrices:
                cut = self._cuts.get(name, {})
                a, b = (_own(each, axis, cut) for each, axis in zip(matrices[name], (1, 0), strict=True))
                weights.a_ARK[slot, : len(a)].copy_(a)
                weights.b_ANR[slot, :, : len(a)].copy_(b)


def _own(matrix: Tensor, axis: int, cut: Cut) -> Tensor:
    """Return the rows or columns of a matrix that this rank has."""
    ranges = cut.get(axis)
    return matrix if ranges is None else torch.cat([matrix.narrow(axis, a, b - a) for a, b in ranges], axis)
