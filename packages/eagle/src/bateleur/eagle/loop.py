"""Speculative decoding of one sequence without an engine: for use with other libraries, as an example, and for tests.

The target is a function of whole sequences, or a model with a cache, such as `CausalLM`. An engine also batches
requests. All tensors are on the target's device.

Legend for shapes: n tokens, K draft tokens at most, V target vocabulary.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from bateleur.eagle.heads.layers import DenseAttend
from bateleur.eagle.heads.spec import Head, vocab_of
from bateleur.eagle.rejection_sampler import draw_draft, verify
from bateleur.eagle.rules import Coupled, Drafts, Logits, OneHot, Rows, Rule, apply_temperature

Function: TypeAlias = Callable[[Tensor], tuple[Tensor, Sequence[Tensor]]]
"""Maps (n,) int64 ids of a sequence to (n, V) logits of the next tokens, and the hidden states that the head reads: one
(n, width) tensor for each that `HeadSpec.needs` lists, none without a head."""
Guess: TypeAlias = Callable[[list[int]], Sequence[int]]
"""Maps all tokens so far to likely next ones, such as an n-gram. It must not use the random numbers of the samples."""
Stop: TypeAlias = Collection[int] | Callable[[list[int]], bool]
"""Tokens that end an answer, or a function of the answer so far that returns whether it ends."""


@dataclass(frozen=True, slots=True)
class Request:
    """A sequence to decode: up to `num_tokens` tokens after a prompt. Temperature 0 is greedy.

    stop: tokens that end the output, or a function of the output so far that returns whether it ends.

    Raises `ValueError` for an empty prompt, or a negative `num_tokens` or `temperature`.
    """

    prompt: Sequence[int]
    num_tokens: int
    seed: int = 0
    temperature: float = 0.0
    stop: Stop = ()

    def __post_init__(self) -> None:
        if not self.prompt or self.num_tokens < 0 or not self.temperature >= 0:
            raise ValueError(
                f"prompt of {len(self.prompt)} tokens, num_tokens={self.num_tokens}, temperature={self.temperature}: "
                "the prompt must have a token, and the numbers must not be negative"
            )

    def ends(self, answer: list[int]) -> bool:
        """Whether an answer is complete: its last token is a stop token, or the function `stop` returns True."""
        return self.stop(answer) if callable(self.stop) else answer[-1] in self.stop


@runtime_checkable
class CachedTarget(Protocol):
    """A model that caches the tokens of one sequence. device: device of its tensors."""

    device: torch.device

    def __call__(self, ids: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Append the tokens `ids` (n,) to the cache; return the logits (n, V) after each, and (n, width) features."""

    def truncate(self, length: int) -> None:
        """Drop all but the first `length` tokens from the cache, for example after rejected drafts."""


class Step(NamedTuple):
    """One pass of the target: the emitted tokens, and the numbers of verified and of accepted drafts."""

    tokens: list[int]
    num_drafts: int
    num_accepted: int


def sample(target: Function | CachedTarget, request: Request) -> list[int]:
    """Decode one token at a time, without drafts. Raises `ValueError` for logits with a NaN, or none above -inf."""
    return [token for step in speculate(target, lambda tokens: (), request, 0) for token in step.tokens]


@torch.no_grad()
def speculate(
    target: Function | CachedTarget,
    drafter: Head | Guess,
    request: Request,
    num_drafts: int,
    *,
    rule: Rule = Rule.COUPLED,
) -> Iterator[Step]:
    """Decode with up to `num_drafts` drafts in each step; yields every step.

    Under `Rule.COUPLED`, and at temperature 0 under every rule, the tokens are those of `sample` with any drafter.

    target: a `Function`, which maps the whole sequence, (n,) int64, to logits (n, V) and hidden states; or a model with
        an empty cache.
    drafter: a head, or a function from all tokens so far to likely next ones (`Guess`).

    Raises `ValueError` for a negative `num_drafts`, or if logits of the target have a NaN or none above -inf. Logits
    after the end of the answer are ignored.
    """
    if num_drafts < 0:
        raise ValueError(f"num_drafts={num_drafts} must not be negative")
    held = target if isinstance(target, CachedTarget) else _UncachedTarget(target)
    tokens, answer = list(request.prompt), list[int]()
    device = held.device
    seeds = torch.tensor([request.seed], device=device)
    temperature = torch.tensor([request.temperature], dtype=torch.float32, device=device)
    propose = _Proposer(drafter, num_drafts, seeds, temperature, rule)
    drafts, known, ended = propose.drafts([], []), 0, False  # known: tokens in the target's cache
    while len(answer) < request.num_tokens and not ended:
        first, k = len(tokens), drafts.tokens.shape[1]
        logits, features = held(torch.cat((torch.tensor(tokens[known:], device=device), drafts.tokens[0])))
        starts = torch.tensor([0, 1 + k], dtype=torch.int32, device=device)
        rows = Rows(starts, seeds, torch.tensor([first], device=device), temperature)
        output = verify(apply_temperature(logits[-1 - k :].float(), temperature), drafts, rows, rule=rule)
        emitted = output.tokens[0, : int(output.num_emitted)].tolist()
        tokens += emitted
        stay, known = len(tokens) - 1 - known, len(tokens) - 1
        held.truncate(known)
        before = len(answer)
        for token in emitted[: request.num_tokens - before]:
            answer.append(token)
            if ended := request.ends(answer):
                break
        if (bad := bool(output.bad)) and not ended and len(answer) < request.num_tokens:
            raise ValueError(f"target: the logits for index {first} or later hold NaN, or no value above -inf")
        yield Step(answer[before:], k, len(emitted) - (not bad))
        drafts = propose(tokens, [feature[:stay] for feature in features])


class _Proposer:
    """Makes drafts for one sequence with a head or a `Guess`, sampled as the acceptance rule `rule` needs them.

    A head runs over a cache of the tokens with target features; drafts are appended and truncated again.
    """

    def __init__(self, drafter: Head | Guess, num_drafts: int, seeds: Tensor, temperature: Tensor, rule: Rule) -> None:
        self._drafter, self._num_drafts, self._rule = drafter, num_drafts, rule
        self._seeds, self._temperature = seeds, temperature
        if isinstance(drafter, Head):
            self._vocab, self._attend = vocab_of(drafter, seeds.device), DenseAttend(drafter.spec)

    def __call__(self, tokens: list[int], features: Sequence[Tensor]) -> Drafts:
        """Return drafts for the tokens after `tokens`.

        features: the target's hidden states of the tokens that the head has not cached; the last token has none yet.
        """
        if isinstance(self._drafter, Head):
            return self._chain(self._drafter, tokens, features)
        return self.drafts(list(self._drafter(list(tokens)))[: self._num_drafts], [])

    def drafts(self, ids: Sequence[int], logits: Sequence[Tensor], target_ids: Tensor | None = None) -> Drafts:
        """Return `ids` with their distribution. logits: (1, Vd) of each, () if not sampled. target_ids: see `Head`."""
        tokens = torch.tensor([ids], dtype=torch.int64, device=self._seeds.device).view(1, -1)
        if self._rule is Rule.COUPLED:
            return Drafts(tokens, Coupled())
        return Drafts(tokens, Logits(torch.stack(tuple(logits), 1), target_ids) if logits else OneHot())

    def _chain(self, head: Head, tokens: list[int], features: Sequence[Tensor]) -> Drafts:
        known, device = len(tokens) - 1, self._seeds.device
        held = known - len(features[0])
        ids = torch.tensor(tokens[held + 1 :], device=device)  # each token is paired with the feature before it
        positions, hidden = torch.arange(held, known, device=device), head.fuse(features)
        chosen, kept = [], []
        for k in range(self._num_drafts):
            h, hidden = head.forward(ids, hidden, positions, self._attend)
            logits, index = head.logits(h[-1:]), torch.tensor([known + 1 + k], device=device)
            draft_id, bad = draw_draft(
                logits, self._temperature, self._seeds, index, rule=self._rule, draft_index=k, vocab=self._vocab
            )
            if bad:
                break
            ids = draft_id if head.target_ids is None else head.target_ids[draft_id]
            hidden, positions = hidden[-1:], positions[-1:] + 1
            chosen.append(int(ids))
            kept.append(logits)
        self._attend.truncate(min(known, len(self._attend)))
        return self.drafts(chosen, kept, head.target_ids)


class _UncachedTarget:
    """Adapts a `Function` to `CachedTarget`: keeps only the tokens, and computes the whole sequence in every step."""

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
