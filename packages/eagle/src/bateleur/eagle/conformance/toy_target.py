"""A tiny dense target model in float64, whose attention is a callable argument, and KV caches for it.

Legend for shapes: T tokens, V vocabulary, W width.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bateleur.eagle.drafter import TargetNeeds
from bateleur.eagle.heads.spec import Attend

DTYPE = torch.float64
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 4


class ToyLayer:
    """A layer of the toy target: x + attention(x), then x + tanh of a linear map."""

    def __init__(self, width_in: int, width: int, make: Callable[..., Tensor]) -> None:
        self.q = make(width_in, NUM_HEADS * HEAD_DIM)
        self.kv = make(width_in, 2 * NUM_KV_HEADS * HEAD_DIM)
        self.o = make(NUM_HEADS * HEAD_DIM, width)
        self.mlp = make(width, width)

    def __call__(self, index: int, x: Tensor, residual: Tensor, attend: Attend) -> Tensor:
        """Return the layer's output (T, width) for input x (T, width_in), added to `residual`."""
        q = (x @ self.q).view(len(x), NUM_HEADS, HEAD_DIM)
        k, v = (x @ self.kv).view(len(x), 2, NUM_KV_HEADS, HEAD_DIM).unbind(1)
        h = residual + attend(index, q, k, v).flatten(1) @ self.o
        return h + torch.tanh(h @ self.mlp)


def weights(seed: int, device: torch.device | str) -> Callable[..., Tensor]:
    """Return a function that creates a random matrix of the given shape; `seed` fixes the sequence of matrices."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=DTYPE).mul_(1.5 * shape[0] ** -0.5).to(device)

    return make


class ToyTarget:
    """A decoder of `num_layers` layers with `max_positions` position embeddings; a position beyond them fails."""

    def __init__(
        self,
        vocab_size: int = 19,
        width: int = 16,
        num_layers: int = 2,
        max_positions: int = 64,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        make = weights(seed, device)
        self.num_layers, self.width, self.vocab_size = num_layers, width, vocab_size
        self.embedding = make(vocab_size, width) * vocab_size**0.5
        self.position_embedding = make(max_positions, width) * max_positions**0.5
        self.layers = [ToyLayer(width, width, make) for _ in range(num_layers)]
        self.head = make(width, vocab_size) * 2

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, ...]:
        """Return the hidden states (T, W) at layer boundaries 0 .. num_layers, and the final one after the norm."""
        boundaries = [self.embedding.index_select(0, ids) + self.position_embedding.index_select(0, positions)]
        for index, layer in enumerate(self.layers):
            boundaries.append(layer(index, boundaries[-1], boundaries[-1], attend))
        return (*boundaries, torch.tanh(boundaries[-1]))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (T, V) float32 of final hidden states (T, W)."""
        return (hidden @ self.head).float()

    def features(self, outputs: Sequence[Tensor], needs: TargetNeeds) -> tuple[Tensor, ...]:
        """Select from the result of `forward` the hidden states that a drafter with `needs` reads."""
        taps = tuple(outputs[tap] for tap in needs.taps)
        return (*taps, outputs[-1]) if needs.hidden else taps


def paged_caches(
    num_layers: int, num_blocks: int, block_size: int, device: torch.device | str = "cpu"
) -> list[tuple[Tensor, Tensor]]:
    """Return (k_cache, v_cache) for each layer; block 0 is the null block, the others hold garbage."""
    shape = (num_blocks, block_size, NUM_KV_HEADS, HEAD_DIM)
    made = []
    for _ in range(num_layers):
        k_cache, v_cache = (torch.full(shape, torch.nan, dtype=DTYPE, device=device) for _ in range(2))
        k_cache[0] = v_cache[0] = 0
        made.append((k_cache, v_cache))
    return made
