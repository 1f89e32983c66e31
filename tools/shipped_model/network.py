"""NemotronH in its training form: dense batches, autograd, Hugging Face's parameter names."""

# Shape letters: B batch, L tokens, D hidden, H mamba heads, P head size, N state size, G groups, C chunks,
# Q tokens of a chunk, V vocabulary.

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes of the shipped model."""

    vocab_size: int = 4096
    hidden_size: int = 256
    pattern: str = "M-M*-M-M*-"
    intermediate_size: int = 768
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    mamba_num_heads: int = 8
    mamba_head_dim: int = 64
    ssm_state_size: int = 64
    n_groups: int = 1
    conv_kernel: int = 4
    eps: float = 1e-5
    max_position_embeddings: int = 2048


class RMSNorm(nn.Module):
    """Root-mean-square norm, optionally over groups and gated by silu(z) before it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor | None = None, groups: int = 1) -> Tensor:
        x = x.float()
        if gate is not None:
            x = x * F.silu(gate.float())
        y = x.unflatten(-1, (groups, -1))
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        out: Tensor = y.flatten(-2) * self.weight
        return out


def chunked_scan(x_BLHP: Tensor, dt_BLH: Tensor, a_H: Tensor, b_BLGN: Tensor, c_BLGN: Tensor, chunk: int) -> Tensor:
    """The Mamba-2 recurrence in its chunked (state space dual) form, arXiv 2405.21060, section 6."""
    B, L, H, P = x_BLHP.shape
    rep = H // b_BLGN.shape[2]
    x = (x_BLHP * dt_BLH[..., None]).view(B, L // chunk, chunk, H, P).permute(0, 1, 3, 2, 4)  # BCHQP
    b = b_BLGN.view(B, L // chunk, chunk, -1, b_BLGN.shape[-1]).permute(0, 1, 3, 2, 4)  # BCGQN
    c = c_BLGN.view(B, L // chunk, chunk, -1, c_BLGN.shape[-1]).permute(0, 1, 3, 2, 4)
    log_decay = (a_H * dt_BLH).view(B, L // chunk, chunk, H).permute(0, 1, 3, 2).float()  # BCHQ
    total = log_decay.cumsum(-1)
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    within = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -torch.inf).exp()  # BCHQQ
    scores = (c @ b.transpose(-1, -2)).repeat_interleave(rep, 2) * within
    y = scores @ x
    to_end = (total[..., -1:] - total).exp()
    states = (x * to_end[..., None]).transpose(-1, -2) @ b.repeat_interleave(rep, 2)  # BCHPN
    across, state = [], torch.zeros_like(states[:, 0])
    for index in range(states.shape[1]):
        across.append(state)
        state = state * total[:, index, :, -1, None, None].exp() + states[:, index]
    start = torch.stack(across, 1)
    y = y + (c.repeat_interleave(rep, 2) @ start.transpose(-1, -2)) * total.exp()[..., None]
    return y.permute(0, 1, 3, 2, 4).reshape(B, L, H, P)


class Mamba2(nn.Module):
    """A Mamba-2 mixer with NemotronH's parameter names."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.s = shape
        self.inner = shape.mamba_num_heads * shape.mamba_head_dim
        self.conv_dim = self.inner + 2 * shape.n_groups * shape.ssm_state_size
        self.in_proj = nn.Linear(shape.hidden_size, self.inner + self.conv_dim + shape.mamba_num_heads, bias=False)
        self.conv1d = nn.Conv1d(
            self.conv_dim, self.conv_dim, shape.conv_kernel, groups=self.conv_dim, padding=shape.conv_kernel - 1
        )
        dt = torch.exp(torch.linspace(math.log(1e-3), math.log(1e-1), shape.mamba_num_heads))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.A_log = nn.Parameter(torch.linspace(1, 16, shape.mamba_num_heads).log())
        self.D = nn.Parameter(torch.ones(shape.mamba_num_heads))
        self.norm = RMSNorm(self.inner, shape.eps)
        self.out_proj = nn.Linear(self.inner, shape.hidden_size, bias=False)

    def forward(self, u_BLD: Tensor) -> Tensor:
        s, (B, L, _) = self.s, u_BLD.shape
        z, xbc, dt = self.in_proj(u_BLD).split([self.inner, self.conv_dim, s.mamba_num_heads], -1)
        xbc = self.conv1d(xbc.transpose(1, 2))[..., :L].transpose(1, 2)
        x, b, c = F.silu(xbc).split([self.inner, *[s.n_groups * s.ssm_state_size] * 2], -1)
        x = x.view(B, L, s.mamba_num_heads, s.mamba_head_dim)
        dt = F.softplus(dt.float() + self.dt_bias)
        b, c = (t.view(B, L, s.n_groups, s.ssm_state_size) for t in (b, c))
        y = chunked_scan(x, dt, -self.A_log.exp(), b, c, chunk=64) + self.D[:, None] * x
        out: Tensor = self.out_proj(self.norm(y.flatten(-2), z, s.n_groups))
        return out


class Attention(nn.Module):
    """Grouped-query attention without positions, as NemotronH has it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.s = shape
        q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, q, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(q, shape.hidden_size, bias=False)

    def forward(self, u_BLD: Tensor) -> Tensor:
        q, k, v = (
            p(u_BLD).unflatten(-1, (-1, self.s.head_dim)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(-2))
        return out


class Mlp(nn.Module):
    """NemotronH's MLP: squared ReLU between two projections."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, u_BLD: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.relu(self.up_proj(u_BLD)).square())
        return out


MIXERS = {"M": Mamba2, "*": Attention, "-": Mlp}


class Layer(nn.Module):
    """One residual branch: norm, then one mixer."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.hidden_size, shape.eps)
        self.mixer = MIXERS[kind](shape)

    def forward(self, h_BLD: Tensor) -> Tensor:
        out: Tensor = h_BLD + self.mixer(self.norm(h_BLD))
        return out


class Backbone(nn.Module):
    """Embeddings, layers, final norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, kind) for kind in shape.pattern)
        self.norm_f = RMSNorm(shape.hidden_size, shape.eps)

    def forward(self, ids_BL: Tensor) -> Tensor:
        h = self.embeddings(ids_BL)
        for layer in self.layers:
            h = layer(h)
        out: Tensor = self.norm_f(h)
        return out


class Network(nn.Module):
    """The language model; the output matrix is the embedding while training and is written out twice."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = Backbone(shape)
        nn.init.normal_(self.model.embeddings.weight, std=0.02)
        for layer in self.model.layers:
            for name, p in layer.named_parameters():
                if name.endswith("_proj.weight"):
                    depth = (
                        math.sqrt(2 * len(shape.pattern))
                        if name.split(".")[-2] in ("out_proj", "o_proj", "down_proj")
                        else 1
                    )
                    nn.init.normal_(p, std=1 / math.sqrt(p.shape[1]) / depth)

    def loss(self, ids_BL: Tensor, reduction: str = "mean") -> Tensor:
        """Cross entropy in nats of predicting each id from the ids before it."""
        with torch.autocast(ids_BL.device.type, torch.bfloat16):
            logits = F.linear(self.model(ids_BL[:, :-1]), self.model.embeddings.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), ids_BL[:, 1:].flatten(), reduction=reduction)
