"""Every operator against its reference, with odd shapes, and NaN where nothing may be read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference_operators as reference
from bateleur.mamba import ops

TIGHT = {"rtol": 1e-10, "atol": 1e-10}
DTYPES = [
    pytest.param(torch.float64, torch.float64, TIGHT, id="f64"),
    pytest.param(torch.float32, torch.float32, {"rtol": 2e-4, "atol": 2e-4}, id="f32"),
    pytest.param(torch.bfloat16, torch.float32, {"rtol": 2e-2, "atol": 2e-2}, id="bf16"),
    pytest.param(torch.bfloat16, torch.bfloat16, {"rtol": 2e-2, "atol": 2e-2}, id="bf16-states"),
    pytest.param(torch.float16, torch.float16, {"rtol": 4e-3, "atol": 4e-3}, id="f16-states"),
]
SHAPES = [
    pytest.param({"heads": 3, "groups": 1, "channels": 5, "size": 7}, id="odd"),
    pytest.param({"heads": 3, "groups": 3, "channels": 5, "size": 7, "width": 2}, id="group-per-head"),
    pytest.param({"heads": 4, "groups": 2, "channels": 8, "size": 16, "width": 3}, id="16-byte-rows"),
]
PROMPTS = [[9, 1, 0, 2, 17], [1], [2, 3], [16, 4], [5, 0, 0]]


def tokens(problem) -> int:
    return sum(problem.lens)


def same_states(got: Tensor, want: Tensor, tolerance: dict[str, float]) -> None:
    """All slots but the scratch one, NaN where NaN was."""
    torch.testing.assert_close(got[1:], want[1:], equal_nan=True, **tolerance)


@pytest.mark.parametrize(("dtype", "state_dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lens", PROMPTS, ids=str)
def test_prompts_match_reference(make, shape, lens, dtype, state_dtype, tolerance):
    rows = len(lens)
    read = [0, *range(1, rows)]  # row 0 starts from zeros
    write = [n + 10 if n % 2 else n for n in range(1, rows + 1)]  # some rows write elsewhere
    kinds = {"dtype": dtype, "state_dtype": state_dtype, "padding": 2}
    got = make(lens, read=read, write=write, **kinds, **shape)
    want = got.copy()
    for y, y_ref in ((got.conv_varlen(ops), want.conv_varlen(reference)), (got.scan(ops), want.scan(reference))):
        assert y.dtype == dtype
        torch.testing.assert_close(y[: tokens(got)], y_ref[: tokens(got)], **tolerance)
    same_states(got.conv["conv_state"], want.conv["conv_state"], tolerance)
    same_states(got.ssm["ssm_state"], want.ssm["ssm_state"], tolerance)


@pytest.mark.parametrize(("dtype", "state_dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("lens", "drafts"), [([1, 1, 1], 0), ([1], 2), ([3, 1, 2, 3], 2), ([2, 0, 1, 0], 1), ([3, 3], 2)]
)
def test_updates_match_reference(make, shape, lens, drafts, dtype, state_dtype, tolerance):
    rows, width = len(lens), shape.get("width", 4)
    read = [0 if n == 1 else n for n in range(1, rows + 1)]
    kinds = {"dtype": dtype, "state_dtype": state_dtype, "drafts": drafts, "slots": 40}
    got = make(lens, read=read, write=range(1, rows + 1), **kinds, **shape)
    want = got.copy()
    offset = torch.tensor([n % (drafts + 1) if read[n] else 0 for n in range(rows)])
    # Row 0 writes where row 1 reads: all reads come first.
    write = torch.arange(2, 2 + rows * (drafts + 1)).view(rows, -1)
    longest = max(lens)
    y = got.conv_update(ops, offset, longest)
    torch.testing.assert_close(y, want.conv_update(reference, offset, longest), **tolerance)
    for n, q in enumerate(lens):
        keep = width - 2 + q if q else width - 1 + drafts
        states = (p.conv["conv_state"][n + 1, :keep] for p in (got, want))
        torch.testing.assert_close(*states, equal_nan=True, **tolerance)
    y = got.update(ops, write, longest)
    torch.testing.assert_close(y, want.update(reference, write, longest), **tolerance)
    same_states(got.ssm["ssm_state"], want.ssm["ssm_state"], tolerance)


def test_conv_without_bias_or_activation(make):
    got = make([5, 2])
    got.conv |= {"bias": None, "activation": "none"}
    want = got.copy()
    torch.testing.assert_close(got.conv_varlen(ops), want.conv_varlen(reference), **TIGHT)


def test_unknown_activation_is_refused(make):
    problem = make([1])
    problem.conv["activation"] = "gelu"
    with pytest.raises(ValueError, match="activation is 'gelu'"):
        problem.conv_varlen(ops)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 3])
def test_gated_rms_norm(dtype, groups):
    x, z, weight = (torch.randn(n, 12).to(dtype) for n in (5, 5, 1))
    got = ops.gated_rms_norm(x, z, weight[0], groups, 1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(got, reference.gated_rms_norm(x, z, weight[0], groups, 1e-5))
    half = torch.randn(5, 24).to(dtype).chunk(2, -1)  # strided, as a split makes them
    for shared in (weight[0], weight[0, : 12 // groups]):
        for options in ((), (False, "sigmoid"), (True,), (True, "sigmoid")):
            want = reference.gated_rms_norm(*half, shared, groups, 1e-5, *options)
            got = ops.gated_rms_norm(*half, shared, groups, 1e-5, *options)
            assert got.dtype == dtype
            torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="activation is 'gelu'; it must be 'silu' or 'sigmoid'"):
        ops.gated_rms_norm(*half, weight[0], groups, 1e-5, activation="gelu")


def test_read_slot_stays_as_it_was(make):
    problem = make([6, 2], read=[1, 2], write=[3, 4])
    before = problem.copy()
    problem.conv_varlen(ops)
    problem.scan(ops)
    for name, part, old in (("conv_state", problem.conv, before.conv), ("ssm_state", problem.ssm, before.ssm)):
        assert torch.equal(part[name][1:3], old[name][1:3])
        assert not part[name][3:5].isnan().any()


def test_rows_without_tokens_write_nothing(make):
    """Padded rows with real slots, after a larger batch, change nothing."""
    make([3, 5, 9]).scan(ops)
    problem = make([0, 4, 0], drafts=3)
    before = problem.copy()
    problem.conv_varlen(ops)
    problem.scan(ops)
    problem.conv_update(ops, torch.zeros(3, dtype=torch.int64), 4)
    for slot in (1, 3):
        assert torch.equal(problem.conv["conv_state"][slot], before.conv["conv_state"][slot])
        assert torch.equal(problem.ssm["ssm_state"][slot], before.ssm["ssm_state"][slot])


def test_decode_padding_is_neutral(make):
    """Padded rows with NaN inputs and one token per row change only slot 0."""
    problem = make([1, 1, 0, 0], padding=2, read=[1, 2, 0, 0])
    want = make([1, 1], read=[1, 2])
    for target in (problem.conv, problem.ssm):
        for name in ("x", "dt", "B", "C"):
            if name in target:
                target[name][:2] = (want.conv if target is problem.conv else want.ssm)[name]
    problem.ssm |= {k: want.ssm[k].clone() for k in ("A", "D", "dt_bias", "ssm_state")}
    problem.conv |= {k: want.conv[k].clone() for k in ("weight", "bias", "conv_state")}
    zeros = torch.zeros(4, dtype=torch.int64)
    y = problem.conv_update(ops, zeros, 1)
    torch.testing.assert_close(y[:2], want.conv_update(ops, zeros[:2], 1), **TIGHT)
    y = problem.update(ops, problem.rows["write"][:, None], 1)
    torch.testing.assert_close(y[:2], want.update(ops, want.rows["write"][:, None], 1), **TIGHT)
    same_states(problem.conv["conv_state"], want.conv["conv_state"], TIGHT)
    same_states(problem.ssm["ssm_state"], want.ssm["ssm_state"], TIGHT)


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 7, 16])
def test_scan_is_update_token_by_token(make, chunk_size):
    """The scan, the recurrence and single-token updates agree."""
    lens = [13, 4, 1]
    chunked = make(lens, chunk_size=chunk_size, phases=[0, 3 % chunk_size, 0])
    single = chunked.copy()
    y = chunked.scan(ops)
    loc = single.rows["query_start_loc"].tolist()
    for row, n in enumerate(lens):
        for token in range(loc[row], loc[row] + n):
            part = {k: v[token : token + 1] if k in ("x", "dt", "B", "C") else v for k, v in single.ssm.items()}
            slot = torch.tensor([row + 1])
            one = ops.selective_state_update(
                **part,
                query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
                max_query_len=1,
                read=slot,
                write=slot[:, None],
            )
            torch.testing.assert_close(one[0], y[token], **TIGHT)
    same_states(chunked.ssm["ssm_state"], single.ssm["ssm_state"], TIGHT)


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    chunk_size=st.integers(1, 16),
    width=st.integers(2, 4),
    neighbour=st.integers(1, 6),
)
def test_any_split_of_a_prompt_is_the_same(make, parts, chunk_size, width, neighbour):
    """States and outputs do not depend on how a prompt is split, or on the other rows."""
    total = sum(parts)
    whole = make([total], read=[0], write=[1], chunk_size=chunk_size, width=width)
    pieces = whole.copy()
    y, z = whole.scan(ops), whole.conv_varlen(ops)
    done = 0
    for part in parts:
        lens, read = [neighbour, part], [0, 1 if done else 0]
        step = make(lens, read=read, write=[2, 1], chunk_size=chunk_size, width=width, phases=[0, done % chunk_size])
        here = slice(done, done + part)
        for target, source in ((step.ssm, pieces.ssm), (step.conv, pieces.conv)):
            for name, value in source.items():
                if name in ("x", "dt", "B", "C"):
                    target[name][neighbour:] = value[here]
                else:
                    target[name] = value
        torch.testing.assert_close(step.scan(ops)[neighbour:], y[here], **TIGHT)
        torch.testing.assert_close(step.conv_varlen(ops)[neighbour:], z[here], **TIGHT)
        done += part
    torch.testing.assert_close(pieces.ssm["ssm_state"][1], whole.ssm["ssm_state"][1], **TIGHT)
    torch.testing.assert_close(pieces.conv["conv_state"][1], whole.conv["conv_state"][1], **TIGHT)


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.integers(1, 3).flatmap(lambda q: st.tuples(st.just(q), st.integers(1, q))), max_size=6))
def test_rejected_tokens_leave_no_trace(make, steps):
    """Drafting with rollback through slots and offsets equals feeding the accepted tokens alone."""
    spec = make([3], drafts=2, read=[0], write=[1])
    plain = make([3], drafts=0, read=[0], write=[1])
    for p in (spec, plain):
        p.scan(ops)
        p.conv_varlen(ops)
    accepted = 1
    for number, (q, kept) in enumerate(steps):
        extra = make([q], drafts=2, seed=number + 1)
        spec.ssm |= {k: extra.ssm[k] for k in ("x", "dt", "B", "C")}
        plain.ssm |= {k: extra.ssm[k][:kept] for k in ("x", "dt", "B", "C")}
        spec.conv["x"], plain.conv["x"] = extra.conv["x"], extra.conv["x"][:kept]
        for p, n in ((spec, q), (plain, kept)):
            p.rows["query_start_loc"] = torch.tensor([0, n], dtype=torch.int32)
            p.rows["write"] = torch.tensor([1])
        spec.rows["read"] = torch.tensor([accepted])  # columns are slots 1, 2, 3
        plain.rows["read"] = torch.tensor([1])
        plain.chunks["chunk_start_loc"] = plain.rows["query_start_loc"]  # one chunk, from 3 tokens on
        y = spec.update(ops, torch.tensor([[1, 2, 3]]), q)
        torch.testing.assert_close(y[:kept], plain.scan(reference), **TIGHT)
        spec.rows["read"] = torch.tensor([1])
        z = spec.conv_update(ops, torch.tensor([accepted - 1]), q)
        torch.testing.assert_close(z[:kept], plain.conv_varlen(reference), **TIGHT)
        accepted = kept


def test_large_decays_do_not_overflow(make):
    """Steps of 2.5 with A = -400: every exponent stays at or below zero."""
    problem = make([40], chunk_size=16, dtype=torch.float32)
    problem.ssm["A"].fill_(-400.0)
    assert problem.scan(ops).isfinite().all()


def test_chunks_take_several_pieces(make, monkeypatch):
    """The tile size does not change results."""
    problem = make([50, 3])
    want = problem.copy().scan(ops)
    monkeypatch.setattr("bateleur.mamba.ops.mamba2._TILE", 3)
    torch.testing.assert_close(problem.scan(ops), want, **TIGHT)


def test_wide_copies_on_cpu(make):
    """States large enough for 16-byte writes, in float32 and float16."""
    for dtype in (torch.float32, torch.float16):
        got = make([1] * 8, heads=4, channels=16, size=64, groups=2, dtype=torch.float32, state_dtype=dtype)
        want = got.copy()
        write = got.rows["write"][:, None].flip(0)
        got.update(ops, write, 1)
        want.update(reference, write, 1)
        same_states(got.ssm["ssm_state"], want.ssm["ssm_state"], {"rtol": 1e-3, "atol": 2e-3})


def test_no_tokens(make):
    problem = make([0, 0])
    assert problem.scan(ops).shape == (0, 3, 5)
    assert problem.conv_varlen(ops).shape[0] == 0


@pytest.mark.parametrize("slots", [(2, 3, 4), (4, 3, 2), (2, 4, 5), (0, 1, 2), (3, 3, 4)], ids=str)
@pytest.mark.parametrize("name", ["causal_conv1d_update", "selective_state_update"])
def test_update_in_place_is_the_same_as_through_a_copy(name: str, slots: tuple[int, ...]) -> None:
    """Rows with consecutive slots in every order."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    read, loc = torch.tensor(slots), torch.arange(4, dtype=torch.int32)
    if name == "selective_state_update":
        state = draw(7, 4, 5, 6)
        inputs = (draw(3, 4, 5), draw(3, 4), -draw(4).abs(), draw(3, 2, 6), draw(3, 2, 6), draw(4), draw(4))
    else:
        state = draw(7, 3, 5)
        inputs = (draw(3, 5), draw(5, 4), draw(5))
    results = []
    for form in (getattr(torch.ops.bateleur, name).default, getattr(reference, name)):
        own = state.clone()
        if name == "selective_state_update":
            y = form(own, *inputs, loc, 1, read, read[:, None], 0.0, float("inf"))
        else:
            y = form(*inputs, own, loc, 1, read, torch.zeros_like(read), read, "silu")
        results.append((y, own[1:]))
    if len(set(slots)) == len(slots):
        torch.testing.assert_close(results[0], results[1])
    else:  # two rows on one slot: which write stays is open, what is read is not
        torch.testing.assert_close(results[0][0], results[1][0])
