"""Every kernel is compiled for sm_90 with its launches at published sizes: no spills, and the stated occupancy.

Tensors are on the CPU and hold nothing: nothing runs, and fake tensors give views of one token other strides.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")
from triton.runtime.jit import JITFunction

from bateleur.mamba import CacheLayout, CopyPlan, FoldPlan, MambaCacheMode, ReplayPlan, SlotPlan
from bateleur.mamba.ops import FORMS
from bateleur.mamba.planners import triton as planners
from sm90 import Compiled, compiling, faults_of, naming, slow_unless
from triton_rows import triton_form

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="nothing compiles in Triton's interpreter"
)
Launches = Iterator[tuple[str, dict[str, Any]]]
WIDTH, CAPACITY, LAYERS, SLOTS = 4, 16, 3, 9
INT32, INT64 = torch.int32, torch.int64
TYPES = [torch.bfloat16, torch.float32]
SIZES = ((64, 700), (1, 1), (33, 1027), (1024, 1030))
"""Rows and tokens of the launched batches. The first batch must compile all kernels that the others need."""
PROMPTS = ((8, 700), (1, 1), (3, 1027), (40, 1030))


def part(size: int, dtype: torch.dtype, first: int) -> Tensor:
    """A view that starts at entry ``first`` of a larger tensor."""
    return torch.empty(first + size, dtype=dtype)[first:]


@dataclass(frozen=True)
class Mamba2:
    """Sizes of a published layer."""

    heads: int
    head_dim: int
    state_size: int
    groups: int
    chunk_size: int

    @property
    def channels(self) -> tuple[int, ...]:
        """Channels of the convolution: x, B and C."""
        return self.heads * self.head_dim, self.groups * self.state_size, self.groups * self.state_size

    def projected(self, num_tokens: int, dtype: torch.dtype) -> dict[str, Any]:
        """Outputs of a layer's projection and convolution, as strided views."""
        projection = torch.empty(num_tokens, self.channels[0] + sum(self.channels) + self.heads, dtype=dtype)
        z, xbc, dt = projection.split([self.channels[0], sum(self.channels), self.heads], 1)
        x, B, C = torch.empty(num_tokens, sum(self.channels), dtype=dtype).split(list(self.channels), 1)
        groups = (self.groups, self.state_size)
        per_head = {name: torch.empty(self.heads) for name in ("A", "D", "dt_bias")}
        x, B, C = x.unflatten(1, (self.heads, -1)), B.unflatten(1, groups), C.unflatten(1, groups)
        return {"z": z, "xbc": xbc, "dt": dt, "x": x, "B": B, "C": C, "dt_min": 0.0, "dt_max": 1e9, **per_head}

    def state(self, state_dtype: torch.dtype) -> Tensor:
        return torch.empty(LAYERS, SLOTS, self.heads, self.head_dim, self.state_size, dtype=state_dtype)

    def rings(self, dtype: torch.dtype) -> dict[str, Tensor]:
        lead = (LAYERS, SLOTS, CAPACITY)
        return {
            "ring_x": torch.empty(*lead, self.heads, self.head_dim, dtype=dtype),
            "ring_dt": torch.empty(*lead, self.heads),
            "ring_B": torch.empty(*lead, self.groups, self.state_size, dtype=dtype),
        }

    def names(self) -> dict[str, str]:
        """The layer's operators by name."""
        return {
            "state": "ssm_state", "update": "selective_state_update", "replay": "replay_update", "fold": "fold_ring",
            "scan": "ssd_scan_varlen",
        }  # fmt: skip

    def norm(self, given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        inner = self.heads * self.head_dim
        y = torch.empty(len(given["z"]), inner, dtype=dtype)
        return {"x": y, "z": given["z"], "weight": torch.empty(inner, dtype=dtype), "groups": self.groups,
                "eps": 1e-5}  # fmt: skip


@dataclass(frozen=True)
class Delta:
    """Sizes of a published layer with a delta rule; Kimi's has a decay for each key channel."""

    groups: int
    heads: int
    value_dim: int = 128
    key_dim: int = 128
    per_channel: bool = False
    chunk_size: int = 128

    @property
    def channels(self) -> tuple[int, ...]:
        """Channels of the convolution: queries, keys and values."""
        return self.groups * self.key_dim, self.groups * self.key_dim, self.heads * self.value_dim

    @property
    def decays(self) -> tuple[int, ...]:
        return (self.heads, self.key_dim) if self.per_channel else (self.heads,)

    def projected(self, num_tokens: int, dtype: torch.dtype) -> dict[str, Any]:
        """Outputs of a layer's projections and convolution, as strided views."""
        values = self.channels[2]
        last = 128 if self.per_channel else self.heads
        sizes = [sum(self.channels), values, self.heads, last]
        xbc, z, b, a = torch.empty(num_tokens, sum(sizes), dtype=dtype).split(sizes, 1)
        if self.per_channel:
            z, a = (torch.empty(num_tokens, values, dtype=dtype), torch.empty(num_tokens, *self.decays, dtype=dtype))
        q, k, v = torch.empty(num_tokens, sum(self.channels), dtype=dtype).split(list(self.channels), 1)
        keys = (self.groups, self.key_dim)
        q, k, v = q.unflatten(1, keys), k.unflatten(1, keys), v.unflatten(1, (self.heads, -1))
        params = {"A": torch.empty(self.heads), "dt_bias": torch.empty(*self.decays), "beta_scale": 1.0}
        return {"z": z, "xbc": xbc, "q": q, "k": k, "v": v, "a": a, "b": b, **params}

    def state(self, state_dtype: torch.dtype) -> Tensor:
        return torch.empty(LAYERS, SLOTS, self.heads, self.value_dim, self.key_dim, dtype=state_dtype)

    def rings(self, dtype: torch.dtype) -> dict[str, Tensor]:
        lead = (LAYERS, SLOTS, CAPACITY)
        return {
            "ring_k": torch.empty(*lead, self.groups, self.key_dim, dtype=dtype),
            "ring_u": torch.empty(*lead, self.heads, self.value_dim),
            "ring_g": torch.empty(*lead, *self.decays),
        }

    def names(self) -> dict[str, str]:
        """The layer's operators by name."""
        return {
            "state": "state", "update": "delta_state_update", "replay": "delta_replay_update",
            "fold": "delta_fold_ring", "scan": "delta_scan_varlen",
        }  # fmt: skip

    def norm(self, given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        y = torch.empty(len(given["z"]), self.channels[2], dtype=dtype)
        return {"x": y, "z": given["z"], "weight": torch.empty(self.value_dim, dtype=dtype), "groups": self.heads,
                "eps": 1e-6, "norm_first": True, "activation": "sigmoid" if self.per_channel else "silu"}  # fmt: skip


MODELS: dict[str, Mamba2 | Delta] = {
    "Nemotron-3-Nano-30B-A3B": Mamba2(64, 64, 128, 8, 128),
    "Nemotron-Nano-9B-v2": Mamba2(128, 80, 128, 8, 128),
    "Granite-4.0-H-Small": Mamba2(128, 64, 128, 1, 256),
    "Granite-4.0-H-350M": Mamba2(48, 32, 128, 1, 256),
    "Qwen3.5-9B": Delta(16, 32),
    "Qwen3.5-9B of four ranks": Delta(4, 8),
    "Kimi-Linear-48B-A3B": Delta(32, 32, per_channel=True),
}


class Batch:
    """Launches of a layer's operators for ``num_rows`` rows; tensors of prefills have any alignment."""

    def __init__(
        self, layer: Mamba2 | Delta, num_rows: int, num_tokens: int, dtype: torch.dtype, state_dtype: torch.dtype
    ) -> None:
        self.layer, self.rows, self.tokens, self.dtype = layer, num_rows, num_tokens, dtype
        self.given, self.names = layer.projected(num_tokens, dtype), layer.names()
        self.state, self.rings = layer.state(state_dtype), layer.rings(dtype)
        self.index = partial(torch.empty, num_rows, dtype=INT64)
        channels = sum(layer.channels)
        self.request_conv = torch.empty(LAYERS, SLOTS, WIDTH + 2, channels, dtype=dtype)
        self.conv = torch.empty(LAYERS, SLOTS, WIDTH - 1, channels, dtype=dtype)
        self.weights = {
            "weight": torch.empty(channels, WIDTH, dtype=dtype),
            "bias": torch.empty(channels, dtype=dtype) if isinstance(layer, Mamba2) else None,
            "activation": "silu",
        }

    def _starts(self) -> Tensor:
        return torch.empty(self.rows + 1, dtype=INT32)

    def slots(self, query_len: int) -> Launches:
        """A decode under SLOTS."""
        rows = {"query_start_loc": self._starts(), "max_query_len": query_len, "read": self.index()}
        write = torch.empty(self.rows, query_len, dtype=INT64)
        yield "causal_conv1d_update", self.weights | rows | {
            "x": self.given["xbc"], "conv_state": self.conv[1], "offset": self.index(), "write": self.index(),
        }  # fmt: skip
        yield self.names["update"], self.given | rows | {self.names["state"]: self.state[1], "write": write}
        yield "gated_rms_norm", self.layer.norm(self.given, self.dtype)

    def copies(self) -> Launches:
        """The state copies after a step under SLOTS."""
        more = {name: self.index() for name in ("conv_src", "conv_bias", "ssm_src", "dst")}
        yield "copy_states", {"conv_state": self.request_conv, "ssm_state": self.state} | more

    def replays(self, query_len: int) -> Launches:
        """A decode under FOLD."""
        more = {name: self.index() for name in ("slot", "ring_row", "ring_start", "ring_len")}
        rings = {name: ring[1] for name, ring in self.rings.items()}
        more |= {"query_start_loc": self._starts(), "max_query_len": query_len}
        yield self.names["replay"], self.given | rings | more | {self.names["state"]: self.state[1]}

    def folds(self) -> Launches:
        """The folds after a step under FOLD."""
        names = ("ring_row", "ring_start", "count", "src", "dst", "page_offset")
        more = {name: self.index() for name in names} | {"conv_state": self.conv, "request_conv": self.request_conv}
        if isinstance(self.layer, Mamba2):
            more["A"] = torch.empty(LAYERS, self.layer.heads)
        yield self.names["fold"], self.rings | more | {self.names["state"]: self.state}
        yield "fold_window", more

    def prompts(self) -> Launches:
        first, chunks = self.rows % 5, self.rows + self.tokens // self.layer.chunk_size
        rows = {
            "query_start_loc": part(self.rows + 1, INT32, first),
            "read": part(self.rows, INT64, first),
            "chunk_start_loc": part(chunks + 1, INT32, first),
            "chunk_row": part(chunks, INT32, first),
            "chunk_write": part(chunks, INT64, first),
        }
        for request_conv in (None, self.request_conv[1]):
            yield "causal_conv1d_varlen", self.weights | rows | {
                "x": self.given["xbc"], "conv_state": self.conv[1], "request_conv": request_conv,
                "request_conv_write": None if request_conv is None else part(self.rows, INT64, first),
            }  # fmt: skip
        more = {"row_chunk_loc": part(self.rows + 1, INT32, first), "max_chunks_per_row": 9}
        more |= {"chunk_size": self.layer.chunk_size, self.names["state"]: self.state[1]}
        yield self.names["scan"], self.given | rows | more


PARTS: dict[str, Callable[[Batch], Launches]] = {
    "slots": lambda batch: (each for n in (1, 4) for each in batch.slots(n)),
    "copies": Batch.copies,
    "one token": lambda batch: batch.replays(1),
    "drafts": lambda batch: batch.replays(4),
    "folds": Batch.folds,
    "prompts": Batch.prompts,
}


def launch(launches: Launches) -> None:
    """Call the Triton form of each operator with the arguments of its signature."""
    for name, given in launches:
        form = triton_form(name)
        code = form.__code__
        form(**{key: value for key, value in given.items() if key in code.co_varnames[: code.co_argcount]})


def check(found: Compiled, record: Callable[[str, object], None], what: str) -> None:
    """Check that kernels were launched and that none has a fault."""
    assert found.kernels
    for kernel in found.kernels:
        name = f"mamba {kernel.name} {what}"
        record("kernel", (name, kernel.registers, kernel.spilled_bytes, kernel.shared_bytes))
    assert [fault for kernel in found.kernels for fault in faults_of(kernel)] == []


def kernels_of_sizes(make: Callable[[int, int], None], sizes: Sequence[tuple[int, int]] = SIZES) -> Compiled:
    """Launch for all batch sizes; only the first may compile kernels."""
    with compiling() as found:
        make(*sizes[0])
        end = len(found.launches)
        for num_rows, num_tokens in sizes[1:]:
            make(num_rows, num_tokens)
    assert [str(kernel) for kernel in found.kernels_since(end)] == [], "compiled for a size of batches"
    return found


FAST = ("Nemotron-3-Nano-30B-A3B", "Qwen3.5-9B", "Kimi-Linear-48B-A3B")
"""Models whose bfloat16 kernels the fast tests compile: one of each recurrence."""
SMALL = ("Granite-4.0-H-350M", "Qwen3.5-9B of four ranks")
"""Kernels that are not compiled for float32."""
CASES = [
    *product(MODELS, [torch.bfloat16], [torch.float32], PARTS),
    *product([model for model in MODELS if model not in SMALL], [torch.float32], [torch.float32], PARTS),
    *product(["Nemotron-3-Nano-30B-A3B", "Qwen3.5-9B"], [torch.bfloat16], [torch.bfloat16], PARTS),
]


def case_id(value: object) -> str:
    """Types without their module."""
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize(
    ("model", "dtype", "state_dtype", "part"),
    slow_unless({*product(FAST, [torch.bfloat16], [torch.float32], PARTS)}, CASES),
    ids=case_id,
)
def test_a_published_layer(
    model: str, dtype: torch.dtype, state_dtype: torch.dtype, part: str, record_property: Callable[[str, object], None]
) -> None:
    """One kernel is used for all batch sizes, and states are read with 16 bytes per thread."""
    layer = MODELS[model]

    def make(num_rows: int, num_tokens: int) -> None:
        launch(PARTS[part](Batch(layer, num_rows, num_tokens, dtype, state_dtype)))

    found = kernels_of_sizes(make, PROMPTS if part == "prompts" else SIZES)
    check(found, record_property, f"{model} {case_id(dtype)}")
    streams = [kernel for kernel in found.kernels if kernel.name in ("update_kernel", "replay_kernel", "fold_kernel")]
    assert all(kernel.instructions["wide loads"] for kernel in streams), "a state is not read by 16 bytes a thread"


@pytest.mark.parametrize("dtype", TYPES, ids=case_id)
def test_windows_of_a_pure_convolution(dtype: torch.dtype, record_property: Callable[[str, object], None]) -> None:
    """LFM2-8B-A1B: 2,048 channels, kernels of width 3, and no other state."""

    def make(num_rows: int, num_tokens: int) -> None:
        index, conv = (partial(torch.empty, num_rows, dtype=INT64), torch.empty(LAYERS, SLOTS, 2, 2048, dtype=dtype))
        request_conv = torch.empty(LAYERS, SLOTS, 5, 2048, dtype=dtype)
        named = {name: index() for name in ("ring_row", "dst", "page_offset", "conv_src", "conv_bias", "ssm_src")}
        launch(iter([
            ("fold_window", named | {"conv_state": conv, "request_conv": request_conv}),
            ("copy_states", named | {"conv_state": request_conv, "ssm_state": None}),
        ]))  # fmt: skip

    found = kernels_of_sizes(make)
    assert {kernel.name for kernel in found.kernels} == {"window_kernel", "copy_kernel"}
    check(found, record_property, f"LFM2-8B-A1B {case_id(dtype)}")


@pytest.mark.parametrize("dtype", TYPES, ids=case_id)
def test_a_scan_of_three_heads(dtype: torch.dtype) -> None:
    """Odd sizes: buffers of a scan are aligned for any number of tokens."""
    layer = Mamba2(3, 16, 16, 1, 16)

    def make(num_rows: int, num_tokens: int) -> None:
        launch(iter([*Batch(layer, num_rows, num_tokens, dtype, torch.float32).prompts()][-1:]))

    found = kernels_of_sizes(make, ((1, 4), (1, 1), (1, 2), (1, 3), (3, 100), (2, 101)))
    assert {kernel.name for kernel in found.kernels} == {
        "steps_kernel", "adds_kernel", "passes_kernel", "outputs_kernel",
    }  # fmt: skip


@pytest.mark.parametrize(("keys", "values", "walk"), [(40, 40, "walk_kernel"), (48, 40, "walk_tiles_kernel")])
def test_a_delta_rule_of_odd_sizes(keys: int, values: int, walk: str) -> None:
    """Tiles of 64 tokens with keys that begin at multiples of 8 channels gave wrong outputs on an H200."""
    layer = Delta(2, 4, values, keys, chunk_size=64)

    def make(num_rows: int, num_tokens: int) -> None:
        launch(iter([*Batch(layer, num_rows, num_tokens, torch.bfloat16, torch.float32).prompts()][-1:]))

    found = kernels_of_sizes(make, PROMPTS)
    assert [fault for kernel in found.kernels for fault in faults_of(kernel)] == []
    assert walk in {kernel.name for kernel in found.kernels}


LAYOUTS = {
    mode: CacheLayout(
        max_model_len=4096, block_size=4096 if mode is MambaCacheMode.NONE else 256, mode=mode,
        num_speculative_tokens=3,
    )
    for mode in MambaCacheMode
}  # fmt: skip


@pytest.mark.parametrize("mode", MambaCacheMode)
@pytest.mark.parametrize("there", [False, True])
def test_planners(there: bool, mode: MambaCacheMode, record_property: Callable[[str, object], None]) -> None:
    """With and without optional arguments."""
    layout = LAYOUTS[mode]

    def make(num_rows: int, num_tokens: int) -> None:
        def ints(dtype: torch.dtype = INT32) -> Tensor:
            return torch.empty(num_rows, dtype=dtype)

        table, accepted = torch.empty(num_rows, layout.columns(), dtype=INT32), ints(INT64)
        maybe = accepted if there else None
        step, copy = SlotPlan.allocate(layout, num_rows, "cpu"), CopyPlan.allocate(num_rows, "cpu")
        prev = CopyPlan.allocate(num_rows, "cpu").prev_col if there else None
        planners.plan_step(layout, step, table, ints(), ints(), maybe, prev)
        planners.plan_copy(layout, copy, table, ints(), ints(), ints(), accepted, step)
        plan, fold = ReplayPlan.allocate(num_rows, "cpu"), FoldPlan.allocate(num_rows, "cpu")
        planners.plan_replay(layout, plan, table, ints(), ints(), ints(INT64), accepted)
        flags = ints(torch.bool) if there else None
        planners.plan_fold(layout, fold, plan, ints(), ints(), accepted, flags, flags)

    check(kernels_of_sizes(make), record_property, f"{mode.name} {there}")


def test_every_kernel_is_launched() -> None:
    modules = {import_module(triton_form(name).__module__) for name in FORMS}
    modules |= {planners, import_module("bateleur.mamba.ops.triton.delta_tiles")}
    every = {
        kernel for module in modules for name, kernel in vars(module).items()
        if isinstance(kernel, JITFunction) and name.endswith("_kernel") and kernel.__module__ == module.__name__
    }  # fmt: skip
    with naming() as launched:
        for model, dtype in product(MODELS, TYPES):
            batch = Batch(MODELS[model], 4, 16, dtype, torch.float32)
            for make in PARTS.values():
                launch(make(batch))
    assert every - launched == {getattr(planners, f"{name}_plan_kernel") for name in ("step", "copy", "replay", "fold")}
