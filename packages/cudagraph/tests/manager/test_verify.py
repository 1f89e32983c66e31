"""Verify: a replay is compared with the eager run, and what differs is named."""

import dataclasses
from collections import namedtuple

import pytest
import torch

from bateleur.cudagraph.errors import NotCaptured
from bateleur.cudagraph.states import Borrowed, Checks
from bateleur.cudagraph.verify import compare, judge


def ready(kit, body=None, toy=None, mode="FULL_AND_PIECEWISE", **options):
    toy = toy or kit.Toy()
    manager = kit.manager(mode, **options)
    manager.capture(toy, toy.body if body is None else body)
    return toy, manager


@pytest.mark.parametrize("checks", [Checks.OFF, Checks.PARANOID])
def test_every_key_large_before_small(kit, checks):
    toy, manager = ready(kit, checks=checks)
    report = manager.verify(also={"cache": toy.cache})
    assert report.ok
    assert [v.key.num_tokens for v in report.comparisons] == [8, 8, 4, 4, 2, 2, 1, 1]
    assert {v.max_difference for v in report.comparisons} == {0.0}
    assert report.table().splitlines()[1].split()[:4] == ["0", "ok", "FULL", "8"]
    assert [each.key for each in manager.verify(kit.full(2), fuzz=1).comparisons] == [kit.full(2)]


def test_a_frozen_value_is_found_with_its_key_and_seed(kit):
    """The body keeps a host scalar of the step: right in the warm-up, frozen in the graph."""
    toy = kit.Toy()

    def body(x):
        out = toy.body(x)
        return {**out, "hidden": (out["hidden"] + (x.state.reach if len(x.state.tokens) == 4 else 0),)}

    _, manager = ready(kit, body, toy, mode="FULL_DECODE_ONLY")
    report = manager.verify(fuzz=8)
    assert not report.ok
    (comparison,) = report.failing
    assert comparison.key == kit.full(4)
    frozen = [kit.WINDOW - toy.fuzz(kit.full(4), seed).state.reach for seed in range(8)]
    assert comparison.max_difference == pytest.approx(max(frozen), abs=1e-5)
    first = next(seed for seed, apart in enumerate(frozen) if apart)
    assert frozen[first + 1 :] != [0] * (7 - first), "a later one differs, too"
    assert comparison.failure == f"seed {first}: output['hidden'][0] differs by {frozen[first]}"
    assert "FAILED  FULL 4 tokens, 4 requests, 1 each: seed" in report.table()


def test_i1_scratch_in_the_memory_of_another_graph_is_found(cpu):
    """Allocated while the first key was captured, read by all: the pool may hand it out again (flashinfer #4238)."""
    toy = cpu.Toy()
    calls, scratch = [], []

    def body(x):
        calls.append(x.key)
        if len(calls) == 2:
            scratch.append(torch.ones(3))
        return toy.body(x)["hidden"] * (scratch[0] if scratch else 1.0)

    _, manager = ready(cpu, body, toy, mode="FULL_DECODE_ONLY")
    manager.replay(cpu.full(8), toy.fuzz(cpu.full(8), 0))  # writes the scratch: from here on all seems well
    assert [v.key.num_tokens for v in manager.verify().failing] == [4], "then both runs read the poison"


def test_writes_in_place_are_compared_when_named(kit):
    toy = kit.Toy()

    def body(x):
        toy.cache[x.state.reach] = 7.0
        return x.state.tokens + 0

    _, manager = ready(kit, body, toy, mode="FULL_DECODE_ONLY")
    assert manager.verify().ok
    report = manager.verify(also={"cache": toy.cache})
    assert len(report.failing) == 4
    assert "cache differs by" in report.failing[0].failure
    report = manager.verify(also=lambda state: {"the first row": toy.cache[state.reach]})
    assert "the first row differs by" in report.failing[0].failure


def test_eager_and_replay_start_from_the_same_cache(kit):
    """The body adds to the cache: two runs on one staging would differ."""
    toy = kit.Toy()

    def body(x):
        toy.cache[x.state.slots] += 1.0
        return toy.cache[x.state.slots] * 2

    _, manager = ready(kit, body, toy, mode="FULL_DECODE_ONLY")
    assert manager.verify(also={"cache": toy.cache}).ok


def test_bad_input(cpu):
    toy, manager = ready(cpu, mode="FULL_DECODE_ONLY")
    with pytest.raises(ValueError, match="fuzz=0 must be at least 1"):
        manager.verify(fuzz=0)
    with pytest.raises(NotCaptured, match="FULL 3"):
        manager.verify(cpu.full(3))

    class Dull:
        stage, addresses, generation = toy.stage, toy.addresses, property(lambda self: toy.generation)

    _, dull = ready(cpu, toy.body, Dull(), mode="FULL_DECODE_ONLY")
    with pytest.raises(TypeError, match=r"producer Dull has no fuzz\(key, seed\)"):
        dull.verify()
    borrowed = cpu.manager()
    borrowed.capture(Borrowed(dull.states), toy.body)
    with pytest.raises(TypeError, match="producer Dull has no fuzz"):
        borrowed.verify()
    lent = cpu.manager(checks=Checks.PARANOID)
    lent.capture(Borrowed(manager.states), toy.body)
    assert lent.verify(also={"cache": toy.cache}).ok


def test_outputs_of_any_shape(cpu):
    Pair = namedtuple("Pair", "left right")

    @dataclasses.dataclass
    class Out:
        pair: Pair
        more: dict

    toy = cpu.Toy()

    def body(x):
        tokens = x.state.tokens
        shift = x.state.reach if flaw == len(tokens) else 0
        return Out(
            Pair(tokens + 1, [tokens * 2, None]), {"flag": tokens > 3, "n": 5, "z": tokens * 1j + shift}
        )

    for flaw, failing in ((0, 0), (2, 1)):
        _, manager = ready(cpu, body, toy, mode="FULL_DECODE_ONLY")
        report = manager.verify()
        assert len(report.failing) == failing
        assert "output.more['z']" in report.table() or not flaw


def test_outputs_that_differ_in_their_tensors(kit):
    one, two = {"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)}
    for eager, replay in ((one, two), (two, one)):
        comparison = judge(
            kit.full(1), lambda seed, run=eager: run, lambda seed, run=replay: run, 2, 0.0, 0.0
        )
        assert comparison.failure == "seed 0: only one of the outputs has b"
        assert comparison.max_difference == inf


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_order_of_a_sum_passes_and_another_value_does_not(cpu, dtype):
    """Two sums of the same terms in bfloat16 differ by a hundred times what they may in float32."""
    toy = cpu.Toy()
    terms = torch.rand(8, 5, generator=torch.Generator().manual_seed(0)).to(dtype)

    def body(x):
        rows = terms[: len(x.state.tokens)]
        if eager:
            rows = rows.flip(1)
        total = rows[:, 0].clone()
        for column in rows.T[1:]:
            total = total + column
        small = total - rows.sum(1)  # nothing but rounding, beside a large element
        return torch.stack([total, small], 1) * (1 + wrong * eager)

    eager, wrong = False, 0.0
    _, manager = ready(cpu, body, toy, mode="FULL_DECODE_ONLY")
    eager = True
    assert manager.verify().ok
    wrong = 0.05
    assert not manager.verify().ok


nan, inf = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("expected", "actual", "difference", "within"),
    [
        ([1.0, nan, inf, -inf], [1.0, nan, inf, -inf], 0.0, True),
        ([1.0, nan], [1.0, 2.0], inf, False),
        ([1.0, 2.0], [1.0, nan], inf, False),
        ([inf], [-inf], inf, False),
        ([inf, 1.0], [inf, 2.0], 1.0, False),
        ([inf], [3.0], inf, False),
        ([100.0], [100.5], 0.5, True),
        ([100.0], [102.0], 2.0, False),
        ([0.0], [0.05], 0.05, True),
        ([7, 2**60], [7, 2**60 + 2**20], 2.0**20, False),
        ([True, False], [True, True], 1.0, False),
        ([1, 2], [1, 2, 3], inf, False),
        ([1, 2], [1.0, 2.0], inf, False),
        ([], [], 0.0, True),
    ],
)
def test_compare(expected, actual, difference, within):
    found = compare(torch.tensor(expected), torch.tensor(actual), rtol=0.01, atol=0.1)
    assert found == (pytest.approx(difference, abs=1e-6), within)
