"""Draws of several ranks that have a part of the vocabulary each: the tokens of one that has all of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bateleur.eagle import HashedVocab, Keys, Role, SampledTokens, SamplingMetadata, argmax, draw, sample
from bateleur.eagle.sampling_metadata import thresholds_by_sort
from bateleur.eagle.shard_truncation import shard_thresholds
from bateleur.eagle.vocab_shard import VocabShard, float_of, order_of
from eagle_doubles.laws import HOSTILE, INF, NAN, SAMPLINGS, keys_of, left_by, likely, metadata_of, normal
from together import OneOf, Together, at_once, parts_of

CPU = torch.device("cpu")
PLAIN = [(0.0, 0, 0, 1), (1, 0, 0, 1), (0.7, 0, 0, 1), (30, 0, 0, 1), (1e-3, 0, 0, 1)] * 3


def of(logits: Tensor, shard: VocabShard) -> Tensor:
    return logits[:, shard.first : shard.end]


def drawn_together(
    logits: Tensor, metadata: SamplingMetadata, keys: Keys, num_ranks: int, role: Role = Role.TARGET
) -> tuple[SampledTokens, Together]:
    """What every rank draws, which is the same, and what it told."""
    together = Together(num_ranks)
    parts = parts_of(logits.shape[1], together)
    vocab = [HashedVocab.of(shard, CPU) for shard in parts]
    every = at_once(together, lambda rank: sample(of(logits, parts[rank]), metadata, keys, role, vocab=vocab[rank]))
    for drawn in every[1:]:
        assert torch.equal(drawn.token_ids, every[0].token_ids)
        assert torch.equal(drawn.bad, every[0].bad)
    return every[0], together


def same(logits: Tensor, metadata: SamplingMetadata, keys: Keys, num_ranks: int, role: Role = Role.TARGET) -> Together:
    want = draw(metadata.apply(logits.float()), metadata.temperature, keys, role)
    got, together = drawn_together(logits, metadata, keys, num_ranks, role)
    assert torch.equal(got.token_ids, want.token_ids)
    assert torch.equal(got.bad, want.bad)
    return together


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", HOSTILE)
def test_ranks_draw_what_one_does(kind: str, num_ranks: int) -> None:
    keys = keys_of(len(PLAIN), num_ranks)
    for logits in (normal(len(PLAIN), 1003, 2.5), likely(len(PLAIN), 1003)):
        together = same(HOSTILE[kind](logits), metadata_of(*PLAIN), keys, num_ranks)
        assert together.told == [("max", 8 * len(PLAIN))]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_what_laws_leave_does_not_hang_on_what_the_host_knows_of_them(num_ranks: int) -> None:
    """As in a graph, which finds them on the device."""
    logits, keys, metadata = (normal(len(SAMPLINGS), 517, 2.0), keys_of(len(SAMPLINGS), 3), metadata_of(*SAMPLINGS))
    want = draw(metadata.apply(logits), metadata.temperature, keys)
    got, _ = drawn_together(logits, SamplingMetadata.unknown(metadata.values), keys, num_ranks)
    assert torch.equal(got.token_ids, want.token_ids)


def test_ranks_that_know_that_nothing_is_cut_tell_no_more_than_their_best() -> None:
    """Of laws on the device; who does not know it goes through both searches for nothing."""
    logits, keys, metadata = normal(len(PLAIN), 1003), keys_of(len(PLAIN), 3), metadata_of(*PLAIN)
    for truncates, told in ((False, 1), (True, 1 + 1 + 4 + 4 + 1)):
        drawn, together = drawn_together(
            logits, SamplingMetadata.unknown(metadata.values, truncates=truncates), keys, 2
        )
        assert torch.equal(drawn.token_ids, draw(metadata.apply(logits), metadata.temperature, keys).token_ids)
        assert len(together.told) == told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("role", Role)
def test_logits_of_any_dtype_and_draws_in_any_role(dtype: torch.dtype, role: Role) -> None:
    same(normal(len(SAMPLINGS), 517, 3.0).to(dtype), metadata_of(*SAMPLINGS), keys_of(len(SAMPLINGS)), 3, role)


def test_rows_that_one_rank_finds_bad_are_bad_on_all() -> None:
    """NaN in any part; no token in some of them, or in all."""
    logits = normal(8, 1003)
    logits[1, 0] = logits[2, 1002] = logits[3, 500] = NAN
    logits[3, 501] = INF
    logits[4] = -INF
    logits[5, :700] = -INF
    logits[6, 300:] = -INF
    logits[7] = -NAN
    for metadata in (metadata_of(*[each] * 8) for each in ((1.0, 0, 0, 1), (0.0, 0, 0, 1), (1.0, 0.1, 5, 0.5))):
        same(logits, metadata, keys_of(8), 3)
        drawn, _ = drawn_together(logits, metadata, keys_of(8), 3)
        assert drawn.bad.tolist() == [False, True, True, True, True, False, False, True]
        assert drawn.token_ids[drawn.bad].tolist() == [0] * 5


def test_of_equal_ones_in_two_parts_the_lowest_id_wins() -> None:
    logits = torch.zeros(4, 10)
    logits[0, [4, 5]] = 1.0  # the last of one part and the first of the next
    logits[1, [2, 9]] = 1.0
    logits[2] = -0.0
    logits[3, 9] = 1.0
    logits[2, 3] = 0.0
    together = Together(2)
    parts = parts_of(10, together)
    every = at_once(together, lambda rank: argmax(of(logits, parts[rank]), parts[rank]))
    assert [each.token_ids.tolist() for each in every] == [[4, 2, 0, 9]] * 2
    assert together.told == [("max", 32)]


def test_numbers_that_go_round_keep_the_order_of_values() -> None:
    values = torch.tensor([-INF, -3.4e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 3.4e38, INF, NAN, -NAN])
    order = order_of(values)
    assert (order.diff() >= 0).all()
    assert (order.diff() == 0).nonzero().flatten().tolist() == [4, 10]
    assert torch.equal(float_of(order)[:10], values[:10])
    assert float_of(order)[10:].isnan().all()


@pytest.mark.parametrize("starts", [(0, 5), (1, 5, 9), (0, 5, 5), (0, 6, 5)])
def test_parts_are_those_of_the_ranks(starts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^starts=\(.*\): must ascend from 0 to the size of the voc"):
        VocabShard(starts, OneOf(Together(2), 0))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", HOSTILE)
def test_what_laws_leave_is_what_they_leave_on_one(kind: str, num_ranks: int) -> None:
    metadata, logits = metadata_of(*SAMPLINGS), HOSTILE[kind](normal(len(SAMPLINGS), 1003, 2.0))
    together = Together(num_ranks)
    parts = parts_of(1003, together)

    def left(rank: int) -> Tensor:
        own = of(logits, parts[rank])
        return left_by(own, *shard_thresholds(own, metadata, parts[rank]), metadata.temperature)

    want = left_by(logits, *thresholds_by_sort(logits, metadata.values), metadata.temperature)
    assert torch.equal(torch.cat(at_once(together, left), 1), want)
    same(logits, metadata, keys_of(len(metadata), 5), num_ranks)
