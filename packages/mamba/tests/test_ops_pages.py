"""States and conv windows after prefills, and copies of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference_operators as reference
from bateleur.mamba import ops

NAN = float("nan")
TIGHT = {"rtol": 1e-10, "atol": 1e-10}
FORMS = [pytest.param(ops, id="ops"), pytest.param(reference, id="reference")]
KINDS = [
    pytest.param(torch.float64, torch.float64, TIGHT, id="f64"),
    pytest.param(torch.float32, torch.float32, {"rtol": 2e-4, "atol": 2e-4}, id="f32"),
    pytest.param(torch.bfloat16, torch.bfloat16, {"rtol": 3e-2, "atol": 3e-2}, id="bf16-states"),
    pytest.param(torch.float16, torch.float16, {"rtol": 4e-3, "atol": 4e-3}, id="f16-states"),
]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(("dtype", "state_dtype", "tolerance"), KINDS)
@pytest.mark.parametrize("lens", [[9, 1, 0, 2, 17], [0, 6], [4, 0, 8], [1]], ids=str)
def test_pages_after_chunks_match_reference(make, lens, dtype, state_dtype, tolerance):
    """Chunks with and without a slot, at the end of a row and inside; each row stores its request conv window."""
    kinds = {"dtype": dtype, "state_dtype": state_dtype, "drafts": 2, "slots": 40, "padding": 1}
    got = make(lens, read=[0, *range(1, len(lens))], phases=[n % 3 for n in range(len(lens))], **kinds)
    chunks = len(got.chunks["chunk_row"])
    got.chunks["pages"] = torch.tensor([0 if k % 3 == 1 else 20 + k for k in range(chunks)])
    got.request_conv = torch.full((len(lens) + 2, *got.conv["conv_state"].shape[1:]), NAN, dtype=dtype)
    got.request_conv_write = torch.tensor([0 if n == 3 else n + 1 for n in range(len(lens))])
    want = got.copy()
    for name in ("conv_varlen", "scan"):
        y, y_ref = getattr(got, name)(ops), getattr(want, name)(reference)
        torch.testing.assert_close(y[: sum(lens)], y_ref[: sum(lens)], **tolerance)
    for a, b in (
        (got.conv["conv_state"], want.conv["conv_state"]),
        (got.ssm["ssm_state"], want.ssm["ssm_state"]),
        (got.request_conv, want.request_conv),
    ):
        torch.testing.assert_close(a[1:], b[1:], equal_nan=True, **tolerance)
    for chunk, slot in enumerate(got.chunks["pages"].tolist()):
        assert slot == 0 or not got.ssm["ssm_state"][slot].isnan().any(), chunk
    assert got.conv["conv_state"][20:, 3:].isnan().all()  # a widened window is written up to its first W - 1


def prompt_beside_neighbours(form, layer, streams, before, lens, block, size):
    """Run a step of three prompts, each from the page after `before` of its tokens, in chunks that end at boundaries.

    Every boundary and every end keeps its page. Returns outputs, pools and {(row, tokens): slot}; row `row` reads
    page `row + 1`.
    """
    conv_state = torch.full((40, layer.width - 1, layer.conv), NAN, dtype=torch.float64)
    ssm_state = torch.full((40, layer.heads, layer.channels, layer.size), NAN, dtype=torch.float64)
    starts, rows, first, pages, inputs, done = [0], [], [0], {}, [], 0
    for row, (stream, n, q) in enumerate(zip(streams, before, lens, strict=True)):
        conv_state[row + 1], ssm_state[row + 1] = stream.windows[n], stream.states[n]
        inputs.append(stream.tokens(n, n + q))
        for t in range(n + 1, n + q + 1):
            if t % size == 0 or t == n + q:
                starts.append(done + t - n)
                rows.append(row)
                if t % block == 0 or t == n + q:
                    pages[row, t] = 4 + len(pages)
        done += q
        first.append(len(rows))
    names = inputs[0]
    tokens = {name: torch.cat([part[name] for part in inputs]) for name in names}
    ends = dict(zip(starts[1:], range(len(rows)), strict=True))
    write = [0] * len(rows)
    for (row, t), slot in pages.items():
        write[ends[sum(lens[:row]) + t - before[row]]] = slot
    i32 = {"dtype": torch.int32}
    shared = {
        "query_start_loc": torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], **i32),
        "read": ints(*((row + 1) * (n > 0) for row, n in enumerate(before))),
        "chunk_start_loc": torch.tensor(starts, **i32),
        "chunk_row": torch.tensor(rows, **i32),
        "chunk_write": ints(*write),
    }
    u = tokens.pop("u")
    conv = {"x": u, "weight": layer.weight, "bias": None, "activation": "silu"}
    z = form.causal_conv1d_varlen(**conv, conv_state=conv_state, request_conv=None, request_conv_write=None, **shared)
    sizes = {"row_chunk_loc": torch.tensor(first, **i32), "max_chunks_per_row": max(1, len(rows)), "chunk_size": size}
    y = form.ssd_scan_varlen(**tokens, **layer.params, ssm_state=ssm_state, **shared, **sizes)
    return y, z, conv_state, ssm_state, pages


def check_prompts(form, layer, block, size, before, lens):
    streams = [layer.stream(n + q, seed) for seed, (n, q) in enumerate(zip(before, lens, strict=True))]
    y, z, conv_state, ssm_state, pages = prompt_beside_neighbours(form, layer, streams, before, lens, block, size)
    for row, (stream, n) in enumerate(zip(streams, before, strict=True)):
        here = slice(sum(lens[:row]), sum(lens[: row + 1]))
        torch.testing.assert_close(y[here], stream.y[n:], **TIGHT)
        torch.testing.assert_close(z[here], stream.z[n:], **TIGHT)
        # What is read is shared with other requests: it stays, bit for bit.
        assert torch.equal(conv_state[row + 1], stream.windows[n])
        assert torch.equal(ssm_state[row + 1], stream.states[n])
    for (row, t), slot in pages.items():
        torch.testing.assert_close(ssm_state[slot], streams[row].states[t], **TIGHT)
        torch.testing.assert_close(conv_state[slot], streams[row].windows[t], **TIGHT)
    written = set(pages.values()) | {0, 1, 2, 3}
    assert all(conv_state[slot].isnan().all() for slot in range(40) if slot not in written)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("block", "before", "tokens"), [(16, 16, 2), (16, 15, 2), (16, 12, 8), (16, 15, 20), (16, 14, 20)]
)
def test_m04_pages_of_a_prompt_beside_neighbours(make_layer, form, block, before, tokens):
    """Few tokens behind a hit (C), few across a boundary (D), a boundary among the first tokens of a step (E)."""
    layer = make_layer(2, 3, 4, 1, 4)
    check_prompts(form, layer, block, 8, [19, before, 5], [9, tokens, 3])


@settings(max_examples=60, deadline=None)
@given(
    block=st.sampled_from([4, 8, 16]),
    parts=st.integers(1, 4),
    before=st.tuples(*[st.integers(0, 20)] * 3),
    lens=st.tuples(*[st.integers(1, 22)] * 3),
    width=st.integers(2, 4),
)
def test_pages_are_those_of_the_recurrence_at_any_alignment(make_layer, block, parts, before, lens, width):
    size = {1: block, 2: block // 2, 3: block // 4, 4: 1}[parts]
    check_prompts(ops, make_layer(2, 3, 4, 1, width), block, size, before, lens)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", [2, 3])
def test_m20_a_layer_of_convolutions_alone_rolls_back(make_layer, form, width):
    """Its window is as wide as any layer's, W - 1 + K: no SSM state is there to tell."""
    layer, drafts = make_layer(1, 1, 1, 1, width), 3
    stream = layer.stream(40, 1)
    state = torch.full((3, width - 1 + drafts, layer.conv), NAN, dtype=torch.float64)
    state[2, : width - 1] = stream.windows[5]
    n, kept = 5, 1
    for tokens, accepted in ((4, 3), (4, 1), (1, 1), (2, 2), (4, 4), (3, 1), (4, 2)):
        u = stream.tokens(n, n + accepted, junk=tokens - accepted)["u"]
        slots = {"read": ints(2), "offset": ints(kept - 1), "write": ints(2)}
        batch = {"query_start_loc": torch.tensor([0, tokens], dtype=torch.int32), "max_query_len": 4}
        z = form.causal_conv1d_update(u, layer.weight, None, state, **batch, **slots, activation="silu")
        torch.testing.assert_close(z[:accepted], stream.z[n : n + accepted], **TIGHT)
        n, kept = n + accepted, accepted


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lens", [[1, 1], [3, 2]], ids=str)
def test_m22_windows_move_between_slots(make, form, lens):
    """Read and write slots differ, and one row writes what the other reads."""
    problem = make(lens, drafts=2, read=[1, 2])
    before = problem.conv["conv_state"].clone()
    same = problem.copy()
    problem.rows = problem.rows | {"write": ints(2, 5)}
    offset = ints(1, 2)
    z = problem.conv_update(form, offset, max(lens))
    torch.testing.assert_close(z, same.conv_update(form, offset, max(lens)), **TIGHT)
    state = problem.conv["conv_state"]
    assert torch.equal(state[1], before[1])
    for row, (slot, own) in enumerate(((2, 1), (5, 2))):
        keep = 2 + lens[row]
        torch.testing.assert_close(state[slot, :keep], same.conv["conv_state"][own, :keep], **TIGHT)


def pools(dtype=torch.float64, entries=6, channels=5, slots=9):
    g = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    return rand(slots, entries, channels), rand(slots, 3, 4, 7)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["sd", "ds"])
def test_m21_copies_shift_in_both_layouts_and_in_place(form, dtype, layout):
    """In place, from one to several, and in a ring: everything is read before anything is written."""
    conv, ssm = pools(dtype)
    if layout == "ds":  # entries are the last dimension in memory
        conv = conv.transpose(1, 2).contiguous().transpose(1, 2)
    old_conv, old_ssm = conv.clone(), ssm.clone()
    rows = [  # conv_src, bias, ssm_src, dst
        (1, 2, 1, 1),
        (2, 1, 3, 3),
        (3, 0, 2, 2),
        (2, 0, 2, 5),
        (0, 0, 0, 6),
        (4, 1, 4, 0),
    ]
    form.copy_states(conv[None], ssm[None], *(ints(*column) for column in zip(*rows, strict=True)))
    old_conv[0], old_ssm[0] = 0, 0
    for conv_src, bias, ssm_src, dst in rows[:-1]:
        assert torch.equal(conv[dst, : 6 - bias], old_conv[conv_src, bias:])
        assert torch.equal(ssm[dst], old_ssm[ssm_src])
    for slot in (4, 7, 8):
        assert torch.equal(conv[slot], old_conv[slot])
        assert torch.equal(ssm[slot], old_ssm[slot])


@pytest.mark.parametrize("form", FORMS)
def test_copies_of_nothing_change_nothing(form):
    conv, ssm = pools()
    conv[0], ssm[0] = NAN, NAN
    old_conv, old_ssm = conv.clone(), ssm.clone()
    form.copy_states(conv[None], ssm[None], ints(1, 2), ints(3, 1), ints(2, 1), ints(0, 0))
    assert torch.equal(conv[1:], old_conv[1:])
    assert torch.equal(ssm[1:], old_ssm[1:])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 8)] * 3, st.integers(0, 5)), min_size=1, max_size=6), st.randoms())
def test_copies_match_reference(rows, random):
    got, want = pools(), pools()
    for conv, ssm in (got, want):
        conv[0], ssm[0] = NAN, NAN
    dst = random.sample(range(9), len(rows))
    conv_src, ssm_src, _, bias = (ints(*column) for column in zip(*rows, strict=True))
    ops.copy_states(*(t[None] for t in got), conv_src, bias, ssm_src, ints(*dst))
    reference.copy_states(*(t[None] for t in want), conv_src, bias, ssm_src, ints(*dst))
    for slot in range(1, 9):
        shown = 6 - (bias[dst.index(slot)] if slot in dst else 0)
        assert torch.equal(got[0][slot, :shown], want[0][slot, :shown])
        assert torch.equal(got[1][slot], want[1][slot])
