"""Sizes and options of a draft head, and its interface.

Legend for shapes: T tokens, R requests that draft, H hidden size of the head, V target vocabulary, Vd draft vocabulary,
Hq/Hk query and key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from bateleur.eagle.drafter import TargetNeeds
from bateleur.eagle.noise import HashedVocab
from bateleur.eagle.vocab_shard import VocabShard

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of a head: (attention layer, q (T, Hq, D), k (T, Hk, D), v (T, Hk, D)) -> (T, Hq, D).

It stores k and v and attends causally with scale D ** -0.5, over the last `spec.sliding_window` positions if there is
a window. Query and key are already rotated.
"""

Project = Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]]
"""Creates the product x W^T + b, (n, columns) to (n, rows), of W (rows, columns) and b (rows,) or None."""


@dataclass(frozen=True, slots=True)
class CProduct:
    """The product y = x W^T + b as a C function with fixed weights, for C code that runs a whole head.

    A Python function x -> y can have its `CProduct` as attribute `in_c`; None or no attribute means no C function.

    The C function is ``int64_t call(x, tokens, stride, columns, W, b, y, rows, threads)``. x (tokens, columns) and y
    (tokens, rows) are addresses of float32; `stride` is the distance of two tokens in x, in elements. Sizes are int64,
    and threads is an int. It returns 0, or another number if it is out of memory.

    address: address of the C function.
    weight: W, in whatever dtype and layout the C function expects.
    bias: b (rows,) float32; None is passed as NULL.
    rows, columns: number of outputs and of inputs.
    """

    address: int
    weight: Tensor
    bias: Tensor | None
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """Sizes of the target model, and tensors that a head may share with it. Nothing is copied.

    num_layers: number of layers. A tap `i` is the input of layer `i`; tap `num_layers` is the output of the last layer.
    embedding, lm_head: (V, hidden_size) each.
    output: the target's product with `lm_head`, (n, hidden_size) to (n, V), for heads that share it; None creates one.
    shard: the vocabulary shard of `embedding` and `lm_head`; None for the whole vocabulary.
    embed: (T,) ids to (T, hidden_size) for a vocabulary-parallel target; used by heads that share the embedding.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    embedding: Tensor
    lm_head: Tensor
    output: Callable[[Tensor], Tensor] | None = None
    shard: VocabShard | None = None
    embed: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if (self.shard is None) != (self.embed is None):
            raise ValueError(f"part is {self.shard} and embed is {self.embed}; a target has both, or neither")
        shape = self.vocab_size if self.shard is None else self.shard.size, self.hidden_size
        for name in ("embedding", "lm_head"):
            if (found := tuple(getattr(self, name).shape)) != shape:
                raise ValueError(
                    f"{name} has shape {found}; vocab_size = {self.vocab_size} and hidden_size = {self.hidden_size} "
                    f"ask for {shape}"
                )

    @classmethod
    def of(cls, model: Any) -> TargetInfo:
        """Return the sizes and tensors of a transformers causal language model."""
        config = model.config.get_text_config()
        embedding, lm_head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        return cls(config.num_hidden_layers, config.hidden_size, config.vocab_size, embedding, lm_head)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of the first 2 * len(inv_freq) dimensions of a head.

    inv_freq: radians per position of each pair of dimensions (i, i + len(inv_freq)), scaling included.
    attention_scaling: factor on cosine and sine (YaRN).
    """

    inv_freq: tuple[float, ...]
    attention_scaling: float = 1.0

    def __post_init__(self) -> None:
        if not self.inv_freq:
            raise ValueError("inv_freq is empty; rotary embedding turns at least one pair of lanes")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """Sizes and options of a draft head, with all defaults resolved.

    kind: a head for multi-token prediction, "mtp", has layers of its target's kinds, and is created by the engine.
    num_layers: number of attention layers, and so of caches; the first argument of `Attend` is a layer index.
    max_positions: maximum position of the head; None if unknown.
    sliding_window: a query sees this many positions, itself included; None sees all. `Attend` applies it.
    recycle: whether the next draft pass reads the output of the last layer, or of the head's final norm.
    tap_norm: norm before `fc`: one for each tap (`fc_norm`), or one over all concatenated taps (`norm_before_fc`).
    norm_before_residual: EAGLE-3: the first residual is the normalised hidden state.
    qk_norm: query and key heads are normalised before rotation.
    biases: layers that have a bias.
    """

    kind: Literal["eagle1", "eagle3", "mtp"]
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    needs: TargetNeeds
    rope: Rope | None = None
    max_positions: int | None = None
    sliding_window: int | None = None
    recycle: Literal["pre_norm", "post_norm"] = "pre_norm"
    tap_norm: Literal["each", "all"] | None = None
    norm_before_residual: bool = False
    qk_norm: bool = False
    biases: frozenset[Literal["fc", "attention", "mlp"]] = frozenset()

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_layers < 1:
            raise ValueError(f"num_layers is {self.num_layers}; a head has at least one attention layer")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads is {self.num_kv_heads}; it must divide num_heads = {self.num_heads}")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}; a head drafts at least one and at most "
                f"vocab_size = {self.vocab_size} tokens"
            )
        if self.rope is not None and 2 * len(self.rope.inv_freq) > self.head_dim:
            raise ValueError(f"rope turns {2 * len(self.rope.inv_freq)} lanes; a head has head_dim = {self.head_dim}")


@runtime_checkable
class Head(Protocol):
    """A draft head: reads target features, and drafts one token further per pass.

    target_ids: (Vd,) int64 target id of each draft id; None if both vocabularies are equal.
    """

    spec: HeadSpec
    target_ids: Tensor | None

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """Return the hidden input (T, H) of the first pass from the target's hidden states, as ordered in `needs`."""

    def reserve_positions(self, num_positions: int) -> None:
        """Announce that all positions are below `num_positions`, so that a head may precompute a table."""

    def forward(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run one draft pass.

        Args:
            ids: (T,) tokens, each the one after the position whose hidden state is given, in the target's vocabulary.
            hidden: (T, H) from `fuse`, or the second result of an earlier pass.
            positions: (T,) int64, positions of the hidden states.
            attend: attention over the head's own cache.
            rows: (R,) int64 tokens whose results are wanted; None is all. Keys and values are stored for all tokens.

        Returns:
            (T, H) input of `logits`, and (T, H) hidden input of the next draft pass; (R, H) each for `rows`.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (R, Vd) float32 of hidden states (R, H), the first result of `forward`."""


def shard_of(head: Head) -> VocabShard | None:
    """Return the vocabulary shard of a head's logits; None for the whole vocabulary, or a head without `shard`."""
    return getattr(head, "shard", None)


def vocab_of(head: Head, device: torch.device) -> HashedVocab:
    """Return the token ids of the columns of a head's logits, hashed once for all sampling of drafts.

    The random numbers for sampling a draft are a hash of seed, position and token id, see `bateleur.eagle.noise`.
    """
    shard, size = shard_of(head), head.spec.vocab_size
    return HashedVocab.of(shard or (size if head.target_ids is None else head.target_ids), device)
