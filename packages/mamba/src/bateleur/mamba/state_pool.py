"""The tensors that hold the states of all Mamba layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bateleur.mamba.spec import MambaSpec


class StatePool:
    """One conv and one SSM tensor per layer, with the same slot numbers in all of them.

    Slot 0 is the null slot: reading it means a zero state, and it takes the writes that are dropped, so its contents
    are scratch. All tensors keep their addresses for life.

    Raises ValueError for no specs, or fewer than two slots (the null slot and one to use).
    """

    def __init__(self, specs: Sequence[MambaSpec], num_slots: int, device: torch.device | str) -> None:
        if not specs:
            raise ValueError("specs is empty; a pool needs at least one layer")
        if num_slots < 2:
            raise ValueError(f"num_slots is {num_slots}; it must be at least 2, of which slot 0 is null")
        self.specs = tuple(specs)
        self.num_slots = num_slots
        self._layers = [
            (
                torch.zeros((num_slots, *spec.conv_shape), dtype=spec.conv_dtype, device=device),
                torch.zeros((num_slots, *spec.ssm_shape), dtype=spec.ssm_dtype, device=device),
            )
            for spec in self.specs
        ]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """conv (num_slots, W-1+K, conv_dim) and ssm (num_slots, H, P, N) of Mamba layer `index`, counted from 0."""
        return self._layers[index]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, the null slot included."""
        return self.num_slots * sum(spec.page_bytes for spec in self.specs)
