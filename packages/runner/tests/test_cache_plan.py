"""Cache plans of published and random models, without tensors."""

from __future__ import annotations

import warnings
from dataclasses import replace
from random import Random

import pytest
import torch

from bateleur.mamba import Mamba2, MambaCacheMode, ShortConv, StatePolicy
from bateleur.runner.cache.costs import CacheOptions, DraftCosts
from bateleur.runner.cache.plan import CachePlan, plan_caches
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.config.state_options import StateOptions
from bateleur.runner.models.spec import AttentionLayer, Layer, MambaLayer, ModelSpec, ShortConvLayer

LONGEST, ROWS, BLOCK = 131_072, 32, 16


def model(*, mamba: tuple[int, int, int, int], attention: tuple[int, int, int], longest: int = LONGEST) -> ModelSpec:
    """mamba: layers, heads, head size, groups. attention: layers, KV heads, head size."""
    count, heads, head_dim, groups = mamba
    state = Mamba2(heads, head_dim, 128, groups)
    layers: list[Layer] = [MambaLayer(state, 128, True, False, 1e-5)] * count
    layers += [AttentionLayer(attention[1], attention[1], attention[2], 1.0)] * attention[0]
    return ModelSpec("x", 1000, 64, tuple(layers), 1e-5, max_position_embeddings=longest)


PUBLISHED = {
    "Nemotron-3-Nano-30B-A3B": model(mamba=(23, 64, 64, 8), attention=(6, 2, 128)),
    "Granite-4.0-H-Tiny": model(mamba=(36, 48, 64, 1), attention=(4, 4, 128)),
    "Granite-4.0-H-Small": model(mamba=(36, 128, 64, 1), attention=(4, 8, 128)),
    "Bamba-9B": model(mamba=(29, 128, 64, 1), attention=(3, 8, 128)),
}


def planned(
    spec: ModelSpec,
    budget: int,
    *,
    share: bool,
    limits: EngineLimits | None = None,
    chosen: bool = True,
    **states: object,
) -> tuple[CachePlan, list[str]]:
    """Return a plan and its warnings."""
    limits = limits or EngineLimits(LONGEST, ROWS, 2048)
    mode = MambaCacheMode.ALL if share else MambaCacheMode.NONE
    how = StateOptions(mode, num_speculative_tokens=limits.num_speculative_tokens)
    options = CacheOptions(
        block_size=BLOCK,
        share_prefixes=share,
        states=replace(how, **states),  # type: ignore[arg-type]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = plan_caches(spec, torch.bfloat16, limits, options, budget, rows_chosen=chosen)
    return plan, [str(each.message) for each in caught]


def longest_request(plan: CachePlan) -> int:
    """Return the tokens of the longest request that fits into the KV cache alone."""
    return min((plan.num_blocks - 1) * BLOCK, LONGEST)


def kept(plan: CachePlan) -> int:
    """Return the number of pages beyond those of running rows."""
    return plan.num_state_slots - 1 - plan.max_num_seqs * plan.costs.pages_per_request


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("gigabytes", [6, 10, 20, 40])
@pytest.mark.parametrize("name", PUBLISHED)
def test_sharing_never_refuses_what_ran_without_it(name: str, gigabytes: int, drafts: int) -> None:
    spec, limits = PUBLISHED[name], EngineLimits(LONGEST, ROWS, 2048, drafts)
    plain, _ = planned(spec, gigabytes * 10**9, share=False, limits=limits)
    shared, said = planned(spec, gigabytes * 10**9, share=True, limits=limits)
    assert shared.share_prefixes
    assert longest_request(shared) >= longest_request(plain)
    assert shared.total_bytes <= gigabytes * 10**9
    assert shared.max_num_seqs >= ROWS // 2
    assert (shared.max_num_seqs < ROWS) == bool(said)
    if kept(shared):
        assert shared.max_num_seqs == ROWS
        assert kept(shared) * shared.costs.page_bytes <= shared.kv_bytes
        working = LONGEST + (ROWS - 1) * 2048
        assert (shared.num_blocks - 1) * BLOCK >= min(working, (plain.num_blocks - 1) * BLOCK)
    if gigabytes >= 20:
        assert kept(shared) >= 20


@pytest.mark.parametrize(
    ("name", "gigabytes", "rows", "tokens", "pages"),
    [
        ("Nemotron-3-Nano-30B-A3B", 10, 32, 643_648, 55),
        ("Nemotron-3-Nano-30B-A3B", 20, 32, 1_456_400, 157),
        ("Nemotron-3-Nano-30B-A3B", 40, 32, 3_081_920, 361),
        ("Granite-4.0-H-Small", 10, 24, 135_424, 0),
        ("Granite-4.0-H-Small", 40, 32, 1_009_376, 86),
        ("Bamba-9B", 10, 32, 137_264, 0),
        ("Bamba-9B", 20, 32, 580_400, 37),
    ],
)
def test_what_published_models_get(name: str, gigabytes: int, rows: int, tokens: int, pages: int) -> None:
    """When pages and keys and values grew by equal tokens, Nano had keys and values of 36,512 tokens in 10 GB."""
    plan, _ = planned(PUBLISHED[name], gigabytes * 10**9, share=True)
    assert (plan.max_num_seqs, (plan.num_blocks - 1) * BLOCK, kept(plan)) == (rows, tokens, pages)


def test_fewer_rows_are_announced_with_both_numbers() -> None:
    plan, said = planned(PUBLISHED["Granite-4.0-H-Small"], 10**10, share=True)
    assert said == [
        "kv_cache_memory_bytes is 10000000000; with prefix caching, and with the keys and values of the longest "
        f"request, it holds the states of {plan.max_num_seqs} of max_num_seqs = 32 requests at once"
    ]


@pytest.mark.parametrize(
    ("name", "share", "gigabytes", "rows"),
    [
        ("Granite-4.0-H-Small", False, 100, 64),
        ("Granite-4.0-H-Small", False, 3, 8),  # with 64 it would be refused
        ("Granite-4.0-H-Small", True, 3, 4),  # a request that shares holds two pages
        ("Bamba-9B", False, 10, 32),  # 64 would leave a quarter of what the longest request takes
        ("Bamba-9B", True, 10, 32),
        ("Bamba-9B", False, 0.3, 1),
    ],
)
def test_rows_that_nobody_chose_make_room(name: str, share: bool, gigabytes: float, rows: int) -> None:
    """The default of 64 rows was refused for hybrids of 7B and more on machines of 24 GB."""
    limits, budget = EngineLimits(LONGEST, 64, 2048), int(gigabytes * 10**9)
    plan, said = planned(PUBLISHED[name], budget, share=share, limits=limits, chosen=False)
    assert plan.max_num_seqs == rows
    assert plan.total_bytes <= budget
    lacks = (
        f"kv_cache_memory_bytes is {budget}; with keys and values it holds the states of {rows} of 64 requests at "
        f"once, so max_num_seqs is {rows}; a value that you give is used or refused"
    )
    assert said == [lacks] * (rows < 64)
    if rows > 1:
        assert plan.kv_bytes >= min(budget // 2 - BLOCK * plan.costs.token_bytes, LONGEST * plan.costs.token_bytes)


@pytest.mark.parametrize("name", PUBLISHED)
def test_pages_lie_as_far_apart_as_they_cost(name: str) -> None:
    """Shared prefixes are found from 64 tokens on; later, a page costs no more than what it saves."""
    costs = planned(PUBLISHED[name], 2 * 10**10, share=True)[0].costs
    rule, layout = costs.retention, costs.layout
    assert rule is not None
    assert layout is not None
    assert layout.block_size == 64
    assert rule.every // 2 * costs.token_bytes < costs.page_bytes <= rule.every * costs.token_bytes
    assert rule.columns_to_cache(0, 1000, 1000) == [0, 1, 3, 7, 14]  # 64, 128, 256, 512 and the end of the prompt, 960
    assert costs.pages_to_share == len(rule.columns_to_cache(0, LONGEST, LONGEST))
    assert costs.pages_to_share * costs.page_bytes < 3 * LONGEST * costs.token_bytes


def test_cheap_pages_are_kept_at_every_boundary() -> None:
    spec = model(mamba=(1, 2, 8, 1), attention=(8, 8, 128))
    plan, _ = planned(spec, 10**9, share=True)
    assert plan.costs.page_bytes < 64 * plan.costs.token_bytes
    assert plan.costs.pages_to_share == LONGEST // 64


@pytest.mark.parametrize("states", [{"block_size": 256}, {"retention": "every=1024"}])
def test_what_a_user_asks_for_is_kept(states: dict[str, object]) -> None:
    plan, _ = planned(PUBLISHED["Bamba-9B"], 2 * 10**10, share=True, **states)
    assert plan.costs.pages_to_share == LONGEST // (256 if "block_size" in states else 1024)
    assert longest_request(plan) == LONGEST
    assert plan.max_num_seqs == ROWS


def test_windows_alone_are_kept_in_a_small_cache_as_well() -> None:
    conv = ShortConvLayer(ShortConv(2048, conv_width=3), 128)  # LFM2-8B-A1B on a GPU of 24 GB
    spec = ModelSpec("x", 1000, 2048, (conv,) * 18 + (AttentionLayer(8, 8, 64, 1.0),) * 6, 1e-5)
    spec = replace(spec, max_position_embeddings=LONGEST)
    plan, said = planned(spec, 29 * 10**8, share=True, limits=EngineLimits(LONGEST, 64, 2048))
    assert not said
    assert longest_request(plan) == LONGEST
    assert kept(plan) * 64 > plan.num_blocks * BLOCK // 3, "pages for a third of the tokens"


def test_one_request_without_room_for_a_second_page_shares_nothing() -> None:
    spec, limits = PUBLISHED["Bamba-9B"], EngineLimits(LONGEST, 1, 2048)
    tight = 2 * 10**9
    plain, _ = planned(spec, tight, share=False, limits=limits)
    for budget, shares in ((plain.costs.fixed_bytes(1) + 100 * 2**20, False), (tight, True)):
        plan, said = planned(spec, budget, share=True, limits=limits)
        assert (plan.share_prefixes, plan.max_num_seqs) == (shares, 1)
        assert [text.endswith("no cached state: prefix caching is off") for text in said] == ([] if shares else [True])


def test_a_model_without_attention_gives_all_to_pages() -> None:
    spec = model(mamba=(4, 4, 16, 1), attention=(0, 1, 1))
    plan, _ = planned(spec, 10**9, share=True)
    assert (plan.num_blocks, plan.num_tokens, plan.kv_bytes) == (0, 0, 0)
    assert kept(plan) == ROWS * plan.costs.pages_to_share
    assert plan.costs.layout is not None
    assert plan.costs.layout.block_size == 64


def test_logits_of_drafts_count() -> None:
    spec, limits = PUBLISHED["Nemotron-3-Nano-30B-A3B"], EngineLimits(LONGEST, ROWS, 2048, 4)
    options = CacheOptions(
        block_size=BLOCK,
        share_prefixes=False,
        states=StateOptions(num_speculative_tokens=4),
        draft=DraftCosts(token_bytes=1024, logits_bytes=4 * 131_072),
    )
    plan = plan_caches(spec, torch.bfloat16, limits, options, 5 * 10**9)
    assert plan.draft_bytes == (ROWS * 4 + 1) * 4 * 131_072
    assert 0 <= 5 * 10**9 - plan.total_bytes < BLOCK * plan.costs.token_bytes
    assert plan.costs.token_bytes == 6 * 2 * 2 * 128 * 2 + 1024


@pytest.mark.parametrize("seed", range(400))
def test_random_plans(seed: int) -> None:
    random = Random(seed)
    longest = random.choice([64, 300, 4096, LONGEST])
    spec = model(
        mamba=(random.randint(1, 8), 2 ** random.randint(0, 6), 2 ** random.randint(2, 6), 1),
        attention=(random.randint(0, 4), 2 ** random.randint(0, 3), 2 ** random.randint(3, 7)),
        longest=longest,
    )
    drafts = random.choice([0, 0, 1, 5])
    limits = EngineLimits(longest, random.choice([1, 2, 3, 32]), 2048, drafts)
    policy = random.choice(list(StatePolicy))
    retention = random.choice([None, "none", "all", "last"])
    states: dict[str, object] = {"policy": policy, "retention": retention}
    need = planned(spec, 10**18, share=False, limits=limits, policy=policy)[0]
    budget = need.costs.fixed_bytes(limits.max_num_seqs) + 2 * BLOCK * need.costs.token_bytes
    budget += int(random.choice([0, 0.01, 0.1, 1, 3]) * need.total_bytes * random.random())
    plain, _ = planned(spec, budget, share=False, limits=limits, policy=policy)
    shared, said = planned(spec, budget, share=True, limits=limits, **states)
    assert plain.max_num_seqs == limits.max_num_seqs
    for plan in (plain, shared):
        assert plan.total_bytes <= budget
        assert 0 <= plan.num_blocks <= 1 + plan.max_num_seqs * plan.max_blocks
    assert min(shared.num_blocks, 1 + shared.max_blocks) >= min(plain.num_blocks, 1 + plain.max_blocks)
    assert shared.max_num_seqs >= max(1, limits.max_num_seqs // 2)
    assert kept(shared) >= 0
    whole = shared.share_prefixes and shared.max_num_seqs == limits.max_num_seqs
    assert whole == (not said)
    assert shared.share_prefixes or limits.max_num_seqs == 1
    spare, token_bytes = budget - shared.total_bytes, shared.costs.token_bytes
    if token_bytes and shared.num_blocks < 1 + shared.max_num_seqs * shared.max_blocks:
        assert spare < BLOCK * token_bytes
    elif kept(shared) < shared.max_num_seqs * shared.costs.pages_to_share:
        assert spare < shared.costs.page_bytes
