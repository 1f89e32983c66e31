"""Several ranks generate the tokens of one process, for every family and with all engine features."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import ALIKE, EVEN

from bateleur.runner import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from bateleur.runner.cache.costs import CacheOptions
from bateleur.runner.cache.plan import plan_caches
from bateleur.runner.cache.tensors import Caches
from bateleur.runner.checkpoint.open import load_model, open_checkpoint
from bateleur.runner.config.engine_config import EngineConfig
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.sampling.rejection_sampler import TRUNCATED, RejectionSampler
from bateleur.runner.sampling.step_end import SampleDispatchReason

pytestmark = pytest.mark.usefixtures("forked_ranks")

PARAMS = [
    SamplingParams(temperature=0, max_tokens=11, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=11, ignore_eos=True),
    SamplingParams(temperature=0.8, n=2, max_tokens=7, ignore_eos=True),
]


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[each.token_ids for each in output.outputs] for output in outputs]


def prompts() -> list[dict[str, Any]]:
    """Three prompts that share 16 tokens."""
    ids: list[int] = np.random.default_rng(1).integers(3, 80, 40).tolist()
    return [{"prompt_token_ids": [*ids[:16], *end]} for end in ([5, 7, 9], ids[16:37], [11] * 3)]


def said(folder: Path, verify: bool = False, **settings: Any) -> list[list[list[int]]]:
    sizes: dict[str, Any] = {
        "max_num_seqs": 3,
        "max_model_len": 64,
        "block_size": 4,
        "max_num_batched_tokens": 23,
        "rank_timeout": 20,
    }
    with LLM(folder, device="cpu", skip_tokenizer_init=True, **(sizes | settings)) as llm:
        outputs = tokens(llm.generate(prompts(), PARAMS))
        if verify:
            report = llm.engine.verify_graphs(fuzz=1)
            assert {each.part for each in report.comparisons} >= {"forward", "end", "proposal"}
            assert report.ok, report.table()
            assert llm.engine.runner.ends.by_reason.keys() >= {SampleDispatchReason.GRAPH, SampleDispatchReason.FORWARD}
        return outputs


@pytest.fixture(scope="module", params=[name for name in EVEN if name not in ALIKE])
def family(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> tuple[Path, Any]:
    """A checkpoint that four ranks can share, and the outputs of one process."""
    folder = tiny(request.param, **EVEN[request.param])
    return folder, said(folder, mamba_state_policy="slots")


ALL_AT_ONCE: dict[str, Any] = {
    "mamba_state_policy": "fold",
    "enable_prefix_caching": True,
    "mamba_block_size": 8,
    "draft": "ngram",
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "cudagraph_backend": "recorded",
    "cudagraph_capture_sizes": [4, 12],
}


def test_two_ranks_say_what_one_says(family: tuple[Path, Any]) -> None:
    folder, wanted = family
    one_size = {"cudagraph_capture_sizes": [12]}
    assert said(folder, tensor_parallel_size=2, **ALL_AT_ONCE | one_size) == wanted


def test_four_ranks_say_it_too(tiny: Callable[..., Path]) -> None:
    """The ranks also compare the plan of every step."""
    folder = tiny("nemotron_h-experts", **EVEN["nemotron_h-experts"])
    wanted = said(folder, mamba_state_policy="slots")
    checks = {"cudagraph_checks": "PARANOID", "max_num_batched_tokens": 64}
    assert said(folder, tensor_parallel_size=4, **ALL_AT_ONCE, **checks) == wanted


def test_laws_that_truncate_end_on_graphs_of_ranks_with_a_part_each(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each parameter alone and then all at once, with a vocabulary that is not divisible by the number of ranks."""
    laws: list[dict[str, Any]] = [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.8}]
    params = [SamplingParams(seed=i, max_tokens=12, ignore_eos=True, **each) for i, each in enumerate(laws)]
    folder, kinds, outcome_of = tiny("llama", **EVEN["llama"]), set[str](), RejectionSampler.outcome_of

    def noted(sampler: RejectionSampler, batch: Any, packed: Any) -> Any:
        kinds.add(batch.sampling.kind)
        return outcome_of(sampler, batch, packed)

    monkeypatch.setattr(RejectionSampler, "outcome_of", noted)
    asked = [*prompts(), prompts()[0]]
    found = []
    ranks = {"tensor_parallel_size": 2, "num_speculative_tokens": 2, "cudagraph_checks": "PARANOID"}
    for options in ({}, ALL_AT_ONCE | ranks):
        with LLM(folder, device="cpu", skip_tokenizer_init=True, max_num_seqs=4, max_model_len=64, **options) as llm:
            found.append(tokens(llm.generate(asked, params)))
    assert found[0] == found[1]
    assert kinds == {TRUNCATED}


def test_all_ranks_forget_prefixes_that_a_verification_overwrote(tiny: Callable[..., Path]) -> None:
    folder = tiny("nemotron_h", **EVEN["nemotron_h"])
    sizes: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 64, "block_size": 4, "rank_timeout": 20}
    options = ALL_AT_ONCE | {"tensor_parallel_size": 2, "skip_tokenizer_init": True}
    with LLM(folder, device="cpu", **sizes, **options) as llm:
        wanted = tokens(llm.generate(prompts()[:2], PARAMS[:2]))
        assert llm.generate(prompts()[:2], PARAMS[:2])[0].num_cached_tokens > 0
        assert llm.engine.verify_graphs(fuzz=1).ok
        again = llm.generate(prompts()[:2], PARAMS[:2])
    assert again[0].num_cached_tokens == 0
    assert tokens(again) == wanted


def test_grammars_rules_and_steps_ahead_are_those_of_one_process() -> None:
    """With drafts of the shipped head, which the ranks sample together."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    params = [
        SamplingParams(temperature=0.8, seed=5, max_tokens=16, structured_outputs=StructuredOutputsParams(json=schema)),
        SamplingParams(temperature=0, max_tokens=16, bad_words=["self"], logprobs=2),
        SamplingParams(temperature=0.7, seed=1, top_p=0.9, repetition_penalty=1.2, max_tokens=16, stop=["\n"]),
    ]
    asked = ["x = ", "def f(self):", "import os\ndef main():"]
    ahead: dict[str, Any] = {"async_scheduling": True, "draft": "auto", "num_speculative_tokens": 3, "rank_timeout": 20}
    texts = []
    kinds: list[dict[str, Any]] = [{}, {"tensor_parallel_size": 2, **ahead}]
    for options in kinds:
        with LLM(device="cpu", max_model_len=128, max_num_seqs=4, **options) as llm:
            texts.append([each.outputs[0].text for each in llm.generate(asked, params)])
    assert texts[0] == texts[1]
    assert texts[0][0].startswith("{")
    assert "self" not in texts[0][1]


SCRIPT = """
import sys
import torch
from bateleur.runner import LLM, SamplingParams
torch.set_num_threads(1)
with LLM(sys.argv[1], device="cpu", skip_tokenizer_init=True, tensor_parallel_size=2) as llm:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True)
    print(llm.generate([{"prompt_token_ids": [5, 6, 7]}], params)[0].outputs[0].token_ids)
"""


def test_under_torchrun_one_script_is_all_ranks(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """The first rank continues after its `LLM` is closed; the others end with it, without an error."""
    folder, script = tiny("llama", **EVEN["llama"]), tmp_path / "script.py"
    script.write_text(SCRIPT)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True)
    with LLM(folder, device="cpu", skip_tokenizer_init=True) as llm:
        wanted = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params)[0].outputs[0].token_ids
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script), str(folder)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(wanted)]


@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed in /proc")
def test_no_thread_of_the_process_group_outlives_it(tiny: Callable[..., Path]) -> None:
    """Such a thread aborts the process if it frees a tensor while the interpreter ends (SIGABRT, in 1 of 30 runs)."""

    def threads() -> int:
        found = 0
        for each in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has ended
                found += "gloo" in (each / "comm").read_text()
        return found

    before = threads()
    with LLM(tiny("llama", **EVEN["llama"]), device="cpu", skip_tokenizer_init=True, tensor_parallel_size=2) as llm:
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=2, ignore_eos=True))
        assert threads() > before
    assert threads() == before


def held_bytes(folder: Path, ranks: Ranks) -> tuple[int, int]:
    """Bytes of weights and caches of a rank."""
    limits = EngineLimits(64, 4, 64)
    model = load_model(open_checkpoint(folder), torch.float32, "cpu", ranks)
    options = CacheOptions.of(EngineConfig.of(), model.spec, torch.device("cpu"))
    plan = plan_caches(model.spec, torch.float32, limits, options, 1 << 30)
    caches = Caches(model.spec, plan, torch.float32, torch.device("cpu"))
    assert (plan.num_blocks, plan.max_num_seqs) == (17, 4)
    weights = sum(weight.nbytes for weight in model.weights().values())
    return weights, sum(cache.nbytes for cache in caches.named().values())


def test_weights_and_caches_divide(tiny: Callable[..., Path]) -> None:
    folder = tiny("nemotron_h", **EVEN["nemotron_h"])
    weights, caches = held_bytes(folder, Ranks())
    halves = [held_bytes(folder, Ranks(rank, 2, "none")) for rank in range(2)]
    assert [each[1] for each in halves] == [caches // 2] * 2
    norms = 7 * 40 * 4  # norms of the hidden state, which every rank has: six layers and the final one
    assert sum(each[0] for each in halves) == weights + norms


@pytest.mark.parametrize("graphs", ["NONE", "FULL_AND_PIECEWISE"])
def test_drafts_of_heads(
    tiny: Callable[..., Path], make_mtp: Callable[..., Path], make_head: Callable[..., Path], graphs: str
) -> None:
    """Every rank has the whole head, except what it shares with the target: its embedding, or its output projection,
    too.
    """
    verify = graphs != "NONE"  # poison the inputs of steps and end graphs between steps
    head = make_head(hidden_size=48, vocab_size=97, head_dim=16, taps=(1, 2, 3))
    for folder, draft in ((make_mtp(**EVEN["qwen3_5_text"]), "mtp"), (tiny("bamba", **EVEN["bamba"]), str(head))):
        wanted = said(folder, mamba_state_policy="slots")
        drafts: dict[str, Any] = {"draft": draft, "num_speculative_tokens": 2}
        drafts["cudagraph_checks"] = "PARANOID" if verify else "ADDRESSES"
        captured = {"cudagraph_mode": graphs, "cudagraph_backend": "recorded", "max_num_batched_tokens": 64}
        captured["cudagraph_capture_sizes"] = [9, 48]
        assert said(folder, verify, tensor_parallel_size=2, **drafts, **captured) == wanted
