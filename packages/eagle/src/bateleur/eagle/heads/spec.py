"""What a draft head is, as plain numbers, and what it looks like to whoever runs it.

Legend for shapes: T tokens, R rows that want a draft, H hidden size of the head, V target vocabulary, Vd draft
vocabulary, Hq/Hk query and key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from bateleur.eagle.drafter import TargetNeeds
from bateleur.eagle.noise import Lanes

if TYPE_CHECKING:
    from bateleur.eagle.part import Part

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(attention layer of the head, q (T, Hq, D), k (T, Hk, D), v (T, Hk, D)) -> (T, Hq, D).

It writes k and v where they belong and attends causally with scale D ** -0.5, over the last `spec.sliding_window`
positions if there is one. Query and key are rotated already.
"""

Project = Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]]
"""Makes the product x W^T + b, (n, columns) to (n, rows), of W (rows, columns) and b (rows,) or None."""


@dataclass(frozen=True, slots=True)
class CProduct:
    """A product x W^T + b as C calls it, ``(x, tokens, stride of x, columns, W, b or NULL, y, rows, threads)``: float32
    addresses, int64 and an int; W lies however the function reads it. It returns 0, or what else int64 it likes where
    it has no memory.
    """

    address: int
    weight: Tensor
    bias: Tensor | None
    rows: int
    columns: int


@runtime_checkable
class CallableInC(Protocol):
    """A product that may be called from C."""

    @property
    def in_c(self) -> CProduct | None:
        """None where it is not."""
        ...


Kind = Literal["eagle1", "eagle3", "mtp"]
"""One for multi-token prediction, "mtp", has layers of its target's kinds, and is made by whoever runs these."""
Recycle = Literal["pre_norm", "post_norm"]


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What a head must know of its target, and what it may share with it. Nothing here is copied."""

    num_layers: int
    """Layers between which boundaries lie: 0 is the output of the embedding, `num_layers` that of the last layer."""
    hidden_size: int
    vocab_size: int
    embedding: Tensor
    """(V, hidden_size)"""
    lm_head: Tensor
    """(V, hidden_size)"""
    output: Callable[[Tensor], Tensor] | None = None
    """The target's own product with `lm_head`, (n, hidden_size) to (n, V), for heads that share it; None makes one."""
    part: Part | None = None
    """The tokens of which there are rows of `embedding` and `lm_head`; None where there are those of all."""
    embed: Callable[[Tensor], Tensor] | None = None
    """(T,) ids to (T, hidden_size), with a part: then heads that share the embedding ask for its rows here."""

    def __post_init__(self) -> None:
        if (self.part is None) != (self.embed is None):
            raise ValueError(f"part is {self.part} and embed is {self.embed}; a target has both, or neither")
        rows = self.vocab_size if self.part is None else self.part.end - self.part.first
        shape = rows, self.hidden_size
        for name in ("embedding", "lm_head"):
            if (found := tuple(getattr(self, name).shape)) != shape:
                raise ValueError(
                    f"{name} has shape {found}; vocab_size = {self.vocab_size} and hidden_size = {self.hidden_size} "
                    f"ask for {shape}"
                )

    @classmethod
    def of(cls, model: Any) -> TargetInfo:
        """Of a causal language model of transformers."""
        config = model.config.get_text_config()
        embedding, lm_head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        return cls(config.num_hidden_layers, config.hidden_size, config.vocab_size, embedding, lm_head)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of the first 2 * len(inv_freq) lanes of a head; lane i turns with lane i + half."""

    inv_freq: tuple[float, ...]
    """Radians per position of each pair of lanes, any scaling already applied."""

    def __post_init__(self) -> None:
        if not self.inv_freq:
            raise ValueError("inv_freq is empty; rotary embedding turns at least one pair of lanes")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """Sizes and switches of a draft head. Every switch that changes the function is here, nothing is guessed later."""

    kind: Kind
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_layers: int
    """Attention layers, so caches; the first argument of `Attend` counts them."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    needs: TargetNeeds
    rope: Rope | None = None
    max_positions: int | None = None
    """Positions that the head was made for; None if it does not say."""
    sliding_window: int | None = None
    """A query sees this many positions, itself included; None sees all. `Attend` applies it."""
    recycle: Recycle = "pre_norm"
    """Whether a draft step is fed the output of the last layer, or that of the head's final norm behind it."""
    norm_before_fc: bool = False
    """EAGLE-3: one norm over all taps side by side, before `fc`."""
    fc_norm: bool = False
    """EAGLE-3.1: a norm for each tap, before `fc`."""
    norm_before_residual: bool = False
    """EAGLE-3: the first residual starts from the normed hidden state."""
    qk_norm: bool = False
    """Query and key heads are normed before they are rotated."""
    fc_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_layers < 1:
            raise ValueError(f"num_layers is {self.num_layers}; a head has at least one attention layer")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads is {self.num_kv_heads}; it must divide num_heads = {self.num_heads}"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}; a head drafts at least one and at most "
                f"vocab_size = {self.vocab_size} tokens"
            )
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm are both true; a head norms its taps in one way")
        if self.rope is not None and 2 * len(self.rope.inv_freq) > self.head_dim:
            raise ValueError(
                f"rope turns {2 * len(self.rope.inv_freq)} lanes; a head has head_dim = {self.head_dim}"
            )


@runtime_checkable
class Head(Protocol):
    """A draft head: target features in, one token further per pass.

    target_ids: (Vd,) int64 target id of each draft id; None where both vocabularies are the same.
    """

    spec: HeadSpec
    target_ids: Tensor | None

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """(T, H) hidden input of the first draft pass, from the (T, target_hidden_size) features in order of needs."""
        ...

    def reserve_positions(self, num_positions: int) -> None:
        """Promise that no position from `num_positions` on will come, so that a head may make a table of them."""
        ...

    def forward(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One pass.

        Args:
            ids: (T,) tokens, each the one after the position whose hidden state is given, in the target's vocabulary.
            hidden: (T, H) from `fuse`, or the second result of an earlier pass.
            positions: (T,) int64, those of the hidden states.
            attend: attention over the head's own cache.
            rows: (R,) int64 tokens whose results are wanted; None is all. Keys and values are stored for all tokens.

        Returns:
            (T, H) input of `logits`, and the (T, H) hidden state that the next draft pass is fed; (R, H) for `rows`.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, Vd) float32 of (R, H)."""
        ...


@runtime_checkable
class SharedHead(Head, Protocol):
    """A head whose logits are those of a part of the target's vocabulary, if `part` is not None."""

    part: Part | None


def lanes_of(head: Head, device: torch.device) -> Lanes:
    """What the logits of a head are of."""
    if isinstance(head, SharedHead) and head.part is not None:
        return Lanes.of(head.part, device)
    return Lanes.of(head.spec.vocab_size if head.target_ids is None else head.target_ids, device)
