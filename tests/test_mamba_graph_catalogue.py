"""Known bugs of Mamba state caching that need a whole engine, by their ids in the catalogue: graphs and buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bateleur.cudagraph import Phase
from bateleur.eagle import EagleSpeculator, geometry
from bateleur.metadata import BatchShape
from bateleur.metadata.dispatch import Implementations
from bateleur.runner import LLM, RequestOutput, SamplingParams
from bateleur.runner.config.graph_options import GraphOptions
from bateleur.runner.model_runner.graph_dispatcher import GraphDispatcher
from eagle_doubles.drafters import RandomDrafter
from scripted import Partly, Script

VOCAB = 97
K = 3
POLICIES = pytest.mark.parametrize("policy", ["fold", "slots"])


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]


def prompt_of(seed: int, length: int) -> dict[str, Any]:
    random = Random(seed)
    return {"prompt_token_ids": [random.randint(3, VOCAB - 1) for _ in range(length)]}


PROMPTS = [prompt_of(1, 5), prompt_of(2, 21), prompt_of(3, 1), prompt_of(4, 16), prompt_of(5, 9)]
PARAMS = [
    SamplingParams(temperature=t, seed=7 + i, max_tokens=13 + 4 * i, ignore_eos=True)
    for i, t in enumerate((0.0, 0.8, 0.8, 0.0, 1.0))
]


@pytest.fixture(scope="module")
def make_llm(make_llm: Callable[..., LLM], tiny_hybrid: Path) -> Callable[..., LLM]:
    return partial(make_llm, model=tiny_hybrid)


@pytest.fixture(scope="module")
def random_head(tiny_head: Path) -> Path:
    return tiny_head


@pytest.fixture(scope="module")
def wanted(make_llm: Callable[..., LLM]) -> list[list[int]]:
    return ids(make_llm(max_model_len=96, max_num_seqs=1).generate(PROMPTS, PARAMS))


@pytest.fixture(scope="module")
def make(make_llm: Callable[..., LLM], wanted: list[list[int]]) -> Callable[..., LLM]:
    """Engines on recorded graphs, with drafts that are partly right."""
    script = Script()
    script.texts += wanted

    def build(policy: str, graphs: str = "FULL_AND_PIECEWISE", **overrides: Any) -> LLM:
        settings: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 4, "block_size": 4}
        settings |= {"mamba_state_policy": policy, "enable_prefix_caching": True, "mamba_block_size": 8}
        settings |= {"num_speculative_tokens": K, "drafter": Partly(script, K, VOCAB, (0, 1, K))}
        settings |= {"max_num_batched_tokens": 16}
        settings |= {"cudagraph_mode": graphs, "cudagraph_backend": "recorded"}
        settings |= {"cudagraph_capture_sizes": [1, 4, 8, 16], "cudagraph_checks": "PARANOID"}
        return make_llm(**(settings | overrides))

    return build


def everything(llm: LLM) -> dict[str, Tensor]:
    """Copies of all persistent state: pages, KV blocks, rings and request states, except the null ones."""
    caches = llm.engine.caches
    kept = {"requests": llm.engine.runner.model_state._states._states[:, 1:]}  # type: ignore[attr-defined]
    for name, layers in (("kv", caches.kv), ("pages", caches.states)):
        kept |= {f"{name}.{i}.{j}": each[1:] for i, pair in enumerate(layers) for j, each in enumerate(pair)}
    for i, rings in enumerate(caches.rings):
        kept |= {} if rings is None else {f"rings.{i}.{j}": t[1:] for j, t in enumerate(rings.tensors())}
    return {name: tensor.clone() for name, tensor in kept.items()}


def differing(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    assert before.keys() == after.keys()
    return [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]


def run_with(llm: LLM, between: Callable[[], None]) -> list[list[int]]:
    """Tokens of the common requests, with a call of `between` before every step."""
    names = [llm.add_request(*each) for each in zip(PROMPTS, PARAMS, strict=True)]
    done = {}
    while llm.has_unfinished_requests:
        done |= {output.request_id: output for output in llm.step() if output.finished}
        with torch.inference_mode():
            between()
    return ids([done[name] for name in names])


@POLICIES
def test_m08_dummy_steps_between_real_ones_change_nothing(
    make: Callable[..., LLM], wanted: list[list[int]], policy: str
) -> None:
    """vLLM #37728: idle ranks, profiling and warm-up run the model, commit what they ran, and store nothing."""
    llm = make(policy)
    engine = llm.engine
    producer, state, turn = engine.runner.producer, engine.runner.model_state, 0
    shapes = [BatchShape.of(1, 1, 1), BatchShape.of(4, 16, K + 1), BatchShape.of(2, 13, 12)]

    def dummy() -> None:
        nonlocal turn
        turn += 1
        before = everything(llm)
        keys = engine.runner.graphs.dispatcher.keys
        staged = producer.stage(keys[turn % len(keys)], list(Phase)[turn % 3])
        engine.runner.graphs.run(staged)
        state.commit(staged.state, None)
        shape = shapes[turn % 3]
        profiled = producer.buffers.dummy(shape, is_prefilling=turn % 2 == 0)
        staged = producer.model_state.prepare(profiled, None)
        engine.runner.graphs.run(staged)
        state.commit(staged.state, torch.full((shape.num_reqs,), 1 + K))
        assert differing(before, everything(llm)) == []

    assert run_with(llm, dummy) == wanted
    assert turn > 20


@POLICIES
def test_m25_capturing_every_key_changes_nothing(
    make: Callable[..., LLM], wanted: list[list[int]], policy: str
) -> None:
    """vLLM #55774, in the middle of requests, like an engine that captures late."""
    llm = make(policy)
    engine, turn = llm.engine, 0
    options = GraphOptions(engine.runner.graphs.dispatcher.mode, "recorded", (1, 4, 8, 16))

    def capture() -> None:
        nonlocal turn
        turn += 1
        if turn % 7 != 3:
            return
        before = everything(llm)
        late = GraphDispatcher(engine.model, engine.runner.producer, options, (1, 1 + K))
        late.capture()
        assert late.manager is not None
        assert len(late.manager.ready) == len(engine.runner.graphs.dispatcher.keys)
        assert differing(before, everything(llm)) == []

    assert run_with(llm, capture) == wanted
    assert turn > 10


def leaves(value: Any) -> list[Any]:
    """All numbers in metadata, as copies."""
    if isinstance(value, Tensor):
        return [value.tolist()]
    if isinstance(value, np.ndarray):
        return [value.tolist()]
    if is_dataclass(value):
        names = [field.name for field in fields(value) if field.name != "generation"]
        return [leaf for name in names for leaf in leaves(getattr(value, name))]
    return [value] if isinstance(value, int | float | bool | None) else []


@POLICIES
def test_m24_a_step_gets_the_same_metadata_after_profiling_and_verifying(
    make: Callable[..., LLM], wanted: list[list[int]], policy: str
) -> None:
    """vLLM #54044: nothing that a builder keeps belongs to another step."""
    llm = make(policy)
    engine = llm.engine
    seen: list[dict[Any, list[Any]]] = [{}, {}]
    for others, found in enumerate(seen):
        assert not others or engine.verify_graphs(fuzz=1).ok
        for key in engine.runner.graphs.dispatcher.keys:
            if others:
                engine.runner.model_state.prepare(engine.runner.producer.buffers.dummy(BatchShape.of(3, 11, 9)), None)
            context = engine.runner.producer.fuzz(key, 11).state
            found[key] = [leaves(context.batch), leaves(context.mamba), leaves(context.attention)]
    for key, (batch, mamba, attention) in seen[0].items():
        assert [batch, mamba, attention] == seen[1][key], key
        assert len(mamba) > 10
    assert ids(llm.generate(PROMPTS, PARAMS)) == wanted


@POLICIES
def test_m26_addresses_cover_what_graphs_read_and_never_change(
    make: Callable[..., LLM], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """vLLM #40648: also for the tensors of `commit`, which is not in a graph yet."""
    llm = make(policy)
    engine = llm.engine
    state, caches = engine.runner.model_state, engine.caches
    book = dict(engine.runner.producer.addresses())
    builder = state._mamba  # type: ignore[attr-defined]
    plan = builder._buffers.plan
    read = {
        **{f"plan.{field.name}": getattr(plan, field.name) for field in fields(plan)},
        **{f"pages.{i}.{j}": each for i, pair in enumerate(caches.states) for j, each in enumerate(pair)},
        **{f"kv.{i}.{j}": each for i, pair in enumerate(caches.kv) for j, each in enumerate(pair)},
        **{
            f"rings.{i}.{j}": each
            for i, rings in enumerate(caches.rings)
            for j, each in enumerate(() if rings is None else rings.tensors())
        },
        "request_row": builder._buffers.request_row,
    }
    assert [name for name, tensor in read.items() if tensor.data_ptr() not in book.values()] == []
    kept = builder._commit_plan
    others = [state._states._states, state._num_valid, *(getattr(kept, f.name) for f in fields(kept))]  # type: ignore[attr-defined]
    before, steps = [each.data_ptr() for each in others], llm.get_metrics().num_steps
    run = engine.runner.graphs.run

    def checked(staged: Any) -> Any:
        plan, row = staged.state.mamba.plan, staged.state.mamba.request_row
        assert all(getattr(plan, f.name).data_ptr() in book.values() for f in fields(plan))
        assert row.data_ptr() in book.values()
        return run(staged)

    monkeypatch.setattr(engine.runner.graphs, "run", checked)
    for _ in range(3):
        assert ids(llm.generate(PROMPTS, PARAMS)) == wanted
    assert llm.get_metrics().num_steps - steps > 50
    assert engine.runner.producer.addresses() == book
    kept = builder._commit_plan
    others = [state._states._states, state._num_valid, *(getattr(kept, f.name) for f in fields(kept))]  # type: ignore[attr-defined]
    assert [each.data_ptr() for each in others] == before


@POLICIES
def test_m27_rows_behind_the_real_ones_are_null(
    make: Callable[..., LLM], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """vLLM #34571: graphs for more tokens, rows and pages than there are requests."""
    llm = make(policy, max_num_seqs=2, cudagraph_capture_sizes=[8, 16])
    engine = llm.engine
    run, padded = engine.runner.graphs.run, 0

    def checked(staged: Any) -> Any:
        nonlocal padded
        batch, mamba = staged.state.batch, staged.state.mamba
        rows = batch.num_actual_reqs
        tables = [table[rows:] for table in batch.block_tables]
        plan = [getattr(mamba.plan, f.name)[rows:] for f in fields(mamba.plan) if f.name != "fold_slot"]
        assert not any(each.any() for each in (*tables, *plan, mamba.request_row[rows:]))
        assert (batch.slot_mappings[0][batch.num_actual_tokens :] == -1).all()
        padded += rows < batch.num_reqs
        return run(staged)

    monkeypatch.setattr(engine.runner.graphs, "run", checked)
    assert ids(llm.generate(PROMPTS, PARAMS)) == wanted
    assert padded > 3
    with torch.inference_mode():
        for key in engine.runner.graphs.dispatcher.keys:
            context = engine.runner.producer.stage(key, Phase.CAPTURE).state
            assert not any(table.any() for table in context.batch.block_tables)
            assert context.mamba is not None
            assert not context.mamba.request_row.any()  # type: ignore[union-attr]


class Waits(Exception):
    """Something waits for the device."""


class NoSync(TorchDispatchMode):
    """Raises for operators whose result or output shape the host waits for."""

    WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique", "item")

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.inside = False
        """Whether one of our operators is running: its CPU implementation may read the host's memory."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls += 1
        name = func.overloadpacket.__name__
        masks = args[1] if name in ("index", "index_put_") else ()
        if name.startswith(self.WAITS) or any(each is not None and each.dtype == torch.bool for each in masks):
            raise Waits(f"{name} waits for the device")
        self.inside = func.namespace != "aten"
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.inside = False


@contextmanager
def no_sync(mode: NoSync, host: set[int]) -> Any:
    """Raise for copies to the host, as on a GPU, except of host fields (data pointers in `host`)."""

    def refuse(name: str) -> Callable[..., Any]:
        method = getattr(Tensor, name)

        def refused(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not mode.inside and self.data_ptr() not in host and self.numel():
                raise Waits(f"Tensor.{name} of shape {tuple(self.shape)}")
            return method(self, *args, **kwargs)

        return refused

    with pytest.MonkeyPatch.context() as patch, mode:
        for name in ("numpy", "tolist", "cpu", "__array__"):
            patch.setattr(Tensor, name, refuse(name))
        yield


@POLICIES
@pytest.mark.parametrize("drafts", ["head", "random"])
def test_m23_verify_commit_and_propose_wait_for_nothing(
    make: Callable[..., LLM],
    wanted: list[list[int]],
    random_head: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    drafts: str,
) -> None:
    """vLLM #43955: accepted counts stay on the device, and everything that depends on them is computed there.

    A CPU may take shortcuts, because its device is the host. They are switched off here.
    """
    for name, forms in geometry.FORMS.items():
        monkeypatch.setitem(geometry.FORMS, name, Implementations(forms.torch))
    head = {"draft": random_head, "drafter": None}
    llm = make(policy, "NONE", **(head if drafts == "head" else {"drafter": RandomDrafter(K, VOCAB)}))
    engine, mode = llm.engine, NoSync()
    drafting = engine.runner.proposer
    assert drafting is not None
    monkeypatch.setattr(drafting, "_sees_drafts", False)  # as on other devices than a CPU
    monkeypatch.setattr(drafting, "_skips", False)
    if isinstance(drafting.drafter, EagleSpeculator):
        monkeypatch.setattr(drafting.drafter, "_native", None)
    watched = [
        (engine.runner.rejection_sampler, "verify"),
        (engine.runner.rejection_sampler, "stage"),
        (engine.runner.model_state, "commit"),
        (drafting, "propose"),
    ]
    counts = dict.fromkeys((name for _, name in watched), 0)

    def watch(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def guarded(*args: Any) -> Any:
            whole = engine.runner.producer.buffers._whole
            host = {whole[field].data_ptr() for field in ("is_prefilling", "query_start_loc_cpu")}
            with no_sync(mode, host):
                before = mode.calls
                result = method(*args)
            counts[name] += mode.calls - before
            return result

        monkeypatch.setattr(owner, name, guarded)

    for owner, name in watched:
        watch(owner, name)
    assert ids(llm.generate(PROMPTS, PARAMS)) == wanted
    assert min(counts.values()) > 50
