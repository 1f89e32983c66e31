"""Random inputs for the operators: ragged rows, slots, and states that are NaN where nothing may be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor


def cut(lens: Sequence[int], phases: Sequence[int], size: int) -> tuple[list[int], list[int], list[int]]:
    """Return chunk starts, the row of each chunk and the first chunk of each row, computed token by token."""
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
class RecurrenceCase:
    """Arguments of all four operators over slots, for the same rows; `lens` may hold zeros, tokens may be padded."""

    lens: list[int]
    chunk_size: int
    conv: dict[str, Any]
    ssm: dict[str, Any]
    chunks: dict[str, Any]
    rows: dict[str, Any]
    request_conv: Tensor | None = None
    request_conv_write: Tensor | None = None

    def copy(self) -> RecurrenceCase:
        request_conv = None if self.request_conv is None else self.request_conv.clone()
        return replace(self, conv=_clone(self.conv), ssm=_clone(self.ssm), request_conv=request_conv)

    @property
    def chunk_write(self) -> Tensor:
        """Slot after each chunk: from `pages` if given, else only each row's last chunk is stored, in `write`."""
        if "pages" in self.chunks:
            return self.chunks["pages"]
        pages, first = [0] * len(self.chunks["chunk_row"]), self.chunks["row_chunk_loc"].tolist()
        for row, slot in enumerate(self.rows["write"].tolist()):
            if first[row] < first[row + 1]:
                pages[first[row + 1] - 1] = slot
        return torch.tensor(pages, dtype=torch.int64)

    def prompts(self, *names: str) -> dict[str, Any]:
        of_rows = {name: self.rows[name] for name in ("query_start_loc", "read")}
        return of_rows | {name: self.chunks[name] for name in names} | {"chunk_write": self.chunk_write}

    def conv_varlen(self, form: Any) -> Tensor:
        chunks = self.prompts("chunk_start_loc", "chunk_row")
        return form.causal_conv1d_varlen(
            **self.conv, **chunks, request_conv=self.request_conv, request_conv_write=self.request_conv_write
        )

    def conv_update(self, form: Any, offset: Tensor, max_query_len: int) -> Tensor:
        extra = {"offset": offset, "max_query_len": max_query_len}
        return form.causal_conv1d_update(**self.conv, **self.rows, **extra)

    def scan(self, form: Any) -> Tensor:
        sizes = ("max_chunks_per_row", "chunk_size")
        return form.ssd_scan_varlen(**self.ssm, **self.prompts("chunk_start_loc", "chunk_row", "row_chunk_loc", *sizes))

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
) -> RecurrenceCase:
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

    return RecurrenceCase(
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


class Layer:
    """Parameters of a small layer. Its conv channels are inputs of their own: the operators do not care."""

    def __init__(self, heads: int, channels: int, size: int, groups: int, width: int, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.heads, self.channels, self.size, self.groups, self.width = heads, channels, size, groups, width
        self.A = -torch.rand(heads, generator=g, dtype=torch.float64) * 2 - 0.1
        self.D, self.dt_bias = torch.randn(2, heads, generator=g, dtype=torch.float64)
        self.conv = 6
        self.weight = torch.randn(self.conv, width, generator=g, dtype=torch.float64)
        self.params = {"A": self.A, "D": self.D, "dt_bias": self.dt_bias, "dt_min": 0.01, "dt_max": 2.5}

    def stream(self, tokens: int, seed: int) -> Stream:
        return Stream(self, tokens, seed)


class Stream:
    """Tokens of one request, with the expected outputs and the state after each token."""

    def __init__(self, layer: Layer, tokens: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)

        def rand(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g, dtype=torch.float64)

        self.x = rand(tokens, layer.heads, layer.channels)
        self.dt = rand(tokens, layer.heads)
        self.B, self.C = rand(2, tokens, layer.groups, layer.size)
        self.u = rand(tokens, layer.conv)
        step = torch.nn.functional.softplus(self.dt + layer.dt_bias).clamp(0.01, 2.5)
        state = torch.zeros(layer.heads, layer.channels, layer.size, dtype=torch.float64)
        line = torch.cat([torch.zeros(layer.width - 1, layer.conv, dtype=torch.float64), self.u])
        self.states, self.y, self.z = [state], torch.empty_like(self.x), torch.empty_like(self.u)
        self.windows = [line[t : t + layer.width - 1] for t in range(tokens + 1)]
        for t in range(tokens):
            b, c = (v[t].repeat_interleave(layer.heads // layer.groups, 0) for v in (self.B, self.C))
            decay = torch.exp(layer.A * step[t])[:, None, None]
            state = decay * state + step[t][:, None, None] * self.x[t][:, :, None] * b[:, None]
            self.states.append(state)
            self.y[t] = (state * c[:, None]).sum(-1) + layer.D[:, None] * self.x[t]
            z = (line[t : t + layer.width] * layer.weight.T).sum(0)
            self.z[t] = z * torch.sigmoid(z)

    def tokens(self, first: int, end: int, junk: int = 0) -> dict[str, Tensor]:
        """Inputs of the tokens from first to end, followed by `junk` NaN tokens."""
        names = ("x", "dt", "B", "C", "u")
        parts = {name: getattr(self, name)[first:end] for name in names}
        return {name: torch.cat([v, v.new_full((junk, *v.shape[1:]), float("nan"))]) for name, v in parts.items()}


@pytest.fixture(scope="session")
def make_layer() -> Callable[..., Layer]:
    """Factory of `Layer`."""
    return Layer


@pytest.fixture(scope="session")
def make() -> Callable[..., RecurrenceCase]:
    """Factory of `RecurrenceCase`."""
    return build


@pytest.fixture(scope="session")
def loop_chunks() -> Callable[..., tuple[list[int], list[int], list[int]]]:
    """Compute the chunk metadata with a plain loop."""
    return cut


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
