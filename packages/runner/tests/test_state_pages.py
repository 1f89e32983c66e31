"""State pages alone: what steps may read and write has a page, nobody holds more than planned, and nothing leaks."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from bateleur.mamba import CacheLayout, MambaCacheMode, Retention, StatePolicy
from bateleur.runner.block_pool import BlockPool
from bateleur.runner.state_options import StateOptions
from bateleur.runner.state_pages import StatePages, pages_per_request

ROWS, BLOCK, LONGEST = 3, 8, 96


def layout_of(policy: StatePolicy, mode: MambaCacheMode, drafts: int) -> CacheLayout:
    return CacheLayout(mode, BLOCK, drafts, LONGEST, policy)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("drafts", [0, 1, 3, 7])
@pytest.mark.parametrize("mode", [MambaCacheMode.ALIGN, MambaCacheMode.ALL])
@pytest.mark.parametrize("policy", list(StatePolicy))
def test_m38_rows_hold_what_steps_need_and_never_more_than_planned(policy, mode, drafts, seed) -> None:
    """The pool has just what rows need, so a page too many fails at once."""
    random = Random(seed)
    layout = layout_of(policy, mode, drafts)
    most = pages_per_request(layout)
    assert most <= layout.slots_per_request()
    pool = BlockPool(1 + ROWS * most)
    pages = StatePages(pool, ROWS, layout, Retention.of(layout))
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
        pages.cover(rows, before, lens, len(decodes))
        for i, row in enumerate(rows):
            scanned = i >= len(decodes)
            needed = layout.written_columns(int(before[i]), int(lens[i]), scanned=scanned)
            held = pages.table[row]
            assert all(held[column] for column in needed)
            if before[i]:
                oldest = layout.oldest_column(int(before[i]), scanned=scanned)
                assert held[layout.column(int(before[i]))]
                assert not held[:oldest].any() or policy is StatePolicy.FOLD
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


def test_a_pool_too_small_is_refused() -> None:
    layout = layout_of(StatePolicy.SLOTS, MambaCacheMode.ALL, 2)
    with pytest.raises(ValueError, match="pool has 11 pages; 3 rows need 12"):
        StatePages(BlockPool(12), ROWS, layout, Retention.of(layout))


def parsed(mode=None, policy=None, block=None, retention=None, dtype="auto", k=0, device="cpu"):
    where = torch.device(device)
    share = mode not in (None, "none")
    return StateOptions.parse(
        mode,
        policy,
        block,
        retention,
        dtype,
        share_prefixes=share,
        num_speculative_tokens=k,
        device=where,
    )


def test_defaults_are_the_best_for_the_device() -> None:
    assert parsed().policy is StatePolicy.SLOTS
    assert parsed(k=1).policy is StatePolicy.FOLD
    assert parsed(device="cuda").policy is StatePolicy.FOLD
    assert parsed(policy="slots", k=3).policy is StatePolicy.SLOTS
    shared = StateOptions.parse(
        None,
        None,
        None,
        None,
        "auto",
        share_prefixes=True,
        num_speculative_tokens=4,
        device=torch.device("cpu"),
    )
    assert (shared.mode, shared.policy) == (MambaCacheMode.ALL, StatePolicy.FOLD)


def test_rings_hold_a_fold_and_a_step() -> None:
    for k in range(12):
        layout = parsed(policy="fold", k=k).layout(16, 256)
        assert layout.ring_capacity >= 1 + 2 * k


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "both"}, "mamba_state_policy is 'both'; it must be one of slots, fold"),
        ({"retention": "all"}, "mamba_retention is 'all'; in cache mode 'none' nothing is kept"),
        ({"dtype": "int8"}, "mamba_ssm_cache_dtype is 'int8'; it must be one of auto, float32"),
        ({"dtype": torch.int8}, "mamba_ssm_cache_dtype is torch.int8; it must be one of float32"),
    ],
)
def test_options_that_mean_nothing_are_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        parsed(**arguments)
