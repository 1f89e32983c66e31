"""The engine end to end with the shipped model: outputs do not depend on scheduling."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bateleur.cudagraph import BatchExecutionDescriptor, CudaGraphMode, Phase
from bateleur.eagle import Keys, Role, gumbel
from bateleur.runner import LLM, RequestOutput, SamplingParams
from bateleur.runner.assets import shipped_model

PROMPTS = [
    "def fibonacci(n):",
    "import os\nimport sys\n\n\nclass",
    "x",
    "    def __init__(self, name, value=None, *, key):\n        self.name = name\n        self.value =",
    "for line in open(path):\n",
]
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=20, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def is_idle(llm: LLM) -> bool:
    """Whether all blocks, rows and requests are free."""
    scheduler = llm.engine.scheduler
    assert scheduler.pool is not None
    return (
        not llm.has_unfinished_requests
        and scheduler.pool.num_free == scheduler.pool.capacity
        and len(scheduler.table.free_rows) == llm.limits.max_num_seqs
        and not scheduler.table.block_table.any()
    )


@pytest.fixture(scope="module")
def alone(make_llm: Callable[..., LLM]) -> dict[str, list[list[int]]]:
    """Outputs of each prompt alone, the reference for every schedule."""
    llm = make_llm(max_num_seqs=1)
    return {
        "greedy": [ids(llm.generate(prompt, GREEDY))[0] for prompt in PROMPTS],
        "sampled": [ids(llm.generate(prompt, SAMPLED))[0] for prompt in PROMPTS],
    }


def test_greedy_tokens_equal_transformers() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = shipped_model()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    llm = LLM(device="cpu", dtype="float32", max_model_len=256)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY), strict=True):
        tokens = tokenizer(prompt, return_tensors="pt").input_ids
        assert output.prompt_token_ids == tokens[0].tolist()
        with torch.no_grad():
            greedy = {"do_sample": False, "repetition_penalty": 1.0}  # overrides generation_config.json
            full = model.generate(tokens, max_new_tokens=20, min_new_tokens=20, **greedy)
        assert output.outputs[0].token_ids == full[0, tokens.shape[1] :].tolist()


def test_a_draw_is_the_models_law_and_the_noise_of_seed_and_position() -> None:
    """Each token is argmax(logits / T + gumbel(seed, position)) of transformers' logits."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(shipped_model(), dtype=torch.float32).eval()
    llm = LLM(device="cpu", dtype="float32", max_model_len=256)
    params = SamplingParams(temperature=0.9, seed=-5, max_tokens=16, ignore_eos=True)
    for output in llm.generate(PROMPTS[:2], params):
        prompt, drawn = output.prompt_token_ids, output.outputs[0].token_ids
        with torch.no_grad():
            logits = model(torch.tensor([prompt + drawn])).logits[0, len(prompt) - 1 : -1]
        positions = torch.arange(len(prompt), len(prompt) + 16)
        noise = gumbel(Keys(torch.full((16,), -5), positions), Role.TARGET, logits.shape[1])
        assert (logits / 0.9 + noise).argmax(-1).tolist() == drawn


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="batched"),
        pytest.param({"max_num_batched_tokens": 8}, id="chunks of at most 8"),
        pytest.param({"max_num_seqs": 3, "max_num_batched_tokens": 3}, id="chunks of 1 to 3"),
        pytest.param({"max_num_seqs": 2, "block_size": 4}, id="two at a time, other blocks"),
        pytest.param({"attention_backend": "reference"}, id="reference attention"),
    ],
)
def test_tokens_do_not_depend_on_the_schedule(
    make_llm: Callable[..., LLM], alone: dict[str, list[list[int]]], kind: str, settings: dict[str, Any]
) -> None:
    llm = make_llm(**settings)
    params = GREEDY if kind == "greedy" else SAMPLED
    assert ids(llm.generate(PROMPTS, params)) == alone[kind]
    assert ids(llm.generate(PROMPTS[::-1], params)) == alone[kind][::-1]
    assert is_idle(llm)


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_tokens_survive_preemption(make_llm: Callable[..., LLM], alone: dict[str, list[list[int]]], kind: str) -> None:
    """A cache so small that requests are preempted and recomputed."""
    one_block = 8 * make_llm().cache_plan.kv_bytes // (make_llm().cache_plan.num_blocks * 8)
    state = make_llm().cache_plan.state_bytes
    llm = make_llm(max_model_len=64, kv_cache_memory_bytes=state + 11 * one_block)
    outputs = llm.generate(PROMPTS, GREEDY if kind == "greedy" else SAMPLED)
    assert ids(outputs) == alone[kind]
    assert sum(output.num_preemptions for output in outputs) > 0
    assert llm.get_metrics().num_preemptions == sum(output.num_preemptions for output in outputs)
    assert is_idle(llm)


def test_requests_join_and_leave_while_others_run(llm: LLM, alone: dict[str, list[list[int]]]) -> None:
    finished: dict[str, RequestOutput] = {}
    first = llm.add_request(PROMPTS[0], SAMPLED)
    victim = llm.add_request(PROMPTS[1], SamplingParams(max_tokens=100, ignore_eos=True, seed=1))
    late = None
    for step in range(200):
        for output in llm.step():
            finished[output.request_id] = output
        if step == 5:
            late = llm.add_request(PROMPTS[3], SAMPLED)
        if step == 9:
            aborted = llm.abort(victim)
            assert aborted.finished
            assert aborted.outputs[0].finish_reason == "abort"
            assert 5 <= len(aborted.outputs[0].token_ids) < 100
        if not llm.has_unfinished_requests:
            break
    assert victim not in finished
    assert finished[first].outputs[0].token_ids == alone["sampled"][0]
    assert late is not None
    assert finished[late].outputs[0].token_ids == alone["sampled"][3]
    assert is_idle(llm)


def test_generate_keeps_what_other_requests_report(llm: LLM) -> None:
    queued = llm.add_request("x", SamplingParams(max_tokens=2, ignore_eos=True))
    llm.generate("y", SamplingParams(max_tokens=8, ignore_eos=True))
    assert llm.has_unfinished_requests
    assert [output.request_id for output in llm.step()] == [queued]
    assert is_idle(llm)


def test_a_recycled_state_slot_starts_from_zero(make_llm: Callable[..., LLM]) -> None:
    """M33, M29: free state slots and KV blocks are full of NaN, as an earlier request could leave them."""
    llm = make_llm()
    clean = ids(llm.generate(PROMPTS, GREEDY))
    for conv, ssm in llm.engine.caches.states:
        conv.fill_(torch.nan)
        ssm.fill_(torch.nan)
    for pair in llm.engine.caches.kv:
        for cache in pair:
            cache[1:].fill_(torch.nan)
    assert ids(llm.generate(PROMPTS, GREEDY)) == clean


def test_large_batch_before_small_leaves_no_trace(
    make_llm: Callable[..., LLM], alone: dict[str, list[list[int]]]
) -> None:
    llm = make_llm()
    llm.generate(PROMPTS * 3, SAMPLED)
    llm.engine.runner.producer.poison()
    assert ids(llm.generate(PROMPTS[:2], SAMPLED)) == alone["sampled"][:2]


def test_a_failing_step_loses_no_request(
    make_llm: Callable[..., LLM], alone: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step raises after all states were written: the rows are recomputed, not advanced twice."""
    llm = make_llm()
    pending = [llm.add_request(prompt, SAMPLED) for prompt in PROMPTS]
    for _ in range(4):
        llm.step()
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.model, "logits", _out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            llm.step()
    finished: dict[str, list[int]] = {}
    while llm.has_unfinished_requests:
        for output in llm.step():
            finished[output.request_id] = output.outputs[0].token_ids
    assert [finished[name] for name in pending] == alone["sampled"]
    assert is_idle(llm)


def _out_of_memory(*_: object) -> torch.Tensor:
    raise RuntimeError("out of memory")


def test_nan_logits_end_their_request_only(
    make_llm: Callable[..., LLM], alone: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A7: a NaN never becomes a token."""
    llm = make_llm()
    model = llm.engine.model
    plain = model.logits

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        logits = plain(hidden)
        logits[1, 5] = torch.nan
        return logits

    names = [llm.add_request(prompt, SAMPLED) for prompt in PROMPTS[:3]]
    reports = llm.step()
    assert reports == []
    with monkeypatch.context() as patch:
        patch.setattr(model, "logits", poisoned)
        (report,) = llm.step()
    assert report.request_id == names[1]
    assert report.outputs[0].finish_reason == "error"
    assert "NaN" in str(report.outputs[0].stop_reason)
    assert report.outputs[0].token_ids == alone["sampled"][1][:1]
    finished = {}
    while llm.has_unfinished_requests:
        finished |= {output.request_id: output.outputs[0].token_ids for output in llm.step()}
    assert [finished[names[0]], finished[names[2]]] == [alone["sampled"][0], alone["sampled"][2]]
    assert is_idle(llm)


def test_kernels_are_told_the_batchs_own_bound(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM #43991: max_model_len is the bound under capture only."""
    llm = make_llm()
    state = llm.engine.runner.model_state
    prepare, seen = state.prepare, []

    def spy(batch: Any, *rest: Any, **more: Any) -> Any:
        seen.append((batch.max_seq_len, int(batch.seq_lens.max())))
        return prepare(batch, *rest, **more)

    monkeypatch.setattr(state, "prepare", spy)
    llm.generate(PROMPTS, GREEDY)
    assert len(seen) == llm.get_metrics().num_steps
    assert all(bound == longest < 256 for bound, longest in seen)
    key = BatchExecutionDescriptor(CudaGraphMode.PIECEWISE, 4)
    for phase in (Phase.WARMUP, Phase.CAPTURE):
        assert llm.engine.runner.producer.stage(key, phase).state.batch.max_seq_len == 256


def test_every_step_is_decided_and_counted(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    llm.generate(PROMPTS, GREEDY)
    decisions = llm.engine.runner.graphs.decisions
    assert decisions.by_reason.total() == llm.get_metrics().num_steps > 0
    assert [str(why) for why in decisions.by_reason] == ["eager: the dispatcher has no graphs"]


def test_unseeded_requests_differ_and_repeat_with_the_engine_seed(make_llm: Callable[..., LLM]) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    one, two, other = make_llm(seed=3), make_llm(seed=3), make_llm(seed=4)
    a = ids(one.generate(["x = "] * 3, params))
    assert len({tuple(tokens) for tokens in a}) == 3
    assert ids(two.generate(["x = "] * 3, params)) == a
    assert ids(other.generate(["x = "] * 3, params)) != a


def test_only_transformers_families_are_needed_from_the_folder(tmp_path: Path) -> None:
    """A copy of the shipped folder loads like the original."""
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((shipped_model() / name).read_bytes())
    llm = LLM(tmp_path, device="cpu", max_model_len=64)
    assert ids(llm.generate("x", GREEDY)) == ids(LLM(device="cpu", max_model_len=64).generate("x", GREEDY))
