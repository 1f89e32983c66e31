"""The tensors that running requests keep beside their pages under FOLD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bateleur.mamba.spec import MambaSpec, StatePolicy


class Rings(NamedTuple):
    """Of one layer, by request row; the arguments of `replay_update` and `fold_ring` with those names."""

    live: Tensor
    """(rows, W - 1 + K, conv_dim) conv windows."""
    x: Tensor
    """(rows, L, H, P), `ring_x`."""
    dt: Tensor
    """(rows, L, H), `ring_dt`: float32 (float64 beside float64 inputs)."""
    B: Tensor
    """(rows, L, G, N), `ring_B`."""


class RingPool:
    """A live conv window and a ring of inputs per layer and running request, with the same rows in all layers.

    Row 0 is null: padded rows name it, and its contents are scratch. All tensors keep their addresses for life.

    Raises ValueError for no specs, a spec of SLOTS, a ring too short for a fold, or fewer than two rows.
    """

    def __init__(
        self, specs: Sequence[MambaSpec], capacity: int, num_rows: int, device: torch.device | str
    ) -> None:
        if not specs:
            raise ValueError("specs is empty; a pool needs at least one layer")
        if num_rows < 2:
            raise ValueError(f"num_rows is {num_rows}; it must be at least 2, of which row 0 is null")
        for spec in specs:
            if spec.policy is not StatePolicy.FOLD:
                raise ValueError(f"specs: policy is {spec.policy.value!r}; only 'fold' has rings")
            if capacity < 1 + 2 * spec.num_speculative_tokens:
                raise ValueError(
                    f"capacity is {capacity}; it must be at least 1 + 2 * num_speculative_tokens = "
                    f"{1 + 2 * spec.num_speculative_tokens}"
                )
        self.specs = tuple(specs)
        self.capacity = capacity
        self.num_rows = num_rows

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros((num_rows, *shape), dtype=dtype, device=device)

        self._layers = []
        for spec in self.specs:
            act = spec.conv_dtype
            rings = Rings(
                zeros(*spec.live_shape, dtype=act),
                zeros(capacity, spec.num_heads, spec.head_dim, dtype=act),
                zeros(capacity, spec.num_heads, dtype=spec.step_dtype),
                zeros(capacity, spec.num_groups, spec.state_size, dtype=act),
            )
            self._layers.append(rings)

    def layer(self, index: int) -> Rings:
        """The tensors of Mamba layer `index`, counted from 0."""
        return self._layers[index]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, the null row included."""
        return sum(tensor.nbytes for rings in self._layers for tensor in rings)
