"""Speculative decoding of one sequence without an engine: to use beside other libraries, to read, and for tests.

The target is a function of whole sequences, or a model that keeps a cache, such as `CausalLM`; an engine batches
requests besides. Everything lies on the target's device.

Legend for shapes: n tokens, K draft tokens at most, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from bateleur.eagle.draw import draw
from bateleur.eagle.heads.dense import DenseAttend
from bateleur.eagle.heads.spec import Head
from bateleur.eagle.noise import Keys, Lanes
from bateleur.eagle.rules import Coupled, Drafts, Logits, OneHot, Rows, Rule, tempered
from bateleur.eagle.verify import draw_draft, verify

Function: TypeAlias = Callable[[Tensor], tuple[Tensor, Sequence[Tensor]]]
"""(n,) int64 ids of a sequence -> (n, V) logits of the tokens that follow, and one (n, width) tensor per need."""
Guess: TypeAlias = Callable[[list[int]], Sequence[int]]
"""All tokens so far -> those that may come next: an n-gram, say. Of its noise it may know nothing."""
Stop: TypeAlias = Collection[int] | Callable[[list[int]], bool]
"""Tokens behind which an answer ends, or whether it ends, given all of it so far."""


@runtime_checkable
class CachedTarget(Protocol):
    """A model that remembers the tokens of one sequence. device: where its tensors are."""

    device: torch.device

    def __call__(self, ids: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """As `Function`, for the (n,) tokens behind those that it holds, which it holds from now on."""
        ...

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens, such as drafts that were rejected."""
        ...


class Step(NamedTuple):
    """One pass of the target: what it emitted, how many drafts it was given, and how many of them it accepted."""

    tokens: list[int]
    num_drafts: int
    num_accepted: int


@torch.no_grad()
def sample(
    target: Function | CachedTarget,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    seed: int = 0,
    temperature: float = 0.0,
    stop: Stop = (),
) -> list[int]:
    """Decode up to `num_tokens` tokens one by one, without drafts. Temperature 0 is greedy; errors as `speculate`."""
    held, tokens, heat = _begin(target, prompt, num_tokens, temperature)
    seeds, ends, answer = torch.tensor([seed], device=held.device), _ends(stop), list[int]()
    for position in range(len(tokens), len(tokens) + num_tokens):
        logits, _ = held(torch.tensor(answer[-1:] or tokens, device=held.device))
        keys = Keys(seeds, torch.tensor([position], device=held.device))
        drawn = draw(tempered(logits[-1:].float(), heat), heat, keys)
        answer.append(_sound(drawn.token_ids, drawn.bad, position))
        if ends(answer):
            break
    return answer


@torch.no_grad()
def speculate(
    target: Function | CachedTarget,
    drafter: Head | Guess,
    prompt: Sequence[int],
    num_tokens: int,
    num_drafts: int,
    *,
    seed: int = 0,
    temperature: float = 0.0,
    rule: Rule = Rule.COUPLED,
    stop: Stop = (),
) -> Iterator[Step]:
    """Decode up to `num_tokens` tokens with up to `num_drafts` drafts in each step; yields every step.

    Under COUPLED, and at temperature 0 under every rule, the tokens are those of `sample`, whoever drafts. A target
    that keeps a cache must hold nothing yet.

    `ValueError` for an empty prompt, a negative number, or a target that returns a row without a token.
    """
    held, tokens, heat = _begin(target, prompt, num_tokens, temperature)
    if num_drafts < 0:
        raise ValueError(f"num_drafts={num_drafts} must not be negative")
    device, ends, answer = held.device, _ends(stop), list[int]()
    seeds, known = torch.tensor([seed], device=device), 0  # tokens that the target holds
    drawn = _Drawn(num_drafts, seeds, heat, rule)
    propose = _Chain(drafter, drawn) if isinstance(drafter, Head) else _Guesses(drafter, drawn)
    drafts, ended = drawn.drafts([], []), False
    while len(answer) < num_tokens and not ended:
        first, k = len(tokens), drafts.tokens.shape[1]
        logits, features = held(torch.cat((torch.tensor(tokens[known:], device=device), drafts.tokens[0])))
        starts = torch.tensor([0, 1 + k], dtype=torch.int32, device=device)
        rows = Rows(starts, seeds, torch.tensor([first], device=device), heat)
        verdict = verify(tempered(logits[-1 - k :].float(), heat), drafts, rows, rule=rule)
        _sound(verdict.tokens[0], verdict.bad, first)
        emitted = verdict.tokens[0, : int(verdict.num_emitted)].tolist()
        tokens += emitted
        stay, known = len(tokens) - 1 - known, len(tokens) - 1
        held.truncate(known)
        before = len(answer)
        for token in emitted[: num_tokens - before]:
            answer.append(token)
            if ended := ends(answer):
                break
        yield Step(answer[before:], k, len(emitted) - 1)
        drafts = propose(tokens, [feature[:stay] for feature in features])


class _Drawn:
    """What drafts are drawn with, and what is said of them."""

    def __init__(self, num_drafts: int, seeds: Tensor, heat: Tensor, rule: Rule) -> None:
        self.num_drafts, self.seeds, self.heat, self.rule = num_drafts, seeds, heat, rule

    def drafts(self, ids: Sequence[int], laws: Sequence[Tensor], target_ids: Tensor | None = None) -> Drafts:
        tokens = torch.tensor([ids], dtype=torch.int64, device=self.seeds.device).view(1, -1)
        drawn = Logits(torch.stack(tuple(laws), 1), target_ids) if laws else OneHot()
        return Drafts(tokens, Coupled() if self.rule is Rule.COUPLED else drawn)


class _Guesses:
    """Drafts of a function of the tokens."""

    def __init__(self, guess: Guess, drawn: _Drawn) -> None:
        self._guess, self._drawn = guess, drawn

    def __call__(self, tokens: list[int], features: Sequence[Tensor]) -> Drafts:
        return self._drawn.drafts(list(self._guess(list(tokens)))[: self._drawn.num_drafts], [])


class _Chain:
    """A head over a cache of the tokens whose features are the target's; drafts are appended and forgotten again."""

    def __init__(self, head: Head, drawn: _Drawn) -> None:
        self._head, self._drawn = head, drawn
        ids = head.spec.vocab_size if head.target_ids is None else head.target_ids
        self._lanes, self._attend = Lanes.of(ids, drawn.seeds.device), DenseAttend(head.spec)

    def __call__(self, tokens: list[int], features: Sequence[Tensor]) -> Drafts:
        """Drafts for the tokens behind `tokens`. `features` of all before the last but those that are held."""
        head, drawn, known = self._head, self._drawn, len(tokens) - 1
        device, held = drawn.seeds.device, known - len(features[0])
        ids = torch.tensor(tokens[held + 1 :], device=device)  # each token sits beside the feature before it
        positions, hidden = torch.arange(held, known, device=device), head.fuse(features)
        chosen, laws = [], []
        for k in range(drawn.num_drafts):
            h, hidden = head.forward(ids, hidden, positions, self._attend)
            logits, index = head.logits(h[-1:]), torch.tensor([known + 1 + k], device=device)
            lane, bad = draw_draft(
                logits, drawn.heat, drawn.seeds, index, rule=drawn.rule, place=k, lanes=self._lanes
            )
            if bad:
                break
            ids = lane if head.target_ids is None else head.target_ids[lane]
            hidden, positions = hidden[-1:], positions[-1:] + 1
            chosen.append(int(ids))
            laws.append(logits)
        self._attend.truncate(min(known, len(self._attend)))
        return drawn.drafts(chosen, laws, head.target_ids)


class _Whole:
    """A target that is a function and keeps the tokens only: it computes the whole sequence in every step."""

    def __init__(self, function: Function) -> None:
        self.device = torch.device("cpu")
        self._function, self._ids = function, torch.zeros(0, dtype=torch.int64)

    def __call__(self, ids: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        self._ids = torch.cat((self._ids, ids))
        logits, features = self._function(self._ids)
        new = len(self._ids) - len(ids)
        return logits[new:], [feature[new:] for feature in features]

    def truncate(self, length: int) -> None:
        self._ids = self._ids[:length]


def _begin(
    target: Function | CachedTarget, prompt: Sequence[int], num_tokens: int, temperature: float
) -> tuple[CachedTarget, list[int], Tensor]:
    if not prompt or num_tokens < 0 or not temperature >= 0:
        raise ValueError(
            f"prompt of {len(prompt)} tokens, num_tokens={num_tokens}, temperature={temperature}: the prompt must "
            "have a token, and the numbers must not be negative"
        )
    held = target if isinstance(target, CachedTarget) else _Whole(target)
    return held, list(prompt), torch.tensor([temperature], dtype=torch.float32, device=held.device)


def _ends(stop: Stop) -> Callable[[list[int]], bool]:
    if callable(stop):
        return stop
    ids = frozenset(stop)
    return lambda answer: answer[-1] in ids


def _sound(token: Tensor, bad: Tensor, position: int) -> int:
    if bad:
        raise ValueError(f"target: the logits for index {position} or behind hold NaN, or nothing above -inf")
    return int(token[0])
