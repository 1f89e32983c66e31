"""Requests that share prefixes get the tokens they would get alone, with less computation."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bateleur.mamba.recurrences import mamba2
from bateleur.runner import LLM, RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=3, max_tokens=9, ignore_eos=True)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def prompts(*lengths: int, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts that are prefixes of one sequence."""
    tokens = np.random.default_rng(seed).integers(3, 60, max(lengths)).tolist()
    return [{"prompt_token_ids": tokens[:length]} for length in lengths]


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
        max_position_embeddings=128,
    )
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(params=["attention", "all", "align", "all-fold"])
def kind(request: pytest.FixtureRequest) -> str:
    """A model without Mamba states, or the cache mode and policy of a model with them."""
    return str(request.param)


@pytest.fixture
def make(tiny_llama: Path, tiny_hybrid: Path, kind: str) -> Callable[..., LLM]:
    """Engines for one kind of model and cache mode. Hits are multiples of 4 tokens, or of 8 with Mamba states."""

    def build(**overrides: Any) -> LLM:
        settings: dict[str, Any] = {"max_num_seqs": 4, "block_size": 4, "max_model_len": 128}
        settings |= {"device": "cpu", "dtype": "float32", "enable_prefix_caching": True}
        settings |= {"skip_tokenizer_init": True}
        if kind == "attention":
            return LLM(tiny_llama, **(settings | overrides))
        mode, _, policy = kind.partition("-")
        settings |= {"mamba_cache_mode": mode, "mamba_block_size": 8, "mamba_state_policy": policy or "slots"}
        if not overrides.get("enable_prefix_caching", True):
            settings |= {"mamba_cache_mode": "none"}
        return LLM(tiny_hybrid, **(settings | overrides))

    return build


def granularity(llm: LLM) -> int:
    assert llm.engine.scheduler.prefixes is not None
    return llm.engine.scheduler.prefixes.granularity


def test_a_prefix_is_computed_once(make: Callable[..., LLM]) -> None:
    llm, plain = make(), make(enable_prefix_caching=False)
    first, second = prompts(21, 30)
    (cold,) = llm.generate([first], GREEDY)
    before = llm.get_metrics().num_prefill_tokens
    (warm,) = llm.generate([second], GREEDY)
    hit = 20 // granularity(llm) * granularity(llm)
    assert cold.num_cached_tokens == 0
    assert cold.cache_miss == "no request computed this prefix, or it was evicted"
    assert (warm.num_cached_tokens, warm.cache_miss) == (hit, "")
    assert llm.get_metrics().num_prefill_tokens - before == 30 - hit
    assert ids([cold, warm]) == ids(plain.generate([first, second], GREEDY))


def test_m13_at_least_one_token_is_left_to_compute(make: Callable[..., LLM]) -> None:
    """vLLM #50409: a prompt that ends with a block hits up to the block before."""
    llm = make()
    (prompt,) = prompts(16)
    tokens = ids(llm.generate([prompt], GREEDY))
    (again,) = llm.generate([prompt], GREEDY)
    assert again.num_cached_tokens == 16 - granularity(llm)
    assert ids([again]) == tokens


def test_a_prompt_that_could_not_hit_says_why(make: Callable[..., LLM]) -> None:
    llm = make()
    (output,) = llm.generate(prompts(4), GREEDY)
    assert output.cache_miss == f"4 tokens; a hit needs at least {1 + granularity(llm)}"


@pytest.mark.parametrize("drafts", [{}, {"draft": "auto", "num_speculative_tokens": 20}])
@pytest.mark.parametrize("longest", [96, 256, 1024])
def test_short_requests_hit_with_default_blocks(longest: int, drafts: dict[str, Any]) -> None:
    """With large blocks, prefix caching would have no hit for requests of this length."""
    llm = LLM(device="cpu", max_model_len=longest, max_num_seqs=2, enable_prefix_caching=True, **drafts)
    (prompt,) = prompts(longest - 2)
    cold, warm = (llm.generate([prompt], SamplingParams(temperature=0, max_tokens=2)) for _ in range(2))
    assert granularity(llm) == {96: 32 if drafts else 16, 256: 64, 1024: 64}[longest]
    assert warm[0].num_cached_tokens == (longest - 3) // granularity(llm) * granularity(llm)
    assert ids(warm) == ids(cold)


@pytest.mark.parametrize("policy", ["slots", "fold"])
def test_a_prefix_whose_states_were_not_kept_says_so(policy: str) -> None:
    """Keys and values are cached, but mode align keeps no state between the first tokens and the end of the prompt."""
    settings: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 2, "block_size": 4}
    settings |= {"mamba_block_size": 8, "mamba_state_policy": policy, "enable_prefix_caching": True}
    llm = LLM(mamba_cache_mode="align", **settings)
    llm.generate(prompts(60), GREEDY)
    (output,) = llm.generate(prompts(21), GREEDY)
    assert output.num_cached_tokens == 0
    assert output.cache_miss.startswith("the KV cache has 16 of its tokens, but no Mamba state at a multiple of 8")


def test_a_conversation_hits_its_own_answers(make: Callable[..., LLM]) -> None:
    """Turn by turn: the output becomes part of the next prompt."""
    llm, plain = make(), make(enable_prefix_caching=False)
    rng = np.random.default_rng(1)
    history: list[int] = rng.integers(3, 60, 7).tolist()
    for turn in range(5):
        prompt = {"prompt_token_ids": list(history)}
        (ours,), (theirs,) = llm.generate([prompt], SAMPLED), plain.generate([prompt], SAMPLED)
        assert ids([ours]) == ids([theirs])
        if turn:
            assert ours.num_cached_tokens >= len(history) - 6 - granularity(llm)
        history += ours.outputs[0].token_ids + rng.integers(3, 60, 5).tolist()


def traffic() -> Iterator[tuple[list[dict[str, Any]], SamplingParams]]:
    """Six rounds of six prompts with shared prefixes."""
    rng = np.random.default_rng(5)
    for _ in range(6):
        chosen = prompts(*rng.integers(1, 40, 6).tolist(), seed=int(rng.integers(2)))
        yield (chosen, SamplingParams(temperature=0.9, seed=3, max_tokens=int(rng.integers(5, 25)), ignore_eos=True))


@pytest.fixture(scope="module")
def cold() -> dict[str, list[list[list[int]]]]:
    """The outputs of an engine without prefix caching, by model kind."""
    return {}


@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
def test_any_traffic_gets_the_tokens_of_a_cold_engine(
    make: Callable[..., LLM], sized: Callable[..., LLM], cold: dict[str, list[list[list[int]]]], kind: str, mode: str
) -> None:
    """Few blocks, so that prefixes are shared, evicted and recomputed, and running requests preempted."""
    same = "all" if kind == "align" else kind  # without prefix caching all modes are equal
    if same not in cold:
        plain = make(enable_prefix_caching=False, max_num_seqs=1)
        cold[same] = [ids(plain.generate(*asked)) for asked in traffic()]
    llm = sized(
        make,
        num_blocks=21,
        spare_pages=3,
        max_num_batched_tokens=11,
        max_model_len=64,
        cudagraph_mode=mode,
        cudagraph_backend="recorded",
        cudagraph_capture_sizes=[1, 4, 11],
        cudagraph_checks="PARANOID",
    )
    hits = 0
    for round_, asked in enumerate(traffic()):
        outputs = llm.generate(*asked)
        hits += sum(output.num_cached_tokens for output in outputs)
        assert ids(outputs) == cold[same][round_], round_
    assert hits > 50
    assert llm.get_metrics().num_preemptions > 0
    scheduler = llm.engine.scheduler
    for pool in (scheduler.pool, scheduler.states.pool if scheduler.states else None):
        if pool is not None:
            assert pool.num_free == pool.capacity
            assert pool.num_cached > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"enable_prefix_caching": True, "mamba_cache_mode": "none"}, "mamba_cache_mode is 'none' and enable_pre"),
        ({"mamba_cache_mode": "all"}, "mamba_cache_mode is 'all' and enable_prefix_caching False"),
        ({"mamba_cache_mode": "some"}, "mamba_cache_mode is 'some'; it must be one of none, align, all"),
        (
            {"enable_prefix_caching": True, "block_size": 16, "mamba_block_size": 24},
            "mamba_block_size is 24; it must be a multiple of block_size = 16",
        ),
    ],
)
def test_modes_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(device="cpu", max_model_len=64, **arguments)


def test_align_keeps_few_states_and_all_keeps_every_one() -> None:
    kept = {}
    for mode in ("align", "all"):
        llm = LLM(
            device="cpu",
            max_model_len=128,
            max_num_seqs=2,
            block_size=4,
            mamba_block_size=8,
            enable_prefix_caching=True,
            mamba_cache_mode=mode,
        )
        llm.generate(prompts(41), SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
        states = llm.engine.scheduler.states
        assert states is not None
        kept[mode] = states.pool.num_cached
    assert kept == {"align": 2, "all": 8}


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "PIECEWISE"])
def test_replays_equal_eager_runs_on_random_pages(mode: str) -> None:
    llm = LLM(
        device="cpu",
        dtype="float32",
        max_model_len=96,
        max_num_seqs=4,
        block_size=4,
        mamba_block_size=8,
        enable_prefix_caching=True,
        cudagraph_mode=mode,
        cudagraph_backend="recorded",
        cudagraph_capture_sizes=[1, 4],
        cudagraph_checks="PARANOID",
    )
    assert llm.engine.verify_graphs(fuzz=6).ok
    kept = llm.engine.runner.producer
    key = llm.engine.runner.graphs.dispatcher.keys[0]
    assert kept.fuzz(key, 3).state.batch.block_tables[1].count_nonzero() > 0


@pytest.mark.parametrize(
    ("retention", "published"), [(None, 8), ("every=16", 4), ("prompt_end", 1), ("last+every=24", 3)]
)
def test_retention_says_which_states_others_find(retention: str | None, published: int) -> None:
    """41 prompt tokens and 24 output tokens pass 8 boundaries of 8 tokens."""
    llm = LLM(
        device="cpu",
        max_model_len=128,
        max_num_seqs=2,
        block_size=4,
        mamba_block_size=8,
        enable_prefix_caching=True,
        mamba_retention=retention,
    )
    (output,) = llm.generate(prompts(41), SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    states = llm.engine.scheduler.states
    assert states is not None
    assert states.pool.num_cached == published
    again = llm.generate(prompts(41), SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert ids(again) == ids([output])
    assert again[0].num_cached_tokens == {None: 40, "every=16": 32, "prompt_end": 40, "last+every=24": 24}[retention]


@pytest.mark.parametrize("policy", ["slots", "fold"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_states_have_the_dtype_that_was_asked_for(dtype: str, policy: str) -> None:
    """Narrow states change the results, but a hit still gives the results of an uncached run."""
    llm = LLM(
        device="cpu",
        max_model_len=64,
        max_num_seqs=2,
        block_size=4,
        mamba_block_size=8,
        enable_prefix_caching=True,
        mamba_state_policy=policy,
        mamba_ssm_cache_dtype=dtype,
    )
    assert {ssm.dtype for _, ssm in llm.engine.caches.states} == {getattr(torch, dtype)}
    cold = llm.generate(prompts(20), GREEDY)
    warm = llm.generate(prompts(20), GREEDY)
    assert warm[0].num_cached_tokens == 16
    assert ids(warm) == ids(cold)


@pytest.mark.parametrize("chunk", [64, 16])
def test_what_went_wrong_is_not_shared(make: Callable[..., LLM], chunk: int) -> None:
    """A request that ends in NaN must not end later requests with the same prefix."""
    llm = make(max_num_batched_tokens=chunk)
    embedding = llm.engine.model.embedding
    whole, prefix = prompts(50, 20, seed=5)
    clean = ids(make(enable_prefix_caching=False).generate([whole, prefix], GREEDY))
    spoiled, kept = 63, embedding[63].clone()
    tokens = whole["prompt_token_ids"]
    bad = {"prompt_token_ids": [*tokens[:20], spoiled, *tokens[20:]]}
    llm.generate([prefix], GREEDY)  # shared with the failing request
    embedding[spoiled] = torch.nan
    (output,) = llm.generate([bad], GREEDY)
    assert output.outputs[0].finish_reason == "error"
    (output,) = llm.generate([{"prompt_token_ids": bad["prompt_token_ids"][:48]}], GREEDY)
    assert (output.outputs[0].finish_reason, output.num_cached_tokens) == ("error", 0)
    embedding[spoiled] = kept
    (output,) = llm.generate([bad], GREEDY)
    assert (output.outputs[0].finish_reason, output.num_cached_tokens) == ("length", 0)
    assert ids([output]) == ids(make(enable_prefix_caching=False).generate([bad], GREEDY))
    assert ids(llm.generate([whole, prefix], GREEDY)) == clean


def test_what_went_wrong_is_not_shared_after_a_preemption(make: Callable[..., LLM]) -> None:
    """A request may lose its table row before the host knows that it computed NaN."""
    llm = make(async_scheduling=True, max_num_batched_tokens=16)
    embedding, scheduler = llm.engine.model.embedding, llm.engine.scheduler
    (bad,) = prompts(50, seed=5)
    spoiled, kept = bad["prompt_token_ids"][0], embedding[bad["prompt_token_ids"][0]].clone()
    embedding[spoiled] = torch.nan
    llm.add_request(bad, GREEDY)
    while not scheduler.running or not scheduler._decodes(scheduler.running[0]):
        llm.step()  # the last part of the prompt is launched, and not collected
    scheduler.preempt(scheduler.running[0])
    (output,) = llm.step()
    assert output.outputs[0].finish_reason == "error"
    embedding[spoiled] = kept
    (output,) = llm.generate([bad], GREEDY)
    assert (output.outputs[0].finish_reason, output.num_cached_tokens) == ("length", 0)
    assert ids([output]) == ids(make(enable_prefix_caching=False).generate([bad], GREEDY))


def test_what_went_wrong_under_drafts_is_not_shared(make_llm: Callable[..., LLM]) -> None:
    """The draft's blocks depend on the token after them, which a request that ended in NaN never sampled."""
    llm = make_llm(enable_prefix_caching=True, mamba_block_size=16, draft="auto")
    embedding = llm.engine.model.embedding
    prompt = {"prompt_token_ids": [7, 9, 11, 13] * 12}
    (clean,) = ids(make_llm().generate([prompt], GREEDY))
    kept = embedding[9].clone()
    embedding[9] = torch.nan
    assert llm.generate([prompt], GREEDY)[0].outputs[0].finish_reason == "error"
    pool = llm.engine.scheduler.pool
    assert pool is not None
    assert pool.num_cached == 0
    embedding[9] = kept
    for _ in range(2):
        assert ids(llm.generate([prompt], GREEDY)) == [clean]


@pytest.mark.parametrize("block", [64, 63])
def test_an_odd_block_size_costs_no_more_chunks_than_an_even_one(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """A scan holds one state per chunk; with chunks of one token there would be one per token."""
    sizes = {"block_size": block, "mamba_block_size": block, "enable_prefix_caching": True}
    llm, found = make_llm(**sizes), []
    scan = mamba2.ssd_scan_varlen

    def counted(*args: Any) -> Any:
        found.append((len(args[10]), args[13]))
        return scan(*args)

    monkeypatch.setattr(mamba2, "ssd_scan_varlen", counted)
    llm.generate([{"prompt_token_ids": list(range(3, 203))}], SamplingParams(max_tokens=1))
    chunks, longest = found[0]
    assert chunks == 4
    assert longest == block
