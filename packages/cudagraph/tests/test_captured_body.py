"""Properties of every captured body, on the recorded and the CUDA backend."""

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
    """Define a `torch.library` operator for one test."""
    name = f"op{next(_numbers)}"
    library = torch.library.Library("bateleur_test", "FRAGMENT")
    library.define(f"{name}{schema}")
    library.impl(name, function, "CompositeExplicitAutograd")
    yield getattr(torch.ops.bateleur_test, name)
    library._destroy()


_numbers = itertools.count()


def test_capture_does_not_execute(graphs: Any) -> None:
    buffer = graphs.tensor([1.0, -0.0, float("nan")])
    source = graphs.tensor([7.0, 8.0, 9.0])
    before = buffer.view(torch.int32).tolist()

    captured = graphs.capture(lambda _: buffer.copy_(source) * 2)
    assert buffer.view(torch.int32).tolist() == before, "restored bit for bit"

    output = captured.replay(None)
    assert buffer.tolist() == [7, 8, 9]
    assert output.tolist() == [14, 16, 18]


def test_host_scalars_keep_their_captured_values(graphs: Any) -> None:
    lens = graphs.tensor([1.0, 2.0, 3.0])
    limits = {"max": 2}
    captured = graphs.capture(lambda _: lens.clamp(max=limits["max"]))
    limits["max"] = 1
    assert captured.replay(None).tolist() == [1, 2, 2]


def test_a_replay_sees_in_place_writes_but_no_rebound_names(graphs: Any) -> None:
    state = {"lens": graphs.tensor([1.0, 2.0])}
    kept = state["lens"]
    captured = graphs.capture(lambda execution: execution.state["lens"] + 0, state)
    state["lens"] = graphs.tensor([9.0, 9.0])
    assert captured.replay(state).tolist() == [1, 2]
    kept.fill_(5)
    assert captured.replay(state).tolist() == [5, 5]


@pytest.mark.parametrize("hold", ["tensor", "view", "parameter"])
def test_freed_external_memory_is_found(graphs: Any, hold: str) -> None:
    tensor = graphs.tensor([[1.0, 2.0], [3.0, 4.0]])
    held = {"x": {"tensor": tensor, "view": tensor[1], "parameter": torch.nn.Parameter(tensor)}[hold]}
    captured = graphs.capture(lambda execution: execution.state["x"] + 1, held)
    del tensor
    captured.check_externals()
    captured.replay(None)
    gc.collect()
    captured.check_externals()
    del held["x"]
    with pytest.raises(DanglingExternal, match=r"float32.*freed"):
        captured.check_externals()


def test_external_memory_that_a_graph_writes_is_marked(graphs: Any) -> None:
    weight, cache = graphs.tensor([2.0, 3.0]), graphs.tensor([0.0] * 6)
    with op("(Tensor(a!)[] outs, *, Tensor(b!)? extra=None) -> ()", lambda outs, extra=None: None) as fill:

        def body(_: Any) -> Tensor:
            made = weight * 2
            cache[2:4].add_(made)
            weight[:].unsqueeze_(0)  # does not write memory
            return made

        captured = graphs.capture(body)
        assert {(e.shape, e.dtype, e.mutated) for e in captured.externals} == {
            ((2,), torch.float32, False),
            ((6,), torch.float32, True),
        }
        addresses = {weight.data_ptr(): 8, cache.data_ptr(): 24}
        assert {e.address: e.nbytes for e in captured.externals} == addresses

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
def test_a_host_sync_is_refused_and_named(graphs: Any, name: str, inference: bool) -> None:
    x, mask = graphs.tensor([1, 0, 2]), graphs.tensor([True, False, True])
    with torch.inference_mode(inference):
        with pytest.raises(HostSync, match=rf"^FULL 4 tokens.*{name.split()[0]}"):
            graphs.capture(lambda _: SYNCS[name](x + 0, mask | mask))
        assert graphs.capture(lambda _: x + 1).replay(None).tolist() == [2, 1, 3], "the backend can capture again"


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
        captured = graphs.capture(lambda _: ALLOWED[name](x + 0, mask | mask))
        x.copy_(graphs.tensor([2, 1, 0]))
        assert torch.equal(captured.replay(None), ALLOWED[name](x, mask))


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

    captured = graphs.capture(body)
    captured.replay(None)
    view, product = captured.replay(None)
    assert buffer.tolist() == [0, 0, 2, 2, 0, 0]
    assert view.tolist() == [2, 2]
    assert view.data_ptr() == buffer[2:].data_ptr()
    assert product.tolist() == [0, 0, 20, 20, 0, 0]


def test_outputs_keep_their_address_and_are_overwritten(graphs: Any) -> None:
    """A graph has one output buffer. Copy an output that must stay valid."""
    x = graphs.tensor([1.0, 2.0])
    captured = graphs.capture(lambda _: {"y": (x + 1, [x * 2])})
    first = captured.replay(None)
    address, copied = first["y"][0].data_ptr(), first["y"][0].clone()
    x.fill_(10)
    second = captured.replay(None)
    assert second is first
    assert second["y"][0].data_ptr() == address
    assert first["y"][0].tolist() == [11, 11]
    assert first["y"][1][0].tolist() == [20, 20]
    assert copied.tolist() == [2, 3]


def test_poison_overwrites_outputs_that_were_not_copied(graphs: Any) -> None:
    """The next replay writes them again. Memory that the graph does not own is not poisoned."""
    x = graphs.tensor([1.0, 2.0])
    captured = graphs.capture(lambda _: (x.mul_(1), x * 3, (x * 2).long()))
    same, triple, double = captured.replay(None)
    copied = triple.clone()
    captured.poison()
    assert same.tolist() == [1, 2], "external memory"
    assert triple.isnan().all()
    assert double.abs().min() > 2**31
    assert copied.tolist() == [3, 6]
    assert captured.replay(None)[1].tolist() == [3, 6]


def test_a_value_cached_by_the_warm_up_is_not_in_the_graph(graphs: Any) -> None:
    """This is why warm-up and capture must get different state objects."""

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


def test_addresses_are_fixed_and_contents_are_not(graphs: Any) -> None:
    """A metadata builder with one persistent buffer must build again before each replay."""
    buffer = torch.zeros(9, dtype=torch.int64, device=graphs.device)

    def build(n: int) -> Tensor:
        buffer[0] = n
        buffer[1:] = 0
        buffer[1 : n + 1] = torch.arange(n, device=graphs.device)
        return buffer[: n + 1]

    bodies = {n: graphs.capture(lambda execution: execution.state * 2, build(n)) for n in (8, 4, 2)}
    assert bodies[8].replay(None)[0] == 4, "the contents are those of the last build"
    build(8)
    assert bodies[8].replay(None).tolist() == [16, 0, 2, 4, 6, 8, 10, 12, 14]


def test_random_operators_draw_new_numbers_in_each_replay(graphs: Any) -> None:
    def state() -> Tensor:
        return torch.cuda.get_rng_state() if graphs.name == "cuda" else torch.get_rng_state()

    x = graphs.tensor([0.0] * 64)
    torch.manual_seed(0)
    before = state()
    captured = graphs.capture(lambda _: x.clone().uniform_())
    assert torch.equal(state(), before), "the capture drew nothing"
    first = captured.replay(None).clone()
    assert not torch.equal(captured.replay(None), first)
    torch.manual_seed(0)
    assert torch.equal(captured.replay(None), first)


def test_any_aliasing_and_any_number_of_results(graphs: Any) -> None:
    x = graphs.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    kept = graphs.tensor([[0.0] * 4] * 2)

    def body(_: Any) -> list[Tensor]:
        made = x + 0
        low, high = made.split(2, dim=1)  # several views
        low.mul_(10)  # write through one of them
        first, second = made.unbind(0)
        torch.add(first, second, out=kept[0])  # into external memory
        into = torch.empty(0, device=x.device)
        torch.add(high, 1, out=into)  # resizes
        values, indices = made.max(dim=1)
        values.unsqueeze_(0)  # the same tensor with another shape
        flat = made.detach().t().contiguous().view(-1)[::2]
        return [made, kept, into, values, indices, flat, torch.stack([first, second]).sum(1)]

    captured = graphs.capture(body)
    assert kept.tolist() == [[0.0] * 4] * 2
    for add in (0, 1):
        x.add_(add)
        replayed = [y.clone() for y in captured.replay(None)]
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
        captured = graphs.capture(lambda _: call(state, [x, y], out=out))
        assert [b.tolist() for b in buffers] == [[0, 0], [1, 1], [2, 2], [3, 3]]
        captured.replay(None)
        first, second = captured.replay(None)
        assert [b.tolist() for b in buffers] == [[2, 2], [1, 1], [8, 8], [2, 2]]
        assert first.tolist() == second.tolist() == [2, 2]


def test_custom_op_decorator(graphs: Any) -> None:
    @torch.library.custom_op(f"bateleur_test::deco{next(_numbers)}", mutates_args=("x",))
    def deco(x: Tensor, by: float) -> Tensor:
        x.mul_(by)
        return x.sum().clone()

    x = graphs.tensor([1.0, 2.0])
    captured = graphs.capture(lambda _: deco(x, 3.0) * 2)
    assert x.tolist() == [1, 2]
    assert captured.replay(None).item() == 18


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("replay_inference", [False, True])
def test_inference_mode_and_modules(graphs: Any, inference: bool, replay_inference: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).to(graphs.device).eval()
    x = torch.randn(2, 3, 8, device=graphs.device)

    def body(_: Any) -> Tensor:
        return layer.linear2(layer.activation(layer.linear1(layer.norm1(x + layer._sa_block(x, None, None))))) + x

    body(None)
    with torch.inference_mode(inference):
        captured = graphs.capture(body)
    x.copy_(torch.randn(2, 3, 8, device=graphs.device))
    with torch.inference_mode(replay_inference):
        output = captured.replay(None)
        torch.testing.assert_close(output, body(None))
    with torch.inference_mode(replay_inference):
        captured.poison()
    assert output.isnan().all()
    assert not output.requires_grad


def test_a_failing_body_leaves_the_backend_usable(graphs: Any) -> None:
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
        assert gc.get_freeze_count() <= frozen  # objects that other code froze may be freed meanwhile
        assert graphs.capture(lambda _: buffer + 1).replay(None).tolist() == [2, 3]


def test_a_released_graph_is_refused_and_the_next_one_works(graphs: Any) -> None:
    x = graphs.tensor([1.0])
    for _ in range(2):
        captured = graphs.capture(lambda _: x + 1)
        assert captured.num_graphs == 1
        captured.release()
        captured.release()
        with pytest.raises(GraphError, match=r"^FULL 4 tokens.*released"):
            captured.replay(None)
        captured.check_externals()
        captured.poison()


def test_a_body_may_return_its_input_or_nothing(graphs: Any) -> None:
    x = graphs.tensor([1.0])
    captured = graphs.capture(lambda execution: execution.state, x)
    assert captured.replay(None) is x
    assert graphs.capture(lambda _: None).replay(None) is None
    assert graphs.capture(lambda execution: (3, str(execution.key))).replay(None)[0] == 3


def test_poison_makes_a_missing_pad_fill_visible(graphs: Any) -> None:
    """A padded tail that nothing fills shows poison."""
    query_start_loc = torch.empty(9, dtype=torch.int32, device=graphs.device)
    lengths = graphs.capture(lambda _: query_start_loc.diff())
    poison_(query_start_loc)
    query_start_loc[:4] = torch.arange(4, dtype=torch.int32, device=graphs.device)
    assert (lengths.replay(None) < 0).any()
    query_start_loc[4:] = 3
    assert (lengths.replay(None) >= 0).all()


def test_the_order_of_captures_does_not_matter(graphs: Any) -> None:
    """Results do not depend on the order of captures and replays of one backend."""
    x = torch.zeros(8, device=graphs.device)
    bodies = {n: (lambda execution: execution.state.cumsum(0) * 2) for n in (8, 4, 2)}
    for order in itertools.permutations(bodies):
        captured = {n: graphs.capture(bodies[n], x[:n]) for n in order}
        for n in (8, 2, 4, 8):
            x.copy_(torch.arange(8.0) + n)
            assert torch.equal(captured[n].replay(None), x[:n].cumsum(0) * 2)
