"""Verification by ranks that have a part of the vocabulary each: what one emits that has all, under every rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bateleur.eagle import (
    Coupled,
    DraftDistribution,
    Drafts,
    HashedVocab,
    Logits,
    OneHot,
    Rows,
    Rule,
    SamplingMetadata,
    VocabShard,
    verify,
)
from bateleur.eagle.vocab_shard import LogNormalizer, exact_sum
from eagle_doubles.laws import NAN, metadata_of, normal
from together import Together, at_once, parts_of

CPU = torch.device("cpu")
LENS, K, V = (4, 1, 3, 4, 2, 4, 4, 0, 4, 4), 3, 203
TEMPERATURE = torch.tensor([1.0, 0.7, 0.0, 1.3, 1.0, 0.0, 0.7, 1.0, 1.0, 2.0])
STARTS = torch.tensor((0, *torch.tensor(LENS).cumsum(0).tolist()), dtype=torch.int32)
ROWS = Rows(STARTS, torch.arange(len(LENS)) * 77, torch.arange(len(LENS)) * 9, TEMPERATURE)
OWNER = torch.repeat_interleave(torch.arange(len(LENS)), torch.tensor(LENS))


def target(seed: int) -> Tensor:
    logits = normal(len(OWNER), V, 2.0, seed)
    logits[:, ::7] -= 40.0
    logits[6, 200] = NAN
    logits[18] = -torch.inf
    return logits


def drafts_for(kind: str, seed: int) -> Drafts:
    """Drafts near enough to the target's law that some stay; one beyond the vocabulary, and one that is missing."""
    width = 90 if kind == "reduced" else 230 if kind == "wider" else V
    logits = normal(len(LENS) * K, width, 1.0, seed + 1).view(len(LENS), K, width)
    if kind != "reduced":
        own = target(seed)[(STARTS[:-1].long().unsqueeze(1) + torch.arange(K)).clamp(max=len(OWNER) - 1)]
        logits[:, :, :V] += 0.8 * own.nan_to_num(0, 0, 0)
    logits[3, 1, 5] = NAN
    scaled = logits.nan_to_num() / TEMPERATURE.where(TEMPERATURE > 0, 0.1).view(-1, 1, 1)
    gumbel = -torch.empty_like(scaled).exponential_(generator=torch.Generator().manual_seed(seed)).log()
    tokens = (scaled + gumbel).argmax(-1)
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(3))[:width] if kind == "reduced" else None
    tokens = tokens if ids is None else ids[tokens]
    tokens[8, 1] = -1
    one_hot: DraftDistribution = OneHot()
    of = {"coupled": Coupled(), "one-hot": one_hot}.get(kind, Logits(logits, ids))
    return Drafts(tokens, of)


def of_shard(drafts: Drafts, shard: VocabShard) -> Drafts:
    distribution = drafts.distribution
    assert isinstance(distribution, Logits)
    return replace(drafts, distribution=Logits(distribution.logits[:, :, shard.first : shard.end], shard=shard))


CASES = [
    (Rule.COUPLED, "coupled"),
    *((rule, kind) for rule in (Rule.RATIO, Rule.BLOCK) for kind in ("one-hot", "whole", "parts", "reduced", "wider")),
]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(("rule", "kind"), CASES)
def test_ranks_emit_what_one_does(rule: Rule, kind: str, num_ranks: int) -> None:
    together = Together(num_ranks)
    parts = parts_of(V, together)
    vocab = [HashedVocab.of(shard, CPU) for shard in parts]
    accepted = 0
    temperatures = enumerate(TEMPERATURE[OWNER].tolist())
    some = [(t, 0.02 * (i % 2), 20 * (i % 3), 0.9 if i % 4 == 3 else 1) for i, t in temperatures]
    laws: tuple[SamplingMetadata | None, ...] = (None, metadata_of(*some))
    for seed in range(4):
        logits, drafts = target(seed), drafts_for(kind, seed)
        for metadata in laws:
            want = verify(logits, drafts, ROWS, rule=rule, metadata=metadata)
            accepted += int((want.num_emitted > 1).sum())

            def emitted(
                rank: int,
                metadata: SamplingMetadata | None = metadata,
                logits: Tensor = logits,
                drafts: Drafts = drafts,
            ) -> object:
                shard = parts[rank]
                own = of_shard(drafts, shard) if kind == "parts" else drafts
                return verify(
                    logits[:, shard.first : shard.end], own, ROWS, rule=rule, metadata=metadata, vocab=vocab[rank]
                )

            for got in at_once(together, emitted):
                for name, value in want._asdict().items():
                    assert torch.equal(getattr(got, name), value), name
    assert accepted > 4


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_normalisers_are_those_of_one_to_the_bit(num_ranks: int) -> None:
    logits, together = normal(50, 5003, 6.0), Together(num_ranks)
    parts = parts_of(5003, together)
    want = LogNormalizer.of(logits)
    for got in at_once(together, lambda r: LogNormalizer.of(logits[:, parts[r].first : parts[r].end], parts[r])):
        assert torch.equal(got.best, want.best)
        assert torch.equal(got.log_mass, want.log_mass)
    exact = logits.double().logsumexp(1, keepdim=True)
    assert float((want.best.double() + want.log_mass - exact).abs().max()) < 2e-6
    assert float((want.log_probs(logits).exp().double().sum(1) - 1).abs().max()) < 1e-6
    assert float(exact_sum(torch.full((1, 8), 0.999))) == pytest.approx(8 * 0.999, rel=1e-6)


@pytest.mark.parametrize(("width", "ids"), [(6, None), (5, torch.arange(5))])
def test_draft_logits_of_a_vocabulary_shard_have_its_size_and_no_ids(width: int, ids: torch.Tensor | None) -> None:
    shard = parts_of(10, Together(2))[0]
    rule = r"must be \(R, K, 5\) with ids=None, because shard is a vocabulary shard of 5 tokens"
    with pytest.raises(ValueError, match=rf"^logits=\(1, 1, {width}\): {rule}$"):
        Logits(torch.zeros(1, 1, width), ids, shard)
