"""Helpers of the Triton tests: ragged rows, and calls of both forms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import reference_operators as reference
from bateleur.mamba.ops import FORMS
from bateleur.metadata.dispatch import load

NAN = float("nan")
OF_LAYERS = ("fold_ring", "delta_fold_ring", "fold_window", "copy_states")
"""Operators on several layers at once; here on two."""


def triton_form(name: str) -> Callable[..., Any]:
    """The Triton form of an operator."""
    form: Callable[..., Any] = load(FORMS[name].triton or "")
    return form


def with_shares(monkeypatch: pytest.MonkeyPatch, name: str, shares: int) -> None:
    """Make the kernel of this operator divide its rows into `shares` shares."""
    home = import_module(triton_form(name).__module__)
    monkeypatch.setattr(home, "row_shares", lambda num_rows, programs: shares)


def moved(value: Any, place: torch.device) -> Any:
    """A copy with the same strides."""
    if not isinstance(value, Tensor):
        return value
    storage = torch.as_strided(value, (value.untyped_storage().nbytes() // value.element_size(),), (1,), 0)
    return storage.clone().to(place).as_strided(value.shape, value.stride(), value.storage_offset())


class PaddedRows:
    """Rows of `lens` tokens, two rows and three tokens of padding, and arguments by their names in the schemas.

    All that nothing may look at is NaN: padding, null slots, slots that no row reads, dead entries of rings.
    """

    out = "y"
    """The name of what operators return, and below of what else they write."""
    written: tuple[str, ...] = ()

    def __init__(
        self,
        lens: Sequence[int],
        read: Sequence[int] | None,
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        self.rng, self.lens = torch.Generator().manual_seed(seed), [*lens, 0, 0]
        self.tokens, self.dtype, self.state_dtype = sum(lens), dtype, state_dtype
        self.read = list(range(1, len(lens) + 1)) if read is None else list(read)
        self.args: dict[str, Any] = {
            "query_start_loc": torch.tensor([0, *np.cumsum(self.lens)], dtype=torch.int32),
            "max_query_len": max(lens, default=1) or 1,
            "read": torch.tensor([*self.read, 0, 0]),
        }

    def rand(self, *shape: int, to: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.rng).to(to or self.dtype)

    def flat(self, size: int) -> Tensor:
        """(tokens and padding, size), to be split as a layer splits its projection: into strided views."""
        values = self.rand(self.tokens + 3, size)
        values[self.tokens :] = NAN
        return values

    def states(self, slots: int, *shape: int) -> Tensor:
        states = torch.full((slots, *shape), NAN, dtype=self.state_dtype)
        for slot in set(self.read) - {0}:
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

    def place_rings(self, lengths: Sequence[int], capacity: int, rings: dict[str, Tensor]) -> None:
        """Row r owns ring row r + 2 and has `lengths[r]` entries, beginning anywhere in it."""
        start = torch.randint(0, capacity, (len(lengths),), generator=self.rng)
        for row in range(-2, len(lengths)):
            begin, request_conv = (0, 0) if row < 0 else (int(start[row]), lengths[row])
            dead = [(begin + entry) % capacity for entry in range(request_conv, capacity)]
            for values in rings.values():
                values[row + 2, dead] = NAN
        self.args |= rings | {
            "ring_row": torch.tensor([*range(2, len(lengths) + 2), 0, 0]),
            "ring_start": torch.tensor([*start.tolist(), 0, 0]),
            "ring_len": torch.tensor([*lengths, 0, 0]),
        }

    def call(self, name: str, device: torch.device, **more: Any) -> list[dict[str, Any]]:
        """Both forms' arguments after the call, and their outputs."""
        names = inspect.signature(getattr(reference, name)).parameters
        chosen = {key: value for key, value in (self.args | more).items() if key in names}
        if name in OF_LAYERS:
            chosen |= {
                key: torch.stack([each, each / 2])
                for key, each in chosen.items()
                if each is not None and each.is_floating_point()
            }
        results = []
        for form, place in ((getattr(reference, name), torch.device("cpu")), (triton_form(name), device)):
            args = {key: moved(value, place) for key, value in chosen.items()}
            output = form(**args)
            results.append(args if output is None else args | {self.out: output})
        return results

    def check(self, name: str, device: torch.device, tolerance: float, **more: Any) -> Tensor | None:
        """Outputs and all that both forms write must agree, NaN where NaN was, and padding must give 0."""
        want, got = self.call(name, device, **more)
        for key in (key for key in (self.out, *self.written) if isinstance(got.get(key), Tensor)):
            mine, other = got[key].cpu(), want[key]
            if key == self.out:
                assert mine.dtype == self.dtype
                assert not mine[self.tokens :].any()
                mine, other = mine[: self.tokens], other[: self.tokens]
            torch.testing.assert_close(
                mine, other, rtol=tolerance, atol=tolerance, equal_nan=key != self.out,
                msg=f"{key}: {{}}".format,
            )  # fmt: skip
        return want.get(self.out)
