"""The contract of verification: rules, how drafts were proposed, and which noise each rule may read.

Legend for shapes: R requests, K draft tokens at most, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from bateleur.eagle.noise import Keys, Role

if TYPE_CHECKING:
    from bateleur.eagle.part import Part


@dataclass(frozen=True, slots=True)
class Coupled:
    """Drafts are draws with the target's own noise, or anything else: the rule that takes them needs no law."""


@dataclass(frozen=True, slots=True)
class OneHot:
    """Drafts are a function of the tokens before them: an argmax, an n-gram, a script. Their law is one-hot."""


@dataclass(frozen=True, slots=True)
class Logits:
    """Drafts were drawn from softmax(logits / temperature) with `draw_draft`, or by a draw as independent.

    logits: (R, K, Vd) float32, before the temperature, the very numbers that the draw read. Where the row's
        draft is missing they are not used.
    ids: (Vd,) int64 distinct target ids of the lanes, in any order; None if lane i is target id i. Lanes at and above V
        are allowed: the target gives them probability 0, so such a draft is always rejected.
    part: whose tokens the lanes are, in their order, where the drafter has a part of the target's vocabulary too; those
        of the logits that are tested. Others have all of theirs on every rank.
    """

    logits: Tensor
    ids: Tensor | None = None
    part: Part | None = None

    def __post_init__(self) -> None:
        if self.logits.dim() != 3 or not self.logits.is_floating_point():
            raise ValueError(
                f"logits must be floating (R, K, Vd), got {self.logits.dtype} {tuple(self.logits.shape)}"
            )
        if self.part is not None and (
            self.ids is not None or self.logits.shape[2] != self.part.end - self.part.first
        ):
            raise ValueError(
                f"logits of a part have its {self.part.end - self.part.first} lanes and no ids, "
                f"got {tuple(self.logits.shape)}"
            )
        if self.ids is not None and (
            self.ids.dtype != torch.int64 or self.ids.shape != self.logits.shape[2:]
        ):
            raise ValueError(
                f"ids must be int64 with one id for each of {self.logits.shape[2]} lanes, "
                f"got {self.ids.dtype} {tuple(self.ids.shape)}"
            )


DraftDistribution: TypeAlias = Coupled | OneHot | Logits


class Rule(Enum):
    """How drafts are tested. Under each of them the emitted tokens have exactly the target's law.

    COUPLED: a draft is accepted iff it equals the target's own draw, which is what is emitted (Daliri, Musco and
        Suresh 2024). Token-identical to plain decoding, for any drafter.
    RATIO: accept with probability min(1, p/q), else draw from (p - q)+ (Leviathan et al. 2023; Chen et al. 2023).
    BLOCK: a joint test of all drafts of a row, at least as long as RATIO's (Sun et al. 2024).

    Greedy rows (temperature 0) are the same function under every rule. RATIO and BLOCK are exact if whether a draft is
    there, and how many are, does not depend on its own value: one that a grammar forbids must be kept (its logit
    is -inf, so it is rejected) and not replaced by -1.
    """

    COUPLED = "coupled"
    RATIO = "ratio"
    BLOCK = "block"

    @property
    def draft_role(self) -> Role:
        """The stream that drafts are drawn from: the target's for COUPLED, else one independent of it."""
        return Role.TARGET if self is Rule.COUPLED else Role.DRAFT

    def keys(self, seeds: Tensor, positions: Tensor, place: int | Tensor = 0) -> Keys:
        """Names of the draws of drafts and of acceptance tests; `place` is that of the draft among those of its step.

        BLOCK looks at numbers behind the place where it stops, so they must not be seen again when the next step
        comes to that position. There they have another place, for every step begins behind the one before it; so its
        names hold the place. The other rules look no further than they emit.
        """
        return Keys(seeds, positions, place if self is Rule.BLOCK else 0)

    def require(self, distribution: DraftDistribution | type[DraftDistribution]) -> None:
        """Raise `ValueError` unless drafts of this distribution can be tested by the rule; for constructors."""
        kind = distribution if isinstance(distribution, type) else type(distribution)
        if kind not in (Coupled, OneHot, Logits):
            raise ValueError(f"distribution is {kind.__name__}; it must be Coupled, OneHot or Logits")
        if self is not Rule.COUPLED and kind is Coupled:
            raise ValueError(
                f"rule {self.name} does not fit the distribution Coupled: drafts that share the target's noise are "
                "tested by COUPLED; RATIO and BLOCK need OneHot, or Logits with noise of their own"
            )


@dataclass(frozen=True, slots=True)
class Drafts:
    """What is under test.

    tokens: (R, K) int64 target ids. A negative id is "no draft here": verification stops there and the target's own
        draw is emitted. Columns behind a request's logit rows are not looked at.
    distribution: how they were drawn. A wrong declaration cannot be seen, and makes RATIO and BLOCK wrong.
    """

    tokens: Tensor
    distribution: DraftDistribution

    def __post_init__(self) -> None:
        if self.tokens.dim() != 2 or self.tokens.dtype != torch.int64:
            raise ValueError(
                f"tokens must be int64 (R, K), got {self.tokens.dtype} {tuple(self.tokens.shape)}"
            )
        if isinstance(self.distribution, Logits) and self.distribution.logits.shape[:2] != self.tokens.shape:
            raise ValueError(
                f"distribution has logits for {tuple(self.distribution.logits.shape[:2])} drafts, "
                f"tokens has {tuple(self.tokens.shape)}"
            )


@dataclass(frozen=True, slots=True)
class Rows:
    """Which logit rows belong to whom. Values inside tensors are the caller's promise.

    query_start_loc: (R+1,) int32: request r owns the logit rows [r] to [r+1]-1, which are 1 + its drafts, at most
        1 + K; ragged. Rows at and behind the last entry are padding. A request without rows emits nothing.
    seeds: (R,) int64.
    first_position: (R,) int64, index in its sequence of the token that the request's first logit row draws.
    temperature: (R,) floating; 0 is greedy.
    """

    query_start_loc: Tensor
    seeds: Tensor
    first_position: Tensor
    temperature: Tensor

    def __post_init__(self) -> None:
        num_reqs = len(self)
        for name, kind, length in (
            ("query_start_loc", "int32", num_reqs + 1),
            ("seeds", "int64", num_reqs),
            ("first_position", "int64", num_reqs),
            ("temperature", "floating", num_reqs),
        ):
            value: Tensor = getattr(self, name)
            sound = value.is_floating_point() if kind == "floating" else value.dtype == getattr(torch, kind)
            if not sound or value.shape != (length,):
                raise ValueError(
                    f"{name} must be {kind} of shape ({length},), got {value.dtype} {tuple(value.shape)}"
                )

    def __len__(self) -> int:
        return self.seeds.shape[0]


class Verdict(NamedTuple):
    """What a step emits.

    tokens: (R, K+1) int64, -1 behind the last one; where a bad row was reached its place holds -1 too.
    num_emitted: (R,) int64 in 1 .. K+1; where `bad`, the tokens before the bad row, which may be none.
        Accepted drafts are num_emitted - 1, or num_emitted where `bad`.
    bad: (R,) bool: a row with a NaN, or with nothing above -inf, was reached. The caller must end that request.
    """

    tokens: Tensor
    num_emitted: Tensor
    bad: Tensor


def tempered(logits: Tensor, temperature: Tensor) -> Tensor:
    """(R, ...) logits divided by their row's temperature; greedy rows by 1. One path for the draw and for its test."""
    return logits / tempering(temperature).view(-1, *[1] * (logits.dim() - 1))


def tempering(temperature: Tensor) -> Tensor:
    """(R,) what logits are divided by: 1 in greedy rows."""
    return temperature.where(temperature > 0, 1.0)
