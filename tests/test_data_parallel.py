"""Data-parallel ranks with shared experts generate the tokens of one process, whichever ranks have work."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import FailsLater, Uneven

from bateleur.cudagraph import CudaGraphMode
from bateleur.runner import LLM, RequestOutput, RequestOutputKind, SamplingParams
from bateleur.runner.checkpoint.open import load_model, open_checkpoint
from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.errors import EngineDead, RankFailed
from bateleur.runner.model_runner.graph_dispatcher import GraphDispatcher
from bateleur.runner.spec_decode.mtp_head import DraftSync

pytestmark = pytest.mark.usefixtures("forked_ranks")

FAMILIES = (
    "nemotron_h-experts",
    "granitemoehybrid-experts",
    "kimi_linear",
    "lfm2_moe",
    "qwen3_next",
    "qwen3_5_moe_text",
    "gpt_oss",
)
SIZES: dict[str, Any] = {
    "device": "cpu",
    "skip_tokenizer_init": True,
    "max_num_seqs": 3,
    "max_model_len": 64,
    "block_size": 4,
    "max_num_batched_tokens": 23,
    "rank_timeout": 20,
}
ALL_AT_ONCE: dict[str, Any] = {
    "mamba_state_policy": "fold",
    "enable_prefix_caching": True,
    "mamba_block_size": 8,
    "kv_offload_bytes": 1 << 20,
    "draft": "ngram",
    "num_speculative_tokens": 2,
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "cudagraph_backend": "recorded",
    "cudagraph_checks": "PARANOID",
    "cudagraph_capture_sizes": [4, 12],
}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=13, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=9, n=2, max_tokens=7, ignore_eos=True),
]


def prompts() -> list[dict[str, Any]]:
    """Three prompts that share 16 tokens."""
    ids: list[int] = np.random.default_rng(1).integers(3, 80, 40).tolist()
    return [{"prompt_token_ids": [*ids[:16], *end]} for end in ([5, 7, 9], ids[16:37], [11] * 3)]


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[each.token_ids for each in output.outputs] for output in outputs]


def said(llm: LLM) -> list[list[list[int]]]:
    return tokens(llm.generate(prompts(), PARAMS))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> tuple[Path, Any]:
    """A checkpoint, and the outputs of one process."""
    folder = tiny(request.param)
    with LLM(folder, **SIZES, mamba_state_policy="slots") as llm:
        return folder, said(llm)


def test_two_ranks_say_what_one_says(family: tuple[Path, Any]) -> None:
    """Run twice, so that prefixes are found. Requests end one after the other, so that ranks become idle."""
    folder, wanted = family
    with LLM(folder, **SIZES, data_parallel_size=2, **ALL_AT_ONCE) as llm:
        assert said(llm) == wanted
        assert said(llm) == wanted
        stats = llm.get_metrics()
    assert stats.num_dummy_steps > 0
    assert stats.prefix_cache.num_hits > 0
    assert stats.num_finished == 8
    assert stats.num_emitted_tokens == 2 * (4 + 13 + 2 * 7)
    assert stats.histograms.request_generation_tokens.count == 8
    assert stats.decisions.num_graph_tokens > 0


def test_state_plans_follow_the_padding_of_other_ranks(tiny: Callable[..., Path]) -> None:
    """The batch of a rank repeats while the other one, with more or fewer requests, changes the graph of both."""
    folder = tiny("granitemoehybrid-experts")
    slots = SIZES | {"mamba_state_policy": "slots"}
    each = [{"prompt_token_ids": [7 + i] * (1 + 5 * i)} for i in range(5)]
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=m, ignore_eos=True) for i, m in enumerate((30, 9, 5, 14, 7))
    ]
    with LLM(folder, **slots) as llm:
        wanted = [tokens(llm.generate(prompt, own)) for prompt, own in zip(each, params, strict=True)]
    graphs = {
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_backend": "recorded",
        "cudagraph_checks": "PARANOID",
        "cudagraph_capture_sizes": [1, 2, 4],
    }
    with LLM(folder, **slots, **graphs, data_parallel_size=2) as llm:
        names, found = [], {}
        for prompt, own in zip(each, params, strict=True):
            names.append(llm.add_request(prompt, own))
            for _ in range(4):
                found |= {output.request_id: tokens([output]) for output in llm.step()}
        while llm.has_unfinished_requests:
            found |= {output.request_id: tokens([output]) for output in llm.step()}
        assert llm.get_metrics().decisions.num_graph_tokens > 0
    assert [found[name] for name in names] == wanted


def test_three_ranks_say_it_eagerly(tiny: Callable[..., Path]) -> None:
    """Ranks hold 2, 2 and 3 of seven experts. A request arrives after others have started, and one is aborted."""
    folder = tiny("granitemoehybrid-experts")
    long = SamplingParams(temperature=0.8, seed=1, max_tokens=14, ignore_eos=True)
    each = [{"prompt_token_ids": [7 + i] * (1 + 6 * i)} for i in range(4)]
    with LLM(folder, **SIZES) as llm:
        wanted = [tokens(llm.generate(prompt, long)) for prompt in each]
    with LLM(folder, **SIZES, data_parallel_size=3) as llm:
        assert [tokens(llm.generate(prompt, long)) for prompt in each] == wanted
        assert llm.get_metrics().num_dummy_steps > 0
        names, found = [], {}
        for prompt in each:
            names.append(llm.add_request(prompt, long, stream=True))
            for output in llm.step():
                found[output.request_id] = output
        assert llm._runner.loads == [2, 1, 1]  # type: ignore[union-attr]
        taken_back = llm.abort(names[1])
        assert taken_back.outputs[0].finish_reason == "abort"
        assert taken_back.outputs[0].token_ids == wanted[1][0][0][: len(taken_back.outputs[0].token_ids)]
        while llm.has_unfinished_requests:
            found |= {output.request_id: output for output in llm.step()}
        assert [tokens([found[name]]) for i, name in enumerate(names) if i != 1] == wanted[:1] + wanted[2:]
        assert llm._runner.loads == [0, 0, 0]  # type: ignore[union-attr]
        steps = llm.get_metrics().num_dummy_steps
        assert llm.step() == []
        assert llm.get_metrics().num_dummy_steps == steps, "with nobody at work nobody steps"


@pytest.fixture
def llm(tiny: Callable[..., Path]) -> Iterator[LLM]:
    with LLM(tiny("nemotron_h-experts"), **SIZES, data_parallel_size=2) as made:
        yield made


HEADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_next": (
        {"num_hidden_layers": 1, "layer_types": ["full_attention"], "decoder_sparse_step": 1},
        {"mtp_num_hidden_layers": 1},
    ),
    "nemotron_h-experts": (
        {"layers_block_type": ["full_attention", "moe"]},
        {"mtp_layers_block_type": ["full_attention", "moe"], "num_nextn_predict_layers": 1},
    ),
}
"""The layers of a head with experts, and the fields of its config."""


@pytest.fixture(scope="module", params=HEADS)
def with_head(
    request: pytest.FixtureRequest,
    tiny: Callable[..., Path],
    tiny_models: ModuleType,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Any]:
    """A checkpoint with an MTP head, and the outputs of one process without it."""
    home, (layers, config) = tmp_path_factory.mktemp("mtp"), HEADS[request.param]
    folder = Path(shutil.copytree(tiny(request.param), home / "target"))
    with torch.random.fork_rng():
        tiny_models.add_mtp(folder, request.param, home / "head", **layers)
    tiny_models.edit_config(folder, **config)
    with LLM(folder, **SIZES, mamba_state_policy="slots") as llm:
        return folder, said(llm)


MTP: dict[str, Any] = {"draft": "mtp", "num_speculative_tokens": 3}


@pytest.mark.parametrize("how", ["eagerly", "on graphs"])
def test_heads_share_their_experts(with_head: tuple[Path, Any], how: str) -> None:
    """Ranks want different numbers of drafts; a rank without work proposes as many as the others."""
    folder, wanted = with_head
    options: dict[str, Any] = {"draft_policy": "auto", "async_scheduling": True}
    if how == "on graphs":
        options = ALL_AT_ONCE | {"draft_policy": Uneven(), "cudagraph_checks": "ADDRESSES"}
    with LLM(folder, **SIZES | options | MTP, data_parallel_size=2) as llm:
        assert said(llm) == wanted
        stats = llm.get_metrics()
        head = llm.engine.setup.drafter.head
        counts = [len(each) for each in head.weights().values() if each.ndim == 3]
        assert counts in ([3, 3], [6, 6]), "of 7 and of 12"
    assert stats.num_dummy_drafts > 0
    assert stats.num_draft_tokens > 0


def test_heads_without_experts_are_each_ranks_own(tiny: Callable[..., Path], make_head: Callable[..., Path]) -> None:
    """With the policy SLOTS on four ranks, some of which never have work."""
    folder = tiny("granitemoehybrid-experts")
    spec = open_checkpoint(folder).spec
    head = make_head(spec.hidden_size, spec.vocab_size, head_dim=8, taps=(0, 1, 2))
    slots = SIZES | {"mamba_state_policy": "slots", "mamba_block_size": 8}
    with LLM(folder, **slots) as llm:
        wanted = said(llm)
    with LLM(folder, **slots, data_parallel_size=4, draft=head, enable_prefix_caching=True) as llm:
        assert said(llm) == wanted
        stats = llm.get_metrics()
    assert stats.num_draft_tokens > 0
    assert stats.num_dummy_steps > 0
    assert stats.num_dummy_drafts == 0


ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)


def step_for_ever(llm: LLM) -> None:
    while True:
        llm.step()


def elsewhere(llm: LLM) -> None:
    """Rank 1 has work, and rank 0 has none."""
    llm.add_request({"prompt_token_ids": [5, 6, 7]}, ONE)
    llm.add_request({"prompt_token_ids": [5, 6, 7]}, LONG)
    llm.step()
    assert llm._runner.loads == [0, 1]  # type: ignore[union-attr]


def test_without_dummy_steps_ranks_would_wait_for_ever(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above must be able to fail."""
    with LLM(tiny("nemotron_h-experts"), **SIZES | {"rank_timeout": 2}, data_parallel_size=2) as llm:
        elsewhere(llm)
        monkeypatch.setattr(GraphDispatcher, "_take_part", lambda self, key: None)
        with pytest.raises(RankFailed, match="has stood still for 2"):
            llm.step()


def test_without_dummy_drafts_ranks_would_wait_for_ever(
    with_head: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(with_head[0], **SIZES | {"rank_timeout": 2} | MTP, data_parallel_size=2) as llm:
        elsewhere(llm)
        monkeypatch.setattr(DraftSync, "_pass", lambda self: None)
        with pytest.raises(RankFailed):
            llm.step()


def test_a_rank_that_is_killed_is_named(llm: LLM) -> None:
    elsewhere(llm)
    assert llm._leader is not None
    (member,) = llm._leader._monitor.ranks
    assert member.process is not None
    os.kill(member.process.pid, signal.SIGKILL)
    with pytest.raises(RankFailed) as raised:
        step_for_ever(llm)
    assert (raised.value.rank, raised.value.cause) == (1, "was ended by SIGKILL")
    with pytest.raises(EngineDead):
        llm.generate(prompts()[0], ONE)


@pytest.mark.parametrize(
    ("how", "cause"), [("raises", "raised ZeroDivisionError: nothing left"), ("sleeps", "< lengths, rank_pool.py")]
)
def test_a_rank_that_raises_or_hangs_is_named(tiny: Callable[..., Path], how: str, cause: str) -> None:
    """The rank fails after the last collective of a step, while the first rank waits for its reply."""
    drafts = {"draft": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
    policy = FailsLater(how, 1)
    sizes = SIZES | {"rank_timeout": 2}
    with LLM(tiny("nemotron_h-experts"), **sizes, **drafts, draft_policy=policy, data_parallel_size=2) as llm:
        elsewhere(llm)
        with pytest.raises(RankFailed) as raised:
            step_for_ever(llm)
    assert raised.value.rank == 1
    assert cause in raised.value.cause


def test_what_is_new_comes_once(llm: LLM) -> None:
    """Deltas of two ranks concatenate to the whole output."""
    params = [
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, output_kind=kind)
        for kind in (RequestOutputKind.DELTA, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY)
    ]
    wanted = tokens(llm.generate(prompts(), params))
    found: dict[str, list[int]] = {}
    for output in llm.stream(prompts(), params):
        found.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
    assert [[each] for each in found.values()] != []
    assert sorted(found.values()) == sorted(each[0] for each in wanted)
    stream = llm.stream(prompts(), params)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm.has_unfinished_requests
    assert tokens(llm.generate(prompts(), params)) == wanted


def test_what_nobody_has_read_is_kept(llm: LLM) -> None:
    """Deltas that were not read are merged while others run, up to an abort on either rank."""
    params = replace(LONG, output_kind=RequestOutputKind.DELTA)
    names = [llm.add_request({"prompt_token_ids": [5, 6, 7]}, params, stream=True) for _ in range(2)]
    (found,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, replace(LONG, max_tokens=9))
    for name in names:
        kept = llm.abort(name).outputs[0]
        assert kept.token_ids[:8] == found.outputs[0].token_ids[:8]


def test_counters_are_of_now_when_the_last_are_forsaken(llm: LLM) -> None:
    stream = llm.stream(prompts(), LONG)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    stats = llm.get_metrics()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)


def test_ranks_read_their_experts_alone(tiny: Callable[..., Path]) -> None:
    """Each rank reads its own experts, and all other weights."""
    checkpoint = open_checkpoint(tiny("nemotron_h-experts"))
    whole = load_model(checkpoint, torch.float32, "cpu").weights()
    parts = [
        load_model(checkpoint, torch.float32, "cpu", data_ranks=Ranks(rank, 5, "none")).weights() for rank in range(5)
    ]
    for name, weight in whole.items():
        shared = weight.ndim == 3
        assert torch.equal(torch.cat([part[name] for part in parts]) if shared else parts[3][name], weight)
    assert any(weight.ndim == 3 for weight in whole.values())


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {}, "data_parallel_size is 2; it must be 1 for a model without experts"),
        (
            "nemotron_h-experts",
            {"data_parallel_size": 13},
            "data_parallel_size is 13; it must be at most the number of experts, 12",
        ),
        (
            "nemotron_h-experts",
            {"tensor_parallel_size": 2},
            "data_parallel_size is 2; it must be 1 with tensor_parallel_size = 2",
        ),
    ],
)
def test_what_is_refused(tiny: Callable[..., Path], family: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        LLM(tiny(family), **SIZES | {"data_parallel_size": 2} | options)


def test_what_several_ranks_do_not_do(llm: LLM) -> None:
    for call in (llm.engine.verify_graphs, lambda: llm.export_prefix([5] * 9, "/nowhere")):
        with pytest.raises(ValueError, match=r"^data_parallel_size is 2; prefixes in files and comparisons of"):
            call()
    assert llm.engine.runner.graphs.dispatcher.mode.decode_mode is CudaGraphMode.NONE
