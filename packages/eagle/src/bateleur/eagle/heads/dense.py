"""Attention of a head over one sequence, with a cache that grows: for tests, teaching and a first try on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.eagle.heads.spec import HeadSpec


class DenseAttend:
    """An `Attend` for one sequence. A pass appends its tokens behind those that are there and sees all of them."""

    def __init__(self, spec: HeadSpec) -> None:
        self._window = spec.sliding_window
        self._keys: list[Tensor | None] = [None] * spec.num_layers
        self._values: list[Tensor | None] = [None] * spec.num_layers

    def __len__(self) -> int:
        """Tokens in the cache of the first layer."""
        keys = self._keys[0]
        return 0 if keys is None else keys.shape[0]

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens, such as drafts that were rejected."""
        if not 0 <= length <= len(self):
            raise ValueError(f"length is {length}; the cache holds {len(self)} tokens")
        self._keys = [None if keys is None else keys[:length] for keys in self._keys]
        self._values = [None if values is None else values[:length] for values in self._values]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(T, Hq, D) for the last T tokens, after k and v are appended."""
        keys, values = _append(self._keys[layer], k), _append(self._values[layer], v)
        self._keys[layer], self._values[layer] = keys, values
        length, num_new = keys.shape[0], q.shape[0]
        key_at = torch.arange(length, device=q.device)
        behind = key_at[length - num_new :, None] - key_at
        seen = behind >= 0 if self._window is None else (behind >= 0) & (behind < self._window)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), seen, enable_gqa=True
        )
        return out.transpose(0, 1)


def _append(old: Tensor | None, new: Tensor) -> Tensor:
    return new.clone() if old is None else torch.cat((old, new))
