"""Sizes of states, the rules of a layout, and the pool. Tests mNN are those of the bug catalogue."""

from __future__ import annotations

import pytest
import torch

from bateleur.mamba import CacheLayout, Mamba2, MambaCacheMode, StatePolicy, StatePool

NONE, ALIGN, ALL = MambaCacheMode
SLOTS, FOLD = StatePolicy

MODELS = {  # layers, heads, head_dim, groups; MiB: without drafts, with 5 and slots, with 5 and a ring of 16; N is 128
    "Nemotron-H-8B": (24, 128, 64, 8, 97, 599, 108),
    "Nemotron-Nano-9B-v2": (27, 128, 80, 8, 137, 840, 151),
    "Nemotron-3-Nano-4B": (21, 96, 80, 8, 80, 491, 89),
    "Nemotron-3-Nano-30B-A3B": (23, 64, 64, 8, 47, 289, 53),
    "Nemotron-3-Super-120B-A12B": (40, 128, 64, 8, 162, 998, 180),
    "Nemotron-3-Ultra-550B-A55B": (48, 256, 64, 8, 389, 2385, 429),
    "Bamba-9B": (29, 128, 64, 1, 117, 718, 129),
    "Granite-4.0-H-350M": (28, 48, 32, 1, 21, 131, 24),
    "Granite-4.0-H-Tiny": (36, 48, 64, 1, 55, 335, 60),
    "Granite-4.0-H-Micro": (36, 64, 64, 1, 73, 446, 80),
    "Granite-4.0-H-Small": (36, 128, 64, 1, 146, 892, 160),
}


@pytest.mark.parametrize("name", MODELS)
def test_m35_bytes_per_request_of_published_models(name):
    # sglang #19169, #23643: rings and request conv windows belong to running requests, not to cached pages.
    layers, heads, head_dim, groups, *want = MODELS[name]
    used = []
    for drafts, policy in ((0, SLOTS), (5, SLOTS), (5, FOLD)):
        spec = Mamba2(heads, head_dim, 128, groups, num_speculative_tokens=drafts, policy=policy)
        layout = CacheLayout(NONE, 4096, drafts, 4096, policy)
        used.append(int(layers * spec.max_memory_usage_bytes(layout) / 2**20 + 0.5))
    assert used == want
    assert 5 * used[2] < used[1]


def test_bytes_in_each_mode():
    slots = Mamba2(4, 8, 16, 2, num_speculative_tokens=3)
    fold = Mamba2(4, 8, 16, 2, num_speculative_tokens=3, policy=FOLD)
    page, row = 96 * 2, 6 * 96 * 2  # an entry of a conv window; a request conv window
    assert (slots.conv_shape, fold.conv_shape, fold.request_conv_shape) == ((6, 96), (3, 96), (6, 96))
    assert (slots.page_bytes, fold.page_bytes) == (6 * page + 2048, 3 * page + 2048)
    assert (slots.request_conv_bytes, slots.ring_bytes(16)) == (0, 0)
    assert (fold.request_conv_bytes, fold.ring_bytes(16)) == (row, 16 * (32 * 2 + 4 * 4 + 32 * 2))
    assert (slots.num_speculative_blocks, fold.num_speculative_blocks) == (3, 0)
    for mode, num_slots, num_folded in ((NONE, 4, 1), (ALIGN, 5, 2), (ALL, 5, 2)):
        size = 64 if mode is NONE else 8
        used = slots.max_memory_usage_bytes(CacheLayout(mode, size, 3, 64))
        assert used == num_slots * slots.page_bytes
        layout = CacheLayout(mode, size, 3, 64, FOLD, 7)
        assert fold.max_memory_usage_bytes(layout) == num_folded * fold.page_bytes + fold.ring_bytes(7) + row
    with pytest.raises(ValueError, match=r"layout\.policy is StatePolicy\.SLOTS; the spec has StatePolicy\.FOLD"):
        fold.max_memory_usage_bytes(CacheLayout(ALL, 8, 3, 64))
    with pytest.raises(ValueError, match=r"layout\.num_speculative_tokens is 2; the spec has 3"):
        slots.max_memory_usage_bytes(CacheLayout(ALL, 8, 2, 64))


def test_m20_windows_hold_the_drafts():
    spec = Mamba2(6, 5, 7, 3, conv_width=3, num_speculative_tokens=2, ssm_dtype=torch.float16)
    assert (spec.inner_size, spec.conv_dim) == (30, 72)
    assert (spec.conv_shape, spec.state_shape) == ((4, 72), (6, 5, 7))
    assert spec.page_bytes == 4 * 72 * 2 + 6 * 5 * 7 * 2
    assert spec.num_speculative_blocks == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 0}, "num_heads is 0; it must be at least 1"),
        ({"state_size": -1}, "state_size is -1"),
        ({"num_groups": 3}, "num_heads is 4; it must be a multiple of num_groups = 3"),
        ({"conv_width": 1}, "conv_width is 1; it must be at least 2"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1"),
        ({"ssm_dtype": torch.int8}, r"ssm_dtype is torch\.int8"),
        ({"head_dim": 2.0}, "head_dim is 2.0; it must be a whole number"),
        ({"policy": "fold"}, r"policy is 'fold'; it must be one of StatePolicy\.SLOTS, StatePolicy\.FOLD"),
    ],
)
def test_bad_specs_are_refused(change, message):
    sizes = {"num_heads": 4, "head_dim": 2, "state_size": 2, "num_groups": 2}
    with pytest.raises(ValueError, match=message):
        Mamba2(**(sizes | change))


@pytest.mark.parametrize(
    ("args", "columns", "slots"),
    [
        ((NONE, 64, 3, 64), 4, 4),
        ((ALIGN, 16, 3, 65), 8, 5),
        ((ALL, 16, 3, 65), 8, 5),
        ((NONE, 64, 3, 64, FOLD), 1, 1),
        ((ALIGN, 16, 3, 65, FOLD), 5, 2),
        ((ALL, 16, 3, 65, FOLD), 5, 2),
        ((ALIGN, 16, 3, 16), 4, 4),
        ((ALIGN, 16, 3, 16, FOLD), 1, 1),
        ((ALL, 128, 0, 100), 1, 1),
    ],
)
def test_columns_and_slots(args, columns, slots):
    layout = CacheLayout(*args)
    assert (layout.columns(), layout.slots_per_request()) == (columns, slots)


@pytest.mark.parametrize(
    ("args", "rule"),
    [
        ((NONE, 16, 0, 64), "block_size is 16; in cache mode 'none' it must equal max_model_len = 64"),
        ((NONE, 64, -1, 64), "num_speculative_tokens is -1"),
        ((ALL, 0, 0, 64), "block_size is 0"),
        ((ALL, 3, 3, 64), "block_size is 3; in cache mode 'all' it must be at least 1 .* = 4"),
        ((ALIGN, 3, 3, 64), "in cache mode 'align' it must be at least 1 .* = 4"),
        ((ALL, 16, 5, 64, FOLD, 10), r"ring_capacity is 10; it must be at least 1 \+ 2 \* .* = 11"),
        ((NONE, 64, 5, 64, FOLD, 10), "ring_capacity is 10"),
        ((NONE, 0, 0, 0), "max_model_len is 0"),
        ((ALL, 16, 0, 64, SLOTS, 0), "ring_capacity is 0"),
        ((ALL, 16.0, 0, 64), "block_size is 16.0; it must be a whole number"),
        ((ALL, None, 0, 64), "block_size is None; it must be a whole number"),
        (("all", 16, 0, 64), r"mode is 'all'; it must be one of MambaCacheMode\.NONE, .*ALIGN, .*ALL"),
        ((ALL, 16, 0, 64, "fold"), r"policy is 'fold'; it must be one of StatePolicy\.SLOTS"),
    ],
)
def test_layout_names_the_broken_rule(args, rule):
    with pytest.raises(ValueError, match=rule):
        CacheLayout(*args)


def test_where_a_state_lies():
    layout = CacheLayout(ALL, 4, 2, 64)
    assert [layout.column(t) for t in (0, 1, 4, 5, 8)] == [-1, 0, 0, 1, 1]


def test_m13_one_token_is_left_to_compute():
    # vllm #50409, #50235: a prompt of whole blocks.
    layout = CacheLayout(ALL, 8, 2, 64)
    assert [layout.max_hit_tokens(n) for n in (0, 1, 8, 9, 16, 17, 24)] == [0, 0, 0, 8, 8, 16, 16]
    assert CacheLayout(NONE, 64, 2, 64).max_hit_tokens(64) == 0


def test_pool():
    specs = [Mamba2(2, 3, 4, 1), Mamba2(4, 3, 4, 2, conv_dtype=torch.float32, num_speculative_tokens=1)]
    pool = StatePool(specs, 5, "cpu")
    conv, ssm = pool.layer(1)
    assert conv.shape == (5, 4, 28)
    assert (conv.dtype, ssm.dtype) == (torch.float32, torch.float32)
    assert ssm.shape == (5, 4, 3, 4)
    assert pool.nbytes == sum(t.nbytes for i in range(2) for t in pool.layer(i))
    assert pool.layer(0)[1].data_ptr() == pool.layer(0)[1].data_ptr()
    with pytest.raises(ValueError, match="num_slots is 1"):
        StatePool(specs, 1, "cpu")
    with pytest.raises(ValueError, match="specs is empty"):
        StatePool([], 4, "cpu")
