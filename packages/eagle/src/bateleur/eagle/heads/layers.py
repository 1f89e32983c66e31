"""Building blocks of draft heads: norm, rotary embedding, attention branch, MLP branch, and a simple `Attend`.

Legend for shapes: T tokens, R tokens whose output is wanted (`rows`), X width of the input, H hidden size, Hq/Hk query
and key heads, D head size, P rotated pairs of dimensions, F intermediate size, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.eagle.heads.spec import Attend, HeadSpec, Rope
from bateleur.eagle.heads.weights import Weights
from bateleur.eagle.vocab_shard import VocabShard

Rotation: TypeAlias = tuple[Tensor, Tensor]
"""Cosine and signed sine of positions; see `Rotary.at`."""


class RMSNorm:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, the mean taken in float32."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float) -> None:
        self.weight = weights.take(f"{name}.weight", size)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise x (..., size)."""
        return F.rms_norm(x, self.weight.shape, self.weight, self._eps)


class Rotary:
    """Rotary embedding. Angles are computed on use, or once for all positions.

    table: cosines and sines of all positions given to `reserve`; None before.
    """

    def __init__(self, rope: Rope, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._scaling = dtype, rope.attention_scaling
        self._inv_freq_P = torch.tensor(rope.inv_freq, dtype=torch.float32, device=device)
        self.table: Rotation | None = None

    def reserve(self, num_positions: int) -> None:
        """Precompute cosines and sines of all positions below `num_positions`; others are then an error."""
        self.table = self._turn(torch.arange(num_positions, device=self._inv_freq_P.device))

    def at(self, positions_T: Tensor) -> Rotation:
        """Return cosine and signed sine of these positions, (T, 1, 2P) each, as `rotate` needs them.

        Both halves of the last dimension have the same P angles. The sine is negated in the first half: (-sin, sin).
        Angles are computed in float32, whatever the dtype of the results.
        """
        if self.table is None:
            return self._turn(positions_T)
        cos, sin = self.table
        return cos.index_select(0, positions_T), sin.index_select(0, positions_T)

    def _turn(self, positions_T: Tensor) -> Rotation:
        angle_TP = positions_T.unsqueeze(1) * self._inv_freq_P
        cos, sin = angle_TP.cos().mul_(self._scaling), angle_TP.sin().mul_(self._scaling)
        cos_TR, sin_TR = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return cos_TR.to(self._dtype).unsqueeze(1), sin_TR.to(self._dtype).unsqueeze(1)


def rotate(x_TAD: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Rotate the first R dimensions of every head, in pairs (i, i + R / 2); the others are unchanged."""
    size = cos_T1R.shape[-1]
    x_TAR = x_TAD[..., :size]
    turned = torch.addcmul(x_TAR * cos_T1R, x_TAR.roll(size // 2, -1), sin_T1R)
    return turned if size == x_TAD.shape[-1] else torch.cat((turned, x_TAD[..., size:]), -1)


class Attention:
    """Grouped-query attention; query, key and value come from one projection of an input of size `width`."""

    def __init__(self, spec: HeadSpec, weights: Weights, name: str, index: int, width: int) -> None:
        """name: prefix of the weight names. index: layer index for `Attend`. width: input size, X."""
        self._index = index
        self._num_heads, self._num_kv_heads, self._head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        rows = [heads * spec.head_dim for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
        parts = [f"{name}.{shard}_proj" for shard in "qkv"]
        self.qkv_proj = weights.product(parts, rows, width, bias="attention" in spec.biases)
        # Qwen2 has biases on query, key and value only.
        out_bias = "attention" in spec.biases and f"{name}.o_proj.bias" in weights
        self.o_proj = weights.product([f"{name}.o_proj"], [spec.hidden_size], rows[0], bias=out_bias)
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            self.q_norm = RMSNorm(weights, f"{name}.q_norm", spec.head_dim, spec.norm_eps)
            self.k_norm = RMSNorm(weights, f"{name}.k_norm", spec.head_dim, spec.norm_eps)

    def __call__(self, x_TX: Tensor, rotary: Rotation | None, attend: Attend) -> Tensor:
        """Return attention (T, H) for input (T, X). rotary: cosines and sines of the positions; None: no rotation."""
        heads, kv_heads = self._num_heads, self._num_kv_heads
        qkv_TAD = self.qkv_proj(x_TX).view(-1, heads + 2 * kv_heads, self._head_dim)
        qk, v = qkv_TAD.split((heads + kv_heads, kv_heads), 1)
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, :heads]), self.k_norm(qk[:, heads:])), 1)
        if rotary is not None:
            qk = rotate(qk, *rotary)
        q, k = qk.split((heads, kv_heads), 1)
        out_TAD = attend(self._index, q, k, v)
        return self.o_proj(out_TAD.flatten(1))


class Mlp:
    """`down(silu(gate(x)) * up(x))`, gate and up from one projection."""

    def __init__(self, spec: HeadSpec, weights: Weights, name: str) -> None:
        size, names = spec.intermediate_size, [f"{name}.gate_proj", f"{name}.up_proj"]
        self.up_proj = weights.product(names, [size, size], spec.hidden_size, bias="mlp" in spec.biases)
        self.down_proj = weights.product([f"{name}.down_proj"], [spec.hidden_size], size, bias="mlp" in spec.biases)

    def __call__(self, x_TH: Tensor) -> Tensor:
        """Return the MLP's output (T, H) for input (T, H)."""
        gate_TF, up_TF = self.up_proj(x_TH).chunk(2, -1)
        return self.down_proj(F.silu(gate_TF).mul_(up_TF))


class DecoderLayer:
    """A Llama layer: attention and MLP, each a residual branch after a norm.

    The first layer of an EAGLE head has no norm before its attention. That of an EAGLE-3 head also reads the token
    embedding: it is `wide`.
    """

    def __init__(self, spec: HeadSpec, weights: Weights, index: int, *, input_norm: bool, wide: bool = False) -> None:
        name, size, eps = f"layers.{index}", spec.hidden_size, spec.norm_eps
        self.input_norm = RMSNorm(weights, f"{name}.input_layernorm", size, eps) if input_norm else None
        self.attention = Attention(spec, weights, f"{name}.self_attn", index, 2 * size if wide else size)
        self.mlp_norm = RMSNorm(weights, f"{name}.post_attention_layernorm", size, eps)
        self.mlp = Mlp(spec, weights, f"{name}.mlp")

    def __call__(
        self, h_TH: Tensor, x_TX: Tensor, rotary: Rotation | None, attend: Attend, rows: Tensor | None
    ) -> Tensor:
        """Return the layer's output (T, H), or (R, H) for `rows`. h: residual. x: attention input before the norm."""
        h_TH = h_TH + self.attention(x_TX if self.input_norm is None else self.input_norm(x_TX), rotary, attend)
        h_RH = h_TH if rows is None else h_TH.index_select(0, rows)
        return h_RH + self.mlp(self.mlp_norm(h_RH))


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token embedding and output projection (`lm_head`) of a head, each the head's own or the target's.

    embedding: embedding matrix. output: multiplies with the output matrix (Vd, H) of `output_dtype`.
    embed: the target's embedding function, if the head uses it in place of `embedding`; shard: the vocabulary shard of
        the logits. Both only with a vocabulary-parallel target.
    """

    embedding: Tensor
    output: Callable[[Tensor], Tensor]
    output_dtype: torch.dtype
    embed: Callable[[Tensor], Tensor] | None = None
    shard: VocabShard | None = None


class BaseHead:
    """Common parts of draft heads: vocabulary, rotary embedding, layers, and the target's final state as input."""

    layers: list[DecoderLayer]

    def __init__(
        self, spec: HeadSpec, weights: Weights, vocabulary: Vocabulary, target_ids: Tensor | None = None
    ) -> None:
        self.spec, self.vocabulary, self.target_ids = spec, vocabulary, target_ids
        self.shard, self.dtype = vocabulary.shard, weights.dtype
        self.rotary = Rotary(spec.rope, weights.dtype, weights.device) if spec.rope is not None else None

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """Return the hidden input of the first draft pass: the target's final hidden state (T, H)."""
        return features[0].to(self.dtype)

    def reserve_positions(self, num_positions: int) -> None:
        """Announce that all positions are below `num_positions`; cosines and sines are then precomputed."""
        if self.rotary is not None:
            self.rotary.reserve(num_positions)

    def embed(self, ids_T: Tensor) -> Tensor:
        """Return the embeddings (T, H) of token ids (T,), in the head's dtype."""
        embed = self.vocabulary.embed
        x_TH = F.embedding(ids_T, self.vocabulary.embedding) if embed is None else embed(ids_T)
        return x_TH.to(self.dtype)

    def run_layers(self, h_TH: Tensor, x_TX: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None) -> Tensor:
        """Return the output (R, H) of the last layer for the token indices `rows` (R,); None is all tokens.

        h: residual before the first layer. x: attention input of the first layer.
        """
        rotary = None if self.rotary is None else self.rotary.at(positions)
        for layer in self.layers[:-1]:
            x_TX = h_TH = layer(h_TH, x_TX, rotary, attend, None)
        return self.layers[-1](h_TH, x_TX, rotary, attend, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (R, Vd) float32 of hidden states (R, H)."""
        return self.vocabulary.output(hidden.to(self.vocabulary.output_dtype)).float()


class DenseAttend:
    """Attention (`Attend`) for one sequence with a growing cache: for tests, teaching and first experiments on a CPU.

    A pass appends its tokens to the cache and attends to all cached ones, or to the sliding window of `spec`.

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
