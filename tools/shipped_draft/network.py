"""The EAGLE-3 head in its training form, and its unrolled pass (Li et al. 2025, arXiv 2503.01840, section 3).

Row i of a sequence holds the target's taps at token i and the embedding of token i + 1, and predicts token i + 2.
Step j of a chain that begins at row i holds the chain's own last state and the embedding of token i + 1 + j, at
position i + j; it attends to rows up to i, as a decoding engine has them in its cache, and to its own chain alone.
"""

# Shape letters: B batch, L tokens, M chains per sequence, D hidden, H heads, G key-value heads, P head size, V draft
# vocabulary, J steps.

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class HeadShape:
    """The sizes of the shipped head."""

    draft_vocab_size: int = 4096
    intermediate_size: int = 512
    vocab_size: int = 4096
    hidden_size: int = 256
    num_taps: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048


class Projections(nn.Module):
    """The four matrices of attention; queries, keys and values read embedding and hidden state side by side."""

    def __init__(self, s: HeadShape) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * s.hidden_size, s.num_attention_heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * s.hidden_size, s.num_key_value_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * s.hidden_size, s.num_key_value_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.num_attention_heads * s.head_dim, s.hidden_size, bias=False)


class GatedMlp(nn.Module):
    """Llama's MLP: silu of one projection gates another."""

    def __init__(self, s: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.up_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.down_proj = nn.Linear(s.intermediate_size, s.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MidLayer(nn.Module):
    """The one decoder layer."""

    def __init__(self, s: HeadShape) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            nn.RMSNorm(s.hidden_size, s.eps) for _ in range(3)
        )
        self.self_attn = Projections(s)
        self.mlp = GatedMlp(s)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of (B, L, heads, P) at (B or 1, L) positions, halves paired as Llama pairs them."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device) / half)
    angle = (positions[..., None] * frequency)[:, :, None]
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Head(nn.Module):
    """One layer between the target's taps and a draft vocabulary; parameters have their checkpoint names."""

    def __init__(self, s: HeadShape) -> None:
        super().__init__()
        self.s = s
        self.fc = nn.Linear(s.num_taps * s.hidden_size, s.hidden_size, bias=False)
        self.midlayer = MidLayer(s)
        self.norm = nn.RMSNorm(s.hidden_size, s.eps)
        self.lm_head = nn.Linear(s.hidden_size, s.draft_vocab_size, bias=False)

    def begin_from(self, output_matrix: Tensor, final_norm: Tensor, seed: int) -> None:
        """Initial weights: the target's own norm and rows of output, its last tap passed through, the rest small.

        output_matrix: (V, D), the target's rows of the draft vocabulary. final_norm: (D,).
        """
        generator = torch.Generator().manual_seed(seed)
        depth = {"o_proj": 0.5, "down_proj": 0.5, "fc": 0.3}
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.ndim == 2:
                    scale = depth.get(name.split(".")[-2], 1.0) / math.sqrt(p.shape[1])
                    p.normal_(std=scale, generator=generator)
            self.fc.weight[:, -self.s.hidden_size :] += torch.eye(self.s.hidden_size)
            self.lm_head.weight.copy_(output_matrix)
            self.norm.weight.copy_(final_norm)

    def fuse(self, taps: Tensor) -> Tensor:
        """(..., D) from (..., taps, D)."""
        out: Tensor = self.fc(taps.flatten(-2)).float()
        return out

    def inputs(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """What attention reads: both norms side by side, (..., 2 D)."""
        return torch.cat([self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(hidden)], -1)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(B, L, G, P) each, keys rotated."""
        k, v = (
            p(x).unflatten(-1, (-1, self.s.head_dim))
            for p in (self.midlayer.self_attn.k_proj, self.midlayer.self_attn.v_proj)
        )
        return rotate(k, positions, self.s.rope_theta), v.float()

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """(B, L, G, H / G, P), rotated."""
        q = self.midlayer.self_attn.q_proj(x).unflatten(-1, (-1, self.s.head_dim))
        out: Tensor = rotate(q, positions, self.s.rope_theta).unflatten(2, (self.s.num_key_value_heads, -1))
        return out

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer: (..., D) is what logits are read from and what the next step is fed."""
        h = hidden + self.midlayer.self_attn.o_proj(attended.flatten(-3))
        h = h + self.midlayer.mlp(self.midlayer.post_attention_layernorm(h))
        out: Tensor = h.to(hidden.dtype)
        return out

    def unroll(self, embedded: Tensor, taps: Tensor, begin: Tensor, chains: int, steps: int) -> list[Tensor]:
        """The states of `chains` neighbouring chains per sequence, teacher-forced: one (B, M, D) per step.

        embedded: (B, L, D) embeddings of the tokens. taps: (B, L, taps, D). begin: (B,) row of the first chain;
        begin + chains + steps <= L.
        """
        length = embedded.shape[1] - 1
        fused = self.fuse(taps[:, :length])
        everywhere = torch.arange(length, device=begin.device)[None]
        k, v = self.keys_values(self.inputs(embedded[:, 1:], fused), everywhere)
        base = begin[:, None] + torch.arange(chains, device=begin.device)  # (B, M)
        later = (everywhere[:, None] > base[..., None])[:, None, None]  # (B, 1, 1, M, L)
        hidden = take(fused, base)
        scale, own, states = 1 / math.sqrt(self.s.head_dim), list[tuple[Tensor, Tensor]](), list[Tensor]()
        for step in range(steps):
            x = self.inputs(take(embedded, base + 1 + step), hidden)
            q = self.queries(x, base + step)
            if step:
                own.append(self.keys_values(x, base + step))
            scores = torch.einsum("bmghp,blgp->bghml", q, k).masked_fill(later, -torch.inf)
            mine = [torch.einsum("bmghp,bmgp->bghm", q, k_own)[..., None] for k_own, _ in own]
            weight = (torch.cat([scores, *mine], -1) * scale).softmax(-1)
            attended = torch.einsum("bghml,blgp->bmghp", weight[..., :length], v)
            for index, (_, v_own) in enumerate(own):
                attended = attended + torch.einsum("bghm,bmgp->bmghp", weight[..., length + index], v_own)
            hidden = self.finish(hidden, attended)
            states.append(hidden)
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., V) over the draft vocabulary."""
        out: Tensor = self.lm_head(self.norm(hidden))
        return out


def take(x: Tensor, rows: Tensor) -> Tensor:
    """Rows (B, M) of (B, L, ...)."""
    return x[torch.arange(len(x), device=x.device)[:, None], rows]
