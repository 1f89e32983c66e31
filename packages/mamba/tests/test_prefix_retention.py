"""`PrefixRetention`: which boundaries are published and dropped."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bateleur.mamba import CacheLayout, MambaCacheMode, PrefixRetention

RULES = ["none", "all", "last", "prompt_end", "last+prompt_end", "every=8", "every=12+last"]
RULES += ["doubling", "doubling+last", "doubling+every=16"]


def steps(sizes):
    total, out = 0, []
    for size in sizes:
        out.append((total, total + size))
        total += size
    return out


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(RULES), st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 120))
def test_the_cache_holds_what_the_rule_keeps(rule, sizes, prompt_len):
    kept, cache = PrefixRetention.parse(rule, 4), set()
    for before, after in steps(sizes):
        cache |= set(kept.columns_to_cache(before, after, prompt_len))
        cache = {column for column in cache if kept.keeps(column, after, prompt_len)}
        assert cache == {p for p in range(after // 4 + 2) if kept.keeps(p, after, prompt_len)}


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(RULES), st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 120))
def test_m34_a_boundary_is_published_once(rule, sizes, prompt_len):
    # sglang #24221, #24954: snapshots that raced. However a request is cut into steps, no column is named twice.
    kept = PrefixRetention.parse(rule, 4)
    seen = [p for before, after in steps(sizes) for p in kept.columns_to_cache(before, after, prompt_len)]
    assert len(seen) == len(set(seen))
    assert seen == sorted(seen)


def test_rules():
    # 40 tokens in blocks of 4, all at once; the prompt has 29, so the same prompt could start from 28.
    def columns(rule):
        return PrefixRetention.parse(rule, 4).columns_to_cache(0, 40, 29)

    assert columns("none") == []
    assert columns("all") == list(range(10))
    assert columns("last") == [9]
    assert columns("prompt_end") == [6]
    assert columns("every=12") == [2, 5, 8]
    assert columns("every=12+prompt_end") == [2, 5, 6, 8]
    assert columns("doubling") == [0, 1, 3, 7]
    assert columns("doubling+every=16+last") == [0, 1, 3, 7, 9]
    # The order makes no difference, and of two rules the wider one counts.
    assert columns("all+every=8") == columns("every=8+all") == columns("last+all") == list(range(10))
    # M13: of a prompt of whole blocks, the last block's end is of no use to the same prompt.
    assert PrefixRetention.parse("prompt_end", 4).columns_to_cache(0, 40, 28) == [5]
    assert PrefixRetention.parse("prompt_end", 4).columns_to_cache(0, 4, 4) == []


def test_modes_are_rules():
    def of(mode):
        return PrefixRetention.of(CacheLayout(mode, 64 if mode is MambaCacheMode.NONE else 8, 2, 64))

    assert of(MambaCacheMode.NONE).columns_to_cache(0, 64, 64) == []
    assert of(MambaCacheMode.ALL) == PrefixRetention.parse("all", 8)
    assert of(MambaCacheMode.ALIGN) == PrefixRetention.parse("last+prompt_end", 8)


@pytest.mark.parametrize(
    "text", ["", "some", "every", "every=", "every=x", "every=0", "none+last", "last=3", "every=4+every=8"]
)
def test_unknown_rules_are_refused(text):
    with pytest.raises(ValueError, match="retention is"):
        PrefixRetention.parse(text, 4)


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="every is 6; it must be a multiple of block_size = 4"):
        PrefixRetention.parse("every=6", 4)
    with pytest.raises(ValueError, match="every is 6"):
        PrefixRetention.parse("all+every=6", 4)
    with pytest.raises(ValueError, match="block_size is 0"):
        PrefixRetention(0)
