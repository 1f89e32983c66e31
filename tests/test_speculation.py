"""Steps that verify drafts emit the tokens of plain decoding, for any drafts and state policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from torch import Tensor

from bateleur.cudagraph import DispatchReason
from bateleur.eagle import DraftContext, Drafter
from bateleur.runner import LLM, RequestOutput, SamplingParams
from eagle_doubles.drafters import NoDrafts, RandomDrafter, ScriptedDrafter, StickyDrafter
from scripted import Partly, Script

VOCAB = 97


DRAFTERS: dict[str, Callable[[Script, int], Drafter]] = {
    "right": lambda script, k: ScriptedDrafter(script, k, None, VOCAB),
    "wrong": lambda script, k: ScriptedDrafter(script, k, 0, VOCAB),
    "partly": lambda script, k: Partly(script, k, VOCAB),
    "random": lambda script, k: RandomDrafter(k, VOCAB),
    "sticky": lambda script, k: StickyDrafter(k),
    "none": lambda script, k: NoDrafts(k),
}


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def tokens_of(seed: int, length: int) -> dict[str, Any]:
    random = Random(seed)
    return {"prompt_token_ids": [random.randint(3, VOCAB - 1) for _ in range(length)]}


PROMPTS = [tokens_of(1, 5), tokens_of(2, 21), tokens_of(3, 1), tokens_of(4, 16), tokens_of(5, 9)]
PARAMS = [
    SamplingParams(temperature=t, seed=7 + i, max_tokens=13 + 4 * i, ignore_eos=True)
    for i, t in enumerate((0.0, 0.8, 0.8, 0.0, 1.0))
]


@pytest.fixture(scope="module")
def make_llm(make_llm: Callable[..., LLM], tiny_hybrid: Path) -> Callable[..., LLM]:
    return partial(make_llm, model=tiny_hybrid)


@pytest.fixture(scope="module")
def plain(make_llm: Callable[..., LLM]) -> LLM:
    """An engine without caching, chunks and speculation; one request at a time."""
    return make_llm(max_model_len=96, max_num_seqs=1, mamba_state_policy="slots")


@pytest.fixture(scope="module")
def script(plain: LLM) -> Script:
    script = Script()
    script.add(plain.generate(PROMPTS, PARAMS))
    return script


@pytest.fixture(scope="module")
def make(make_llm: Callable[..., LLM], script: Script) -> Callable[..., LLM]:
    def build(drafter: str = "partly", k: int = 3, mode: str = "none", **overrides: Any) -> LLM:
        settings: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 4, "block_size": 4}
        settings |= {"num_speculative_tokens": k, "drafter": DRAFTERS[drafter](script, k)}
        if mode != "none":
            settings |= {"enable_prefix_caching": True, "mamba_cache_mode": mode, "mamba_block_size": 8}
        return make_llm(**(settings | overrides))

    return build


def test_what_a_drafter_leaves_out_was_not_verified(make: Callable[..., LLM]) -> None:
    """A position without a draft is not verified, whatever number the policy asked for and whatever follows it."""
    llm = make("sticky", k=4)
    drafter = llm.engine.setup.drafter
    assert isinstance(drafter, StickyDrafter)
    propose = drafter.propose

    def with_holes(context: DraftContext) -> Tensor:
        drafts = propose(context)
        drafts[0::2, 1:2] = drafts[1::2] = -1  # one draft, a gap and two more; or no drafts
        return drafts

    drafter.propose = with_holes  # type: ignore[method-assign]
    llm.generate(PROMPTS, [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in range(9, 14)])
    counts = llm.get_metrics().acceptance
    counted = counts.tried.tolist()
    assert counts.num_drafts == counted[0] == counts.num_steps > 0, "one draft at most"
    assert counted[1:] == [0, 0, 0]
    assert counts.num_plain > 5, "rows whose drafter had none decode plainly"


@pytest.mark.parametrize(
    ("policy", "mode", "drafter"),
    [
        *product(("slots", "fold"), ("none", "align", "all"), ("right", "wrong", "partly")),
        *product(("fold",), ("all",), ("random", "sticky", "none")),
    ],
)
def test_the_tokens_are_those_of_plain_decoding(
    make: Callable[..., LLM], script: Script, policy: str, mode: str, drafter: str
) -> None:
    llm = make(drafter, mode=mode, mamba_state_policy=policy)
    for _ in range(1 if mode == "none" else 2):  # the second time with prefix hits
        outputs = llm.generate(PROMPTS, PARAMS)
        assert [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs] == script.texts[:5]
    stats = llm.get_metrics()
    assert (stats.num_cached_tokens > 0) == (mode != "none")
    assert stats.num_draft_tokens >= stats.acceptance.tried.sum()
    assert bool(stats.acceptance.tried.sum()) == (drafter != "none")
    if drafter == "wrong":
        assert stats.num_draft_tokens > stats.acceptance.tried.sum(), "what lies behind a rejected draft counts"
    if drafter in ("wrong", "none"):
        assert stats.tokens_per_step == 1.0
    elif drafter == "right":
        assert stats.tokens_per_step > 3.0


@pytest.mark.parametrize("policy", ["slots", "fold"])
@pytest.mark.parametrize("graphs", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_recorded_graphs_verify_like_eager_steps(
    make: Callable[..., LLM], script: Script, graphs: str, policy: str
) -> None:
    llm = make(
        mode="all",
        k=2,
        mamba_state_policy=policy,
        cudagraph_mode=graphs,
        cudagraph_backend="recorded",
        cudagraph_capture_sizes=[3, 6, 12],
        cudagraph_checks="PARANOID",
        max_num_batched_tokens=12,
    )
    for _ in range(2):
        outputs = llm.generate(PROMPTS, PARAMS)
        assert [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs] == script.texts[:5]
    by_key = llm.engine.runner.graphs.decisions
    assert by_key.by_reason[DispatchReason.DECODE] > 10
    assert llm.engine.verify_graphs(fuzz=3).ok


@pytest.mark.parametrize(("policy", "mode"), [*product(("slots", "fold"), ("align", "all"))])
def test_conversations_with_hits_and_chunks_go_on_as_they_would(
    make_llm: Callable[..., LLM], policy: str, mode: str
) -> None:
    """Each turn's prompt is the previous one with its answer and a question. Prompts run in chunks of odd lengths."""
    script = Script()
    settings: dict[str, Any] = {"max_model_len": 160, "block_size": 4}
    plain = make_llm(max_num_seqs=1, mamba_state_policy="slots", **settings)
    llm = make_llm(
        max_num_seqs=3,
        max_num_batched_tokens=17,
        enable_prefix_caching=True,
        mamba_cache_mode=mode,
        mamba_block_size=8,
        mamba_state_policy=policy,
        num_speculative_tokens=4,
        drafter=Partly(script, 4, VOCAB),
        **settings,
    )
    talks = [tokens_of(9, 19)["prompt_token_ids"], tokens_of(10, 30)["prompt_token_ids"]]
    for turn in range(4):
        params = SamplingParams(temperature=0.7, seed=turn, max_tokens=11, ignore_eos=True)
        asked = [{"prompt_token_ids": talk} for talk in talks]
        wanted = ids(script.add(plain.generate(asked, params)))
        outputs = llm.generate(asked, params)
        assert ids(outputs) == wanted
        assert all((output.num_cached_tokens > 0) == (turn > 0) for output in outputs)
        talks = [talk + new + [50 + turn] * 5 for talk, new in zip(talks, wanted, strict=True)]
    assert llm.get_metrics().tokens_per_step > 1.5


@pytest.mark.parametrize("k", [1, 2, 3, 7])
@pytest.mark.parametrize("graphs", ["NONE", "FULL_DECODE_ONLY"])
def test_g_a_drafter_that_is_right_up_to_s_gives_s_plus_1_tokens(
    make_llm: Callable[..., LLM], plain: LLM, k: int, graphs: str
) -> None:
    """For every batch size; with the target itself as drafter, k + 1 tokens per step."""
    for right in sorted({0, k // 2, k}):
        script = Script()
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=1 + 3 * (right + 1), ignore_eos=True)
        script.add(plain.generate(PROMPTS, params))
        llm = make_llm(
            max_model_len=96,
            num_speculative_tokens=k,
            drafter=ScriptedDrafter(script, k, right, VOCAB),
            cudagraph_mode=graphs,
            cudagraph_backend="recorded",
            cudagraph_capture_sizes=[1 + k, 2 * (1 + k), 8 * (1 + k)],
        )
        for batch in (1, 2, 5):
            assert ids(llm.generate(PROMPTS[:batch], params)) == [
                text[-params.max_tokens :] for text in script.texts[:batch]
            ]
        assert llm.get_metrics().tokens_per_step == right + 1


def test_m33_a_hit_that_leaves_one_token_finds_its_window_in_the_ring(make: Callable[..., LLM], plain: LLM) -> None:
    """A prompt of one token after a cached state is a decode row, whose ring another request has used."""
    llm = make("none", mode="all", max_num_seqs=1)
    for seed in (21, 22):
        prompt = tokens_of(seed, 17)
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        wanted = ids(plain.generate([prompt], params))
        for cached in (0, 16):
            outputs = llm.generate([prompt], params)
            assert outputs[0].num_cached_tokens == cached
            assert ids(outputs) == wanted


def test_drafters_that_do_not_fit_are_refused(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(ValueError, match=r"num_speculative_tokens is 3; it must be num_speculative_tokens = 2"):
        make_llm(num_speculative_tokens=2, drafter=NoDrafts(3))
    with pytest.raises(ValueError, match="num_speculative_tokens is -1; it must be an integer >= 0"):
        make_llm(num_speculative_tokens=-1)
    with pytest.raises(ValueError, match=r"max_num_seqs = 8 rows of 3 tokens each"):
        make_llm(num_speculative_tokens=2, drafter=NoDrafts(2), max_num_batched_tokens=20)
    with pytest.raises(ValueError, match=r"^mamba_block_size is 8; it must be at least 9, the tokens of a step"):
        make_llm(
            num_speculative_tokens=8, drafter=NoDrafts(8), enable_prefix_caching=True, block_size=4, mamba_block_size=8
        )
