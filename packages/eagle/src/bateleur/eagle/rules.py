"""Acceptance rules of verification, how drafts were proposed, and the noise that each rule may read.

Legend for shapes: R requests, N logit rows, K draft tokens at most, C = K + 1, V and Vd vocabulary of target and draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from bateleur.eagle.noise import Keys, Role
from bateleur.eagle.vocab_shard import VocabShard


@dataclass(frozen=True, slots=True)
class Coupled:
    """Drafts of any kind, such as samples with the noise of the target, for the acceptance rule `Rule.COUPLED`."""


@dataclass(frozen=True, slots=True)
class OneHot:
    """Drafts are a function of the tokens before them: an argmax, an n-gram. Their distribution is one-hot."""


@dataclass(frozen=True, slots=True)
class Logits:
    """Drafts were sampled from softmax(logits / temperature) with `draw_draft`, or independently in another way.

    logits: (R, K, Vd) float32, before the temperature: exactly those that were sampled from. Ignored where a draft is
        missing.
    ids: (Vd,) int64 distinct target ids of the draft vocabulary, in any order; None if draft id i is target id i. Ids
        at and above V are allowed: the target gives them probability 0, so these drafts are always rejected.
    shard: the vocabulary shard of the draft logits, in its order, if the drafter is vocabulary-parallel. It must be
        the shard of the target logits. None if every rank has all draft logits.
    """

    logits: Tensor
    ids: Tensor | None = None
    shard: VocabShard | None = None

    def __post_init__(self) -> None:
        if self.logits.dim() != 3 or not self.logits.is_floating_point():
            raise ValueError(f"logits={self.logits.dtype} {tuple(self.logits.shape)}: must be floating (R, K, Vd)")
        if self.shard is not None and (self.ids is not None or self.logits.shape[2] != self.shard.size):
            size, shape = self.shard.size, tuple(self.logits.shape)
            rule = f"must be (R, K, {size}) with ids=None, because shard is a vocabulary shard of {size} tokens"
            raise ValueError(f"logits={shape}: {rule}")
        if self.ids is not None and (self.ids.dtype != torch.int64 or self.ids.shape != self.logits.shape[2:]):
            raise ValueError(
                f"ids must be int64 with one id for each of Vd = {self.logits.shape[2]} draft logits, "
                f"got {self.ids.dtype} {tuple(self.ids.shape)}"
            )


DraftDistribution: TypeAlias = Coupled | OneHot | Logits


class Rule(Enum):
    """How drafts are verified. Under every rule the emitted tokens have exactly the distribution of the target.

    COUPLED: a draft is accepted if it equals the target's own sample, which is emitted in any case (Daliri, Musco and
    Suresh 2024). The tokens are those of decoding without drafts, for any drafter.
    RATIO: accept with probability min(1, p/q), else sample from (p - q)+ (Leviathan et al. 2023; Chen et al. 2023).
    BLOCK: a joint test of all drafts of a request, which accepts at least as many as RATIO (Sun et al. 2024).

    Greedy requests (temperature 0) give the same tokens under every rule. RATIO and BLOCK are exact if the number of
    drafts does not depend on their values: a draft that a grammar forbids must be kept (its logit is -inf, so it is
    rejected) and not replaced by -1.
    """

    COUPLED = "coupled"
    RATIO = "ratio"
    BLOCK = "block"

    @property
    def draft_role(self) -> Role:
        """Role of the noise that drafts are sampled with: the target's for COUPLED, else an independent one."""
        return Role.TARGET if self is Rule.COUPLED else Role.DRAFT

    def keys(self, seeds: Tensor, positions: Tensor, draft_index: int | Tensor = 0) -> Keys:
        """Return the keys of the noise of R drafts and of their acceptance tests.

        seeds, positions: (R,) int64, as of `Keys`. draft_index: index of the draft in its step; only BLOCK uses it.
        BLOCK reads noise after the position where it stops, and the next step must read other numbers there.
        """
        return Keys(seeds, positions, draft_index if self is Rule.BLOCK else 0)

    def require(self, distribution: DraftDistribution | type[DraftDistribution]) -> None:
        """Raise `ValueError` unless the rule can verify drafts of this distribution."""
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
    """Drafts to verify.

    tokens: (R, K) int64 target ids. At a negative id verification stops and emits the target's own sample. Columns
        after the logit rows of a request are ignored.
    distribution: distribution that the drafts were sampled from. A wrong one makes the output of `Rule.RATIO` and
        `Rule.BLOCK` wrong, and nothing detects that.
    """

    tokens: Tensor
    distribution: DraftDistribution

    def __post_init__(self) -> None:
        if self.tokens.dim() != 2 or self.tokens.dtype != torch.int64:
            raise ValueError(f"tokens must be int64 (R, K), got {self.tokens.dtype} {tuple(self.tokens.shape)}")
        if isinstance(self.distribution, Logits) and self.distribution.logits.shape[:2] != self.tokens.shape:
            raise ValueError(
                f"distribution has logits for {tuple(self.distribution.logits.shape[:2])} drafts, "
                f"tokens has {tuple(self.tokens.shape)}"
            )


@dataclass(frozen=True, slots=True)
class Rows:
    """Which logit rows belong to which request. The values in the tensors are not checked.

    query_start_loc: (R+1,) int32: request r has the logit rows query_start_loc[r] to query_start_loc[r+1] - 1, one more
        than its drafts. Rows from the last entry on are padding. A request without rows emits nothing.
    seeds: (R,) int64.
    first_position: (R,) int64, index in its sequence of the token that is sampled from the request's first logit row.
    temperature: (R,) floating; 0 is greedy.
    """

    query_start_loc: Tensor
    seeds: Tensor
    first_position: Tensor
    temperature: Tensor

    def __post_init__(self) -> None:
        kinds = {"query_start_loc": "int32", "seeds": "int64", "first_position": "int64", "temperature": "floating"}
        for name, kind in kinds.items():
            value: Tensor = getattr(self, name)
            length = len(self) + (name == "query_start_loc")
            sound = value.is_floating_point() if kind == "floating" else value.dtype == getattr(torch, kind)
            if not sound or value.shape != (length,):
                raise ValueError(f"{name} must be {kind} of shape ({length},), got {value.dtype} {tuple(value.shape)}")

    def __len__(self) -> int:
        return self.seeds.shape[0]


@dataclass(frozen=True, slots=True)
class LogitRows:
    """Maps drafts to the logit rows that verify them.

    tokens: `Drafts.tokens`. row_numbers: (C,) int64, the numbers 0 .. C-1. index: (R, C) int64, index among the N logit
        rows of the i-th logit row of each request, clamped to N - 1. drafted: (R, K) bool, whether there is a draft.
        occupied: (R,) bool, whether the request has logit rows.
    """

    rows: Rows
    tokens: Tensor
    row_numbers: Tensor
    index: Tensor
    drafted: Tensor
    occupied: Tensor

    @classmethod
    def of(cls, num_logits: int, drafts: Drafts, rows: Rows) -> LogitRows:
        """Assign each draft to the logit row that verifies it. num_logits: N."""
        tokens_RK, first_R = drafts.tokens, rows.query_start_loc[:-1].long()
        num_R = rows.query_start_loc[1:] - first_R
        row_C = torch.arange(tokens_RK.shape[1] + 1, device=tokens_RK.device)
        index_RC = (first_R.unsqueeze(1) + row_C).clamp_(max=num_logits - 1)
        drafted_RK = (row_C[1:] < num_R.unsqueeze(1)) & (tokens_RK >= 0)
        return cls(rows, tokens_RK, row_C, index_RC, drafted_RK, num_R > 0)

    def owners(self, num_logits: int) -> tuple[Tensor, Keys]:
        """Return request, (N,) int64, and noise key of each logit row. Padding rows count as the last request's."""
        starts, row_N = self.rows.query_start_loc, torch.arange(num_logits, device=self.index.device)
        owner_N = torch.searchsorted(starts[1:].contiguous(), row_N.int(), right=True).clamp_(max=len(self.rows) - 1)
        position_N = self.rows.first_position[owner_N] + (row_N - starts[owner_N])
        return owner_N, Keys(self.rows.seeds[owner_N], position_N)

    def run(self, passed_RK: Tensor) -> Tensor:
        """Return how many leading drafts of each request exist and passed their tests `passed_RK`, (R,) int64."""
        return (passed_RK & self.drafted).to(torch.int64).cumprod(1).sum(1)


class RejectionOutput(NamedTuple):
    """Tokens that a verified step emits.

    tokens: (R, K+1) int64, -1 after the last one, and in place of a bad row.
    num_emitted: (R,) int64 in 1 .. K+1; where `bad`, the number of tokens before the bad row, which may be 0. The
        number of accepted drafts is num_emitted - 1, or num_emitted where `bad`.
    bad: (R,) bool: a row with a NaN, or without a logit above -inf, was reached. The caller must end this request.
    """

    tokens: Tensor
    num_emitted: Tensor
    bad: Tensor


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Divide logits (R, ...) by the temperature of their row; greedy rows are divided by 1."""
    divisor_R = temperature.where(temperature > 0, 1.0)
    return logits / divisor_R.view(-1, *[1] * (logits.dim() - 1))
