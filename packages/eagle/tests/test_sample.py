"""`sample` in C gives the same tokens, bit for bit, as a draw from the whole truncated and tempered law."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bateleur.eagle import (
    Coupled,
    Drafts,
    HashedVocab,
    Keys,
    Role,
    Rows,
    SamplingMetadata,
    argmax,
    draw,
    native,
    sample,
    verify,
)
from bateleur.eagle.noise import names
from bateleur.metadata.native import unavailable_reason
from eagle_doubles.laws import HOSTILE, INF, NAN, SAMPLINGS, Row, keys_of, likely, metadata_of, normal

CPU = torch.device("cpu")


def same(logits: torch.Tensor, metadata: SamplingMetadata, keys: Keys, role: Role = Role.TARGET) -> None:
    before = logits.clone()
    want = draw(metadata.apply(logits.float()), metadata.temperature, keys, role)
    got = sample(logits, metadata, keys, role)
    assert torch.equal(got.token_ids, want.token_ids)
    assert torch.equal(got.bad, want.bad)
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0)), "not written to"


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_draw_is_that_of_the_whole_law(kind: str) -> None:
    for seed, logits in ((1, normal(len(SAMPLINGS), 8200, 2.5)), (2, likely(len(SAMPLINGS), 8200))):
        same(HOSTILE[kind](logits), metadata_of(*SAMPLINGS), keys_of(len(SAMPLINGS), seed))


@pytest.mark.parametrize("size", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("role", Role)
def test_vocabularies_of_any_size_and_dtype(size: int, dtype: torch.dtype, role: Role) -> None:
    keys = Keys(*(keys_of(len(SAMPLINGS), size).seed, keys_of(len(SAMPLINGS)).position), int(role))
    same(normal(len(SAMPLINGS), size, 3.0).to(dtype), metadata_of(*SAMPLINGS), keys, role)


@pytest.mark.parametrize("scale", [0.0, 3.0])
def test_a_wide_vocabulary(scale: float) -> None:
    some = [(0.8, 0, 0, 1), (30, 0, 0, 1), (0.8, 0, 50, 1), (1, 0, 0, 0.9), (1, 0.02, 0, 0.95)]
    logits = normal(len(some), 128_256, scale) if scale else likely(len(some), 128_256)
    same(logits, metadata_of(*some), keys_of(len(some), 7))


def test_rows_apart_in_memory() -> None:
    logits = normal(2 * len(SAMPLINGS), 9000, 2.0)[::2, 5:8400]
    same(logits, metadata_of(*SAMPLINGS), keys_of(len(SAMPLINGS)))
    assert argmax(logits).token_ids.tolist() == logits.max(1).indices.tolist()


def test_bad_rows_are_told_and_others_are_not() -> None:
    logits = normal(len(SAMPLINGS) * 3, 8200)
    logits[1::3, 4321] = NAN
    logits[2::3] = -INF
    metadata = metadata_of(*(each for each in SAMPLINGS for _ in range(3)))
    same(logits, metadata, keys_of(len(metadata)))
    assert sample(logits, metadata, keys_of(len(metadata))).bad.tolist() == [False, True, True] * len(SAMPLINGS)


@pytest.mark.skipif(unavailable_reason() is not None, reason=f"no kernels in C: {unavailable_reason()}")
def test_rows_are_decided_by_few_tokens() -> None:
    """Else all of this would hold with `SamplingMetadata.apply` alone."""
    laws = [each for each in SAMPLINGS if each[2] <= 50 and not 0 < 1 - each[3] < 1e-3]
    metadata, logits = metadata_of(*laws), likely(len(laws), 32_768)
    keys, words = keys_of(len(laws)), HashedVocab.of(32_768, CPU).hashes
    tokens, _ = native.draw_rows(logits, metadata.values, words, keys.seed, names(keys, Role.TARGET))
    assert (tokens >= 0).all()


def test_ids_of_a_reduced_vocabulary_keep_their_noise() -> None:
    ids = torch.arange(0, 40_000, 4)
    metadata, keys = metadata_of(*[(1.0, 0, 0, 1.0), (1.0, 0, 20, 1.0)] * 4), keys_of(8)
    logits, vocab = likely(8, len(ids)), HashedVocab.of(ids, CPU)
    got = sample(logits, metadata, keys, vocab=vocab)
    assert torch.equal(got.token_ids, draw(metadata.apply(logits), metadata.temperature, keys, vocab=vocab).token_ids)


def test_first_maxima_of_wide_rows() -> None:
    for size in (32_768, 40_001):
        logits = normal(6, size).round()
        logits[1, -1] = 40.0
        logits[2, [size - 130, size - 3]] = 40.0
        logits[3] = 0.0
        logits[4, 77] = NAN
        logits[5] = -INF
        drawn = argmax(logits)
        assert drawn.token_ids[:4].tolist() == [int((row == row.max()).nonzero()[0]) for row in logits[:4]]
        assert drawn.bad.tolist() == [False] * 4 + [True] * 2
        assert drawn.token_ids[4:].tolist() == [0, 0]


def test_drafts_are_tested_against_the_same_draws() -> None:
    """At every place of a draft, in rows of different laws."""
    num_reqs, num_drafts, size = 7, 2, 8200
    starts = torch.arange(0, num_reqs * 3 + 1, 3, dtype=torch.int32)
    metadata = metadata_of(*[SAMPLINGS[i % len(SAMPLINGS)] for i in range(num_reqs) for _ in range(3)])
    rows = Rows(starts, torch.arange(num_reqs), torch.arange(num_reqs) * 9, metadata.temperature[::3].contiguous())
    logits = likely(num_reqs * 3, size)
    whole = metadata.apply(logits)
    tokens = torch.full((num_reqs, num_drafts), -1)
    for place in range(num_drafts):
        found = verify(whole, Drafts(tokens, Coupled()), rows).tokens
        tokens[:, place] = torch.where(torch.arange(num_reqs) % 3 == place, 1, found[:, place])
    want = verify(whole, Drafts(tokens, Coupled()), rows)
    got = verify(logits, Drafts(tokens, Coupled()), rows, metadata=metadata)
    assert want.num_emitted.unique().tolist() == [1, 2, 3]
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("metadata", [(1, 0, 0, 1), (1, 0, 0, 0.6), (1, 0, 8, 1)])
def test_frequencies_over_a_wide_vocabulary(metadata: Row) -> None:
    """Half of the mass is on eight tokens, the rest on a quarter of a million, told apart by their id modulo 8."""
    size, num = 250_000, 600
    logits = torch.zeros(size)
    heavy = torch.arange(8) * 31_000 + 5
    logits[heavy] = math.log(size / 8)
    drawn = torch.cat([
        sample(logits.expand(50, -1), metadata_of(*[metadata] * 50), keys_of(50, seed)).token_ids for seed in
        range(num // 50)
    ])  # fmt: skip
    place = torch.where(torch.isin(drawn, heavy), drawn // 31_000, 8 + drawn % 8)
    weight = torch.ones(16) if metadata[2:] == (0, 1) else torch.ones(16).index_fill_(0, torch.arange(8, 16), 0.0)
    if metadata[3] < 1:  # by the lowest ids of the many that are equal: a tenth of the mass, all below 50,000
        weight[8:] = 0.2
        assert drawn[~torch.isin(drawn, heavy)].max() < 51_000
    counts = torch.bincount(place, minlength=16).double()
    expected = (weight / weight.sum() * num).double()
    used = expected > 0
    assert counts[~used].sum() == 0
    chi = ((counts - expected)[used] ** 2 / expected[used]).sum()
    freedom = int(used.sum()) - 1
    assert abs(float(chi) - freedom) / math.sqrt(2 * freedom) < 5


def test_refusals() -> None:
    metadata = metadata_of((1, 0, 0, 1), (1, 0, 0, 1))
    with pytest.raises(ValueError, match=r"logits=\(3, 5\), metadata of 2 rows, keys=3: must have"):
        sample(torch.zeros(3, 5), metadata, keys_of(3))
    rows = Rows(torch.arange(4, dtype=torch.int32), torch.arange(3), torch.arange(3), torch.ones(3))
    with pytest.raises(ValueError, match="metadata has 2 rows: must have 3, as many as logits"):
        verify(torch.zeros(3, 5), Drafts(torch.zeros(3, 0, dtype=torch.int64), Coupled()), rows, metadata=metadata)
    with pytest.raises(ValueError, match=r"host=float64 \(2, 4\): must be float32 \(N, 4\)"):
        SamplingMetadata(metadata.host.astype(np.float64), metadata.values)
    with pytest.raises(ValueError, match=r"values=torch.float32 \(1, 4\): must be float32 \(2, 4\), like host"):
        SamplingMetadata(metadata.host, metadata.values[:1])
