"""Speculative decoding of one sequence, in the open: to read, for a first try of a head, and for tests.

The target is a function and computes the whole sequence in every step; an engine keeps caches and batches requests.

Legend for shapes: T tokens of a sequence, K draft tokens at most, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bateleur.eagle.draw import draw
from bateleur.eagle.heads.dense import DenseAttend
from bateleur.eagle.heads.spec import Head
from bateleur.eagle.noise import Keys, Lanes
from bateleur.eagle.rules import Coupled, Drafts, Logits, OneHot, Rows, Rule, tempered
from bateleur.eagle.verify import draw_draft, verify

Target = Callable[[Tensor], tuple[Tensor, Sequence[Tensor]]]
"""(T,) int64 ids of a sequence -> (T, V) logits of the tokens that follow, and one (T, width) tensor per need."""


class Step(NamedTuple):
    """One pass of the target: what it emitted, how many drafts it was given, and how many of them it accepted."""

    tokens: list[int]
    num_drafts: int
    num_accepted: int


@torch.no_grad()
def sample(
    target: Target, prompt: Sequence[int], num_tokens: int, *, seed: int = 0, temperature: float = 0.0
) -> list[int]:
    """Decode `num_tokens` tokens one by one, without drafts. Temperature 0 is greedy."""
    tokens, heat = _checked(prompt, num_tokens, temperature), torch.tensor([temperature], dtype=torch.float32)
    for position in range(len(tokens), len(tokens) + num_tokens):
        logits, _ = target(torch.tensor(tokens))
        keys = Keys(torch.tensor([seed]), torch.tensor([position]))
        drawn = draw(tempered(logits[-1:].float(), heat), heat, keys)
        tokens.append(_sound(drawn.token_ids, drawn.bad, position))
    return tokens[len(prompt) :]


@torch.no_grad()
def speculate(
    target: Target,
    head: Head,
    prompt: Sequence[int],
    num_tokens: int,
    num_drafts: int,
    *,
    seed: int = 0,
    temperature: float = 0.0,
    rule: Rule = Rule.COUPLED,
) -> Iterator[Step]:
    """Decode `num_tokens` tokens with up to `num_drafts` drafts of `head` in each step; yields every step.

    Under COUPLED, and at temperature 0 under every rule, the tokens are those of `sample`. `ValueError` for an empty
    prompt, a negative number, or a target that returns a row without a token.
    """
    tokens, seeds, heat = (
        _checked(prompt, num_tokens, temperature),
        torch.tensor([seed]),
        torch.tensor([temperature], dtype=torch.float32),
    )
    if num_drafts < 0:
        raise ValueError(f"num_drafts={num_drafts} must not be negative")
    end, chain = len(tokens) + num_tokens, _Chain(head, num_drafts, seeds, heat, rule)
    drafts = Drafts(torch.zeros(1, 0, dtype=torch.int64), OneHot())
    while len(tokens) < end:
        first = len(tokens)  # index of the token that the first logit row draws
        logits, features = target(torch.cat((torch.tensor(tokens), drafts.tokens[0])))
        k = drafts.tokens.shape[1]
        rows = Rows(torch.tensor([0, 1 + k], dtype=torch.int32), seeds, torch.tensor([first]), heat)
        verdict = verify(tempered(logits[first - 1 :].float(), heat), drafts, rows, rule=rule)
        _sound(verdict.tokens[0], verdict.bad, first)
        emitted = verdict.tokens[0, : int(verdict.num_emitted)].tolist()
        tokens += emitted
        yield Step(emitted[: end - first], k, len(emitted) - 1)
        drafts = chain.propose(torch.tensor(tokens), features)


class _Chain:
    """A head over a cache of the tokens whose features are the target's; drafts are appended and forgotten again."""

    def __init__(self, head: Head, num_drafts: int, seeds: Tensor, heat: Tensor, rule: Rule) -> None:
        self.head, self.num_drafts, self.seeds, self.heat, self.rule = head, num_drafts, seeds, heat, rule
        ids = head.spec.vocab_size if head.target_ids is None else head.target_ids
        self.lanes, self.attend, self.held = Lanes.of(ids, seeds.device), DenseAttend(head.spec), 0

    def propose(self, tokens: Tensor, features: Sequence[Tensor]) -> Drafts:
        """Drafts for the tokens behind `tokens`, all of which but the last have a row of `features`."""
        known, held = len(tokens) - 1, self.held
        ids, positions = (
            tokens[held + 1 :],
            torch.arange(held, known),
        )  # each token sits beside the feature before it
        hidden = self.head.fuse([feature[held:known] for feature in features])
        chosen, laws = [tokens[:0]], []
        for k in range(self.num_drafts):
            h, hidden = self.head.forward(ids, hidden, positions, self.attend)
            logits, index = self.head.logits(h[-1:]), torch.tensor([known + 1 + k])
            lane, bad = draw_draft(
                logits, self.heat, self.seeds, index, rule=self.rule, place=k, lanes=self.lanes
            )
            if bad:
                break
            ids = lane if self.head.target_ids is None else self.head.target_ids[lane]
            hidden, positions = hidden[-1:], positions[-1:] + 1
            chosen.append(ids)
            laws.append(logits)
        self.held = known
        self.attend.truncate(min(known, len(self.attend)))
        drawn = Logits(torch.stack(laws, 1), self.head.target_ids) if laws else OneHot()
        return Drafts(torch.cat(chosen)[None], Coupled() if self.rule is Rule.COUPLED else drawn)


def _checked(prompt: Sequence[int], num_tokens: int, temperature: float) -> list[int]:
    if not prompt or num_tokens < 0 or not temperature >= 0:
        raise ValueError(
            f"prompt of {len(prompt)} tokens, num_tokens={num_tokens}, temperature={temperature}: the prompt must "
            "have a token, and the numbers must not be negative"
        )
    return list(prompt)


def _sound(token: Tensor, bad: Tensor, position: int) -> int:
    if bad:
        raise ValueError(f"target: the logits for index {position} or behind hold NaN, or nothing above -inf")
    return int(token[0])
