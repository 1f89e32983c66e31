"""Drafters without a model, to test an engine with: what they propose is known, so what must be accepted is too.

Against a target whose continuation they are given, `ScriptedDrafter` with `right_up_to=s` must give exactly s + 1
tokens per step, and without it K + 1, for any batch, schedule and graph. Legend for shapes: R rows, K drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bateleur.eagle.drafter import DraftContext, TargetNeeds
from bateleur.eagle.noise import Keys, Role, bits


class _Drafter:
    """What all of them share: nothing is needed of the target, and nothing remembered."""

    needs = TargetNeeds()

    def __init__(self, num_speculative_tokens: int) -> None:
        if num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens={num_speculative_tokens} must be at least 1")
        self.num_speculative_tokens = num_speculative_tokens

    def admit(self, row: int, token_ids: list[int]) -> None:
        """See `Drafter`."""

    def _wanted(self, drafts: Tensor, context: DraftContext) -> Tensor:
        """No drafts behind those that are wanted."""
        drafts[:, context.num_drafts :] = -1
        return drafts


class NoDrafts(_Drafter):
    """Proposes nothing: speculation that must cost and change nothing."""

    def propose(self, context: DraftContext) -> Tensor:
        """(R, K) of -1."""
        return context.next_token.new_full((len(context.next_token), self.num_speculative_tokens), -1)


class StickyDrafter(_Drafter):
    """Repeats the last token: right where the target does, and wrong elsewhere."""

    def propose(self, context: DraftContext) -> Tensor:
        """(R, K) of the rows' `next_token`."""
        return self._wanted(context.next_token.unsqueeze(1).repeat(1, self.num_speculative_tokens), context)


class RandomDrafter(_Drafter):
    """Proposes ids that depend on the request's seed and length alone, not on the batch or the number of steps."""

    def __init__(self, num_speculative_tokens: int, vocab_size: int, seed: int = 0) -> None:
        super().__init__(num_speculative_tokens)
        if not 1 <= vocab_size < 2**31:
            raise ValueError(f"vocab_size={vocab_size} must be in [1, 2^31)")
        self.vocab_size, self.seed = vocab_size, seed

    def propose(self, context: DraftContext) -> Tensor:
        """(R, K) ids below the vocabulary's size."""
        position = context.batch.num_computed_tokens[: len(context.next_token)] + context.num_valid
        noise = bits(Keys(context.seeds + self.seed, position), Role.DRAFT, self.num_speculative_tokens)
        return self._wanted(noise.bitwise_and(0x7FFFFFFF).to(torch.int64) % self.vocab_size, context)


class ScriptedDrafter(_Drafter):
    """Proposes the true continuation, and from a position on wrong tokens. Reads the device: for tests only.

    It keeps every request's tokens from `admit` and what was emitted, and a `next_token` that does not follow from
    them is a `RuntimeError`: somebody told it of the wrong row, or not of every step.
    """

    def __init__(
        self,
        continuation: Callable[[list[int]], Sequence[int]],
        num_speculative_tokens: int,
        right_up_to: int | None,
        vocab_size: int,
    ) -> None:
        """Propose `continuation(tokens so far)`, of which the first `right_up_to` stay right; None is all.

        Where the continuation ends there is no draft. A wrong token is the right one + 1, modulo `vocab_size`.
        """
        super().__init__(num_speculative_tokens)
        if vocab_size < 2:
            raise ValueError(f"vocab_size={vocab_size} must be at least 2, or no token is wrong")
        if right_up_to is not None and right_up_to < 0:
            raise ValueError(f"right_up_to={right_up_to} must not be negative")
        self._continuation, self._vocab_size = continuation, vocab_size
        self._right = num_speculative_tokens if right_up_to is None else right_up_to
        self._tokens: dict[int, list[int]] = {}

    def admit(self, row: int, token_ids: list[int]) -> None:
        """See `Drafter`."""
        self._tokens[row] = list(token_ids)

    def propose(self, context: DraftContext) -> Tensor:
        """(R, K) drafts; -1 where the prompt goes on, behind the continuation, and behind those that are wanted."""
        emitted, last = context.emitted.tolist(), context.next_token.tolist()
        drafts = [
            self._row(row, [token for token in new if token >= 0], next_token)
            for row, new, next_token in zip(context.rows.tolist(), emitted, last, strict=True)
        ]
        shape = len(drafts), self.num_speculative_tokens
        return self._wanted(context.next_token.new_tensor(drafts).view(shape), context)

    def _row(self, row: int, emitted: list[int], next_token: int) -> list[int]:
        k = self.num_speculative_tokens
        if row not in self._tokens:
            raise RuntimeError(f"row {row} takes part in a step, but no request was admitted to it")
        if not emitted:
            return [-1] * k
        tokens = self._tokens[row]
        tokens += emitted
        if tokens[-1] != next_token:
            raise RuntimeError(f"row {row}: next_token {next_token} does not follow; emitted were {emitted}")
        right = list(self._continuation(list(tokens)))[:k]
        drafts = right[: self._right] + [(token + 1) % self._vocab_size for token in right[self._right :]]
        return drafts + [-1] * (k - len(drafts))
