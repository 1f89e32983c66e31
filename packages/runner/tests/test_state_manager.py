"""State pages: steps have all pages they need, no row holds more than planned, and nothing leaks."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from bateleur.mamba import CacheLayout, MambaCacheMode, MambaStateManager, PrefixRetention, StatePolicy
from bateleur.runner.cache.block_pool import BlockPool
from bateleur.runner.config.engine_config import CacheConfig
from bateleur.runner.config.state_options import StateOptions
from oracle import Planner
from oracle import run as run_oracle

ROWS, BLOCK, LONGEST = 3, 8, 96


def layout_of(policy: StatePolicy, mode: MambaCacheMode, drafts: int) -> CacheLayout:
    return CacheLayout(mode, BLOCK, drafts, LONGEST, policy)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("drafts", [0, 1, 3, 7])
@pytest.mark.parametrize("mode", [MambaCacheMode.ALIGN, MambaCacheMode.ALL])
@pytest.mark.parametrize("policy", list(StatePolicy))
def test_m38_rows_hold_what_steps_need_and_never_more_than_planned(policy, mode, drafts, seed) -> None:
    """The first pool has just what rows need, so a page too many fails at once; the others have spare pages."""
    random = Random(seed)
    layout = layout_of(policy, mode, drafts)
    most = layout.slots_per_request()
    assert most <= layout.slots_per_request()
    pool = BlockPool(1 + ROWS * most + 5 * seed)
    rules = (None, "all", "every=16+prompt_end", "none")
    rule = PrefixRetention.of(layout) if rules[seed] is None else PrefixRetention.parse(rules[seed], BLOCK)
    pages = MambaStateManager(pool, ROWS, layout, rule)
    computed = np.zeros(ROWS, np.int32)
    prompt = np.array([random.randint(1, 40) for _ in range(ROWS)], np.int32)
    number = list(range(ROWS))
    for step in range(60):
        decodes = [r for r in range(ROWS) if computed[r] >= prompt[r]]
        prompts = [r for r in range(ROWS) if computed[r] < prompt[r]]
        rows = np.array(decodes + prompts, np.int64)
        room = LONGEST - 1 - computed[rows]
        lens = [1 + random.randint(0, drafts) for _ in decodes] + [
            random.randint(1, int(prompt[r] - computed[r])) for r in prompts
        ]
        lens = np.minimum(np.array(lens, np.int32), room).astype(np.int32)
        before = computed[rows]
        pages.allocate_blocks(rows, before, lens, len(decodes), prompt[rows])
        for i, row in enumerate(rows):
            scanned = i >= len(decodes)
            held, last = pages.table[row], layout.column(int(before[i] + lens[i]))
            steps = 1 if scanned or policy is StatePolicy.FOLD else int(lens[i])
            first = int(before[i]) // BLOCK if policy is StatePolicy.FOLD and not scanned else last
            assert all(held[first : first + steps])
            kept = rule.columns_to_cache(int(before[i]), int(before[i] + lens[i]), int(prompt[row])) if scanned else []
            own = [c for c in np.flatnonzero(held).tolist() if held[c] not in pool._keys and c not in kept]
            assert len(own) <= layout.slots_per_request()
            if before[i]:
                assert held[layout.column(int(before[i]))]
        kept = np.array([random.randint(1, int(n)) if i < len(decodes) else n for i, n in enumerate(lens)])
        after = (before + kept).astype(np.int32)
        names = [number[row] for row in rows]
        pages.commit(rows, before, after, prompt[rows], lambda i, n, names=names: b"%d.%d" % (names[i], n))
        computed[rows] = after
        for row in range(ROWS):
            held = pages.table[row][pages.table[row] > 0]
            private = [page for page in held.tolist() if page not in pool._keys]
            assert len(private) <= most
            if computed[row] >= LONGEST - 2 - drafts or random.random() < 0.05:
                pages.release(row)
                computed[row], prompt[row], number[row] = 0, random.randint(1, 40), 100 * (step + 1) + row
    for row in range(ROWS):
        pages.release(row)
    assert pool.num_free == pool.capacity
    assert not pages.table.any()


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize("retention", ["all", "every=16", "last+prompt_end", "none"])
@pytest.mark.parametrize("spare", range(0, 40, 3))
def test_long_prompts_side_by_side_leave_each_other_a_page(spare: int, retention: str) -> None:
    """Each takes spare pages for boundaries within it, and not what the next one must have."""
    layout = layout_of(StatePolicy.FOLD, MambaCacheMode.ALL, 0)
    pool = BlockPool(1 + ROWS * layout.slots_per_request() + spare)
    pages = MambaStateManager(pool, ROWS, layout, PrefixRetention.parse(retention, BLOCK))
    rows, none, lens = np.arange(ROWS), np.zeros(ROWS, np.int32), np.full(ROWS, 90, np.int32)
    pages.allocate_blocks(rows, none, lens, 0, lens)
    assert pages.table[:, 11].all()
    inside = {"all": 11, "every=16": 5, "last+prompt_end": 1, "none": 0}[retention]
    assert np.count_nonzero(pages.table[:, :11]) >= min(spare, ROWS * inside)


def run(pages: MambaStateManager, row: int, before: int, after: int, text: str, prompt: int) -> None:
    """Run one row's prompt; `text` determines its tokens."""
    at = (np.array([row]), numbers(before))
    pages.allocate_blocks(*at, numbers(after - before), 0, numbers(prompt))
    pages.commit(*at, numbers(after), numbers(prompt), lambda _, n: f"{text}.{n}".encode())


@pytest.mark.parametrize("policy", list(StatePolicy))
def test_boundaries_that_nobody_keeps_take_no_page_from_others(policy: StatePolicy) -> None:
    layout = layout_of(policy, MambaCacheMode.ALIGN, 0)
    pages = MambaStateManager(BlockPool(1 + ROWS * 2 + 4), ROWS, layout, PrefixRetention.of(layout))
    for text in ("a", "b", "c"):
        run(pages, 0, 0, 20, text, 20)
        pages.release(0)
    run(pages, 1, 0, 90, "long", 90)
    assert all(pages.pool.find(key) for key in (b"a.16", b"b.16", b"c.16", b"long.88"))
    assert np.count_nonzero(pages.table[1]) <= layout.slots_per_request()


def test_a_row_drops_only_what_it_published() -> None:
    """A conversation that continues from the end of a prompt leaves it to requests that repeat the prompt."""
    layout = layout_of(StatePolicy.FOLD, MambaCacheMode.ALIGN, 0)
    pages = MambaStateManager(BlockPool(1 + ROWS * 2 + 8), ROWS, layout, PrefixRetention.of(layout))
    run(pages, 0, 0, 20, "a", 20)
    end = pages.pool.find(b"a.16")
    pages.admit(1, 16, end)
    run(pages, 1, 16, 30, "a", 50)
    assert pages.pool.find(b"a.16") == end
    assert pages.pool.find(b"a.24")
    run(pages, 1, 30, 40, "a", 50)  # what it published itself goes when the next boundary is there
    assert not pages.pool.find(b"a.24")
    run(pages, 2, 0, 20, "a", 50)  # beside row 0, which was first
    run(pages, 2, 20, 40, "a", 50)
    assert (pages.pool.find(b"a.16"), bool(pages.pool.find(b"a.40"))) == (end, True)


@pytest.mark.parametrize("rule", ["none", "all", "last", "prompt_end", "every=16+last+prompt_end", "doubling"])
def test_of_many_rows_the_pool_has_what_the_rule_keeps_of_each(rule: str) -> None:
    random, layout = Random(rule), layout_of(StatePolicy.FOLD, MambaCacheMode.ALL, 0)
    retention = PrefixRetention.parse(rule, BLOCK)
    num_rows = 24
    pages = MambaStateManager(BlockPool(1 + 20 * num_rows), num_rows, layout, retention)
    rows = np.arange(num_rows)
    prompts = np.array([random.randint(1, 40) for _ in rows], np.int32)
    for row in rows:  # of every column, whatever is needed
        pages.blocks.write(row, np.arange(12), pages.pool.allocate(12))
    pages.blocks.write_cells = lambda *_: None  # type: ignore[method-assign]
    pages.pool.free = lambda _: None  # type: ignore[method-assign]
    before = np.zeros(num_rows, np.int32)
    while (before < 80).any():
        steps = np.array([random.randint(0, 13) for _ in rows], np.int32)
        after = np.minimum(before + steps, LONGEST - 1)
        pages.commit(rows, before, after, prompts, lambda i, n: b"%d.%d" % (i, n))
        before = after
        kept = {
            b"%d.%d" % (row, (column + 1) * BLOCK): pages.table[row, column]
            for row in rows
            for column in range(12)
            if retention.keeps(column, int(after[row]), int(prompts[row]))
        }
        assert kept == pages.pool._blocks


class OverBlockPool(Planner):
    """A state manager over the engine's block pool."""

    pool = BlockPool


def test_the_oracle_finds_nothing_in_pages_over_the_engines_pool() -> None:
    report = run_oracle(400, 7, planner=OverBlockPool(), num_lanes=16)
    assert report.differences == 0, f"{report}, {report.failing}"
    assert report.seen["hits"] > 200


def parsed(mode=None, policy=None, block=None, retention=None, dtype="auto", k=0, device="cpu", share=False):
    cache = CacheConfig(
        mamba_cache_mode=mode,
        mamba_state_policy=policy,
        mamba_block_size=block,
        mamba_retention=retention,
        mamba_ssm_cache_dtype=dtype,
        enable_prefix_caching=share or mode not in (None, "none"),
    )
    return StateOptions.of(cache, k, torch.device(device))


def test_defaults_are_the_best_for_the_device() -> None:
    assert parsed().policy is StatePolicy.SLOTS
    assert parsed(k=1).policy is StatePolicy.SLOTS
    assert parsed(policy="slots", k=3).policy is StatePolicy.SLOTS
    for share in (False, True):
        assert parsed(device="cuda", share=share).policy is StatePolicy.SLOTS
        assert parsed(device="cuda", share=share, k=1).policy is StatePolicy.FOLD
        assert parsed(device="cuda", share=share, policy="fold").policy is StatePolicy.FOLD
    shared = parsed(k=4, share=True)
    assert (shared.mode, shared.policy) == (MambaCacheMode.ALL, StatePolicy.FOLD)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("every=12", "mamba_retention is 'every=12'; it must be a multiple of block_size = 8"),
        ("some", "mamba_retention is 'some'; it must be 'none', or some of"),
    ],
)
def test_rules_that_do_not_fit_are_refused(rule: str, message: str) -> None:
    options = parsed("all", "fold", 8, rule)
    with pytest.raises(ValueError, match=message):
        options.retained(options.layout(8, 96), page_bytes=1000, token_bytes=10)


def test_rings_hold_a_fold_and_a_step() -> None:
    for k in range(12):
        layout = parsed(policy="fold", k=k).layout(16, 256)
        assert layout.ring_capacity >= 1 + 2 * k


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "both"}, "mamba_state_policy is 'both'; it must be one of slots, fold"),
        ({"retention": "all"}, "mamba_retention is 'all'; it must be None in cache mode 'none', which keeps no states"),
        ({"dtype": "int8"}, "mamba_ssm_cache_dtype is 'int8'; it must be one of auto, float32"),
        ({"dtype": torch.int8}, "mamba_ssm_cache_dtype is 'int8'; it must be one of auto, float32"),
    ],
)
def test_options_that_mean_nothing_are_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        parsed(**arguments)
