"""The Triton forms of the delta rules against the naive ones, as `test_triton_kernels` does for Mamba-2.

In Triton's interpreter in a process of their own, which the last test starts, and on CUDA where there is a device.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

import reference_operators as reference
from triton_rows import NAN, PaddedRows, triton_form, with_shares

pytest.importorskip("triton", reason="triton is not installed")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ODD = {"groups": 3, "shared": 1, "values": 5, "keys": 7}
TWO_TILES = {"groups": 2, "shared": 2, "values": 40, "keys": 16}
# sizes; types of activations and states; and what the two forms may differ by
KINDS = pytest.mark.parametrize(
    ("shape", "dtype", "state_dtype", "tolerance"),
    [
        pytest.param(ODD, torch.float32, torch.float32, 2e-5, id="odd-f32"),
        pytest.param(TWO_TILES, torch.bfloat16, torch.float32, 1e-2, id="two-tiles-bf16"),
        pytest.param(TWO_TILES, torch.float16, torch.float16, 2e-3, id="two-tiles-f16"),
        pytest.param(ODD, torch.float32, torch.bfloat16, 1e-2, id="odd-f32-bf16-states"),
    ],
)
PER_CHANNEL = pytest.mark.parametrize("per_channel", [False, True], ids=["head", "channel"])


def sums_of_a_gpu(scan: Any, x: Any) -> list[Any]:
    """Running sums in the order of a warp, pairs first; the interpreter adds one token after another."""
    total, distance = np.moveaxis(x.handle.data.copy(), scan.axis, 0), 1
    while distance < len(total):
        total[distance:] = total[distance:] + total[:-distance]
        distance *= 2
    return [scan.to_tensor(np.ascontiguousarray(np.moveaxis(total, 0, scan.axis)), x.dtype)]


@pytest.fixture(params=["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Device of the kernels; new memory is NaN, so that reads before writes are detected."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if INTERPRETED:
        monkeypatch.setattr("triton.runtime.interpreter.ScanOps.cumsum", sums_of_a_gpu)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(NAN))
    return torch.device(request.param)


class Batch(PaddedRows):
    """Of a layer with a delta rule."""

    out = "o"
    written = ("state", "conv_state", "ring_k", "ring_u", "ring_g")

    def __init__(
        self,
        lens: Sequence[int],
        *,
        groups: int = 2,
        shared: int = 2,
        values: int = 5,
        keys: int = 7,
        per_channel: bool = False,
        dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype = torch.float32,
        read: Sequence[int] | None = None,
        slots: int = 40,
    ) -> None:
        super().__init__(lens, read, dtype, state_dtype)
        heads = groups * shared
        self.decay_shape = (heads, keys) if per_channel else (heads,)
        # One convolution's channels, and one projection of gates.
        channels = self.flat(2 * groups * keys + heads * values)
        gates = self.flat(heads + int(np.prod(self.decay_shape)))
        q, k, v = channels.split([groups * keys, groups * keys, heads * values], 1)
        self.args |= {
            "q": q.unflatten(1, (groups, keys)),
            "k": k.unflatten(1, (groups, keys)),
            "v": v.unflatten(1, (heads, values)),
            "a": gates[:, heads:].unflatten(1, self.decay_shape),
            "b": gates[:, :heads],
            "A": -self.rand(heads, to=torch.float32).abs() - 0.1,
            "dt_bias": self.rand(*self.decay_shape, to=torch.float32),
            "beta_scale": 2.0 if shared > 1 else 1.0,
            "state": self.states(slots, heads, values, keys),
        }

    def ring(self, lengths: Sequence[int], capacity: int) -> None:
        """See `place_rings`."""
        heads, values, keys = self.args["state"].shape[1:]
        rows, groups = len(lengths), self.args["k"].shape[1]
        rings = {
            "ring_k": self.rand(rows + 2, capacity, groups, keys),
            "ring_u": self.rand(rows + 2, capacity, heads, values, to=torch.float32),
            "ring_g": -self.rand(rows + 2, capacity, *self.decay_shape, to=torch.float32).abs(),
        }
        self.place_rings(lengths, capacity, rings)
        self.args["slot"] = self.args["read"]


@KINDS
@PER_CHANNEL
def test_update(
    device: torch.device, per_channel: bool, shape: dict[str, int], dtype: torch.dtype, state_dtype: torch.dtype,
    tolerance: float,
) -> None:  # fmt: skip
    """Row 0 starts from zeros; one token's state is dropped; the last row writes the slot it reads."""
    batch = Batch(
        [3, 0, 1, 2], per_channel=per_channel, dtype=dtype, state_dtype=state_dtype, read=[0, 1, 2, 3], **shape
    )
    write = torch.zeros(6, 4, dtype=torch.int64)
    write[:4] = 10 + torch.arange(16).view(4, 4)
    write[3, 0], write[0, -2] = 3, 0
    batch.check("delta_state_update", device, tolerance, write=write)


@KINDS
@PER_CHANNEL
def test_fold(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, per_channel: bool, shape: dict[str, int],
    dtype: torch.dtype, state_dtype: torch.dtype, tolerance: float,
) -> None:  # fmt: skip
    """In place, from zeros, to another slot, nothing to do, and a copy of the state alone."""
    batch = Batch([1] * 5, per_channel=per_channel, dtype=dtype, state_dtype=state_dtype, read=[1, 2, 3, 4, 5], **shape)
    batch.ring([9, 5, 1, 4, 1], 9)
    request_conv = batch.rand(7, 5, 11)
    request_conv[:2] = NAN
    for shares in (7, 2, 1):  # a program visits one row, some rows and all rows
        with_shares(monkeypatch, "delta_fold_ring", shares)
        batch.check(
            "delta_fold_ring",
            device,
            min(tolerance, 2e-5) if state_dtype == torch.float32 else tolerance,
            request_conv=request_conv,
            conv_state=torch.full((40, 3, 11), NAN, dtype=dtype),
            count=torch.tensor([9, 4, 1, 3, 0, 0, 0]),
            src=torch.tensor([1, 0, 3, 4, 5, 0, 0]),
            dst=torch.tensor([1, 9, 10, 0, 11, 0, 0]),
            page_offset=torch.tensor([0, 2, 1, 2, 0, 0, 0]),
        )


@KINDS
@PER_CHANNEL
@pytest.mark.parametrize(
    ("lens", "held"), [([3, 0, 1, 2], [0, 5, 4, 3]), ([1, 1, 1, 0], [0, 4, 2, 5])], ids=["several", "one"]
)
def test_replay(
    device: torch.device, lens: list[int], held: list[int], per_channel: bool, shape: dict[str, int],
    dtype: torch.dtype, state_dtype: torch.dtype, tolerance: float,
) -> None:  # fmt: skip
    """From an empty ring and up to a full one. Row 0 starts from zeros, and no row writes its checkpoint."""
    batch = Batch(lens, per_channel=per_channel, dtype=dtype, state_dtype=state_dtype, read=[0, 1, 2, 3], **shape)
    batch.ring(held, 5)
    batch.check("delta_replay_update", device, tolerance)


@PER_CHANNEL
def test_replay_of_one_token_takes_all_lines_of_key_channels(device: torch.device, per_channel: bool) -> None:
    """Lines of 32 key channels, the last one not full, and two tiles of value channels."""
    batch = Batch([1, 1], per_channel=per_channel, keys=70, values=40)
    batch.ring([15, 3], 16)
    batch.check("delta_replay_update", device, 2e-5)


@PER_CHANNEL
def test_replay_of_many_tokens_and_entries(device: torch.device, per_channel: bool) -> None:
    """Keys that repeat, hardly decay and are corrected twice over; several lines of key channels."""
    batch = Batch([17, 2], per_channel=per_channel, keys=40)
    batch.args["k"][1:17] = batch.args["k"][0]
    batch.args["a"][:16] = -9.0
    batch.args["b"][:16] = 9.0
    batch.ring([15, 30], 32)
    batch.check("delta_replay_update", device, 2e-4)


@pytest.mark.parametrize(
    ("lens", "size", "shape", "dtype", "tolerance"),
    [
        ([9, 1, 0, 2, 14], 4, ODD, torch.float32, 2e-5),
        ([0, 2, 5], 1, ODD, torch.float32, 2e-5),
        ([5, 0, 17], 8, TWO_TILES, torch.float16, 2e-3),
        ([45, 3], 32, ODD, torch.float32, 2e-5),  # several tiles of tokens
    ],
    ids=str,
)
@PER_CHANNEL
def test_scan(
    device: torch.device, per_channel: bool, lens: list[int], size: int, shape: dict[str, int], dtype: torch.dtype,
    tolerance: float,
) -> None:  # fmt: skip
    """Rows from zeros and from states, short first chunks, states exported in the middle, dropped, and in place."""
    batch = Batch(
        lens, per_channel=per_channel, dtype=dtype, state_dtype=dtype, read=[0, *range(1, len(lens))], **shape
    )
    slots = iter(range(len(lens), 40))
    phases = [(7 * row + 2) % size for row in range(len(lens))]
    batch.chunks(size, phases, lambda row, rank, last: row if last else (next(slots) if rank % 3 < 2 else 0))
    batch.check("delta_scan_varlen", device, tolerance)


def scanned(batch: Batch, device: torch.device, tolerance: float = 5e-6) -> dict[str, torch.Tensor]:
    """What the Triton form makes of bfloat16 tokens and float32 states, after a comparison with exact arithmetic.

    Outputs are rounded to bfloat16. tolerance: of states, as a part of the largest entry.
    """
    _, got = batch.call("delta_scan_varlen", device)
    exact = {
        key: each.double() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for key, each in batch.args.items()
    }
    names = inspect.signature(reference.delta_scan_varlen).parameters
    exact |= {"o": reference.delta_scan_varlen(**{key: exact[key] for key in names})}
    for key, part in (("o", 1e-2), ("state", tolerance)):
        mine, want = (each[key].double().cpu()[: batch.tokens if key == "o" else None] for each in (got, exact))
        bound = part * float(want[~want.isnan()].abs().max())
        torch.testing.assert_close(mine, want, rtol=0, atol=bound, equal_nan=True, msg=f"{key}: {{}}".format)
    return got


@PER_CHANNEL
@pytest.mark.parametrize(
    ("lens", "size", "shape"),
    [
        ([150, 1, 70, 0, 33], 64, {"keys": 48, "values": 40}),  # three tiles of values, and tiles of all lengths
        ([150, 1, 70, 0, 33], 64, {"keys": 40, "values": 40}),  # tiles of 16 tokens, because keys are not aligned
        ([100, 16], 32, {"keys": 16, "groups": 1, "shared": 3, "values": 16}),
        ([65], 128, {"keys": 128, "values": 8}),
    ],
    ids=str,
)
def test_scan_of_bfloat16_keeps_states_of_float32(
    device: torch.device, per_channel: bool, lens: list[int], size: int, shape: dict[str, int]
) -> None:
    """Rows from zeros and from states, begun anywhere in a chunk. All states are exported."""
    batch = Batch(
        lens, per_channel=per_channel, dtype=torch.bfloat16, state_dtype=torch.float32,
        read=[0, *range(1, len(lens))], **shape,
    )  # fmt: skip
    slots = iter(range(len(lens), 40))
    phases = [(7 * row + 2) % size for row in range(len(lens))]
    batch.chunks(size, phases, lambda row, rank, last: (row or 39) if last else next(slots) * (rank != 1))
    scanned(batch, device)


@PER_CHANNEL
@pytest.mark.parametrize("decays", ["none", "some", "strong"])
def test_scan_of_bfloat16_holds_for_all_decays_and_repeated_keys(
    device: torch.device, per_channel: bool, decays: str
) -> None:
    """Keys that repeat and are corrected twice over, if they do not decay; logarithms of thousands a token."""
    batch = Batch(
        [140, 30], per_channel=per_channel, keys=16, values=8, dtype=torch.bfloat16, state_dtype=torch.float32
    )
    if decays == "none":
        batch.args["k"][1:130] = batch.args["k"][0]
        batch.args["a"][:130], batch.args["b"][:130] = -9.0, 9.0
    else:
        batch.args["A"].fill_(-20.0 if decays == "some" else -4000.0)
        batch.args["a"][::3] = -20.0  # and some tokens that forget nothing
    batch.chunks(64, [0, 10], lambda row, rank, last: row + 1 if last else 20 + 5 * row + rank)
    tolerance = 1e-3 if decays == "none" else 5e-6  # a sum of 130 corrections of one key loses digits of float32
    assert scanned(batch, device, tolerance)["o"].isfinite().all()


@PER_CHANNEL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_prompt_cut_between_chunks_has_the_same_bits(
    device: torch.device, dtype: torch.dtype, per_channel: bool
) -> None:
    """The first part leaves the state of its last chunk, from which the second part goes on."""
    whole = Batch([170], per_channel=per_channel, keys=16, values=8, dtype=dtype)
    results = []
    for parts in ([170], [64, 106], [128, 42]):
        outputs, state, begin = [], whole.args["state"], 0
        for length in parts:
            part = Batch([length], per_channel=per_channel, keys=16, values=8, dtype=dtype)
            part.args |= {key: whole.args[key] for key in ("A", "dt_bias")} | {"state": state}
            part.args |= {key: whole.args[key][begin : begin + length] for key in ("q", "k", "v", "a", "b")}
            part.chunks(64, [begin % 64], lambda row, rank, last: int(last))
            _, got = part.call("delta_scan_varlen", device)
            outputs.append(got["o"].cpu())
            state, begin = got["state"].cpu(), begin + length
        results.append((torch.cat(outputs), state[1]))
    for o, state in results[1:]:
        assert torch.equal(o, results[0][0])
        assert torch.equal(state, results[0][1])


@PER_CHANNEL
@pytest.mark.parametrize("lens", [[2, 1], [1, 1]], ids=["several", "one"])
def test_replay_of_a_row_without_a_ring_leaves_the_null_row(
    device: torch.device, lens: list[int], per_channel: bool
) -> None:
    """A dummy step has tokens but only null slots and rings: nothing else may change."""
    batch = Batch(lens, per_channel=per_channel)
    batch.ring([1, 3], 7)
    batch.args["slot"] = batch.args["ring_row"] = torch.zeros(4, dtype=torch.int64)
    _, got = batch.call("delta_replay_update", device)
    assert got["o"][: sum(lens)].isfinite().all()
    for name in ("state", "ring_k", "ring_u", "ring_g"):
        torch.testing.assert_close(got[name].cpu(), batch.args[name], rtol=0, atol=0, equal_nan=True)


@PER_CHANNEL
def test_strong_decays_do_not_overflow(device: torch.device, per_channel: bool) -> None:
    """Logarithms of thousands a token: every exponent stays at or below zero."""
    batch = Batch([20, 3], per_channel=per_channel)
    batch.args["A"].fill_(-4000.0)
    batch.args["a"][::3] = -20.0  # and some tokens that forget nothing
    batch.chunks(18, [0, 0], lambda row, rank, last: row + 1 if last else 20)
    batch.check("delta_scan_varlen", device, 2e-5)
    for lens in ([3, 3], [1, 1]):
        short = Batch(lens, per_channel=per_channel)
        short.args["A"].fill_(-4000.0)
        short.ring([9, 0], 12)
        short.args["ring_g"] *= 4000.0
        short.check("delta_replay_update", device, 1e-4)


BITS = 0x7FFFFFFF
"""Of a float32 that is not a number, as CUDA makes it: adding to them may make it one."""


@pytest.mark.parametrize("name", ["delta_replay_update", "delta_scan_varlen", "delta_state_update"])
@PER_CHANNEL
def test_nan_stays_in_its_row(device: torch.device, per_channel: bool, name: str) -> None:
    """Row 1 has tokens 1 and 2: of a NaN in its state, or in one of its tokens, comes NaN, in that row and no other."""
    nan = torch.tensor([BITS], dtype=torch.int32).view(torch.float32)
    for poisoned in ("state", "q", "k", "v", "a", "b"):
        batch = Batch([1, 2, 3], per_channel=per_channel, dtype=torch.float16, groups=1)
        batch.ring([2, 0, 3], 8)
        batch.chunks(4, [0, 0, 0], lambda row, rank, last: row + 1)
        batch.args[poisoned][2] = nan.to(batch.args[poisoned].dtype)
        results = batch.call(name, device, write=torch.arange(10, 25).view(5, 3))
        want, got = (each["o"].cpu().isnan() for each in results)
        assert want[1:3].any()
        assert got[want].all(), poisoned
        assert not got[[0, 3, 4, 5]].any(), poisoned
        # Token 1 may be kept, and token 2 rejected: what comes of the former does not depend on the latter.
        assert name == "delta_scan_varlen" or torch.equal(got, want), poisoned
        kept = [each["ring_u"].cpu().isnan() for each in results if "ring_u" in each]
        assert not kept or torch.equal(*kept), poisoned


@PER_CHANNEL
def test_nan_of_one_token_stays_in_its_row(device: torch.device, per_channel: bool) -> None:
    """Rows of one token each, of which row 1 reads a NaN."""
    for poisoned in ("state", "q", "k", "v", "a", "b", "ring_k", "ring_u", "ring_g"):
        batch = Batch([1, 1, 1], per_channel=per_channel, groups=1)
        batch.ring([2, 4, 3], 8)
        at = 3 if poisoned.startswith("ring") else 2 if poisoned == "state" else 1
        batch.args[poisoned][at] = NAN
        want, got = batch.call("delta_replay_update", device)
        assert want["o"][1].isnan().any()
        assert torch.equal(got["o"].cpu()[:3].isnan(), want["o"][:3].isnan()), poisoned
        assert torch.equal(got["ring_u"].cpu()[2:].isnan(), want["ring_u"][2:].isnan()), poisoned


@pytest.mark.parametrize("name", ["delta_state_update", "delta_replay_update"])
def test_real_rows_are_bit_equal_under_padding(device: torch.device, name: str) -> None:
    """max_query_len, padded rows and padding tokens do not change a bit of real rows."""
    results = []
    for rows, tokens, bound in ((3, 6, 3), (5, 9, 3), (5, 9, 4)):
        batch = Batch([2, 1, 3])
        batch.ring([3, 0, 2], 8)
        batch.args |= {"write": torch.arange(10, 10 + rows * 4).view(rows, 4), "max_query_len": bound}
        for key in ("read", "slot", "ring_row", "ring_start", "ring_len"):
            batch.args[key] = batch.args[key][:rows]
        batch.args["query_start_loc"] = batch.args["query_start_loc"][: rows + 1]
        batch.args |= {key: batch.args[key][:tokens] for key in ("q", "k", "v", "a", "b")}
        results.append(batch.call(name, device)[1]["o"])
    for o in results[1:]:
        assert torch.equal(o[:6], results[0])


@pytest.mark.parametrize(("name", "most"), [("delta_fold_ring", 1), ("delta_scan_varlen", 4)])
def test_launches_are_no_more_than_those_of_mamba_2(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    """All layers of a fold are one launch."""
    home = import_module(triton_form(name).__module__)
    launches: list[tuple[int, ...]] = []

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            launches.append(grid)
            return lambda *args, **options: None

    for kernel in [each for each in vars(home) if each.endswith("_kernel")]:
        monkeypatch.setattr(home, kernel, Counted())
    batch, one = Batch([1, 1]), torch.ones(4, dtype=torch.int64)
    batch.ring([3, 2], 8)
    batch.chunks(4, [0, 0], lambda *_: 1)
    args = {"request_conv": torch.zeros(7, 5, 11), "conv_state": torch.zeros(40, 3, 11), **batch.args}
    args = {key: args.get(key, one) for key in inspect.signature(triton_form(name)).parameters}
    if name == "delta_fold_ring":
        args |= {key: torch.stack([each] * 5) for key, each in args.items() if each.is_floating_point()}
    triton_form(name)(**args)
    assert 1 <= len(launches) <= most
    assert name != "delta_fold_ring" or launches[0][1:] == (4, 5)


def test_no_tokens(device: torch.device) -> None:
    batch = Batch([0, 0])
    batch.ring([2, 0], 4)
    batch.chunks(4, [0, 0], lambda *_: 1)
    batch.check("delta_scan_varlen", device, 0.0)
    batch.check("delta_state_update", device, 0.0, write=torch.ones(4, 1, dtype=torch.int64))
    batch.check("delta_replay_update", device, 0.0)


def test_kernels_refuse_what_they_would_misread(device: torch.device) -> None:
    batch = Batch([1, 1])
    with pytest.raises(ValueError, match=r"state: strides .* must be dense in the last 3"):
        batch.call(
            "delta_state_update",
            device,
            write=torch.ones(4, 1, dtype=torch.int64),
            state=torch.zeros(40, 4, 5, 14)[..., ::2],
        )


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test starts")
def test_all_of_this_in_the_interpreter(in_interpreter: Callable[[str], int]) -> None:
    assert in_interpreter(__file__)
