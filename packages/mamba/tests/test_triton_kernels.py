"""The Triton forms against the naive ones: on CPU in Triton's interpreter, and on CUDA where there is a device.

Triton decides whether to interpret when a kernel is defined, so the CPU tests of this file run in a process of
their own, which the last test starts.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch

import reference_operators as reference
from bateleur.mamba.ops import FORMS
from triton_rows import NAN, PaddedRows, moved, triton_form, with_shares

pytest.importorskip("triton", reason="triton is not installed")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# of activations and states; and what the two may differ by
KINDS = [
    pytest.param(torch.float32, torch.float32, 2e-5, id="f32"),
    pytest.param(torch.bfloat16, torch.float32, 2e-2, id="bf16"),
    pytest.param(torch.float16, torch.float16, 4e-3, id="f16"),
    pytest.param(torch.bfloat16, torch.bfloat16, 2e-2, id="bf16-states"),
    pytest.param(torch.float32, torch.bfloat16, 1e-2, id="f32-bf16-states"),
]
# Triton's interpreter multiplies the bits of bfloat16 matrices as integers.
SCAN_KINDS = [KINDS[0], KINDS[2], KINDS[4]] if INTERPRETED else KINDS
ROUNDED = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""What states may differ by that are not rounded on the way."""
SHAPES = [
    pytest.param({"heads": 3, "head_dim": 5, "size": 7, "groups": 1}, id="odd"),
    pytest.param({"heads": 4, "head_dim": 40, "size": 16, "groups": 2, "width": 3}, id="two-tiles"),
]


@pytest.fixture(params=["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Device of the kernels; new memory is NaN, so that reads before writes are detected."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(NAN))
    return torch.device(request.param)


class Batch(PaddedRows):
    """Of a layer of Mamba-2, or of a convolution."""

    written = ("conv_state", "ssm_state", "request_conv", "ring_x", "ring_dt", "ring_B")

    def __init__(
        self,
        lens: Sequence[int],
        *,
        heads: int = 3,
        head_dim: int = 5,
        size: int = 7,
        groups: int = 1,
        width: int = 4,
        drafts: int = 0,
        dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype = torch.float32,
        read: Sequence[int] | None = None,
        slots: int = 40,
        seed: int = 0,
    ) -> None:
        super().__init__(lens, read, dtype, state_dtype, seed)
        inner, outer = heads * head_dim, groups * size
        flat = self.flat(inner + 2 * outer + heads)
        x, B, C, dt = flat.split([inner, outer, outer, heads], 1)
        self.args |= {
            "x": x.unflatten(1, (heads, -1)),
            "B": B.unflatten(1, (groups, -1)),
            "C": C.unflatten(1, (groups, -1)),
            "dt": dt,
            "A": -self.rand(heads, to=torch.float32).abs() - 0.1,
            "D": self.rand(heads, to=torch.float32),
            "dt_bias": self.rand(heads, to=torch.float32),
            "dt_min": 0.01,
            "dt_max": 2.5,
            "weight": self.rand(inner + 2 * outer, width),
            "bias": self.rand(inner + 2 * outer),
            "activation": "silu",
            "conv_state": self.states(slots, width - 1 + drafts, inner + 2 * outer),
            "ssm_state": self.states(slots, heads, head_dim, size),
        }
        self.xbc = flat[:, : inner + 2 * outer]

    def ring(self, lengths: Sequence[int], capacity: int) -> None:
        """See `place_rings`."""
        heads, head_dim, size = self.args["ssm_state"].shape[1:]
        rows, groups = len(lengths), self.args["B"].shape[1]
        rings = {
            "ring_x": self.rand(rows + 2, capacity, heads, head_dim),
            "ring_dt": self.rand(rows + 2, capacity, heads, to=torch.float32).abs(),
            "ring_B": self.rand(rows + 2, capacity, groups, size),
        }
        self.place_rings(lengths, capacity, rings)


@pytest.mark.parametrize("name", FORMS)
def test_forms_take_the_arguments_of_the_reference(name: str) -> None:
    mine, other = (inspect.signature(f).parameters for f in (triton_form(name), getattr(reference, name)))
    assert [*mine] == [*other]


@pytest.mark.parametrize(("dtype", "state_dtype", "tolerance"), KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lens", [[1, 1, 1], [3, 0, 1, 2]], ids=str)
def test_state_update(
    device: torch.device, lens: list[int], shape: dict[str, int], dtype: torch.dtype, state_dtype: torch.dtype,
    tolerance: float,
) -> None:  # fmt: skip
    """Row 0 starts from zeros; one token's state is dropped; the last row writes the slot it reads."""
    batch = Batch(lens, dtype=dtype, state_dtype=state_dtype, read=[0, *range(1, len(lens))], **shape)
    write = torch.zeros(len(batch.lens), max(lens) + 1, dtype=torch.int64)
    write[: len(lens)] = 10 + torch.arange(len(lens) * write.shape[1]).view(len(lens), -1)
    write[-3, 0], write[0, -2] = len(lens) - 1, 0
    batch.check("selective_state_update", device, tolerance, write=write)


@pytest.mark.parametrize(("dtype", "state_dtype", "tolerance"), KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("lens", "capacity"), [([1, 1], 16), ([3, 0, 1, 2], 5), ([2, 3], 20)], ids=str)
def test_replay(
    device: torch.device, lens: list[int], capacity: int, shape: dict[str, int], dtype: torch.dtype,
    state_dtype: torch.dtype, tolerance: float,
) -> None:  # fmt: skip
    """From an empty ring, and up to a full one; row 0 starts from zeros; the checkpoint is only read."""
    batch = Batch(lens, dtype=dtype, state_dtype=state_dtype, read=[0, *range(1, len(lens))], **shape)
    lengths = [0, *(capacity - n for n in lens[1:-1]), capacity // 3]
    batch.ring(lengths, capacity)
    batch.check("replay_update", device, tolerance, slot=batch.args["read"])


def test_replay_of_a_row_without_a_ring_leaves_the_null_row(device: torch.device) -> None:
    """A dummy step has tokens but only null slots and rings: nothing else may change."""
    batch = Batch([2, 1])
    batch.ring([1, 3], 7)
    names = inspect.signature(reference.replay_update).parameters
    batch.args["slot"] = batch.args["ring_row"] = torch.zeros(4, dtype=torch.int64)
    args = {key: moved(batch.args[key], device) for key in names}
    y = triton_form("replay_update")(**args)
    assert y[:3].isfinite().all()
    for name in ("ssm_state", "ring_x", "ring_dt", "ring_B"):
        torch.testing.assert_close(args[name].cpu(), batch.args[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("dtype", "state_dtype", "tolerance"), KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_fold(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    shape: dict[str, int],
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    tolerance: float,
) -> None:
    """In place, from zeros, to another slot, nothing to do, and a copy of the state alone."""
    shape = {"width": 4} | shape
    batch = Batch([1] * 5, dtype=dtype, state_dtype=state_dtype, read=[1, 2, 3, 4, 5], **shape)
    batch.ring([9, 5, 1, 4, 1], 9)
    request_conv = batch.rand(7, shape["width"] + 2, batch.xbc.shape[1])
    request_conv[:2] = NAN
    for shares in (7, 2, 1):  # a program visits one row, some rows and all rows
        with_shares(monkeypatch, "fold_ring", shares)
        batch.check(
            "fold_ring",
            device,
            ROUNDED[state_dtype],
            request_conv=request_conv,
            count=torch.tensor([9, 4, 1, 3, 0, 0, 0]),
            src=torch.tensor([1, 0, 3, 4, 5, 0, 0]),
            dst=torch.tensor([1, 9, 10, 0, 11, 0, 0]),
            page_offset=torch.tensor([0, 3, 1, 2, 3, 0, 0]),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "head_dim"), [(3, 5), (2, 700)])
def test_windows_alone(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, width: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Of layers without a state: folds of the oldest window, of the newest and of none, and copies."""
    batch = Batch([1] * 3, dtype=dtype, state_dtype=dtype, read=[1, 2, 3], width=width, head_dim=head_dim, slots=13)
    batch.ring([1, 1, 1], 3)
    request_conv = batch.rand(5, width + 2, batch.xbc.shape[1])
    request_conv[:2] = NAN
    dst = torch.tensor([9, 2, 0, 0, 0])
    conv_src, bias = torch.tensor([1, 2, 3, 0, 0]), torch.tensor([0, 1, 1, 0, 0])
    alone = {"conv_src": conv_src, "conv_bias": bias, "ssm_src": conv_src, "dst": dst, "ssm_state": None}
    for shares in (5, 1):
        for name in ("fold_window", "copy_states"):
            with_shares(monkeypatch, name, shares)
        batch.check(
            "fold_window", device, 0.0, request_conv=request_conv, dst=dst, page_offset=torch.tensor([0, 3, 1, 0, 0])
        )
        batch.check("copy_states", device, 0.0, **alone)


@pytest.mark.parametrize("shares", [1, 3])
def test_rows_are_visited_once_however_many_there_are(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, shares: int
) -> None:
    """A program looks at 256 rows at a time. What it visits is the first, the last and neighbours."""
    with_shares(monkeypatch, "fold_window", shares)
    rows = 600
    conv, request_conv = torch.full((2, 20, 2, 5), NAN), torch.randn(2, rows, 4, 5)
    dst, row, offset = torch.zeros(rows, dtype=torch.int64), torch.arange(rows), torch.arange(rows) % 3
    visited = torch.tensor([0, 1, 2, 254, 255, 256, 257, 511, 512, 598, 599])
    dst[visited] = 1 + torch.arange(len(visited))
    want = conv.clone()
    reference.fold_window(want, request_conv, row, dst, offset)
    got = conv.to(device)
    triton_form("fold_window")(got, *(each.to(device) for each in (request_conv, row, dst, offset)))
    assert not want[:, 1 : 1 + len(visited)].isnan().any()
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("dtype", "state_dtype", "tolerance"), KINDS)
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize(("lens", "drafts"), [([1, 1, 1], 0), ([3, 0, 1, 2], 3)], ids=str)
def test_conv_update(
    device: torch.device, lens: list[int], drafts: int, width: int, dtype: torch.dtype, state_dtype: torch.dtype,
    tolerance: float,
) -> None:  # fmt: skip
    """In place, from zeros, to another slot, and to nowhere; entries behind the window stay as they were."""
    rows = len(lens)
    batch = Batch(
        lens, dtype=dtype, state_dtype=state_dtype, read=[0, *range(1, rows)], width=width, drafts=drafts,
        head_dim=90,
    )  # fmt: skip
    offset = torch.tensor([*(row % (drafts + 1) for row in range(rows)), 0, 0])
    write = torch.tensor([9, *range(1, rows - 1), 10, 0, 0])
    batch.check("causal_conv1d_update", device, tolerance, x=batch.xbc, offset=offset, write=write)
    write[0], more = 0, {"bias": None, "activation": "none"}
    batch.check("causal_conv1d_update", device, tolerance, x=batch.xbc, offset=offset, write=write, **more)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize(
    ("size", "dtype", "tolerance"), [(1, torch.float32, 2e-5), (3, torch.bfloat16, 2e-2), (16, torch.float16, 4e-3)]
)
@pytest.mark.parametrize("lens", [[9, 1, 0, 2, 18], [0, 3, 16]], ids=str)
def test_m04_conv_windows_of_chunks_reach_into_the_initial_one(
    device: torch.device, lens: list[int], size: int, width: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Short rows and first chunks; every row ends in the slot it reads, or in a new one; some chunks are dropped."""
    batch = Batch(
        lens, dtype=dtype, state_dtype=dtype, read=[0, *range(1, len(lens))], width=width, drafts=2,
        slots=80, head_dim=45,
    )  # fmt: skip
    slots = iter(range(len(lens), 80))
    phases = [(7 * row + 2) % size for row in range(len(lens))]
    batch.chunks(size, phases, lambda row, rank, last: row if last else (next(slots) if rank % 3 < 2 else 0))
    request_conv = torch.full((9, width + 1, batch.xbc.shape[1]), NAN, dtype=dtype)
    more = {"x": batch.xbc, "request_conv": None, "request_conv_write": None}
    batch.check("causal_conv1d_varlen", device, tolerance, **more)
    request_conv_write = torch.tensor([*(0, 3, 5, 1, 7)[: len(lens)], 0, 0])
    more |= {"request_conv": request_conv, "request_conv_write": request_conv_write, "bias": None, "activation": "none"}
    batch.check("causal_conv1d_varlen", device, tolerance, **more)


@pytest.mark.parametrize(
    ("lens", "size", "shape"),
    [
        ([9, 1, 0, 2, 14], 4, SHAPES[0].values[0]),
        ([0, 2, 9], 1, SHAPES[0].values[0]),
        ([5, 0, 17], 8, SHAPES[1].values[0]),
        ([70, 3], 48, SHAPES[1].values[0]),  # several tiles of queries and of keys
    ],
    ids=str,
)
@pytest.mark.parametrize(("dtype", "state_dtype", "tolerance"), SCAN_KINDS)
def test_scan(
    device: torch.device, lens: list[int], size: int, shape: dict[str, int], dtype: torch.dtype,
    state_dtype: torch.dtype, tolerance: float,
) -> None:  # fmt: skip
    """Rows from zeros and from states, short first chunks, states exported in the middle, dropped, and in place."""
    batch = Batch(lens, dtype=dtype, state_dtype=state_dtype, read=[0, *range(1, len(lens))], **shape)
    slots = iter(range(len(lens), 40))
    phases = [(7 * row + 2) % size for row in range(len(lens))]
    batch.chunks(size, phases, lambda row, rank, last: row if last else (next(slots) if rank % 3 < 2 else 0))
    # Decays and entering states are rounded to halves before they are multiplied.
    exact = dtype == state_dtype == torch.float32
    batch.check("ssd_scan_varlen", device, 1e-4 if exact else 5 * tolerance)


def test_large_decays_do_not_overflow(device: torch.device) -> None:
    """Steps of 2.5 with A = -400: every exponent stays at or below zero."""
    batch = Batch([40, 3])
    batch.args["A"].fill_(-400.0)
    batch.chunks(16, [0, 0], lambda row, rank, last: row + 1)
    batch.check("ssd_scan_varlen", device, 2e-4)
    batch.args["max_query_len"] = 3
    short = Batch([3, 3])
    short.args["A"].fill_(-400.0)
    short.ring([9, 0], 12)
    short.check("replay_update", device, 2e-4, slot=short.args["read"])


NANS = [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000]
"""Bits of a float32: what CUDA makes, its negative, and what everybody else makes."""


@pytest.mark.parametrize("bits", NANS, ids=hex)
@pytest.mark.parametrize("name", ["replay_update", "ssd_scan_varlen", "selective_state_update"])
def test_nan_in_a_state_reaches_the_outputs_of_its_row_alone(device: torch.device, name: str, bits: int) -> None:
    """Halves are multiplied in TF32, to which a state is rounded: adding to the bits of a NaN may make it a number."""
    batch = Batch([1, 2, 3], dtype=torch.float16, read=[1, 2, 3])
    _call_with_nan(batch, "ssm_state", (2,), bits, device, name)


@pytest.mark.parametrize("poisoned", ["x", "dt", "B", "C"])
@pytest.mark.parametrize("name", ["replay_update", "ssd_scan_varlen", "selective_state_update"])
def test_nan_in_a_token_reaches_what_comes_of_it(device: torch.device, name: str, poisoned: str) -> None:
    """A step of NaN is no number between its limits."""
    batch = Batch([1, 2, 3], dtype=torch.float16, read=[1, 2, 3])
    _call_with_nan(batch, poisoned, (2,), 0x7FFFFFFF, device, name)


def _call_with_nan(
    batch: Batch, poisoned: str, at: tuple[int, ...], bits: int, device: torch.device, name: str
) -> None:
    """Row 1 has tokens 1 and 2, and gets a NaN; what is NaN in the reference is NaN, in that row and no other."""
    batch.ring([2, 0, 3], 8)
    batch.chunks(4, [0, 0, 0], lambda row, rank, last: row + 1)
    batch.args |= {"slot": batch.args["read"], "write": torch.arange(10, 25).view(5, 3)}
    nan = torch.tensor([bits - (bits >> 31 << 32)], dtype=torch.int32).view(torch.float32)
    batch.args[poisoned][at] = nan.to(batch.args[poisoned].dtype)
    names = inspect.signature(getattr(reference, name)).parameters
    results = []
    for form, place in ((getattr(reference, name), torch.device("cpu")), (triton_form(name), device)):
        args = {key: moved(batch.args[key], place) for key in names}
        results.append(form(**args).cpu().isnan())
    want, got = results
    assert want[1:3].any()
    assert got[want].all()
    assert not got[[0, 3, 4, 5]].any()
    # Token 2 may be a draft that is rejected: what comes of token 1 does not depend on it.
    assert name == "ssd_scan_varlen" or torch.equal(got, want)


def test_tiny_steps_keep_their_digits(device: torch.device) -> None:
    """softplus of -30 is 1e-13, and not 0."""
    batch = Batch([1, 1], read=[0, 0])
    batch.args |= {"dt_min": 0.0, "D": torch.zeros(3), "dt_bias": torch.full((3,), -30.0)}
    write = torch.tensor([[5], [6], [0], [0]])
    names = inspect.signature(reference.selective_state_update).parameters
    states = []
    for form, place in (
        (reference.selective_state_update, torch.device("cpu")),
        (triton_form("selective_state_update"), device),
    ):
        args = {key: moved((batch.args | {"write": write})[key], place) for key in names}
        form(**args)
        states.append(args["ssm_state"].cpu()[5:7])
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=0)


@pytest.mark.parametrize(("dtype", "state_dtype", "tolerance"), KINDS)
@pytest.mark.parametrize(("groups", "size"), [(1, 30), (3, 16), (2, 600)])
def test_gated_norm(
    device: torch.device, groups: int, size: int, dtype: torch.dtype, state_dtype: torch.dtype, tolerance: float
) -> None:
    batch, inner = Batch([5], dtype=dtype), groups * size
    half = batch.rand(5, 2 * inner)  # strided, as a split makes them
    for weights, *options in ((inner,), (inner, False, "sigmoid"), (inner, True), (size, True, "sigmoid")):
        args = (half[:, :inner], half[:, inner:], batch.rand(weights), groups, 1e-5, *options)
        want = reference.gated_rms_norm(*args)
        got = triton_form("gated_rms_norm")(*(moved(each, device) for each in args))
        assert got.dtype == dtype
        torch.testing.assert_close(got.cpu(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [5, 700])
def test_m21_copies_shift_windows_in_place(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, head_dim: int
) -> None:
    """To another slot, in place with a shift, a window and a state of different slots, from nothing, and nowhere."""
    from bateleur.mamba.ops.triton import states as copy

    monkeypatch.setattr(copy, "_MOST_PROGRAMS", 2)
    batch = Batch([1] * 5, state_dtype=dtype, drafts=3, head_dim=head_dim, read=[1, 2, 3, 4, 5], slots=13)
    for shares in (6, 1):
        with_shares(monkeypatch, "copy_states", shares)
        batch.check(
            "copy_states",
            device,
            0.0,
            conv_src=torch.tensor([1, 2, 3, 0, 5, 0]),
            conv_bias=torch.tensor([0, 2, 3, 0, 1, 0]),
            ssm_src=torch.tensor([1, 2, 4, 0, 5, 0]),
            dst=torch.tensor([11, 2, 10, 9, 0, 0]),
        )


@pytest.mark.parametrize(
    ("name", "kernel"), [("fold_ring", "fold_kernel"), ("fold_window", "window_kernel"), ("copy_states", "copy_kernel")]
)
def test_all_layers_are_one_launch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str, kernel: str
) -> None:
    home = import_module(triton_form(name).__module__)
    launches: list[tuple[int, ...]] = []

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            launches.append(grid)
            return lambda *args, **options: None

    monkeypatch.setattr(home, kernel, Counted())
    batch, one = Batch([1, 1], drafts=2), torch.ones(4, dtype=torch.int64)
    batch.ring([3, 2], 8)
    args = {"request_conv": batch.args["conv_state"], **batch.args}
    args = {key: args.get(key, one) for key in inspect.signature(triton_form(name)).parameters}
    layers = {key: torch.stack([each] * 5) for key, each in args.items() if each.is_floating_point()}
    triton_form(name)(**(args | layers))
    assert [grid[1:] for grid in launches] == [(4, 5)]


@pytest.mark.parametrize("name", ["selective_state_update", "replay_update", "causal_conv1d_update"])
def test_real_rows_are_bit_equal_under_padding(device: torch.device, name: str) -> None:
    """max_query_len, padded rows and padding tokens do not change a bit of real rows."""
    lens, names = [2, 1, 3], inspect.signature(getattr(reference, name)).parameters
    results = []
    for rows, tokens, bound in ((3, 6, 3), (5, 9, 3), (5, 9, 4)):
        batch = Batch(lens, drafts=3)
        batch.ring([3, 0, 2], 8)
        write = torch.arange(10, 10 + rows * 4).view(rows, 4)
        args: dict[str, Any] = batch.args | {"slot": batch.args["read"], "write": write, "max_query_len": bound}
        if name == "causal_conv1d_update":
            args |= {"x": batch.xbc, "offset": torch.tensor([1, 0, 2, 0, 0]), "write": write[:, 0]}
        for key in ("read", "slot", "offset", "ring_row", "ring_start", "ring_len"):
            args[key] = args[key][:rows] if key in args else None
        args["query_start_loc"] = args["query_start_loc"][: rows + 1]
        args |= {key: args[key][:tokens] for key in ("x", "B", "C", "dt")}
        results.append(triton_form(name)(**{key: moved(args[key], device) for key in names}))
    for y in results[1:]:
        assert torch.equal(y[:6], results[0])


def test_no_tokens(device: torch.device) -> None:
    batch = Batch([0, 0])
    batch.chunks(4, [0, 0], lambda *_: 1)
    batch.check("ssd_scan_varlen", device, 0.0)
    batch.check("causal_conv1d_varlen", device, 0.0, x=batch.xbc, request_conv=None, request_conv_write=None)
    batch.check("selective_state_update", device, 0.0, write=torch.ones(4, 1, dtype=torch.int64))


def test_kernels_refuse_what_they_would_misread(device: torch.device) -> None:
    batch = Batch([1, 1], heads=4)
    names = inspect.signature(reference.selective_state_update).parameters
    changes = {"write": torch.ones(4, 1, dtype=torch.int64), "ssm_state": batch.args["ssm_state"][:, ::2]}
    args = [moved((batch.args | changes)[key], device) for key in names]
    with pytest.raises(ValueError, match=r"ssm_state: strides .* must be dense in the last 3"):
        triton_form("selective_state_update")(*args)
    with pytest.raises(ValueError, match="activation is 'gelu'"):
        triton_form("causal_conv1d_update")(
            *(batch.xbc, batch.args["weight"], None, batch.args["conv_state"], batch.args["query_start_loc"]),
            *(1, batch.args["read"], batch.args["read"], batch.args["read"], "gelu"),
        )


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test starts")
def test_all_of_this_in_the_interpreter(in_interpreter: Callable[[str], int]) -> None:
    assert in_interpreter(__file__)
