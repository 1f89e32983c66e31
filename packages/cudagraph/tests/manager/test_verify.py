"""`verify`: compares replays with eager runs, and names the tensor that differs."""

import dataclasses
from collections import namedtuple

import pytest
import torch

from bateleur.cudagraph.captured_state import CapturedStateProducer
from bateleur.cudagraph.errors import NotCaptured
from bateleur.cudagraph.replay_checks import ReplayChecks
from bateleur.cudagraph.verify import compare_runs, compare_tensors


def ready(kit, body=None, toy=None, mode="FULL_AND_PIECEWISE", **options):
    toy = toy or kit.Toy()
    manager = kit.manager(mode, **options)
    manager.capture(toy, toy.body if body is None else body)
    return toy, manager


@pytest.mark.parametrize("checks", [ReplayChecks.OFF, ReplayChecks.PARANOID])
def test_all_keys_are_verified_large_keys_first(kit, checks):
    toy, manager = ready(kit, checks=checks)
    report = manager.verify(extra_tensors={"cache": toy.cache})
    assert report.ok
    assert [v.key.num_tokens for v in report.comparisons] == [8, 8, 4, 4, 2, 2, 1, 1]
    assert {v.max_difference for v in report.comparisons} == {0.0}
    assert report.table().splitlines()[1].split()[:4] == ["0", "ok", "FULL", "8"]
    assert [each.key for each in manager.verify(kit.full(2), fuzz=1).comparisons] == [kit.full(2)]


def test_a_host_scalar_fixed_in_the_graph_is_found_with_key_and_seed(kit):
    """The body uses a host scalar of the step. The graph has the captured value."""
    toy = kit.Toy()

    def body(x):
        out = toy.body(x)
        return {**out, "hidden": (out["hidden"] + (x.state.reach if len(x.state.tokens) == 4 else 0),)}

    _, manager = ready(kit, body, toy, mode="FULL_DECODE_ONLY")
    report = manager.verify(fuzz=8)
    assert not report.ok
    (comparison,) = report.failing
    assert comparison.key == kit.full(4)
    differences = [kit.WINDOW - toy.fuzz(kit.full(4), seed).state.reach for seed in range(8)]
    assert comparison.max_difference == pytest.approx(max(differences), abs=1e-5)
    first = next(seed for seed, difference in enumerate(differences) if difference)
    assert differences[first + 1 :] != [0] * (7 - first), "a later seed differs too"
    assert comparison.failure == f"seed {first}: output['hidden'][0] differs by {differences[first]}"
    assert "FAILED  FULL 4 tokens, 4 requests, 1 each: seed" in report.table()


def test_a_scratch_buffer_in_the_memory_of_another_graph_is_found(cpu):
    """It was allocated in the capture of the first key and is read by all keys (flashinfer #4238)."""
    toy = cpu.Toy()
    calls, scratch = [], []

    def body(x):
        calls.append(x.key)
        if len(calls) == 2:
            scratch.append(torch.ones(3))
        return toy.body(x)["hidden"] * (scratch[0] if scratch else 1.0)

    _, manager = ready(cpu, body, toy, mode="FULL_DECODE_ONLY")
    manager.replay(cpu.full(8), toy.fuzz(cpu.full(8), 0))  # writes the scratch buffer, so that it has valid contents
    assert [v.key.num_tokens for v in manager.verify().failing] == [4], "after that both runs read poison"


def test_extra_tensors_are_compared(kit):
    toy = kit.Toy()

    def body(x):
        toy.cache[x.state.reach] = 7.0
        return x.state.tokens + 0

    _, manager = ready(kit, body, toy, mode="FULL_DECODE_ONLY")
    assert manager.verify().ok
    report = manager.verify(extra_tensors={"cache": toy.cache})
    assert len(report.failing) == 4
    assert "cache differs by" in report.failing[0].failure
    report = manager.verify(extra_tensors=lambda state: {"the first row": toy.cache[state.reach]})
    assert "the first row differs by" in report.failing[0].failure


def test_eager_and_replay_start_from_the_same_cache(kit):
    """The body adds to the cache, so two runs after one staging would differ."""
    toy = kit.Toy()

    def body(x):
        toy.cache[x.state.slots] += 1.0
        return toy.cache[x.state.slots] * 2

    _, manager = ready(kit, body, toy, mode="FULL_DECODE_ONLY")
    assert manager.verify(extra_tensors={"cache": toy.cache}).ok


def test_bad_input(cpu):
    toy, manager = ready(cpu, mode="FULL_DECODE_ONLY")
    with pytest.raises(ValueError, match="fuzz=0 must be at least 1"):
        manager.verify(fuzz=0)
    with pytest.raises(NotCaptured, match="FULL 3"):
        manager.verify(cpu.full(3))

    class NotFuzzable:
        stage, addresses, generation = toy.stage, toy.addresses, property(lambda self: toy.generation)

    _, not_fuzzable = ready(cpu, toy.body, NotFuzzable(), mode="FULL_DECODE_ONLY")
    with pytest.raises(TypeError, match=r"producer NotFuzzable has no method fuzz\(key, seed\)"):
        not_fuzzable.verify()
    other = cpu.manager()
    other.capture(CapturedStateProducer(not_fuzzable.states), toy.body)
    with pytest.raises(TypeError, match="producer NotFuzzable has no method fuzz"):
        other.verify()
    paranoid = cpu.manager(checks=ReplayChecks.PARANOID)
    paranoid.capture(CapturedStateProducer(manager.states), toy.body)
    assert paranoid.verify(extra_tensors={"cache": toy.cache}).ok


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
        return Out(Pair(tokens + 1, [tokens * 2, None]), {"flag": tokens > 3, "n": 5, "z": tokens * 1j + shift})

    for flaw, failing in ((0, 0), (2, 1)):
        _, manager = ready(cpu, body, toy, mode="FULL_DECODE_ONLY")
        report = manager.verify()
        assert len(report.failing) == failing
        assert "output.more['z']" in report.table() or not flaw


def test_outputs_that_differ_in_their_tensors(kit):
    one, two = {"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)}
    for eager, replay in ((one, two), (two, one)):
        comparison = compare_runs(kit.full(1), lambda seed, run=eager: run, lambda seed, run=replay: run, 2, 0.0, 0.0)
        assert comparison.failure == "seed 0: only one of the outputs has b"
        assert comparison.max_difference == inf


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_another_order_of_a_sum_passes_and_another_value_fails(cpu, dtype):
    """The tolerance depends on the dtype: bfloat16 sums differ far more than float32 sums."""
    toy = cpu.Toy()
    terms = torch.rand(8, 5, generator=torch.Generator().manual_seed(0)).to(dtype)

    def body(x):
        rows = terms[: len(x.state.tokens)]
        if eager:
            rows = rows.flip(1)
        total = rows[:, 0].clone()
        for column in rows.T[1:]:
            total = total + column
        small = total - rows.sum(1)  # only rounding, in a row with a large element
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
    found = compare_tensors(torch.tensor(expected), torch.tensor(actual), rtol=0.01, atol=0.1)
    assert found == (pytest.approx(difference, abs=1e-6), within)
