"""The draw: its law, its ties, and rows that have no token."""

import math

import pytest
import torch

from bateleur.eagle import Keys, Role, argmax, draw

N = 20_000
LAW = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])


def tokens(positions: torch.Tensor, seeds: torch.Tensor, role: Role = Role.TARGET) -> torch.Tensor:
    logits = LAW.log().expand(len(seeds), -1).contiguous()
    drawn = draw(logits, torch.ones(len(seeds)), Keys(seeds, positions), role)
    assert not drawn.bad.any()
    return drawn.token_ids


def joint_z(first: torch.Tensor, second: torch.Tensor) -> float:
    """Chi-square of two draws against the product law, in standard deviations."""
    counts = torch.bincount(first * 5 + second, minlength=25).double()
    expected = torch.outer(LAW, LAW).flatten().double() * len(first)
    return float((((counts - expected) ** 2 / expected).sum() - 24) / math.sqrt(48))


def test_joint_law_of_neighbouring_draws() -> None:
    seeds, zero = torch.arange(N), torch.zeros(N, dtype=torch.int64)
    first = tokens(zero, seeds)
    assert abs(joint_z(first, tokens(zero + 1, seeds))) < 5
    assert abs(joint_z(first, tokens(zero, seeds + N))) < 5
    assert abs(joint_z(first, tokens(zero, seeds, Role.DRAFT))) < 5


def test_the_law_test_rejects_reused_noise_and_a_wrong_law() -> None:
    seeds, zero = torch.arange(N), torch.zeros(N, dtype=torch.int64)
    first = tokens(zero, seeds)
    assert joint_z(first, tokens(zero, seeds)) > 100
    wrong = draw(torch.zeros(N, 5), torch.ones(N), Keys(seeds, zero + 1)).token_ids
    assert joint_z(first, wrong) > 100


def test_temperature_zero_takes_the_first_maximum() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    keys = Keys(torch.tensor([1, 2]), torch.tensor([0, 0]))
    assert draw(logits, torch.zeros(2), keys).token_ids.tolist() == [1, 0]
    assert argmax(logits).token_ids.tolist() == [1, 0]
    tied = torch.zeros(1, 50_000)
    tied[0, 1234:] = 7.0
    assert argmax(tied).token_ids.tolist() == [1234]


def test_greedy_and_drawn_rows_mix() -> None:
    logits = torch.randn(6, 33, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    keys = Keys(torch.arange(6), torch.arange(6) + 100)
    temperature = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    mixed = draw(logits, temperature, keys).token_ids
    cold = temperature == 0
    assert torch.equal(mixed[cold], logits.argmax(-1)[cold])
    assert torch.equal(mixed[~cold], draw(logits, torch.ones(6), keys).token_ids[~cold])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_token_are_flagged(temperature: float) -> None:
    logits = torch.zeros(5, 7)
    logits[1, 3] = torch.nan
    logits[2] = torch.nan
    logits[3] = -torch.inf
    logits[4, :6] = -torch.inf
    drawn = draw(logits, torch.full((5,), temperature), Keys(torch.arange(5), torch.arange(5)))
    assert drawn.bad.tolist() == [False, True, True, True, False]
    assert drawn.token_ids[1:].tolist() == [0, 0, 0, 6]


def test_bad_shapes() -> None:
    keys = Keys(torch.arange(3), torch.arange(3))
    with pytest.raises(ValueError, match="must have the same number of rows"):
        draw(torch.zeros(2, 5), torch.ones(2), keys)
    with pytest.raises(ValueError, match="must have the same"):
        draw(torch.zeros(3, 5), torch.ones(2), keys)
