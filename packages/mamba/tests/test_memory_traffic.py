"""The byte counts against the bytes that operators use, found by corrupting one piece after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import reference_operators as reference
from bateleur.mamba import CacheLayout, Mamba2, MambaCacheMode, ShortConv, StatePolicy, plan_fold, plan_replay
from bateleur.mamba import memory_traffic as bytes_of

SLOTS, FOLD = StatePolicy
NAN = float("nan")
ROWS, CAPACITY = 3, 9
MODELS = {  # mamba layers; heads, head_dim, state, groups
    "Nemotron-3-Nano-30B": (23, (64, 64, 128, 8)),
    "Nemotron-Nano-9B-v2": (27, (128, 80, 128, 8)),
    "Granite-4.0-H-350M": (28, (48, 32, 128, 1)),
}
SHAPES = [(2, 3, 4, 1, 4), (4, 2, 3, 2, 3)]


def spec_of(shape: tuple[int, ...], drafts: int, policy: StatePolicy) -> Mamba2:
    return Mamba2(*shape, num_speculative_tokens=drafts, policy=policy)


DEPTH = {"conv_state": 2, "request_conv": 2, "ring_x": 2, "ring_dt": 2, "ring_B": 2}


class Tensors(dict[str, Tensor]):
    """Arguments by name. A piece is the smallest part that is moved as a whole: a slot, an entry, a token."""

    def pieces(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, tensor in self.items():
            shape = tensor.shape[: DEPTH.get(name, 1)]
            yield from ((name, tuple(index)) for index in torch.ones(shape).nonzero().tolist())

    def copy(self) -> Tensors:
        return Tensors({name: tensor.clone() for name, tensor in self.items()})


def moved(call: Callable[[Tensors], Tensor | None], tensors: Tensors) -> int:
    """Bytes of the pieces that decide what `call` leaves or returns, of those that it changes, and of its result."""
    after = tensors.copy()
    result = call(after)
    total = 0 if result is None else result.nbytes
    for name, index in tensors.pieces():
        piece = tensors[name][index]
        changed = not torch.equal(piece, after[name][index])
        spoiled = tensors.copy()
        spoiled[name][index] = NAN
        got = call(spoiled)
        if not changed:  # then the spoiled piece itself is no evidence
            spoiled[name][index] = piece
        same = all(torch.equal(spoiled[other], after[other]) for other in tensors)
        looked_at = not (same and (result is None or torch.equal(got, result)))
        total += piece.nbytes * (looked_at + changed)
    return total


def pools(spec: Mamba2, tokens: int) -> Tensors:
    """Slots, request conv windows and rings of a row of number 1, and its tokens."""
    torch.manual_seed(0)
    heads, head_dim, size = spec.state_shape
    groups, act = spec.num_groups, spec.conv_dtype
    made = {
        "ssm_state": torch.randn(12, *spec.state_shape),
        "conv_state": torch.randn(12, *spec.conv_shape).to(act),
        "request_conv": torch.randn(ROWS, *spec.request_conv_shape).to(act),
        "ring_x": torch.randn(ROWS, CAPACITY, heads, head_dim).to(act),
        "ring_dt": torch.rand(ROWS, CAPACITY, heads),
        "ring_B": torch.randn(ROWS, CAPACITY, groups, size).to(act),
        "u": torch.randn(tokens, spec.conv_dim).to(act),
        "x": torch.randn(tokens, heads, head_dim).to(act),
        "dt": torch.randn(tokens, heads).to(act),
        "B": torch.randn(tokens, groups, size).to(act),
        "C": torch.randn(tokens, groups, size).to(act),
    }
    return Tensors(made)


def chosen(tensors: Tensors, *names: str) -> Tensors:
    return Tensors({name: tensors[name] for name in names})


def row(tokens: int) -> dict[str, object]:
    return {"query_start_loc": torch.tensor([0, tokens], dtype=torch.int32), "max_query_len": tokens}


def weights(spec: Mamba2) -> dict[str, object]:
    torch.manual_seed(1)
    A, D, dt_bias = -torch.rand(spec.num_heads), torch.rand(spec.num_heads), torch.rand(spec.num_heads)
    return {"A": A, "D": D, "dt_bias": dt_bias, "dt_min": 0.0, "dt_max": float("inf")}


def i64(*values: int) -> Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("drafts", "tokens"), [(0, 1), (2, 1), (2, 3)])
def test_conv_update(shape, drafts, tokens):
    for policy, name in ((SLOTS, "conv_state"), (FOLD, "request_conv")):
        spec = spec_of(shape, drafts, policy)
        weight = torch.randn(spec.conv_dim, spec.conv_width)

        def call(t: Tensors, name: str = name, weight: Tensor = weight) -> Tensor:
            where = {"read": i64(1), "offset": i64(drafts), "write": i64(1)}
            return reference.causal_conv1d_update(
                t["u"], weight, None, t[name], **row(tokens), **where, activation="silu"
            )

        counted = bytes_of.conv_update_bytes(spec, tokens)
        assert moved(call, chosen(pools(spec, tokens), "u", name)) == counted


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("drafts", "tokens"), [(0, 1), (2, 1), (2, 3)])
def test_state_update(shape, drafts, tokens):
    spec = spec_of(shape, drafts, SLOTS)

    def call(t: Tensors) -> Tensor:
        write = torch.arange(2, 3 + drafts)[None]
        return reference.selective_state_update(**t, **weights(spec), **row(tokens), read=i64(1), write=write)

    tensors = chosen(pools(spec, tokens), "ssm_state", "x", "dt", "B", "C")
    assert moved(call, tensors) == bytes_of.state_update_bytes(spec, tokens)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("tokens", "length"), [(1, 0), (1, 5), (3, 4), (3, 6)])
def test_replay(shape, tokens, length):
    spec = spec_of(shape, 2, FOLD)

    def call(t: Tensors) -> Tensor:
        ring = {"slot": i64(4), "ring_row": i64(1), "ring_start": i64(7), "ring_len": i64(length)}
        return reference.replay_update(**t, **weights(spec), **row(tokens), **ring)

    tensors = chosen(pools(spec, tokens), "ssm_state", "ring_x", "ring_dt", "ring_B", "x", "dt", "B", "C")
    assert moved(call, tensors) == bytes_of.replay_bytes(spec, tokens, length)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("count", "src", "dst"), [(3, 4, 4), (9, 4, 5), (1, 4, 5)])
def test_fold(shape, count, src, dst):
    spec = spec_of(shape, 2, FOLD)

    def call(t: Tensors) -> None:
        ring = {"ring_row": i64(1), "ring_start": i64(7), "count": i64(count), "page_offset": i64(1)}
        layer = {name: tensor[None] for name, tensor in {**t, "A": weights(spec)["A"]}.items()}
        reference.fold_ring(**layer, **ring, src=i64(src), dst=i64(dst))

    names = ("ssm_state", "conv_state", "request_conv", "ring_x", "ring_dt", "ring_B")
    assert moved(call, chosen(pools(spec, 1), *names)) == bytes_of.fold_bytes(spec, count)


@pytest.mark.parametrize("width", [2, 4])
def test_a_pure_convolution_moves_windows_alone(width):
    slots, fold = (ShortConv(5, conv_width=width, num_speculative_tokens=2, policy=policy) for policy in (SLOTS, FOLD))
    assert (fold.state_bytes, fold.ring_bytes(9), bytes_of.token_bytes(fold)) == (0, 0, 0)
    assert bytes_of.state_update_bytes(slots, 3) == bytes_of.replay_bytes(fold, 3, 4) == 0
    torch.manual_seed(0)
    made = {
        "conv_state": torch.randn(12, *fold.conv_shape),
        "request_conv": torch.randn(ROWS, *fold.request_conv_shape),
    }
    tensors = Tensors({name: tensor.to(fold.conv_dtype) for name, tensor in made.items()})

    def folded(t: Tensors) -> None:
        layer = {name: tensor[None] for name, tensor in t.items()}
        reference.fold_window(**layer, ring_row=i64(1), dst=i64(5), page_offset=i64(1))

    assert moved(folded, tensors) == bytes_of.fold_bytes(fold, 7)

    def copied(t: Tensors) -> None:
        windows = {"conv_state": t["conv_state"][None], "ssm_state": None}
        reference.copy_states(**windows, conv_src=i64(3), conv_bias=i64(2), ssm_src=i64(5), dst=i64(8))

    pages = Tensors({"conv_state": torch.randn(12, *slots.conv_shape).to(slots.conv_dtype)})
    assert moved(copied, pages) == copy_bytes(slots, 2)


def copy_bytes(spec: Mamba2 | ShortConv, bias: int) -> int:
    """Bytes of `copy_states` of one slot whose convolution window loses its first `bias` entries."""
    return 2 * (spec.state_bytes + bytes_of.window_bytes(spec, spec.conv_shape[0] - bias))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [0, 2])
def test_copy(shape, bias):
    spec = spec_of(shape, 2, SLOTS)

    def call(t: Tensors) -> None:
        layer = {name: tensor[None] for name, tensor in t.items()}
        reference.copy_states(**layer, conv_src=i64(3), conv_bias=i64(bias), ssm_src=i64(5), dst=i64(8))

    tensors = chosen(pools(spec, 1), "conv_state", "ssm_state")
    assert moved(call, tensors) == copy_bytes(spec, bias)


@pytest.mark.parametrize("drafts", [0, 3, 5, 7])
def test_a_cycle_is_what_the_planner_does(drafts):
    layout = CacheLayout(MambaCacheMode.NONE, 4096, drafts, 4096, FOLD)
    table, tokens = torch.ones((1, 1), dtype=torch.int32), torch.tensor([1 + drafts])
    for accepted in range(1, 2 + drafts):
        cycle = bytes_of.FoldCycle.of(layout, accepted)
        n, base, lens, counts = 100, i64(100), [], []
        for _ in range(3 * cycle.steps):
            plan = plan_replay(layout, table, i64(n), tokens, base, i64(1))
            done = plan_fold(layout, plan, i64(n), tokens, i64(accepted))
            lens.append(int(plan.ring_len))
            counts.append(int(done.count))
            n, base = n + accepted, done.base
        assert counts == ([0] * (cycle.steps - 1) + [cycle.folded]) * 3
        assert sum(lens) / len(lens) == cycle.mean_ring_len


def test_cycles_of_nothing_are_refused():
    layout = CacheLayout(MambaCacheMode.NONE, 64, 2, 64, FOLD)
    with pytest.raises(ValueError, match=r"accepted is 4; it must be in \[1, 1 \+ num_speculative_tokens = 3\]"):
        bytes_of.FoldCycle.of(layout, 4)
    with pytest.raises(ValueError, match="layout has the policy 'slots'; only 'fold' has a cycle"):
        bytes_of.FoldCycle.of(CacheLayout(MambaCacheMode.NONE, 64, 2, 64), 1)


@pytest.mark.parametrize("name", MODELS)
def test_fold_moves_a_third_and_keeps_a_fifth(name):
    """At 5 draft tokens, whatever is accepted; all of a step's bytes, the convolution's included."""
    _, shape = MODELS[name]
    slots, fold = (spec_of(shape, 5, policy) for policy in (SLOTS, FOLD))
    layouts = [CacheLayout(MambaCacheMode.NONE, 4096, 5, 4096, policy) for policy in (SLOTS, FOLD)]
    whole = bytes_of.slots_step_bytes(slots, 6)
    for accepted in range(1, 7):
        cycle = bytes_of.FoldCycle.of(layouts[1], accepted)
        assert whole >= 3 * bytes_of.fold_step_bytes(fold, 6, cycle)
    used = [spec.max_memory_usage_bytes(layout) for spec, layout in zip((slots, fold), layouts, strict=True)]
    assert 5 * used[1] <= used[0]


def test_megabytes_of_a_request():
    layers, shape = MODELS["Nemotron-3-Nano-30B"]
    used = [
        layers * spec_of(shape, 5, policy).max_memory_usage_bytes(CacheLayout(MambaCacheMode.NONE, 64, 5, 64, policy))
        for policy in (SLOTS, FOLD)
    ]
    assert [round(value / 2**20) for value in used] == [289, 53]
