"""Attention of a head over one sequence with a growing cache: for tests, teaching and first experiments on a CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.eagle.heads.spec import HeadSpec


class DenseAttend:
    """Attention (`Attend`) for one sequence. A pass appends its tokens to the cache and attends to all cached ones, or
    to the sliding window of `spec`.

    kv: keys and values (n, Hk, D) of each layer that has run, for n tokens, Hk heads and head size D.
    """

    def __init__(self, spec: HeadSpec | None = None) -> None:
        self._window = None if spec is None else spec.sliding_window
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.kv[0][0]) if self.kv else 0

    def truncate(self, length: int) -> None:
        """Drop all but the first `length` tokens from the cache, for example after rejected drafts."""
        if not 0 <= length <= len(self):
            raise ValueError(f"length is {length}; the cache holds {len(self)} tokens")
        self.kv = {layer: (keys[:length], values[:length]) for layer, (keys, values) in self.kv.items()}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append k and v to the cache, and return attention (T, Hq, D) of q, the queries of the last T tokens."""
        keys, values = self.kv.get(layer, (k[:0], v[:0]))
        self.kv[layer] = keys, values = torch.cat((keys, k)), torch.cat((values, v))
        length, num_new = keys.shape[0], q.shape[0]
        key_at = torch.arange(length, device=q.device)
        behind = key_at[length - num_new :, None] - key_at
        seen = behind >= 0 if self._window is None else (behind >= 0) & (behind < self._window)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), seen, enable_gqa=True
        )
        return out.transpose(0, 1)
