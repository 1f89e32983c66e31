"""A toy target and a toy drafter whose laws are known exactly, run through a whole loop of speculative decoding.

Legend for shapes: V vocabulary, S sequences, L tokens of each, K draft tokens at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bateleur.eagle.noise import Keys, Role
from bateleur.eagle.rejection_sampler import draw_draft, verify
from bateleur.eagle.rules import Coupled, DraftDistribution, Drafts, Logits, OneHot, Rows, Rule, apply_temperature
from bateleur.eagle.sample import argmax, draw
from eagle_doubles.expected import accepted_law

_LEAST_EXPECTED = 5.0


@dataclass(frozen=True, slots=True)
class Toy:
    """Order-1 Markov laws: row v of each is the law of the token after v. (V, V) float64. A sequence begins after 0."""

    target: Tensor
    draft: Tensor

    @classmethod
    def random(cls, vocab_size: int, seed: int = 0, likeness: float = 0.4) -> Toy:
        """Laws with no small entry; `likeness` in [0, 1] is the share that the draft takes from the target."""
        generator = torch.Generator().manual_seed(seed)
        shape = (2, vocab_size, vocab_size)
        spiky = torch.rand(shape, generator=generator, dtype=torch.float64).log().neg().softmax(-1)
        target, other = 0.75 * spiky + 0.25 / vocab_size
        return cls(target, likeness * target + (1 - likeness) * other)


def exact_law(transition: Tensor, length: int) -> Tensor:
    """Joint law of the first `length` tokens after 0, (V^length,) float64; the first token counts most in the index."""
    metadata = transition[0]
    for _ in range(length - 1):
        metadata = (metadata.unsqueeze(-1) * transition.repeat(metadata.numel() // transition.shape[0], 1)).flatten()
    return metadata


class Fit(NamedTuple):
    """Chi-square of a sample: the statistic, its degrees of freedom, and its Wilson-Hilferty z (normal if right)."""

    statistic: float
    freedom: int
    z: float


def chi_square(tokens: Tensor, metadata: Tensor, vocab_size: int) -> Fit:
    """Compare (S, L) tokens with their joint law (V^L,); cells that expect fewer than 5 count as one."""
    place = vocab_size ** torch.arange(tokens.shape[1] - 1, -1, -1)
    observed = torch.bincount((tokens * place).sum(1), minlength=metadata.numel()).double()
    expected = metadata * len(tokens)
    rare = expected < _LEAST_EXPECTED
    observed = torch.cat([observed[~rare], observed[rare].sum().unsqueeze(0)])
    expected = torch.cat([expected[~rare], expected[rare].sum().unsqueeze(0)])
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    spread = 2 / (9 * freedom)
    return Fit(statistic, freedom, ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


def exact_accepted(toy: Toy, rule: Rule, num_drafts: int) -> Tensor:
    """Probability that at least 1 .. K drafts of the first step are accepted, (K,) float64: every path summed up."""
    vocab_size = toy.target.shape[0]
    paths = torch.zeros(1, dtype=torch.int64)  # the last token of each path
    weight, proposed = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    found = []
    for _ in range(num_drafts):
        p, q = toy.target[paths], toy.draft[paths]
        if rule is Rule.BLOCK:
            weight = (weight.unsqueeze(1) * p / q).clamp_max(1).flatten()
            proposed = (proposed.unsqueeze(1) * q).flatten()
        else:
            proposed = (proposed.unsqueeze(1) * accepted_law(p, q, rule)).flatten()
            weight = torch.ones_like(proposed)
        paths = torch.arange(vocab_size).repeat(len(paths))
        found.append((weight * proposed).sum())
    return torch.stack(found)


@dataclass(frozen=True, slots=True)
class Fault:
    """What a loop may get wrong, for tests that must fail. The default is right.

    draft_role: drafts are drawn with the noise of this role, whatever the rule asks for.
    drawn_from: (V, V) law that drafts are really drawn from, while the toy's is declared.
    """

    draft_role: Role | None = None
    drawn_from: Tensor | None = None


class Run(NamedTuple):
    """What a simulation emitted.

    tokens: (S, L) int64. tokens_per_step: emitted tokens per step of a sequence, surplus ones included.
    reached: (K,) float64, share of the sequences whose first step accepted at least 1 .. K drafts.
    """

    tokens: Tensor
    tokens_per_step: float
    reached: Tensor


def plain(toy: Toy, num_sequences: int, length: int, *, temperature: float = 1.0) -> Tensor:
    """Decode without speculation, (S, L) int64; sequence s has seed s. Its joint law is `exact_law(toy.target, L)`."""
    seeds, last = torch.arange(num_sequences), torch.zeros(num_sequences, dtype=torch.int64)
    logits, heat = toy.target.log().float(), torch.full((num_sequences,), temperature)
    tokens = []
    for position in range(length):
        last = draw(logits[last], heat, Keys(seeds, torch.full_like(seeds, position))).token_ids
        tokens.append(last)
    return torch.stack(tokens, 1)


def simulate(
    toy: Toy,
    rule: Rule,
    num_sequences: int,
    length: int,
    num_drafts: int,
    *,
    kind: type[DraftDistribution] | None = None,
    temperature: float = 1.0,
    ragged: bool = False,
    fault: Fault | None = None,
) -> Run:
    """Decode with speculation, all sequences of the batch at once, until each has `length` tokens.

    kind: how drafts are proposed: `Coupled` and `Logits` draw them, `OneHot` takes the argmax; by default what suits
        the rule.
    temperature: above 0 the toy's laws are what is left after it; at 0 their maxima are taken.
    ragged: every request has 0 to K drafts, anew in each step, and one place in ten holds -1.
    """
    kind = kind or (Coupled if rule is Rule.COUPLED else Logits)
    rule.require(kind)
    fault = fault or Fault()
    tokens = torch.zeros(num_sequences, length + num_drafts + 1, dtype=torch.int64)
    count, last = torch.zeros(num_sequences, dtype=torch.int64), torch.zeros(num_sequences, dtype=torch.int64)
    generator, place_C = torch.Generator().manual_seed(1), torch.arange(num_drafts + 1)
    reached, num_steps = torch.zeros(num_drafts, dtype=torch.float64), 0
    while (seeds := (count < length).nonzero().squeeze(1)).numel():  # a sequence's index is its seed
        wanted = torch.full_like(seeds, num_drafts)
        batch = _Batch(seeds, count[seeds], last[seeds], torch.full(seeds.shape, temperature))
        drafts = _propose(toy, rule, kind, fault, batch, num_drafts)
        if ragged:
            wanted = torch.randint(0, num_drafts + 1, seeds.shape, generator=generator)
            drafts.tokens[torch.rand(drafts.tokens.shape, generator=generator) < 0.1] = -1
        context = torch.cat([batch.last.unsqueeze(1), drafts.tokens.clamp_min(0)], 1)
        logits = toy.target.log().float()[context[place_C <= wanted.unsqueeze(1)]]
        starts = pad((wanted + 1).cumsum(0), (1, 0)).int()
        output = verify(logits, drafts, Rows(starts, seeds, batch.first, batch.temperature), rule=rule)
        tokens[seeds.unsqueeze(1), batch.first.unsqueeze(1) + place_C] = output.tokens
        count[seeds] += output.num_emitted
        last[seeds] = output.tokens.gather(1, output.num_emitted.unsqueeze(1) - 1).squeeze(1)
        if not num_steps:
            reached = (output.num_emitted.unsqueeze(1) - 1 > place_C[:-1]).double().mean(0)
        num_steps += len(seeds)
    return Run(tokens[:, :length], int(count.sum()) / num_steps, reached)


class _Batch(NamedTuple):
    """The sequences of a step: seed, position of the next token, token before it, temperature."""

    seeds: Tensor
    first: Tensor
    last: Tensor
    temperature: Tensor


def _propose(
    toy: Toy, rule: Rule, kind: type[DraftDistribution], fault: Fault, batch: _Batch, num_drafts: int
) -> Drafts:
    """A chain of drafts; the declared logits are those of the toy's draft, before the temperature."""
    scale_S1 = batch.temperature.where(batch.temperature > 0, 1.0).unsqueeze(1)
    declared = toy.draft.log().float()
    drawn_from = declared if fault.drawn_from is None else fault.drawn_from.log().float()
    tokens = torch.empty(len(batch.seeds), num_drafts, dtype=torch.int64)
    logits = torch.empty(*tokens.shape, declared.shape[1])
    last = batch.last
    for k in range(num_drafts):
        logits[:, k] = declared[last] * scale_S1
        read, position = drawn_from[last] * scale_S1, batch.first + k
        if kind is OneHot:
            last = argmax(read).token_ids
        elif fault.draft_role is None:
            drawn = draw_draft(read, batch.temperature, batch.seeds, position, rule=rule, draft_index=k)
            last = drawn.token_ids
        else:
            keys = Keys(batch.seeds, position)
            last = draw(apply_temperature(read, batch.temperature), batch.temperature, keys, fault.draft_role).token_ids
        tokens[:, k] = last
    return Drafts(tokens, Logits(logits) if kind is Logits else OneHot() if kind is OneHot else Coupled())
