"""No two names have related numbers: the quick form of `benchmarks/law.py`, over differences that mix least."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from bateleur.eagle import HashedVocab, Keys, Role, uniform
from eagle_doubles.markov import chi_square

ROWS = 200_000
LIMIT = 5.5
"""What the largest of 10,000 |z| exceeds in one run of 2,600."""
BASE = 0x1B56C4E9
ONE_BIT = [1 << bit for bit in range(32)]


def worst_z(first: Tensor, second: Tensor) -> float:
    """How far from its probability, given the first of two tokens, the second one is drawn; uniform numbers (N, D)."""
    first, second = (-(-u).log1p() for u in (first, second))  # exponential: the smallest E / probability wins
    worst = 0.0
    for p in (0.1, 0.9):
        least = first * (p / (1 - p))
        chance = -torch.expm1(-least)
        surplus = ((second < least).float() - chance).double().sum(0)
        worst = max(worst, float((surplus / (chance * (1 - chance)).double().sum(0).sqrt()).abs().max()))
    return worst


def of_hashed_ids(changes: list[int]) -> Tensor:
    """(N, 1 + D) numbers of a lane and of those whose hashed ids differ from its own so."""
    words = torch.tensor([BASE ^ change for change in (0, *changes)]).to(torch.uint32).view(torch.int32)
    rows = torch.arange(ROWS)
    return uniform(Keys(torch.full_like(rows, 5), rows), Role.TARGET, HashedVocab(words))


@pytest.mark.parametrize("start", range(0, 32, 4))
def test_lanes_whose_hashed_ids_differ_in_one_or_two_bits(start: int) -> None:
    for bit in ONE_BIT[start : start + 4]:
        u = of_hashed_ids([bit, *(bit | other for other in ONE_BIT if other > bit)])
        assert worst_z(u[:, :1], u[:, 1:]) < LIMIT, hex(bit)


@pytest.mark.parametrize(("size", "count"), [(50_257, 1), (128_256, 3), (151_936, 6), (262_144, 10)])
def test_tokens_of_real_vocabularies_whose_hashed_ids_differ_in_the_top_bit(size: int, count: int) -> None:
    low, ids = (HashedVocab.of(size, torch.device("cpu")).hashes & 0x7FFFFFFF).sort()
    at = (low[1:] == low[:-1]).nonzero().flatten()
    assert len(at) == count
    rows = torch.arange(ROWS)
    u = uniform(Keys(rows, rows), Role.TARGET, torch.cat((ids[at], ids[at + 1])))
    assert worst_z(u[:, :count], u[:, count:]) < LIMIT


def test_four_lanes_whose_hashed_ids_have_the_xor_0() -> None:
    metadata = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    for left, right in combinations(ONE_BIT[::4] + ONE_BIT[-3:], 2):
        drawn = (-(-of_hashed_ids([left, right, left | right])).log1p() / metadata).argmin(1, keepdim=True)
        assert chi_square(drawn, metadata, 4).z < LIMIT, (hex(left), hex(right))


@pytest.mark.parametrize("what", ["seed", "position", "draft_index", "role"])
def test_one_lane_in_rows_whose_names_differ_in_one_bit(what: str) -> None:
    rows = torch.arange(ROWS)
    name = {"seed": rows * 0x9E3779B97F4A7C1, "position": rows * 0x9E3779B1 & 0xFFFFFFFF, "draft_index": rows & 0xFFF}
    bits = {"seed": 64, "position": 32, "draft_index": 24, "role": 2}[what]
    first = uniform(Keys(**name), Role.TARGET)
    for bit in range(bits):
        change = (1 << bit) - ((1 << 64) if bit == 63 else 0)
        second = name if what == "role" else name | {what: name[what] ^ change}
        role = Role(change) if what == "role" else Role.TARGET
        assert worst_z(first, uniform(Keys(**second), role)) < LIMIT, bit
