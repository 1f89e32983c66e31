"""The engine on recorded graphs, which follow the rules of CUDA graphs, generates the tokens of eager runs."""

import json
import logging
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bateleur.cudagraph import (
    AddressMoved,
    BatchExecutionDescriptor,
    CudaGraphMode,
    DanglingExternal,
    DispatchReason,
    Execution,
    Phase,
    ReplayChecks,
    StaleState,
)
from bateleur.metadata import BatchInvariant, BatchLimits, BuildPhase, GraphSupport
from bateleur.metadata.backends.paged import TorchBackend, TritonBackend
from bateleur.runner import LLM, RequestOutput, SamplingParams
from bateleur.runner.cli import main
from bateleur.runner.config.graph_options import GraphOptions
from bateleur.runner.model_runner.graph_dispatcher import make_dispatcher

PROMPTS = [
    "def:fibonacci(n):",
    "import_os;import_sys;class",
    "x",
    "def:__init__(self,name,value=None,*,key):self.name=name;self.value=",
    "for:line:in:open(path):",
]
# Different lengths, so that the batch shrinks: large keys before small ones (T-A5).
SAMPLED = [SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=6 + 4 * i, ignore_eos=True) for i in range(5)]
SIZES = [1, 2, 4, 8]
FULL_4 = BatchExecutionDescriptor(CudaGraphMode.FULL, 4, 4, 1, 1)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def make_llm(make_llm: Callable[..., LLM], tiny_hybrid: Path) -> Callable[..., LLM]:
    return partial(make_llm, model=tiny_hybrid)


@pytest.fixture(scope="module")
def random_head(tiny_head: Path) -> Path:
    return tiny_head


@pytest.fixture(scope="module")
def make(make_llm: Callable[..., LLM]) -> Callable[..., LLM]:
    """A small engine on recorded graphs."""

    def build(mode: str = "FULL_DECODE_ONLY", **overrides: Any) -> LLM:
        settings = {
            "cudagraph_mode": mode,
            "cudagraph_backend": "recorded",
            "cudagraph_capture_sizes": SIZES,
            "max_model_len": 96,
        }
        return make_llm(**(settings | overrides))

    return build


@pytest.fixture(scope="module")
def eager_tokens(make_llm: Callable[..., LLM]) -> list[list[int]]:
    return ids(make_llm(max_model_len=96).generate(PROMPTS, SAMPLED))


@pytest.mark.parametrize("checks", ["OFF", "PARANOID"])
@pytest.mark.parametrize(
    ("mode", "settings", "expected"),
    [
        ("FULL_DECODE_ONLY", {}, {DispatchReason.DECODE, DispatchReason.HAS_PREFILL}),
        (
            "FULL_DECODE_ONLY",
            {"max_num_seqs": 4, "max_num_batched_tokens": 7},
            {DispatchReason.DECODE, DispatchReason.HAS_PREFILL},
        ),
        ("PIECEWISE", {"max_num_batched_tokens": 8}, {DispatchReason.PIECEWISE}),
        (
            "PIECEWISE",  # captured with a prompt after decodes, and replayed without one
            {"max_num_seqs": 2, "max_num_batched_tokens": 8, "cudagraph_capture_sizes": [3, 8]},
            {DispatchReason.PIECEWISE},
        ),
        ("FULL_AND_PIECEWISE", {"max_num_batched_tokens": 8}, {DispatchReason.DECODE, DispatchReason.PIECEWISE}),
    ],
)
def test_recorded_graphs_give_the_tokens_of_eager_steps(
    make: Callable[..., LLM],
    eager_tokens: list[list[int]],
    mode: str,
    settings: dict[str, Any],
    expected: set[DispatchReason],
    checks: str,
) -> None:
    llm = make(mode, cudagraph_checks=checks, **settings)
    assert ids(llm.generate(PROMPTS, SAMPLED)) == eager_tokens
    assert ids(llm.generate(PROMPTS[::-1], SAMPLED[::-1])) == eager_tokens[::-1]
    decisions = llm.engine.runner.graphs.decisions
    assert set(decisions.by_reason) == expected
    assert decisions.by_reason.total() == llm.get_metrics().num_steps
    assert decisions.num_pad_tokens > 0


def test_the_eager_backend_runs_the_same_path(make: Callable[..., LLM], eager_tokens: list[list[int]]) -> None:
    llm = make(cudagraph_backend="auto")
    assert llm.engine.runner.graphs.manager is not None
    assert llm.engine.runner.graphs.manager.report.backend == "eager"
    assert ids(llm.generate(PROMPTS, SAMPLED)) == eager_tokens
    assert llm.engine.runner.graphs.decisions.by_reason[DispatchReason.DECODE] > 0


@pytest.mark.parametrize("backend", [TorchBackend, TritonBackend])
def test_full_graphs_of_mixed_batches_where_every_layer_is_attention(
    tiny_llama: Path, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key for mixed batches freezes no decode/prefill split: under capture the paged builder returns none.

    With CUDA's default backend, whose operators run as torch implementations here, the rotary embedding is part of the
    graph.
    """
    monkeypatch.setattr("bateleur.runner.config.resolve.get_backend", lambda *_, **__: backend())
    prompts = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (1, 9, 4, 14)]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 3, 7, 5)]
    common = {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 12, "max_model_len": 32}
    expected = LLM(tiny_llama, skip_tokenizer_init=True, **common).generate(prompts, params)
    llm = LLM(
        tiny_llama,
        skip_tokenizer_init=True,
        cudagraph_mode="FULL",
        cudagraph_backend="recorded",
        cudagraph_capture_sizes=[1, 2, 4, 12],
        cudagraph_checks="PARANOID",
        **common,
    )
    assert llm.engine.runner.graphs.dispatcher.mode is CudaGraphMode.FULL
    assert ids(llm.generate(prompts, params)) == ids(expected)
    assert set(llm.engine.runner.graphs.decisions.by_reason) == {DispatchReason.DECODE, DispatchReason.MIXED}
    assert llm.engine.verify_graphs().ok


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_a_hybrid_model_lowers_full_and_says_so(make: Callable[..., LLM]) -> None:
    with pytest.warns(RuntimeWarning, match="cudagraph_mode is FULL_AND_PIECEWISE: .*every batch"):
        llm = make("FULL", cudagraph_capture_sizes=[2])
    assert llm.engine.runner.graphs.dispatcher.mode is CudaGraphMode.FULL_AND_PIECEWISE


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE"])
def test_replays_equal_eager_runs_on_random_steps(make: Callable[..., LLM], mode: str) -> None:
    """Random rows over random caches, keys from large to small, with padded rows."""
    report = make(mode, cudagraph_checks="PARANOID").engine.verify_graphs(fuzz=4)
    assert report.ok, report
    parts = {"forward": 2, "end": 3} if mode == "FULL_AND_PIECEWISE" else {"forward": 1}
    counts = Counter(each.part for each in report.comparisons)
    assert counts == {part: kinds * len(SIZES) for part, kinds in parts.items()}


def test_verifying_finds_a_graph_that_differs(make: Callable[..., LLM]) -> None:
    llm = make()
    report = llm.engine.verify_graphs(fuzz=2)
    assert report.ok
    norm = llm.engine.model._final_norm
    baked = norm.weight
    norm.weight = baked * 2  # the graphs still read the old tensor
    assert not llm.engine.verify_graphs(fuzz=2).ok
    del baked  # T-C1: the old tensor is freed
    with pytest.raises(DanglingExternal, match=r"shape \(48,\)"):
        llm.engine.verify_graphs(fuzz=2)


@pytest.mark.parametrize("policy", ["slots", "fold"])
def test_verifying_finds_writes_that_are_lost_or_stray(make: Callable[..., LLM], policy: str) -> None:
    """The outputs of a body do not show such writes; the next step would."""
    llm = make(cudagraph_capture_sizes=[4], mamba_state_policy=policy)
    caches, manager = llm.engine.caches, llm.engine.runner.graphs.manager
    assert manager is not None
    (record,) = manager._captured.values()
    recording = record.graph
    run = recording.replay
    rings = [rings.tensors() for rings in caches.rings if rings is not None]
    states = ("states", caches.states) if policy == "slots" else ("rings", rings)
    for kind, layers in (("kv", caches.kv), states):
        tensors = [tensor for layer in layers for tensor in layer]

        def forgets(state: Any, tensors: list[torch.Tensor] = tensors) -> Any:
            before = [tensor.clone() for tensor in tensors]
            output = run(state)
            for tensor, was in zip(tensors, before, strict=True):
                tensor.copy_(was)
            return output

        recording.replay = forgets  # type: ignore[method-assign]
        (comparison,) = llm.engine.verify_graphs().failing
        assert comparison.failure is not None
        assert f"{kind}.0." in comparison.failure

    def strays(state: Any) -> Any:
        caches.states[0][0][-1] += 1.0  # a page that no row uses in this step
        return run(state)

    recording.replay = strays  # type: ignore[method-assign]
    comparison, *behind = llm.engine.verify_graphs().failing
    assert comparison.part == "forward"
    assert {each.part for each in behind} <= {"end"}, "it is staged by a replay of that"
    assert "states.0.0 elsewhere" in str(comparison.failure)
    recording.replay = run  # type: ignore[method-assign]
    assert llm.engine.verify_graphs().ok


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "PIECEWISE"])
def test_verifying_passes_a_sound_engine_in_bfloat16(make: Callable[..., LLM], mode: str) -> None:
    """Memory alignment changes the order of its sums, and so their rounding."""
    report = make(mode, dtype="bfloat16", cudagraph_capture_sizes=[4]).engine.verify_graphs()
    assert report.ok, report.table()


class Draws(TorchDispatchMode):
    """Records dtype and size of each tensor that is filled with noise."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.seen.append((result.dtype, result.numel()))
        return result


@pytest.mark.parametrize("policy", ["slots", "fold"])
def test_noise_for_caches_has_their_dtype_and_is_only_where_rows_are(make: Callable[..., LLM], policy: str) -> None:
    """Float32 noise on the host for whole caches would take hours for those of a GPU."""
    settings = {"dtype": "bfloat16", "max_num_seqs": 16, "mamba_state_policy": policy}
    engine = make(cudagraph_capture_sizes=[2], **settings).engine
    caches = engine.caches.named()
    with Draws() as draws:
        staged = engine.runner.producer.fuzz(BatchExecutionDescriptor(CudaGraphMode.FULL, 2, 2, 1, 1), 0)
    assert len(draws.seen) == len(caches)
    assert Counter(dtype for dtype, _ in draws.seen) == Counter(each.dtype for each in caches.values())
    assert sum(count for _, count in draws.seen) < sum(each.numel() for each in caches.values()) / 4
    rows = engine.runner.producer.written(staged.state)
    for name, whole in caches.items():
        assert len(rows[name]) <= 3 < len(whole.flatten(0, 1) if name.startswith("kv") else whole), name


def test_verifying_waits_for_an_idle_engine(make: Callable[..., LLM]) -> None:
    llm = make()
    name = llm.add_request("x", SAMPLED[0])
    with pytest.raises(ValueError, match="1 are not finished"):
        llm.engine.verify_graphs()
    llm.abort(name)
    with pytest.raises(ValueError, match="no graphs"):
        make("NONE").engine.verify_graphs()


def test_kernels_are_told_the_longest_request_under_capture(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM #43991, both halves: max_model_len under capture, the batch's own bound at run time."""
    from bateleur.runner.model_runner.model_state import ModelState

    prepare = ModelState.prepare
    seen: dict[BuildPhase, set[int]] = {phase: set() for phase in BuildPhase}

    def spy(self: Any, batch: Any, key: Any, phase: BuildPhase = BuildPhase.RUN, **options: Any) -> Any:
        seen[phase].add(batch.max_seq_len)
        assert phase is not BuildPhase.RUN or batch.max_seq_len == int(batch.seq_lens.max())
        return prepare(self, batch, key, phase, **options)

    monkeypatch.setattr(ModelState, "prepare", spy)
    llm = make()
    llm.generate(PROMPTS, SAMPLED)
    assert seen[BuildPhase.CAPTURE] == seen[BuildPhase.WARMUP] == {96}
    assert len(seen[BuildPhase.RUN]) > 10
    assert max(seen[BuildPhase.RUN]) < 96


def test_a_failing_graph_runs_its_step_eagerly_from_then_on(
    make: Callable[..., LLM], eager_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """kekzl/imp#1417: the logits of the previous step must never replace those of a failed replay."""
    llm = make()
    manager = llm.engine.runner.graphs.manager
    assert manager is not None
    names = [llm.add_request(p, s) for p, s in zip(PROMPTS, SAMPLED, strict=True)]
    finished: dict[str, list[int]] = {}
    for step in range(200):
        if step == 3:
            (broken,) = (key for key in manager.ready if key.num_tokens == 8)
            recording = manager._captured[broken].graph
            monkeypatch.setattr(type(recording), "replay", _fails)
            with pytest.warns(RuntimeWarning, match="its requests are recomputed"):
                reports = llm.step()
            monkeypatch.undo()
        else:
            reports = llm.step()
        finished |= {output.request_id: output.outputs[0].token_ids for output in reports}
        if not llm.has_unfinished_requests:
            break
    assert [finished[name] for name in names] == eager_tokens
    assert broken not in manager.ready
    assert "device lost" in manager.report.table()
    assert llm.engine.runner.graphs.decisions.by_reason[DispatchReason.NOT_CAPTURED] > 0


def _fails(*_: object) -> None:
    raise RuntimeError("device lost")


def test_a_failing_capture_leaves_an_engine_that_runs(
    make: Callable[..., LLM], eager_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """T-K2: the failed key runs eagerly, the others on their graphs."""
    from bateleur.runner.model_runner.graph_dispatcher import GraphDispatcher

    body = GraphDispatcher._body

    def fails_for_four(self: GraphDispatcher, execution: Execution[Any]) -> torch.Tensor:
        if execution.key is not None and execution.key.num_tokens == 4:
            raise RuntimeError("no memory for four")
        return body(self, execution)

    with monkeypatch.context() as patch:
        patch.setattr(GraphDispatcher, "_body", fails_for_four)
        with pytest.warns(RuntimeWarning, match="no graph for FULL 4 tokens.*no memory for four"):
            llm = make()
    manager = llm.engine.runner.graphs.manager
    assert manager is not None
    assert sorted(key.num_tokens for key in manager.ready) == [1, 2, 8]
    assert ids(llm.generate(PROMPTS, SAMPLED)) == eager_tokens


def test_staged_steps_are_proof_and_states_are_lent(make: Callable[..., LLM]) -> None:
    """T-B1, T-C1, T-D2 on the engine's own states."""
    llm = make(cudagraph_checks="ADDRESSES")
    manager = llm.engine.runner.graphs.manager
    assert manager is not None
    states = manager.states
    large, small = (next(key for key in states if key.num_tokens == n) for n in (8, 2))
    with torch.inference_mode():
        first = states[large].restage(Phase.RUN)
        states[small].restage(Phase.RUN)
        with pytest.raises(StaleState):
            manager.replay(large, first)
        again = states[large].restage(Phase.RUN)
        assert manager.replay(large, again)[0].shape[0] == 8
        moved = llm.engine.caches.states[0][0].clone()
        llm.engine.caches.states[0] = (moved, llm.engine.caches.states[0][1])
        with pytest.raises(AddressMoved, match=r"states\.0\.0"):
            manager.replay(large, again)


def test_b1_a_batch_that_was_staged_before_another_is_not_replayed(make: Callable[..., LLM]) -> None:
    """Its tensors are views of buffers that hold the later batch."""
    producer, manager = (llm := make()).engine.runner.producer, llm.engine.runner.graphs.manager
    assert manager is not None
    large, small = (next(key for key in manager.ready if key.num_tokens == n) for n in (8, 2))
    with torch.inference_mode():
        old = producer.stage(large, Phase.RUN).state.batch
        assert manager.replay(large, producer.model_state.prepare(old, large))[0].shape[0] == 8
        producer.stage(small, Phase.RUN)
        for batch in (old, old.unpadded()):
            with pytest.raises(StaleState, match=r"FULL 8 tokens.*: staged at generation"):
                manager.replay(large, producer.model_state.prepare(batch, large))


@pytest.mark.parametrize("checks", ["ADDRESSES", "PARANOID"])
def test_b2_paranoid_validates_every_batch(make: Callable[..., LLM], checks: str) -> None:
    producer = make(cudagraph_checks=checks).engine.runner.producer
    with torch.inference_mode():
        batch = producer.stage(FULL_4, Phase.RUN).state.batch
        batch.positions[1] += 1
        if checks == "ADDRESSES":
            assert producer.model_state.prepare(batch, FULL_4).key == FULL_4
            return
        with pytest.raises(BatchInvariant, match="positions: has 2 for token 1, must be 1"):
            producer.model_state.prepare(batch, FULL_4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cudagraph_mode": "SOMETIMES"}, "cudagraph_mode is 'SOMETIMES'; it must be one of NONE, PIECEWISE"),
        ({"cudagraph_backend": "vulkan"}, "cudagraph_backend is 'vulkan'"),
        ({"cudagraph_backend": "cuda"}, "cudagraph_backend is 'cuda'"),
        ({"cudagraph_capture_sizes": []}, r"cudagraph_capture_sizes is \(\)"),
        ({"cudagraph_capture_sizes": [4, 0]}, r"cudagraph_capture_sizes\[1\] is 0"),
        ({"cudagraph_checks": "SOME"}, "cudagraph_checks is 'SOME'; it must be one of OFF"),
    ],
)
def test_bad_arguments(make_llm: Callable[..., LLM], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_llm(**arguments)


def test_a_user_who_names_the_enum_gets_it(make: Callable[..., LLM]) -> None:
    llm = make(CudaGraphMode.FULL_DECODE_ONLY, cudagraph_checks=ReplayChecks.OFF, cudagraph_capture_sizes=None)
    assert [key.num_reqs for key in llm.engine.runner.graphs.dispatcher.keys] == [8, 4, 2, 1]


def test_info_prints_what_runs_on_which_graph(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["info", "--graphs", "--cudagraph-mode", "FULL_AND_PIECEWISE", "--max-num-seqs", "6"]
    command += ["--cudagraph-capture-sizes", "1", "4", "16", "--max-num-batched-tokens", "20"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "mode FULL_AND_PIECEWISE, 6 graphs" in text
    assert "5-6  FULL 6 tokens, 6 requests, 1 each" in text
    assert "17-20  eager: more tokens than the largest graph" in text
    (shared,) = re.findall(r"^all graphs share about ([\d,]+) bytes; the driver keeps more for each$", text, re.M)
    assert main([*command, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["mode"] == "FULL_AND_PIECEWISE"
    assert f"{facts['bytes']:,}" == shared
    assert [coverage["query_len"] for coverage in facts["decode"]] == [1]
    assert facts["decode"][0]["spans"][0] == {
        "first": 1,
        "last": 1,
        "graph": "FULL 1 tokens, 1 requests, 1 each",
        "why": "decode graph",
    }


@pytest.mark.parametrize("draft", [False, True])
def test_the_start_says_what_graphs_took(
    make: Callable[..., LLM], random_head: Path, draft: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bateleur")
    drafts = {"draft": random_head, "num_speculative_tokens": 2, "cudagraph_capture_sizes": [3, 6]}
    llm = make("FULL_AND_PIECEWISE", **(drafts if draft else {}))
    reports = llm.engine.runner.graph_reports
    parts = {"forward", "end", "first draft pass", "draft chain", "proposal"} if draft else {"forward", "end"}
    assert set(reports) == parts
    costs, rows = llm.graph_costs, [row for report in reports.values() for row in report.captured]
    assert (costs.num_keys, costs.num_failed) == (len(rows), 0)
    assert costs.num_graphs == sum(row.num_graphs for row in rows) > len(rows)
    assert costs.nbytes == sum(row.nbytes for row in rows) > 0
    assert [record.message for record in caplog.records] == [str(costs)]
    assert re.fullmatch(r"captured \d+ graphs for \d+ keys in \d+\.\d s, [\d,]+ bytes", str(costs))
    assert make("NONE").graph_costs.num_graphs == 0
    assert len(caplog.records) == 1


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_all_graphs_of_an_engine_keep_little_more_than_the_largest(make: Callable[..., LLM], mode: str) -> None:
    """If every key kept its outputs and those of eager parts, memory would be 12 times the largest key's."""
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    engines = [make(mode, cudagraph_capture_sizes=sizes, **settings).engine for sizes in ([64], [*range(2, 65, 2)])]
    one, all_of_them = (engine.runner.graphs.manager.report for engine in engines if engine.runner.graphs.manager)
    largest = sum(row.nbytes for row in one.captured)
    assert len(all_of_them.captured) > 30
    assert 0 < all_of_them.nbytes <= 1.2 * largest


def test_info_shows_what_cuda_would_do_where_nothing_is_captured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--graphs", "--device", "cpu", "--max-num-seqs", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mode FULL_DECODE_ONLY, 3 graphs"
    assert lines[1].startswith("for a CUDA device: on cpu all steps run eagerly unless")
    assert "4 of 4 sizes at 1 tokens per request on a graph; padding 6.2% on average, 25.0% at worst" in lines
    assert main(["info", "--graphs", "--device", "cpu", "--cudagraph-mode", "NONE"]) == 0
    assert capsys.readouterr().out.startswith("mode NONE, 0 graphs\n\n")


def test_f2_graphs_for_drafts_are_counted_and_missed(
    make: Callable[..., LLM], capsys: pytest.CaptureFixture[str], random_head: Path
) -> None:
    """Sizes count tokens (vLLM #50488): sizes that cover every batch without drafts cover one of four with drafts."""
    sizes, note = ["1", "2", "4"], "3 of 4 batch sizes have no graph for rows of 5 tokens"
    command = ["info", "--graphs", "--cudagraph-mode", "FULL_DECODE_ONLY", "--draft", str(random_head)]
    command += ["--num-speculative-tokens", "4", "--max-num-seqs", "4", "--device", "cpu"]
    assert main([*command, "--cudagraph-capture-sizes", *sizes]) == 0
    text = capsys.readouterr().out
    assert note in text
    assert "decoding requests, with 4 drafts each" in text
    assert "1 of 4 sizes at 5 tokens per request on a graph" in text
    assert main(command) == 0
    assert "4 of 4 sizes at 5 tokens per request on a graph" in capsys.readouterr().out
    options = {"draft": random_head, "num_speculative_tokens": 4, "max_num_seqs": 4}
    with pytest.warns(RuntimeWarning, match=note):
        make(cudagraph_capture_sizes=[1, 2, 4], **options)


def test_a_mode_takes_the_longest_decoding_row_into_account() -> None:
    limits = BatchLimits(4, 64, 64)
    options = GraphOptions(CudaGraphMode.FULL_DECODE_ONLY, capture_sizes=[6])
    plan, reason = make_dispatcher(options, limits, GraphSupport.SINGLE_TOKEN, query_lens=(1, 3))
    assert plan.mode is CudaGraphMode.PIECEWISE
    assert reason is not None
    assert "decode rows have up to 3 tokens" in reason
    plan, reason = make_dispatcher(options, limits, GraphSupport.UNIFORM, (1, 3))
    assert reason is None
    assert [key.uniform_query_len for key in plan.keys] == [3, 1]


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE"])
def test_a4_real_rows_do_not_depend_on_what_padded_rows_hold(make: Callable[..., LLM], mode: str) -> None:
    """Every padded token has an id whose embedding is NaN, and free parts of the caches are full of NaN."""
    llm = make(mode)
    engine = llm.engine
    producer, graphs = engine.runner.producer, engine.runner.graphs
    assert graphs.manager is not None
    nan_id = engine.model.spec.vocab_size - 1
    compared = 0
    with torch.inference_mode():
        for key in graphs.dispatcher.keys:
            for seed in range(6):
                outputs = []
                for spoiled in (False, True):
                    staged = producer.fuzz(key, seed)
                    batch = staged.state.batch
                    batch.input_ids[: batch.num_actual_tokens].clamp_(max=nan_id - 1)
                    row = engine.model.embedding[nan_id].clone()
                    if spoiled:
                        engine.model.embedding[nan_id] = torch.nan
                        batch.input_ids[batch.num_actual_tokens :] = nan_id
                        for pair in engine.caches.states:
                            for states in pair:
                                states[0] = torch.nan
                        for pair in engine.caches.kv:
                            for cache in pair:
                                cache[0, 1:] = torch.nan
                    hidden = graphs.manager.replay(key, staged)[0]
                    outputs.append(hidden[: batch.num_actual_tokens].clone())
                    engine.model.embedding[nan_id] = row
                compared += batch.num_actual_tokens < batch.num_tokens
                assert torch.equal(outputs[0], outputs[1]), key
    assert compared >= 5
