"""The Triton forms of the delta rules against the naive ones, as `test_triton_kernels` does for Mamba-2.

In Triton's interpreter in a process of their own, which the last test starts, and on CUDA where there is a device.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import delta_naive as reference
import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NAN = float("nan")
# of activations and states; and what the two may differ by
KINDS = [
    pytest.param(torch.float32, torch.float32, 2e-5, id="f32"),
    pytest.param(torch.bfloat16, torch.float32, 1e-2, id="bf16"),
    pytest.param(torch.float16, torch.float16, 2e-3, id="f16"),
    pytest.param(torch.float32, torch.bfloat16, 1e-2, id="f32-bf16-states"),
]
SHAPES = [
    pytest.param({"groups": 3, "shared": 1, "values": 5, "keys": 7}, id="odd"),
    pytest.param({"groups": 2, "shared": 2, "values": 40, "keys": 16}, id="two-tiles"),
]
PER_CHANNEL = pytest.mark.parametrize("per_channel", [False, True], ids=["head", "channel"])
FOLDERS = {
    "delta_state_update": "delta_update",
    "delta_fold_ring": "delta_fold",
    "delta_replay_update": "delta_replay",
    "delta_scan_varlen": "delta_scan",
}
NEW = ("o", "state", "conv_state", "ring_k", "ring_u", "ring_g")


def triton_form(name: str) -> Callable[..., Any]:
    """The Triton form of an operator."""
    form: Callable[..., Any] = getattr(import_module(f"bateleur.mamba.ops.{FOLDERS[name]}.triton"), name)
    return form


@pytest.fixture(params=["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where kernels run; new memory is NaN there, so that a read before the write shows."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(NAN))
    return torch.device(request.param)


class Batch:
    """Rows of `lens` tokens, two rows and three tokens of padding, and arguments by their names in the schemas.

    All that nothing may look at is NaN: padding, null slots, slots that no row reads, dead entries of rings.
    """

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
        self.rng, self.lens = torch.Generator().manual_seed(0), [*lens, 0, 0]
        self.tokens, self.dtype, self.state_dtype = sum(lens), dtype, state_dtype
        heads = groups * shared
        self.decay_shape = (heads, keys) if per_channel else (heads,)
        # One convolution's channels, and one projection of gates, split as a layer splits them.
        channels, gates = (
            self.rand(self.tokens + 3, size)
            for size in (2 * groups * keys + heads * values, heads + int(np.prod(self.decay_shape)))
        )
        channels[self.tokens :] = gates[self.tokens :] = NAN
        q, k, v = channels.split([groups * keys, groups * keys, heads * values], 1)
        read = list(range(1, len(lens) + 1)) if read is None else list(read)
        self.args: dict[str, Any] = {
            "q": q.unflatten(1, (groups, keys)),
            "k": k.unflatten(1, (groups, keys)),
            "v": v.unflatten(1, (heads, values)),
            "a": gates[:, heads:].unflatten(1, self.decay_shape),
            "b": gates[:, :heads],
            "A": -self.rand(heads, to=torch.float32).abs() - 0.1,
            "dt_bias": self.rand(*self.decay_shape, to=torch.float32),
            "beta_scale": 2.0 if shared > 1 else 1.0,
            "query_start_loc": torch.tensor([0, *np.cumsum(self.lens)], dtype=torch.int32),
            "max_query_len": max(lens, default=1) or 1,
            "read": torch.tensor([*read, 0, 0]),
            "state": self.states(read, slots, heads, values, keys),
        }

    def rand(self, *shape: int, to: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.rng).to(to or self.dtype)

    def states(self, filled: Sequence[int], slots: int, *shape: int) -> Tensor:
        states = torch.full((slots, *shape), NAN, dtype=self.state_dtype)
        for slot in set(filled) - {0}:
            states[slot] = self.rand(*shape, to=self.state_dtype)
        return states

    def chunks(self, size: int, phases: Sequence[int], write: Callable[[int, int, bool], int]) -> None:
        """Chunks of `size` from `phases` tokens before each row; `write(row, chunk of it, is last)` names slots."""
        starts, rows, first, slots = [0], [], [0], []
        for row, (length, phase) in enumerate(zip(self.lens, [*phases, 0, 0], strict=True)):
            ends = sorted({*range(size - phase, length, size), length} - {0}) if length else []
            for rank, end in enumerate(ends):
                starts.append(int(self.args["query_start_loc"][row]) + end)
                rows.append(row)
                slots.append(write(row, rank, end == length))
            first.append(len(rows))
        self.args |= {
            "chunk_start_loc": torch.tensor(starts, dtype=torch.int32),
            "chunk_row": torch.tensor(rows, dtype=torch.int32),
            "row_chunk_loc": torch.tensor(first, dtype=torch.int32),
            "chunk_write": torch.tensor(slots, dtype=torch.int64),
            "max_chunks_per_row": int(max(np.diff(first))),
            "chunk_size": size,
        }

    def ring(self, lengths: Sequence[int], capacity: int) -> None:
        """Row r owns ring row r + 2 and has `lengths[r]` entries, beginning anywhere in it."""
        heads, values, keys = self.args["state"].shape[1:]
        rows, groups = len(lengths), self.args["k"].shape[1]
        start = torch.randint(0, capacity, (rows,), generator=self.rng)
        rings = {
            "ring_k": self.rand(rows + 2, capacity, groups, keys),
            "ring_u": self.rand(rows + 2, capacity, heads, values, to=torch.float32),
            "ring_g": -self.rand(rows + 2, capacity, *self.decay_shape, to=torch.float32).abs(),
        }
        for row in range(-2, rows):
            live = 0 if row < 0 else lengths[row]
            dead = [(int(start[row]) + entry) % capacity for entry in range(live, capacity)]
            for values_of in rings.values():
                values_of[row + 2, dead] = NAN
        self.args |= rings | {
            "ring_row": torch.tensor([*range(2, rows + 2), 0, 0]),
            "ring_start": torch.tensor([*start.tolist(), 0, 0]),
            "ring_len": torch.tensor([*lengths, 0, 0]),
            "slot": self.args["read"],
        }

    def check(self, name: str, device: torch.device, tolerance: float, **more: Any) -> None:
        """Call both forms; outputs and all that they write must agree, NaN where NaN was, and padding must give 0."""
        results = self.call(name, device, **more)
        want, got = results
        for key in (key for key in NEW if isinstance(got.get(key), Tensor)):
            mine, other = got[key].cpu(), want[key]
            if key == "o":
                assert mine.dtype == self.dtype
                assert not mine[self.tokens :].any()
                mine, other = mine[: self.tokens], other[: self.tokens]
            torch.testing.assert_close(
                mine, other, rtol=tolerance, atol=tolerance, equal_nan=key != "o", msg=f"{key}: {{}}".format
            )

    def call(self, name: str, device: torch.device, **more: Any) -> list[dict[str, Any]]:
        """Both forms' arguments after the call, and their outputs."""
        chosen = self.args | more
        chosen = {key: chosen[key] for key in inspect.signature(triton_form(name)).parameters}
        if name == "delta_fold_ring":  # on several layers at once; here on two
            chosen |= {
                key: torch.stack([each, each / 2]) for key, each in chosen.items() if each.is_floating_point()
            }
        results = []
        for form, place in ((getattr(reference, name), torch.device("cpu")), (triton_form(name), device)):
            args = {key: _moved(value, place) for key, value in chosen.items()}
            o = form(**args)
            results.append(args if o is None else args | {"o": o})
        return results


def _moved(value: Any, place: torch.device) -> Any:
    """A copy with the same strides."""
    if not isinstance(value, Tensor):
        return value
    storage = torch.as_strided(value, (value.untyped_storage().nbytes() // value.element_size(),), (1,), 0)
    return storage.clone().to(place).as_strided(value.shape, value.stride(), value.storage_offset())


@pytest.mark.parametrize(("dtype", "state_dtype", "tolerance"), KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@PER_CHANNEL
def test_update(
    device: torch.device, per_channel: bool, shape: dict[str, int], dtype: torch.dtype, state_dtype: torch.dtype,
    tolerance: float,
) -> None:  # fmt: skip
    """Row 0 starts from zeros; one token's state is dropped; the last row writes the slot it reads."""
    batch = Batch(
        [3, 0, 1, 2],
        per_channel=per_channel,
        dtype=dtype,
        state_dtype=state_dtype,
        read=[0, 1, 2, 3],
        **shape,
    )
    write = torch.zeros(6, 4, dtype=torch.int64)
    write[:4] = 10 + torch.arange(16).view(4, 4)
    write[3, 0], write[0, -2] = 3, 0
    batch.check("delta_state_update", device, tolerance, write=write)


@pytest.mark.parametrize(("dtype", "state_dtype", "tolerance"), KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@PER_CHANNEL
def test_fold(
    device: torch.device, per_channel: bool, shape: dict[str, int], dtype: torch.dtype, state_dtype: torch.dtype,
    tolerance: float,
) -> None:  # fmt: skip
    """In place, from zeros, to another slot, nothing to do, and a copy of the state alone."""
    batch = Batch(
        [1] * 5, per_channel=per_channel, dtype=dtype, state_dtype=state_dtype, read=[1, 2, 3, 4, 5], **shape
    )
    batch.ring([9, 5, 1, 4, 1], 9)
    live = batch.rand(7, 5, 11)
    live[:2] = NAN
    batch.check(
        "delta_fold_ring",
        device,
        min(tolerance, 2e-5) if state_dtype == torch.float32 else tolerance,
        live=live,
        conv_state=torch.full((40, 3, 11), NAN, dtype=dtype),
        count=torch.tensor([9, 4, 1, 3, 0, 0, 0]),
        src=torch.tensor([1, 0, 3, 4, 5, 0, 0]),
        dst=torch.tensor([1, 9, 10, 0, 11, 0, 0]),
        page_offset=torch.tensor([0, 2, 1, 2, 0, 0, 0]),
    )


@pytest.mark.parametrize(("dtype", "state_dtype", "tolerance"), KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@PER_CHANNEL
def test_replay(
    device: torch.device, per_channel: bool, shape: dict[str, int], dtype: torch.dtype, state_dtype: torch.dtype,
    tolerance: float,
) -> None:  # fmt: skip
    """From an empty ring, and up to a full one; row 0 starts from zeros; the checkpoint is only read."""
    batch = Batch(
        [3, 0, 1, 2],
        per_channel=per_channel,
        dtype=dtype,
        state_dtype=state_dtype,
        read=[0, 1, 2, 3],
        **shape,
    )
    batch.ring([0, 5, 4, 3], 5)
    batch.check("delta_replay_update", device, tolerance)


@PER_CHANNEL
def test_replay_of_many_tokens_and_entries(device: torch.device, per_channel: bool) -> None:
    """More than a tile of tokens and of entries, all of them full; keys that repeat, hardly decay and are corrected twice."""
    batch = Batch([17, 2], per_channel=per_channel, keys=16)
    batch.args["k"][1:17] = batch.args["k"][0]
    batch.args["a"][:16] = -9.0
    batch.args["b"][:16] = 9.0
    batch.ring([15, 30], 32)
    batch.check("delta_replay_update", device, 2e-4)


@pytest.mark.parametrize(
    ("lens", "size", "shape"),
    [
        ([9, 1, 0, 2, 14], 4, SHAPES[0].values[0]),
        ([0, 2, 9], 1, SHAPES[0].values[0]),
        ([5, 0, 17], 8, SHAPES[1].values[0]),
        ([70, 3], 48, SHAPES[1].values[0]),
    ],
    ids=str,
)
@PER_CHANNEL
def test_scan(
    device: torch.device, per_channel: bool, lens: list[int], size: int, shape: dict[str, int]
) -> None:
    """Rows from zeros and from states, short first chunks, states exported in the middle, dropped, and in place."""
    for dtype, state_dtype, tolerance in (kind.values for kind in (KINDS[0], KINDS[2])):
        batch = Batch(
            lens, per_channel=per_channel, dtype=dtype, state_dtype=state_dtype, read=[0, *range(1, len(lens))],
            **shape,
        )  # fmt: skip
        slots = iter(range(len(lens), 40))
        phases = [(7 * row + 2) % size for row in range(len(lens))]
        batch.chunks(
            size, phases, lambda row, rank, last: row if last else (next(slots) if rank % 3 < 2 else 0)
        )
        batch.check("delta_scan_varlen", device, tolerance)


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test starts")
def test_all_of_this_in_the_interpreter(in_interpreter: Callable[[str], int]) -> None:
    assert in_interpreter(__file__)
