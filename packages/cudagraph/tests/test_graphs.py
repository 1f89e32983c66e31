"""What holds for every graph, recorded or CUDA."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from bateleur.cudagraph._memory import poison_
from bateleur.cudagraph.errors import CaptureError, DanglingExternal, GraphError, HostSync


@contextmanager
def op(schema: str, function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """A `torch.library` operator for the length of a test."""
    name = f"op{next(_numbers)}"
    library = torch.library.Library("bateleur_test", "FRAGMENT")
    library.define(f"{name}{schema}")
    library.impl(name, function, "CompositeExplicitAutograd")
    yield getattr(torch.ops.bateleur_test, name)
    library._destroy()


_numbers = itertools.count()


def test_k1_capture_does_not_execute(graphs: Any) -> None:
    """Class K, T-K1."""
    buffer = graphs.tensor([1.0, -0.0, float("nan")])
    source = graphs.tensor([7.0, 8.0, 9.0])
    before = buffer.view(torch.int32).tolist()

    recording = graphs.capture(lambda _: buffer.copy_(source) * 2)
    assert buffer.view(torch.int32).tolist() == before, "bit for bit"

    output = recording.replay(None)
    assert buffer.tolist() == [7, 8, 9]
    assert output.tolist() == [14, 16, 18]


def test_host_scalars_freeze(graphs: Any) -> None:
    lens = graphs.tensor([1.0, 2.0, 3.0])
    limits = {"max": 2}
    recording = graphs.capture(lambda _: lens.clamp(max=limits["max"]))
    limits["max"] = 1
    assert recording.replay(None).tolist() == [1, 2, 2]


def test_rebinding_is_invisible_and_writing_is_not(graphs: Any) -> None:
    state = {"lens": graphs.tensor([1.0, 2.0])}
    kept = state["lens"]
    recording = graphs.capture(lambda execution: execution.state["lens"] + 0, state)
    state["lens"] = graphs.tensor([9.0, 9.0])
    assert recording.replay(state).tolist() == [1, 2]
    kept.fill_(5)
    assert recording.replay(state).tolist() == [5, 5]


@pytest.mark.parametrize("hold", ["tensor", "view", "parameter"])
def test_c1_freed_memory_is_found(graphs: Any, hold: str) -> None:
    """Class C, T-C1."""
    tensor = graphs.tensor([[1.0, 2.0], [3.0, 4.0]])
    held = {"x": {"tensor": tensor, "view": tensor[1], "parameter": torch.nn.Parameter(tensor)}[hold]}
    recording = graphs.capture(lambda execution: execution.state["x"] + 1, held)
    del tensor
    recording.check_externals()
    recording.replay(None)
    gc.collect()
    recording.check_externals()
    del held["x"]
    with pytest.raises(DanglingExternal, match=r"float32.*freed"):
        recording.check_externals()


def test_externals_say_what_is_written(graphs: Any) -> None:
    weight, cache = graphs.tensor([2.0, 3.0]), graphs.tensor([0.0] * 6)
    with op("(Tensor(a!)[] outs, *, Tensor(b!)? extra=None) -> ()", lambda outs, extra=None: None) as fill:

        def body(_: Any) -> Tensor:
            made = weight * 2
            cache[2:4].add_(made)
            weight[:].unsqueeze_(0)  # writes to no memory
            return made

        recording = graphs.capture(body)
        assert {(e.shape, e.dtype, e.mutated) for e in recording.externals} == {
            ((2,), torch.float32, False),
            ((6,), torch.float32, True),
        }
        addresses = {weight.data_ptr(): 8, cache.data_ptr(): 24}
        assert {e.address: e.nbytes for e in recording.externals} == addresses

        lists = graphs.capture(lambda _: fill([cache], extra=weight))
        assert all(external.mutated for external in lists.externals)
        assert len(lists.externals) == 2


SYNCS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "_local_scalar_dense item": lambda x, mask: x[0].item(),
    "_local_scalar_dense int": lambda x, mask: int(x[0]),
    "_local_scalar_dense float": lambda x, mask: float(x[0]),
    "_local_scalar_dense bool": lambda x, mask: bool(mask.any()),
    "allclose": lambda x, mask: torch.allclose(x, x),
    "_local_scalar_dense slice": lambda x, mask: x[: x[0]],
    "_local_scalar_dense index": lambda x, mask: x[x[0]],
    "nonzero": lambda x, mask: x.nonzero(),
    "nonzero where": lambda x, mask: torch.where(mask),
    "index.Tensor": lambda x, mask: x[mask],
    "index.Tensor mixed": lambda x, mask: x.expand(3, 3)[x, mask],
    "index_put_": lambda x, mask: x.index_put_((mask,), x[:1]),
    "index_put.default": lambda x, mask: x.index_put((mask,), x[:1]),
    "masked_select": lambda x, mask: x.masked_select(mask),
    "_unique2": lambda x, mask: x.unique(),
    "unique_consecutive": lambda x, mask: x.unique_consecutive(),
    "equal": lambda x, mask: torch.equal(x, x),
    "bincount": lambda x, mask: x.bincount(),
    "repeat_interleave": lambda x, mask: x.repeat_interleave(x),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", SYNCS)
def test_m1_a_host_sync_is_refused_and_named(graphs: Any, name: str, inference: bool) -> None:
    """Class M, T-M1."""
    x, mask = graphs.tensor([1, 0, 2]), graphs.tensor([True, False, True])
    with torch.inference_mode(inference):
        with pytest.raises(HostSync, match=rf"^FULL 4 tokens.*{name.split()[0]}"):
            graphs.capture(lambda _: SYNCS[name](x + 0, mask | mask))
        assert graphs.capture(lambda _: x + 1).replay(None).tolist() == [2, 1, 3], "still usable"


ALLOWED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked_fill": lambda x, mask: x.masked_fill(mask, 9),
    "where": lambda x, mask: torch.where(mask, x, -x),
    "gather rows": lambda x, mask: x.expand(3, 3)[x.clamp(0, 2)],
    "scatter rows": lambda x, mask: x.index_put((x.clamp(0, 2),), x),
    "repeat to a size": lambda x, mask: x.repeat_interleave(x.clamp(1, 1), output_size=3),
    "sort": lambda x, mask: x.sort().values + x.cumsum(0) + x.topk(2).indices.sum(),
    "set a slice": lambda x, mask: _set(x.clone(), slice(1, None), 7),
    "set a column": lambda x, mask: _set(x.clone().view(1, 3), (..., 1), 7),
    "set a row": lambda x, mask: _set(torch.stack([x, x]), (None, 1), 7),
    "set where masked": lambda x, mask: _set(torch.stack([x, x], 1), mask, 7),
}


def _set(x: Tensor, index: Any, value: int) -> Tensor:
    x[index] = value
    return x


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", ALLOWED)
def test_what_cuda_can_capture_is_not_refused(graphs: Any, name: str, inference: bool) -> None:
    x, mask = graphs.tensor([1, 0, 2]), graphs.tensor([True, False, True])
    with torch.inference_mode(inference):
        recording = graphs.capture(lambda _: ALLOWED[name](x + 0, mask | mask))
        x.copy_(graphs.tensor([2, 1, 0]))
        assert torch.equal(recording.replay(None), ALLOWED[name](x, mask))


def test_a_caught_host_sync_still_fails_the_capture(graphs: Any) -> None:
    x = graphs.tensor([1.0])

    def body(_: Any) -> Tensor:
        with suppress(RuntimeError):
            x.item()
        return x + 1

    with pytest.raises(HostSync, match="_local_scalar_dense"):
        graphs.capture(body)


def test_views_alias(graphs: Any) -> None:
    buffer = graphs.tensor([0.0] * 6)

    def body(_: Any) -> tuple[Tensor, Tensor]:
        view = buffer[2:4]
        view.add_(1)
        return view, buffer * 10

    recording = graphs.capture(body)
    recording.replay(None)
    view, product = recording.replay(None)
    assert buffer.tolist() == [0, 0, 2, 2, 0, 0]
    assert view.tolist() == [2, 2]
    assert view.data_ptr() == buffer[2:].data_ptr()
    assert product.tolist() == [0, 0, 20, 20, 0, 0]


def test_i1_outputs_keep_their_address_and_are_overwritten(graphs: Any) -> None:
    """Class I: one output buffer per graph; who wants to keep it copies it."""
    x = graphs.tensor([1.0, 2.0])
    recording = graphs.capture(lambda _: {"y": (x + 1, [x * 2])})
    first = recording.replay(None)
    address, copied = first["y"][0].data_ptr(), first["y"][0].clone()
    x.fill_(10)
    second = recording.replay(None)
    assert second is first
    assert second["y"][0].data_ptr() == address
    assert first["y"][0].tolist() == [11, 11]
    assert first["y"][1][0].tolist() == [20, 20]
    assert copied.tolist() == [2, 3]


def test_i1_a_sibling_spoils_outputs_that_were_not_copied(graphs: Any) -> None:
    """Class I, T-I1: the next replay repairs them, and memory that the graph does not own is left alone."""
    x = graphs.tensor([1.0, 2.0])
    recording = graphs.capture(lambda _: (x.mul_(1), x * 3, (x * 2).long()))
    same, triple, double = recording.replay(None)
    copied = triple.clone()
    recording.poison()
    assert same.tolist() == [1, 2], "not owned"
    assert triple.isnan().all()
    assert double.abs().min() > 2**31
    assert copied.tolist() == [3, 6]
    assert recording.replay(None)[1].tolist() == [3, 6]


def test_d1_what_a_warm_up_fills_lazily_is_not_in_the_graph(graphs: Any) -> None:
    """Class D, T-D1: why warm-up and capture get different objects."""

    @dataclass
    class Lazy:
        plan: Tensor | None = None

    lens = graphs.tensor([1.0, 1.0])

    def attend(state: Lazy) -> Tensor:
        if state.plan is None:
            state.plan = lens * 100
        return state.plan + 1

    shared = Lazy()
    attend(shared)
    stale = graphs.capture(lambda execution: attend(execution.state), shared)
    fresh = graphs.capture(lambda execution: attend(execution.state), Lazy())
    lens.fill_(5)
    assert stale.replay(None).tolist() == [101, 101]
    assert fresh.replay(None).tolist() == [501, 501]


def test_d2_addresses_survive_and_contents_do_not(graphs: Any) -> None:
    """Class D, T-D2: a builder with one persistent buffer, captured largest first; each replay needs its own build."""
    buffer = torch.zeros(9, dtype=torch.int64, device=graphs.device)

    def build(n: int) -> Tensor:
        buffer[0] = n
        buffer[1:] = 0
        buffer[1 : n + 1] = torch.arange(n, device=graphs.device)
        return buffer[: n + 1]

    recordings = {n: graphs.capture(lambda execution: execution.state * 2, build(n)) for n in (8, 4, 2)}
    assert recordings[8].replay(None)[0] == 4, "the contents are those of the last build"
    build(8)
    assert recordings[8].replay(None).tolist() == [16, 0, 2, 4, 6, 8, 10, 12, 14]


def test_random_operators_draw_anew_on_each_replay(graphs: Any) -> None:
    def state() -> Tensor:
        return torch.cuda.get_rng_state() if graphs.name == "cuda" else torch.get_rng_state()

    x = graphs.tensor([0.0] * 64)
    torch.manual_seed(0)
    before = state()
    recording = graphs.capture(lambda _: x.clone().uniform_())
    assert torch.equal(state(), before), "the capture drew nothing"
    first = recording.replay(None).clone()
    assert not torch.equal(recording.replay(None), first)
    torch.manual_seed(0)
    assert torch.equal(recording.replay(None), first)


def test_any_aliasing_and_any_number_of_results(graphs: Any) -> None:
    x = graphs.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    kept = graphs.tensor([[0.0] * 4] * 2)

    def body(_: Any) -> list[Tensor]:
        made = x + 0
        low, high = made.split(2, dim=1)  # several views
        low.mul_(10)  # write through one of them
        first, second = made.unbind(0)
        torch.add(first, second, out=kept[0])  # into foreign memory
        into = torch.empty(0, device=x.device)
        torch.add(high, 1, out=into)  # resizes
        values, indices = made.max(dim=1)
        values.unsqueeze_(0)  # a tensor that is seen in two shapes
        flat = made.detach().t().contiguous().view(-1)[::2]
        return [made, kept, into, values, indices, flat, torch.stack([first, second]).sum(1)]

    recording = graphs.capture(body)
    assert kept.tolist() == [[0.0] * 4] * 2
    for add in (0, 1):
        x.add_(add)
        replayed = [y.clone() for y in recording.replay(None)]
        for mine, theirs in zip(replayed, body(None), strict=True):
            assert torch.equal(mine, theirs)


def test_custom_operators_with_mutable_arguments(graphs: Any) -> None:
    def update(state: Tensor, xs: list[Tensor], *, out: Tensor) -> tuple[Tensor, Tensor]:
        state.add_(xs[0])
        xs[1].mul_(2)
        out.copy_(state)
        both = torch.stack([state, out])
        return both[0], both[1]  # two views of one new storage

    with op("(Tensor(a!) state, Tensor(b!)[] xs, *, Tensor(c!) out) -> (Tensor, Tensor)", update) as call:
        state, x, y, out = (graphs.tensor([float(i)] * 2) for i in range(4))
        buffers = (state, x, y, out)
        recording = graphs.capture(lambda _: call(state, [x, y], out=out))
        assert [b.tolist() for b in buffers] == [[0, 0], [1, 1], [2, 2], [3, 3]]
        recording.replay(None)
        first, second = recording.replay(None)
        assert [b.tolist() for b in buffers] == [[2, 2], [1, 1], [8, 8], [2, 2]]
        assert first.tolist() == second.tolist() == [2, 2]


def test_custom_op_decorator(graphs: Any) -> None:
    @torch.library.custom_op(f"bateleur_test::deco{next(_numbers)}", mutates_args=("x",))
    def deco(x: Tensor, by: float) -> Tensor:
        x.mul_(by)
        return x.sum().clone()

    x = graphs.tensor([1.0, 2.0])
    recording = graphs.capture(lambda _: deco(x, 3.0) * 2)
    assert x.tolist() == [1, 2]
    assert recording.replay(None).item() == 18


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("replay_inference", [False, True])
def test_inference_mode_and_modules(graphs: Any, inference: bool, replay_inference: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).to(graphs.device).eval()
    x = torch.randn(2, 3, 8, device=graphs.device)

    def body(_: Any) -> Tensor:
        return (
            layer.linear2(layer.activation(layer.linear1(layer.norm1(x + layer._sa_block(x, None, None)))))
            + x
        )

    body(None)
    with torch.inference_mode(inference):
        recording = graphs.capture(body)
    x.copy_(torch.randn(2, 3, 8, device=graphs.device))
    with torch.inference_mode(replay_inference):
        output = recording.replay(None)
        torch.testing.assert_close(output, body(None))
    with torch.inference_mode(replay_inference):
        recording.poison()
    assert output.isnan().all()
    assert not output.requires_grad


def test_k2_a_failing_body_leaves_the_backend_usable(graphs: Any) -> None:
    """Class K, T-K2."""
    buffer = graphs.tensor([1.0, 2.0])
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()

    def body(_: Any) -> Tensor:
        buffer.fill_(9)
        raise KeyError("weights")

    for _ in range(2):
        with pytest.raises(CaptureError, match=r"^FULL 4 tokens.*KeyError.*weights") as caught:
            graphs.capture(body)
        assert isinstance(caught.value.__cause__, KeyError)
        assert buffer.tolist() == [1, 2]
        assert gc.isenabled() == enabled
        assert gc.get_freeze_count() <= frozen  # what others froze may be freed meanwhile
        assert graphs.capture(lambda _: buffer + 1).replay(None).tolist() == [2, 3]


def test_a_released_graph_is_refused_and_the_next_one_works(graphs: Any) -> None:
    x = graphs.tensor([1.0])
    for _ in range(2):
        recording = graphs.capture(lambda _: x + 1)
        assert recording.num_graphs == 1
        recording.release()
        recording.release()
        with pytest.raises(GraphError, match=r"^FULL 4 tokens.*released"):
            recording.replay(None)
        recording.check_externals()
        recording.poison()


def test_a_body_may_return_what_it_was_given_or_nothing(graphs: Any) -> None:
    x = graphs.tensor([1.0])
    recording = graphs.capture(lambda execution: execution.state, x)
    assert recording.replay(None) is x
    assert graphs.capture(lambda _: None).replay(None) is None
    assert graphs.capture(lambda execution: (3, str(execution.key))).replay(None)[0] == 3


def test_a3_poison_makes_a_missing_pad_fill_visible(graphs: Any) -> None:
    """Class A, T-A3: an unfilled tail shows, a filled one does not."""
    query_start_loc = torch.empty(9, dtype=torch.int32, device=graphs.device)
    lengths = graphs.capture(lambda _: query_start_loc.diff())
    poison_(query_start_loc)
    query_start_loc[:4] = torch.arange(4, dtype=torch.int32, device=graphs.device)
    assert (lengths.replay(None) < 0).any()
    query_start_loc[4:] = 3
    assert (lengths.replay(None) >= 0).all()


def test_d3_the_order_of_captures_does_not_matter(graphs: Any) -> None:
    """Class D, T-D3: recordings of one backend do not depend on the order of capture or replay."""
    x = torch.zeros(8, device=graphs.device)
    bodies = {n: (lambda execution: execution.state.cumsum(0) * 2) for n in (8, 4, 2)}
    for order in itertools.permutations(bodies):
        recordings = {n: graphs.capture(bodies[n], x[:n]) for n in order}
        for n in (8, 2, 4, 8):
            x.copy_(torch.arange(8.0) + n)
            assert torch.equal(recordings[n].replay(None), x[:n].cumsum(0) * 2)
