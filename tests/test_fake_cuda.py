"""Engine steps on a fake CUDA device: no step waits for the device, and no operator gets tensors of two devices."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedTokenizerFast

from bateleur.cudagraph import DispatchReason
from bateleur.eagle import Role
from bateleur.mamba.ops import fla
from bateleur.metadata import Fetch
from bateleur.metadata.backends.paged import TritonBackend
from bateleur.metadata.dispatch import Implementations
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.engine.engine import Engine
from bateleur.runner.engine.output_processor import OutputProcessor
from bateleur.runner.engine.step_in_flight import StepInFlight
from bateleur.runner.sampling.rejection_sampler import RejectionSampler
from bateleur.runner.scheduling import step_batch
from bateleur.runner.scheduling.scheduler import Scheduler
from bateleur.runner.structured.grammar import Grammars
from fla_double import Double, unlooked
from quick_fakes import QuickFakes, leaves_of

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="fakes a device that this machine has"),
    # Graph managers record addresses; those of fake tensors are 0.
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning"),
]

SLOW = pytest.mark.slow
# The first prompt takes two steps, the second joins it, the third can share its pages.
PROMPTS = [range(10, 43), [5], range(10, 43)]
PLAIN = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    {"temperature": 1.0, "top_k": 20, "seed": 2},
]
DRAFTS = {"draft": "auto", "num_speculative_tokens": 2}
SLOTS = {"mamba_state_policy": "slots"}
PREFIX = {"enable_prefix_caching": True, "mamba_block_size": 16}
GRAPHS = {"cudagraph_capture_sizes": [2, 6, 24]}
DECODES = GRAPHS | {"cudagraph_mode": "FULL_DECODE_ONLY"}
ALL_STEPS = GRAPHS | {"cudagraph_mode": "FULL_AND_PIECEWISE"}
PARANOID, CHEAP = {"cudagraph_checks": "PARANOID"}, {"cudagraph_checks": "CHEAP"}


def finish(cuda: Any, llm: LLM, *, max_tokens: int = 4, **params: Any) -> None:
    """Run all prompts to their end and check that there was no fault."""
    requests = [SamplingParams(max_tokens=max_tokens, ignore_eos=True, **each, **params) for each in PLAIN]
    done = cuda.run(llm, PROMPTS, requests)
    assert not cuda.faults, "\n".join(cuda.faults)
    assert len(done) == len(PROMPTS)
    assert {output.outputs[0].finish_reason for output in done} <= {"length", "stop"}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"attention_backend": "torch"}, id="torch-attention"),
        pytest.param(SLOTS, id="slots"),
        pytest.param(DRAFTS | SLOTS, id="drafts-slots"),
        pytest.param(DRAFTS | {"speculative_rule": "ratio"}, id="drafts-ratio", marks=SLOW),
        pytest.param(DRAFTS | {"speculative_rule": "block"}, id="drafts-block", marks=SLOW),
        pytest.param(DRAFTS | {"draft_policy": {1: 1, 2: 2}}, id="drafts-mapping", marks=SLOW),
        pytest.param(DRAFTS | {"draft_policy": "auto"}, id="drafts-auto", marks=SLOW),
        pytest.param(PREFIX | DRAFTS, id="prefix-drafts", marks=SLOW),
        pytest.param(PREFIX | DRAFTS | SLOTS | {"mamba_cache_mode": "align"}, id="prefix-drafts-slots-align"),
    ],
)
def test_no_step_waits_or_mixes_devices(cuda: Any, settings: dict[str, Any]) -> None:
    """Other settings, drafts alone and prefix caching alone are covered by the tests below, which check more."""
    llm = cuda.make(**settings)
    assert llm.engine.device == torch.device("cuda:0")
    finish(cuda, llm, max_tokens=24 if settings.get("draft_policy") == "auto" else 4)
    stats = llm.get_metrics()
    assert (stats.num_cached_tokens > 0) == ("enable_prefix_caching" in settings)
    assert (stats.num_verified_tokens > stats.num_verify_rows) == ("draft" in settings)


@pytest.mark.parametrize("settings", [{}, DRAFTS, SLOTS], ids=["plain", "drafts", "slots"])
def test_what_leaves_the_device_and_comes_back_is_not_waited_for(
    cuda: Any, sized: Callable[..., LLM], settings: dict[str, Any]
) -> None:
    llm = sized(cuda.make, 13, 1, kv_offload_bytes=1 << 20, **PREFIX | settings)
    prompts = [[seed * 7 + i for i in range(40)] for seed in (1, 2, 3, 1)]
    params = [SamplingParams(max_tokens=3, ignore_eos=True)] * len(prompts)
    done = cuda.run(llm, prompts, params)
    assert not cuda.faults, "\n".join(cuda.faults)
    assert len(done) == len(prompts)
    stats = llm.get_metrics().offload
    assert min(stats.stored_bytes, stats.loaded_bytes) > 0
    assert any("copies.py" in place for step in cuda.sent for place, _ in step)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain", marks=SLOW),
        pytest.param(DRAFTS | PREFIX, id="drafts", marks=SLOW),
        pytest.param(DRAFTS | GRAPHS, id="graphs"),
    ],
)
def test_a_steady_step_sends_one_copy_of_counts_and_new_blocks(cuda: Any, settings: dict[str, Any]) -> None:
    """256 rows, some with a long context: the bytes depend on the number of rows, not on their length."""
    rows, long = 256, 90_000
    llm = cuda.make(
        max_num_seqs=rows,
        max_model_len=1 << 17,
        max_num_batched_tokens=1 << 18,
        kv_cache_memory_bytes=1 << 34,
        **settings,
    )
    prompts = [[1 + i % 90] * (3 if i > 1 else long) for i in range(rows)]
    ruled = {"repetition_penalty": 1.1, "logit_bias": {3: 1.5}, "allowed_token_ids": [*range(1, 90)]}
    params = [
        SamplingParams(
            max_tokens=50, ignore_eos=True, temperature=0.8, top_p=0.9, min_p=0.01, seed=i,
            **(ruled if i % 16 == 0 else {}),
        )
        for i in range(rows)
    ]  # fmt: skip
    cuda.run(llm, prompts, params, max_steps=9)
    assert not cuda.faults, "\n".join(cuda.faults)
    begin, _, _, *steady = (sum(size for _, size in step) for step in cuda.sent)
    assert begin > long * 4
    assert max(steady) < 4096
    counts = 0 if "draft" in settings else rows * 4  # with drafts only the device knows them
    assert counts <= min(steady) < counts + rows, "the counts, and few cells"
    assert {len(step) for step in cuda.sent[3:]} == {1}


@pytest.mark.parametrize("settings", [PREFIX, PREFIX | DRAFTS], ids=["plain", "drafts"])
def test_a_step_in_which_all_rows_begin_blocks_and_pages_sends_their_cells(cuda: Any, settings: dict[str, Any]) -> None:
    """All rows cross a block boundary in the same step: the most that a decode step can send."""
    rows = 256
    llm = cuda.make(max_num_seqs=rows, max_num_batched_tokens=1 << 13, kv_cache_memory_bytes=1 << 30, **settings)
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    cuda.run(llm, [[1 + i % 90] * 3 for i in range(rows)], [params] * rows, max_steps=20)
    assert not cuda.faults, "\n".join(cuda.faults)
    _, _, _, *steady = (sum(size for _, size in step) for step in cuda.sent)
    if "draft" in settings:  # rows advance differently, and only the device knows their counts
        assert max(steady) < rows * 8
    else:
        # counts and new cells of block tables; one step later the cells of freed pages
        assert sorted(steady)[-3:] == [rows * 12, rows * 12, rows * 20]
        assert sorted(steady)[:-3] == [rows * 4] * (len(steady) - 3)


@pytest.mark.parametrize("settings", [{}, DRAFTS], ids=["plain", "drafts"])
def test_a_step_is_launched_before_the_one_before_it_is_waited_for(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Each output is fetched by one copy and waited for once, after the host's work for the next step."""
    run, emit, init, schedule = Engine._launch, OutputProcessor.emit, Fetch.__init__, Scheduler.schedule
    launched: list[StepInFlight] = []
    copies: list[Any] = []
    waits: list[tuple[int, int]] = []
    followed: set[int] = set()

    def planned(scheduler: Scheduler, *, in_flight: bool) -> Any:
        plan = schedule(scheduler, in_flight=in_flight)
        if in_flight and plan is not None:
            followed.add(len(launched) - 1)
        return plan

    def noted(engine: Engine, *step: Any) -> StepInFlight | None:
        if (flight := run(engine, *step)) is not None:
            launched.append(flight)
        return flight

    def waited(outputs: OutputProcessor, flight: StepInFlight, present: Any) -> Any:
        waits.append((next(i for i, each in enumerate(launched) if each is flight), len(launched)))
        return emit(outputs, flight, present)

    monkeypatch.setattr(Scheduler, "schedule", planned)
    monkeypatch.setattr(Engine, "_launch", noted)
    monkeypatch.setattr(OutputProcessor, "emit", waited)
    monkeypatch.setattr(Fetch, "__init__", lambda fetch, tensors: copies.append(tensors) or init(fetch, tensors))
    finish(cuda, cuda.make(**settings))
    drawing = [flight for flight in launched if flight.fetched is not None]
    assert len(copies) == len(drawing)
    assert [step for step, _ in waits] == sorted({step for step, _ in waits})
    ahead = [known - step - 1 for step, known in waits]
    assert ahead == [int(step in followed) for step, _ in waits], "the next step, where there is one, and no more"
    assert sum(ahead) > 3


def test_no_step_with_prompts_by_fla_waits(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging and calls are checked here; the scan itself is checked in its package's tests."""
    double, calls = Double.installed(monkeypatch), []
    for home in fla.FUNCTIONS.values():
        zeros = unlooked(getattr(double, home.name))
        counted = wraps(zeros)(lambda zeros=zeros, **given: calls.append(zeros) or zeros(**given))
        monkeypatch.setattr(sys.modules[home.module], home.name, counted)
    monkeypatch.setattr(fla, "version", lambda: "0.6.0")
    finish(cuda, cuda.make(prompt_scan="fla"))
    assert len({*calls}) == 2
    fla.kernel.cache_clear()


@pytest.mark.parametrize("settings", [{}, DRAFTS], ids=["plain", "drafts"])
def test_no_request_makes_a_step_wait(cuda: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    """All optional outputs are requested at once: each is handled separately."""
    words = ((5,), (6, 7), (1, 2, 3, 4))
    monkeypatch.setattr("bateleur.runner.engine.input_processor.bad_words_token_ids", lambda *_: words)
    params = {
        "logprobs": 3,
        "prompt_logprobs": 2,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "min_p": 0.05,
        "min_tokens": 3,
        "stop_token_ids": [*range(1, 40)],
        "logit_bias": {3: 1.5, 4: -100},
        "allowed_token_ids": [*range(1, 90)],
    }
    finish(cuda, cuda.make(**settings), **params)


@pytest.mark.parametrize(
    "settings", [{}, DRAFTS, DRAFTS | DECODES | {"cudagraph_capture_sizes": [6]}], ids=["plain", "drafts", "graphs"]
)
def test_no_grammar_makes_a_step_wait(cuda: Any, settings: dict[str, Any]) -> None:
    """Masks are sent to the device without a wait. Drafts are read when the next step is planned."""
    pytest.importorskip("llguidance")
    letters = Tokenizer(models.WordLevel({chr(40 + i): i for i in range(96)}, chr(40)))
    letters.decoder = decoders.Fuse()
    llm = cuda.make(**settings)
    llm._input_processor.grammars = Grammars(PreTrainedTokenizerFast(tokenizer_object=letters), 96, (0,))
    finish(cuda, llm, structured_outputs={"regex": r"(.|\n)*"})
    assert not llm.engine.requests


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param(DECODES | PARANOID, {DispatchReason.DECODE, DispatchReason.HAS_PREFILL}, id="decodes"),
        pytest.param(
            DECODES | CHEAP | DRAFTS, {DispatchReason.DECODE, DispatchReason.HAS_PREFILL}, id="decodes-drafts"
        ),
        pytest.param(ALL_STEPS | CHEAP, {DispatchReason.DECODE, DispatchReason.PIECEWISE}, id="all-steps"),
        pytest.param(
            ALL_STEPS | PARANOID | DRAFTS | SLOTS,
            {DispatchReason.DECODE, DispatchReason.PIECEWISE},
            id="all-steps-drafts-slots",
        ),
    ],
)
def test_no_step_on_a_graph_waits(cuda: Any, settings: dict[str, Any], expected: set[DispatchReason]) -> None:
    """Eager-backend graphs: staging, checks and poisoning of a replay, and the body itself."""
    llm = cuda.make(**settings)
    finish(cuda, llm)
    assert set(llm.engine.runner.graphs.decisions.by_reason) == expected
    if "draft" in settings:
        assert llm.engine.runner.proposer.drafter.decisions.by_reason[DispatchReason.DECODE] > 0


@pytest.mark.parametrize("mode", [{}, DECODES], ids=["no-graphs", "graphs"])
def test_no_request_is_the_first_to_launch_a_form_of_a_draw(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any]
) -> None:
    """Truncation and penalties have kernels of their own: no request parameter causes a compilation in a step."""
    launched: set[tuple[bool, bool, bool, int | None]] = set()
    verifies, samples = (import_module(f"bateleur.eagle.{name}") for name in ("rejection_sampler", "sample"))
    coupled, alone = verifies.COUPLED.torch, samples.SAMPLE.torch

    def note(logits: Tensor, metadata: Any, *, drafts: bool) -> None:
        penalties = None if metadata is None else metadata.penalties
        before = None if penalties is None or penalties.before is None else penalties.before.shape[1]
        truncates = metadata is not None and metadata.truncates(logits.shape[1])
        launched.add((drafts, metadata is not None, truncates, None if penalties is None else before or 0))

    def verified(logits: Tensor, *args: Any, metadata: Any, **options: Any) -> Any:
        note(logits, metadata, drafts=True)
        return coupled(logits, *args, metadata=metadata, **options)

    def sampled(logits: Tensor, metadata: Any, *args: Any) -> Any:
        note(logits, metadata, drafts=False)
        return alone(logits, metadata, *args)

    monkeypatch.setattr(verifies, "COUPLED", Implementations(verified))
    monkeypatch.setattr(samples, "SAMPLE", Implementations(sampled))
    # One kernel on CUDA.
    monkeypatch.setattr(verifies, "sample", lambda *args, vocab: alone(*args, Role.TARGET, vocab))
    llm = cuda.make(**DRAFTS, **mode)
    before = launched.copy()
    launched.clear()
    for params in ({}, {"min_p": 0.1}, {"repetition_penalty": 1.1}):
        finish(cuda, llm, **params)
    assert {kind for *_, kind in launched} == {None, 0, 2}
    assert launched <= before


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain"),
        pytest.param(DRAFTS, id="drafts", marks=SLOW),
        pytest.param(DRAFTS | SLOTS | PREFIX, id="drafts-slots-prefix", marks=SLOW),
        pytest.param(DRAFTS | ALL_STEPS, id="drafts-graphs", marks=SLOW),
    ],
)
def test_arguments_of_kernels_begin_at_16_bytes(cuda: Any, settings: dict[str, Any]) -> None:
    """So no kernel is compiled twice for even and odd numbers of rows."""
    llm = cuda.make(max_num_seqs=7, **settings)
    finish(cuda, llm)
    finish(cuda, llm, repetition_penalty=1.1)
    assert cuda.unaligned == []


def test_clearing_fresh_blocks_does_not_wait(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonBackend, "needs_finite_cache", True)
    finish(cuda, cuda.make(**DRAFTS))


# --- tests of the harness itself -------------------------------------------------------------------------------------


def into_mask(x: Tensor) -> None:
    x[x > 0] = x.flatten()[:3]


def condition(x: Tensor) -> None:
    if (x > 0).any():
        raise AssertionError("a fake tensor has no value to decide by")


def fill(x: Tensor) -> None:
    x[x > 0] = 0


FAULTS = [
    pytest.param(
        lambda x: x.copy_(torch.zeros(x.shape), non_blocking=True), "copy from pageable memory", id="pageable"
    ),
    pytest.param(lambda x: x.cpu(), "blocking copy from cuda to cpu by aten::_to_copy", id="cpu"),
    pytest.param(lambda x: torch.zeros(2).to(x.device), "blocking copy from cpu to cuda by aten::_to_copy", id="to"),
    pytest.param(lambda x: x.new_tensor([2.0]), "blocking copy from cpu to cuda by aten::_to_copy", id="new_tensor"),
    pytest.param(
        lambda x: torch.tensor(2.0, device=x.device), "blocking copy from cpu to cuda by aten::_to_copy", id="tensor"
    ),
    pytest.param(lambda x: x.copy_(torch.zeros(x.shape)), "blocking copy from cpu to cuda by aten::copy_", id="copy_"),
    pytest.param(lambda x: torch.zeros(x.shape).copy_(x), "blocking copy from cuda to cpu by aten::copy_", id="fetch"),
    pytest.param(lambda x: x[0, 0].item(), "read by aten::_local_scalar_dense", id="item"),
    pytest.param(lambda x: x[0].tolist(), "read by aten::_local_scalar_dense", id="tolist"),
    pytest.param(condition, "read by aten::_local_scalar_dense", id="condition"),
    pytest.param(lambda x: x.nonzero(), "read by aten::nonzero", id="nonzero"),
    pytest.param(lambda x: x.masked_select(x > 0), "read by aten::masked_select", id="masked_select"),
    pytest.param(lambda x: x[x > 0], "read by aten::index with a mask", id="mask"),
    pytest.param(into_mask, "read by aten::index_put_ with a mask", id="into-mask"),
    pytest.param(lambda x: x + torch.zeros(x.shape), "CPU and CUDA tensors in aten::add", id="add"),
    pytest.param(lambda x: x[torch.tensor([0])], "CPU and CUDA tensors in aten::index", id="index"),
    pytest.param(lambda x: torch.cat((x, torch.zeros(x.shape))), "CPU and CUDA tensors in aten::cat", id="cat"),
]
NO_FAULTS = [
    pytest.param(lambda x: x.to("cpu", non_blocking=True), id="to"),
    pytest.param(lambda x: x * torch.tensor(2.0), id="number"),
    pytest.param(fill, id="fill"),
    pytest.param(lambda x: torch.zeros(3)[torch.ones(3) > 0].tolist(), id="host"),
]


def in_every_step(monkeypatch: pytest.MonkeyPatch, do: Callable[[Tensor], object]) -> None:
    """Apply a function to the hidden states before sampling in every step."""
    verify = RejectionSampler.verify

    def verify_and_do(self: RejectionSampler, plan: Any, batch: Any, hidden: Tensor, *masks: Any) -> Any:
        do(hidden)
        return verify(self, plan, batch, hidden, *masks)

    monkeypatch.setattr(RejectionSampler, "verify", verify_and_do)


@pytest.mark.parametrize(("do", "fault"), FAULTS)
def test_a_fault_is_found_where_it_is(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, do: Callable[[Tensor], object], fault: str
) -> None:
    llm = cuda.make()  # warm-up may wait
    in_every_step(monkeypatch, do)
    cuda.run(llm, [[5]], [SamplingParams(max_tokens=2)])
    first = do.__code__.co_firstlineno
    last = max(line for *_, line in do.__code__.co_lines() if line is not None)
    assert cuda.faults
    assert cuda.faults[0] in {f"{fault} at {__file__}:{line}" for line in range(first, last + 1)}


@pytest.mark.parametrize("do", NO_FAULTS)
def test_what_does_not_wait_is_no_fault(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, do: Callable[[Tensor], object]
) -> None:
    llm = cuda.make()
    in_every_step(monkeypatch, do)
    assert len(cuda.run(llm, [[5]], [SamplingParams(max_tokens=2)])) == 1
    assert cuda.faults == []


def test_a_blocking_upload_is_named(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own function without its `non_blocking`."""
    monkeypatch.setattr(step_batch, "upload", lambda array, device: torch.from_numpy(array).to(device))
    with pytest.raises(AssertionError, match=r"blocking copy from cpu to cuda .*test_fake_cuda\.py:\d+"):
        finish(cuda, cuda.make(**DRAFTS))


def test_other_errors_are_raised(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = cuda.make()
    in_every_step(monkeypatch, lambda x: {}["missing"])
    with pytest.raises(KeyError, match="missing"):
        cuda.run(llm, [[5]], [SamplingParams(max_tokens=2)])


CALLS = [
    pytest.param(lambda x: x + 1, id="new"),
    pytest.param(lambda x: x.add_(1), id="in-place"),
    pytest.param(lambda x: x[1:, 1].unsqueeze(0), id="view"),
    pytest.param(lambda x: x.split([1, 2], 1), id="views"),
    pytest.param(lambda x: x.max(1), id="two"),
    pytest.param(lambda x: torch.add(x, 2, out=x), id="out"),
    pytest.param(lambda x: x.to(torch.float64).t().contiguous(), id="several"),
]


@pytest.mark.parametrize("call", CALLS)
def test_what_is_remembered_is_what_torch_says(call: Callable[[Tensor], Any]) -> None:
    """The layout of results and the owner of their memory."""

    def layouts(mode: FakeTensorMode) -> list[Any]:
        with mode:
            x = torch.empty(3, 5, device="cuda:0")[:, ::2]
            found = call(x)
            told: list[Any] = [type(found)]
            for each in [found] if isinstance(found, Tensor) else found:
                own = each.untyped_storage()._cdata != x.untyped_storage()._cdata
                told += [each is x, own, each.shape, each.stride(), each.storage_offset(), each.dtype, each.device]
        return told

    class Remembering(QuickFakes):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            return self.result(func, types, args, kwargs, leaves_of((*args, *kwargs.values())))

    expected = layouts(FakeTensorMode())
    assert layouts(Remembering()) == expected, "seen for the first time, or not"
    assert layouts(Remembering()) == expected


def test_nothing_stays_replaced(harness: ModuleType) -> None:
    before = (torch.inference_mode, Engine.step, OutputProcessor.emit, Fetch.__init__)
    with pytest.MonkeyPatch.context() as patch:
        cuda = harness.FakeCuda(patch)
        assert all(old is not new for old, new in zip(before, (torch.inference_mode, Engine.step), strict=False))
        cuda.run(cuda.make(), [[5]], [SamplingParams(max_tokens=2)])
    assert before == (torch.inference_mode, Engine.step, OutputProcessor.emit, Fetch.__init__)
