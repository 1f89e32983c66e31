"""The hash law: exact bits against plain integers, and the statistics that a draw relies on."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bateleur.eagle import HashedVocab, Keys, Role, bits, gumbel, noise, uniform

M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def fmix64(x: int) -> int:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x ^= x >> 33
        x = x * factor & M64
    return x ^ x >> 33


def fmix32(x: int) -> int:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x ^= x >> shift
        x = x * factor & M32
    return x ^ x >> 16


def plain_bits(seed: int, position: int, draft_index: int, role: int, lane: int) -> int:
    """The law of the module's docstring in unbounded integers."""
    row = fmix64(fmix64((seed + 0x9E3779B97F4A7C15) & M64) ^ (position + (draft_index << 32) + (role << 56)))
    x = ((fmix32((lane + 0x9E3779B9) & M32) ^ (row & M32)) * 0x7FEB352D & M32) ^ row >> 32
    x = (x ^ x >> 15) * 0x846CA68B & M32
    return (x ^ x >> 16) * 0x2C1B3C6D & M32


def keys(seeds: list[int], positions: list[int], draft_index: int = 0) -> Keys:
    return Keys(torch.tensor(seeds), torch.tensor(positions), draft_index)


def independence_z(x: torch.Tensor, y: torch.Tensor, cells: int = 16) -> float:
    """How far the joint law of two samples in [0, 1) is from uniform, in standard deviations of chi-square."""
    cell = (x * cells).long() * cells + (y * cells).long()
    counts = torch.bincount(cell.flatten(), minlength=cells * cells).double()
    expected = counts.sum() / cells**2
    freedom = cells**2 - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ((0, 0, 0, 0, 0), 0x8AE79EC2),
        ((1, 7, 0, 0, 3), 0xB25861D0),
        ((-1, 4095, 2, 1, 150000), 0x4B531C1D),
        ((2**63 - 1, 2**32 - 1, 2**24 - 1, 2, 2**31 - 1), 0xEAE348FB),
    ],
)
def test_golden_bits(name: tuple[int, int, int, int, int], expected: int) -> None:
    seed, position, draft_index, role, lane = name
    assert plain_bits(*name) == expected
    got = bits(keys([seed], [position], draft_index), Role(role), torch.tensor([lane]))
    assert int(got) & M32 == expected


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**24 - 1)),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from(Role),
)
def test_bits_follow_the_law(rows: list[tuple[int, int, int]], role: Role) -> None:
    seed, position, draft_index = (torch.tensor(column) for column in zip(*rows, strict=True))
    got = bits(Keys(seed, position, draft_index), role, 5)
    for r, row in enumerate(rows):
        assert [int(b) & M32 for b in got[r]] == [plain_bits(*row, int(role), lane) for lane in range(5)]


@pytest.mark.parametrize("num_lanes", [1, 3, 37, 251, 40_001])
def test_rows_do_not_depend_on_the_batch(num_lanes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    seed = torch.randint(-(2**62), 2**62, (7,), generator=generator)
    position = torch.randint(0, 2**31, (7,), generator=generator)
    batch = gumbel(Keys(seed, position), Role.TARGET, num_lanes)
    order = torch.tensor([4, 0, 6, 5, 2, 1, 3])
    assert torch.equal(gumbel(Keys(seed[order], position[order]), Role.TARGET, num_lanes), batch[order])
    for r in range(7):
        alone = gumbel(Keys(seed[r : r + 1], position[r : r + 1]), Role.TARGET, num_lanes)
        assert torch.equal(alone[0], batch[r])


def test_a_reduced_vocabulary_shares_the_noise_of_its_ids() -> None:
    k = keys([3, -9], [10, 11])
    ids = torch.tensor([90, 4, 4, 17], dtype=torch.int32)
    assert torch.equal(gumbel(k, Role.DRAFT, ids), gumbel(k, Role.DRAFT, 100)[:, ids.long()])
    assert torch.equal(gumbel(k, Role.DRAFT, HashedVocab.of(100, torch.device("cpu"))), gumbel(k, Role.DRAFT, 100))


def test_inputs_are_left_alone() -> None:
    k = Keys(torch.tensor([5]), torch.tensor([6]), torch.tensor([7]))
    ids, vocab = torch.arange(9, dtype=torch.int32), HashedVocab.of(9, torch.device("cpu"))
    words = vocab.hashes.clone()
    gumbel(k, Role.ACCEPT, ids)
    gumbel(k, Role.ACCEPT, vocab)
    assert (k.seed.item(), k.position.item(), k.draft_index) == (5, 6, torch.tensor([7]))
    assert torch.equal(ids, torch.arange(9, dtype=torch.int32))
    assert torch.equal(vocab.hashes, words)


def test_uniform_is_uniform() -> None:
    u = uniform(keys(list(range(64)), [9] * 64), Role.TARGET, 4096).flatten().double().sort().values
    n = u.numel()
    grid = torch.arange(n, dtype=torch.float64)
    statistic = float(torch.maximum((grid + 1) / n - u, u - grid / n).max()) * math.sqrt(n)
    assert statistic < 1.95  # Kolmogorov-Smirnov, p = 0.001


@pytest.mark.parametrize("what", ["seed", "position", "draft_index", "role", "lane"])
def test_neighbouring_names_are_independent(what: str) -> None:
    base = torch.arange(400)
    fixed, first = torch.zeros_like(base), uniform(Keys(base, base * 0), Role.TARGET, 512)
    other = {
        "seed": lambda: uniform(Keys(base + 1, fixed), Role.TARGET, 512),
        "position": lambda: uniform(Keys(base, fixed + 1), Role.TARGET, 512),
        "draft_index": lambda: uniform(Keys(base, fixed, 1), Role.TARGET, 512),
        "role": lambda: uniform(Keys(base, fixed), Role.DRAFT, 512),
        "lane": lambda: uniform(Keys(base, fixed), Role.TARGET, torch.arange(1, 513)),
    }[what]()
    assert not torch.equal(first, other)
    assert abs(independence_z(first, other)) < 5


def test_the_independence_test_can_fail() -> None:
    u = uniform(keys(list(range(400)), [0] * 400), Role.TARGET, 512)
    assert independence_z(u, (u + 0.3 * uniform(keys([1], [1]), Role.DRAFT, 512)) % 1) > 50


def test_rows_are_uncorrelated_pair_by_pair() -> None:
    u = uniform(keys([0] * 500 + list(range(1, 501)), list(range(500)) + [0] * 500), Role.TARGET, 2048)
    z = (u.double() - 0.5) * math.sqrt(12)
    pairs = (z @ z.T / math.sqrt(2048)).triu(1)
    values = pairs[torch.triu(torch.ones_like(pairs), 1) > 0]
    assert abs(float(values.std()) - 1) < 0.01
    assert float(values.abs().max()) < 6.5


def test_one_bit_of_the_name_turns_half_of_the_bits() -> None:
    base = torch.arange(200)
    zero = torch.zeros_like(base)
    reference = bits(Keys(base, zero), Role.TARGET, 64)
    for bit in (0, 1, 13, 31, 47, 63):
        flipped = bits(Keys(base ^ ((1 << bit) - (1 << 64 if bit == 63 else 0)), zero), Role.TARGET, 64)
        changed = (reference ^ flipped).long() & M32
        for out in range(31):
            assert abs(float((changed >> out & 1).float().mean()) - 0.5) < 0.03


def test_names_are_injective_on_a_grid() -> None:
    seed, position, draft_index = torch.cartesian_prod(
        torch.tensor([0, 1, 2, -1, 2**40, -(2**63)]), torch.tensor([0, 1, 255, 2**32 - 1]), torch.arange(3)
    ).T.contiguous()
    rows = []
    for role in Role:
        low, high = noise.row_words(Keys(seed, position, draft_index), role)
        rows.append(high.long() << 32 | (low.long() & M32))
    words = torch.cat(rows).flatten()
    assert words.unique().numel() == words.numel() == 6 * 4 * 3 * 3
    vocab = bits(keys([1], [1]), Role.TARGET, 200_000)
    assert vocab.unique().numel() == 200_000


def test_gumbel_is_finite_for_every_bit_pattern_at_the_ends() -> None:
    ends = torch.tensor([0, 1, 2, -1, -2, 2**31 - 1, 2**31 - 64, -(2**31)], dtype=torch.int32)
    u = noise.unit(ends.clone())
    assert float(u.min()) == 2.0**-32
    assert float(u.max()) == 1 - 2.0**-24
    g = noise.gumbel_(u)
    assert bool(g.isfinite().all())
    assert -2.82 < float(g.min()) < float(g.max()) < 22.2
    # The usual form reaches 1 in float32, and its Gumbel variate is infinite.
    assert float((torch.tensor(2**24 - 1) + 0.5) * 2.0**-24) == 1.0


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Keys(torch.zeros(2), torch.zeros(2, dtype=torch.int64)), "seed must be int64"),
        (lambda: Keys(torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)), "position"),
        (lambda: keys([1], [1], draft_index=-1), r"draft_index=-1 must be in \[0, 2\^24\)"),
        (lambda: keys([1], [1], draft_index=2**24), "draft_index=16777216"),
        (lambda: gumbel(keys([1], [1]), Role.TARGET, 0), "vocab=0 must be at least 1"),
    ],
)
def test_bad_input(make: object, match: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=match):
        make()
