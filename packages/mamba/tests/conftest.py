"""Random problems for the operators: rows of given lengths, slots, and states poisoned where nothing may look."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor


def cut(lens: Sequence[int], phases: Sequence[int], size: int) -> tuple[list[int], list[int], list[int]]:
    """Chunk starts, the row of each, and the first chunk of each row, one token at a time."""
    starts, rows, first, token = [], [], [0], 0
    for row, (length, phase) in enumerate(zip(lens, phases, strict=True)):
        for i in range(length):
            if i == 0 or (phase + i) % size == 0:
                starts.append(token + i)
                rows.append(row)
        token += length
        first.append(len(rows))
    return [*starts, token], rows, first


@dataclass
class Problem:
    """Arguments of all four state operators over the same rows; `lens` may hold zeros, tokens may be padded."""

    lens: list[int]
    chunk_size: int
    conv: dict[str, Any]
    ssm: dict[str, Any]
    chunks: dict[str, Any]
    rows: dict[str, Any]

    def copy(self) -> Problem:
        return replace(self, conv=_clone(self.conv), ssm=_clone(self.ssm))

    def prompts(self) -> dict[str, Any]:
        """The rows as prompts: `read`, and `write` as the slot of each row's last chunk."""
        write, first = self.rows["write"], self.chunks["row_chunk_loc"].tolist()
        chunk_write = torch.zeros(first[-1], dtype=torch.int64)
        for row in range(len(write)):
            if first[row + 1] > first[row]:
                chunk_write[first[row + 1] - 1] = write[row]
        rows = {name: value for name, value in self.rows.items() if name != "write"}
        return {**rows, "chunk_write": chunk_write}

    def conv_varlen(self, form: Any) -> Tensor:
        cuts = {name: self.chunks[name] for name in ("chunk_start_loc", "chunk_row")}
        return form.causal_conv1d_varlen(**self.conv, **cuts, **self.prompts(), live=None, live_write=None)

    def conv_update(self, form: Any, offset: Tensor, max_query_len: int) -> Tensor:
        extra = {"offset": offset, "max_query_len": max_query_len}
        return form.causal_conv1d_update(**self.conv, **self.rows, **extra)

    def scan(self, form: Any) -> Tensor:
        return form.ssd_scan_varlen(**self.ssm, **self.chunks, **self.prompts())

    def update(self, form: Any, write: Tensor, max_query_len: int) -> Tensor:
        extra = {"write": write, "max_query_len": max_query_len}
        return form.selective_state_update(**self.ssm, **(self.rows | extra))


def _clone(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()}


def build(
    lens: Sequence[int],
    *,
    heads: int = 3,
    channels: int = 5,
    size: int = 7,
    groups: int = 1,
    width: int = 4,
    drafts: int = 0,
    chunk_size: int = 4,
    phases: Sequence[int] | None = None,
    read: Sequence[int] | None = None,
    write: Sequence[int] | None = None,
    slots: int = 24,
    padding: int = 0,
    dtype: torch.dtype = torch.float64,
    state_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Problem:
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(to)

    tokens, rows = sum(lens) + padding, len(lens)
    conv_dim = heads * channels + 2 * groups * size
    state_dtype = state_dtype or dtype
    read = list(read) if read is not None else list(range(1, rows + 1))
    write = list(write) if write is not None else list(read)
    conv_state = torch.full((slots, width - 1 + drafts, conv_dim), float("nan"), dtype=state_dtype)
    ssm_state = torch.full((slots, heads, channels, size), float("nan"), dtype=state_dtype)
    for slot in read:
        if slot:
            conv_state[slot] = rand(*conv_state.shape[1:], to=state_dtype)
            ssm_state[slot] = rand(*ssm_state.shape[1:], to=state_dtype)
    # One projection, split as a layer splits it: x, B and C are strided views.
    projected = rand(tokens, conv_dim + heads)
    projected[tokens - padding :] = float("nan")
    x, B, C, dt = projected.split([heads * channels, groups * size, groups * size, heads], -1)
    param = torch.float64 if dtype == torch.float64 else torch.float32
    starts, chunk_rows, first = cut(lens, phases or [0] * rows, chunk_size)

    def i32(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return Problem(
        lens=list(lens),
        chunk_size=chunk_size,
        conv={
            "x": projected[:, :conv_dim],
            "weight": rand(conv_dim, width),
            "bias": rand(conv_dim),
            "conv_state": conv_state,
            "activation": "silu",
        },
        ssm={
            "x": x.view(tokens, heads, channels),
            "dt": dt,
            "A": -torch.rand(heads, generator=g, dtype=param) * 2 - 0.1,
            "B": B.view(tokens, groups, size),
            "C": C.view(tokens, groups, size),
            "D": rand(heads, to=param),
            "dt_bias": rand(heads, to=param),
            "ssm_state": ssm_state,
            "dt_min": 0.01,
            "dt_max": 2.5,
        },
        chunks={
            "chunk_start_loc": i32(starts),
            "chunk_row": i32(chunk_rows),
            "row_chunk_loc": i32(first),
            "max_chunks_per_row": max(np.diff(first).tolist(), default=0),
            "chunk_size": chunk_size,
        },
        rows={
            "query_start_loc": i32([0, *np.cumsum(lens).tolist()]),
            "read": torch.tensor(read, dtype=torch.int64),
            "write": torch.tensor(write, dtype=torch.int64),
        },
    )


@pytest.fixture(scope="session")
def make() -> Callable[..., Problem]:
    """Builds a `Problem`."""
    return build


@pytest.fixture(scope="session")
def loop_chunks() -> Callable[..., tuple[list[int], list[int], list[int]]]:
    """The chunk metadata as a plain loop."""
    return cut


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
