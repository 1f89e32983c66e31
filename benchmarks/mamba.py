"""Recurrent states in a decode step: bytes by policy, step time relative to its bound, memory, and planning time.

    python benchmarks/mamba.py --output benchmarks/results/mamba-cpu.json

SLOTS updates a state and writes one for each token. FOLD replays a ring over a state that it only reads, and folds the
ring into the state once in a while. Bytes are those of `bateleur.mamba.memory_traffic`, for one layer of a published
model with bfloat16 activations, float32 states, and 70 % of a step's tokens accepted. On CUDA the step of each policy
runs in a graph over many layers, so that caches do not help. Steps and a plain copy run in interleaved rounds, and a
step time is compared with its bytes at the copy's bandwidth. The rows of a batch are spread over the fold cycle, as in
a long run. On other devices only the byte counts and the host's planning time are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bateleur.mamba import (
    CacheLayout,
    CopyPlan,
    FoldBatch,
    FoldPlan,
    GatedDelta,
    KimiDelta,
    Mamba2,
    MambaCacheMode,
    MambaMetadata,
    PrefillChunks,
    Recurrence,
    ReplayPlan,
    RequestStates,
    SlotPlan,
    StatePolicy,
    causal_conv1d_update,
    memory_traffic,
    plan_copy,
    plan_fold,
    plan_replay,
    plan_step,
)
from bateleur.mamba.prefill_chunks import PrefillChunker

SLOTS, FOLD = StatePolicy
MODEL_LEN, BLOCK = 16384, 256
DRAFTS = (0, 3, 5, 7)
BATCHES = (1, 4, 16, 64, 128, 256)
WORKING_SET_BYTES = 1 << 28
"""Bytes of states read per round over all layers, far more than a cache holds."""
PLANNED_ROWS = 64
BESIDE_TRANSFORMERS = ("Nemotron-3-Nano-30B", "Qwen3.5-9B", "Kimi-Linear-48B")
"""One model for each recurrence that transformers implements."""


@dataclass(frozen=True)
class Model:
    """The recurrent layers of a published model: their number, recurrence and sizes."""

    layers: int
    kind: type[Recurrence]
    sizes: tuple[int, ...]

    def spec(self, drafts: int, policy: StatePolicy, act: torch.dtype = torch.bfloat16) -> Recurrence:
        return self.kind(*self.sizes, num_speculative_tokens=drafts, policy=policy, conv_dtype=act)


MODELS = {
    "Nemotron-3-Nano-30B": Model(23, Mamba2, (64, 64, 128, 8)),
    "Nemotron-Nano-9B-v2": Model(27, Mamba2, (128, 80, 128, 8)),
    "Granite-4.0-H-350M": Model(28, Mamba2, (48, 32, 128, 1)),
    "Qwen3.5-9B": Model(24, GatedDelta, (16, 32, 128, 128)),
    "Kimi-Linear-48B": Model(21, KimiDelta, (32, 128, 128)),  # number of layers by transformers' defaults
}
TINY = {
    "tiny": Model(2, Mamba2, (4, 16, 16, 2)),
    "tiny gated": Model(2, GatedDelta, (2, 4, 16, 16)),
    "tiny kimi": Model(2, KimiDelta, (2, 16, 16)),
}


def layout_of(drafts: int, policy: StatePolicy, mode: MambaCacheMode = MambaCacheMode.ALL) -> CacheLayout:
    block = MODEL_LEN if mode is MambaCacheMode.NONE else BLOCK
    return CacheLayout(mode, block, drafts, MODEL_LEN, policy)


def cycle_of(drafts: int) -> memory_traffic.FoldCycle:
    return memory_traffic.FoldCycle.of(layout_of(drafts, FOLD), max(1, round(0.7 * (1 + drafts))))


def counted(model: Model, drafts: int) -> dict[str, Any]:
    """Megabytes per row and layer, and mebibytes per request in all layers."""
    slots, fold = (model.spec(drafts, policy) for policy in (SLOTS, FOLD))
    tokens, cycle = 1 + drafts, cycle_of(drafts)
    whole, ours = (memory_traffic.slots_step_bytes(slots, tokens), memory_traffic.fold_step_bytes(fold, tokens, cycle))
    memory = {
        f"{policy.value}_{mode.value}_MiB": model.layers
        * model.spec(drafts, policy).max_memory_usage_bytes(layout_of(drafts, policy, mode))
        / 2**20
        for policy in StatePolicy
        for mode in (MambaCacheMode.NONE, MambaCacheMode.ALIGN)
    }
    return {
        "drafts": drafts,
        "accepted": cycle.accepted,
        "steps_between_folds": cycle.steps,
        "conv_update_MB": memory_traffic.conv_update_bytes(slots, tokens) / 1e6,
        "state_update_MB": memory_traffic.state_update_bytes(slots, tokens) / 1e6,
        "replay_MB": memory_traffic.replay_bytes(fold, tokens, cycle.mean_ring_len) / 1e6,
        "fold_MB": memory_traffic.fold_bytes(fold, cycle.folded) / 1e6,
        "slots_step_MB": whole / 1e6,
        "fold_step_MB": ours / 1e6,
        "ratio": whole / ours,
        "request": memory,
    }


class Layer:
    """The states of one layer under both policies, and a decode step of a batch of `rows`."""

    def __init__(self, model: Model, drafts: int, rows: int, device: torch.device, phase: int) -> None:
        self.slots, self.fold = (model.spec(drafts, policy) for policy in (SLOTS, FOLD))
        self.tokens, self.rows, self.cycle = 1 + drafts, rows, cycle_of(drafts)
        spec, capacity = self.fold, layout_of(drafts, FOLD).ring_capacity

        def rand(*shape: int, dtype: torch.dtype = spec.conv_dtype, sign: int = 0) -> Tensor:
            drawn = torch.randn(shape, device=device).mul_(0.1)
            return (drawn.abs_().mul_(sign) if sign else drawn).to(dtype)

        width, pages = rows * self.tokens, 1 + rows * self.tokens
        self.channels = rand(width, spec.conv_dim)
        self.gates = tuple(rand(width, *gate.shape, dtype=gate.dtype) for gate in spec.gates)
        self.params = tuple(rand(*each.shape, dtype=each.dtype, sign=each.sign) for each in spec.parameters)
        self.weight = rand(spec.conv_dim, spec.conv_width)
        self.state = rand(pages, *spec.state_shape, dtype=spec.ssm_dtype)
        self.conv, self.windows = rand(pages, *self.slots.conv_shape), rand(1 + rows, *spec.conv_shape)
        self.request_conv = rand(1 + rows, *spec.request_conv_shape)
        self.ring = tuple(
            rand(1 + rows, capacity, *each.shape, dtype=each.dtype, sign=each.sign) for each in spec.ring_entry
        )
        row = torch.arange(rows, device=device)
        self.row, write = 1 + row, 1 + self.tokens * row[:, None] + torch.arange(self.tokens, device=device)
        read = write[:, 0].contiguous()
        # Rows are spread over the fold cycle; rows at its end fold.
        place = (row + phase) % self.cycle.steps
        offset, ring_len = torch.full_like(row, self.cycle.accepted - 1), place * self.cycle.accepted
        ends = (place == self.cycle.steps - 1).long()
        self.folds, self.held = int(ends.sum()), int(ring_len.sum())
        loc = torch.arange(0, width + 1, self.tokens, dtype=torch.int32, device=device)

        def step(plan: SlotPlan | ReplayPlan) -> MambaMetadata:
            none = PrefillChunks.empty(device)
            return MambaMetadata(rows, width, 0, plan, loc, none, BLOCK, self.tokens, self.row)

        self.by_slot = step(SlotPlan(read, write, read, offset, read, read))
        self.by_ring = step(ReplayPlan(self.row, self.row, 3 * row % capacity, ring_len, offset))
        counts, dst = ends * self.cycle.folded, ends * self.row
        self.at = FoldBatch(self.row, 3 * row % capacity, counts, self.row, dst, offset)

    def by_slots(self) -> None:
        assert isinstance(self.by_slot.plan, SlotPlan)
        self._conv(self.conv, self.by_slot.plan.conv_read)
        self.by_update()

    def by_fold(self) -> None:
        self._conv(self.request_conv, self.row)
        self.by_replay()
        conv, state, request_conv, *ring = (
            each[None] for each in (self.windows, self.state, self.request_conv, *self.ring)
        )
        self.fold.fold(tuple(each[None] for each in self.params), conv, state, request_conv, tuple(ring), self.at)

    def by_update(self) -> None:
        self.slots.update(self.params, self.channels, self.gates, self.state, self.by_slot)

    def by_replay(self) -> None:
        self.fold.replay(self.params, self.channels, self.gates, self.state, self.ring, self.by_ring)

    def _conv(self, windows: Tensor, where: Tensor) -> None:
        loc, offset = self.by_slot.query_start_loc, self.at.page_offset
        causal_conv1d_update(self.channels, self.weight, None, windows, loc, self.tokens, where, offset, where, "silu")

    def bytes_moved(self) -> dict[str, float]:
        """Bytes of the step of each method, all rows together."""
        mean = self.held / self.rows
        replay = self.rows * memory_traffic.replay_bytes(self.fold, self.tokens, mean)
        conv = self.rows * memory_traffic.conv_update_bytes(self.fold, self.tokens)
        return {
            "slots": self.rows * memory_traffic.slots_step_bytes(self.slots, self.tokens),
            "fold": conv + replay + self.folds * memory_traffic.fold_bytes(self.fold, self.cycle.folded),
            "update": self.rows * memory_traffic.state_update_bytes(self.slots, self.tokens),
            "replay": replay,
        }


def replayed(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Capture `call` in a CUDA graph, to exclude launch overhead. Returns `call` itself on other devices."""
    if device.type != "cuda":
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def timed(calls: dict[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, float]:
    """Median microseconds of each call, in interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            if device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                end.record()
                torch.cuda.synchronize()
                times[name].append(start.elapsed_time(end) * 1e3)
            else:
                began = time.perf_counter()
                call()
                times[name].append((time.perf_counter() - began) * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(
    model: Model, drafts: int, rows: int, device: torch.device, rounds: int, working_set: int
) -> dict[str, Any]:
    """Microseconds of a layer's step by policy and operator, and their share of the copy's bandwidth."""
    one = rows * model.spec(drafts, FOLD).state_bytes
    layers = [Layer(model, drafts, rows, device, phase) for phase in range(-(-working_set // one))]
    source = torch.empty(max(1 << 20, 4 * working_set), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def over_layers(name: str) -> Callable[[], object]:
        methods = [getattr(layer, f"by_{name}") for layer in layers]
        return replayed(lambda: [method() for method in methods], device)

    names = ("slots", "fold", "update", "replay")
    calls: dict[str, Callable[[], object]] = {name: over_layers(name) for name in names}
    calls["copy"] = replayed(lambda: target.copy_(source), device)
    us = timed(calls, device, rounds)
    bandwidth = 2 * source.nbytes / us["copy"] * 1e6
    moved = {name: sum(layer.bytes_moved()[name] for layer in layers) for name in names}
    return {
        "drafts": drafts,
        "batch": rows,
        "layers": len(layers),
        "copy_GB_per_s": bandwidth / 1e9,
        "us": {name: us[name] / len(layers) for name in names},
        "bound_us": {name: moved[name] / len(layers) / bandwidth * 1e6 for name in names},
        "of_bound": {name: moved[name] / us[name] * 1e6 / bandwidth for name in names},
        "bytes_ratio": moved["slots"] / moved["fold"],
        "time_ratio": us["slots"] / us["fold"],
    }


def planners(rows: int, drafts: int) -> dict[str, Callable[[], object]]:
    """All planners on a decode batch, with the request states that they update."""
    computed = torch.randint(300, 3000, (rows,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    computed[0] = 2 * BLOCK - 1  # in most steps some row crosses a block boundary
    lens = torch.full((rows,), 1 + drafts, dtype=torch.int32)
    accepted, row = torch.arange(rows) % (1 + drafts) + 1, 1 + torch.arange(rows)
    states = RequestStates(1 + rows, "cpu")
    states.scatter(row, accepted)
    calls: dict[str, Callable[[], object]] = {}

    def add(name: str, planner: Callable[..., object]) -> None:
        calls[name] = planner
        planner()  # the next planner needs its plan

    for mode in MambaCacheMode:
        layout = layout_of(drafts, SLOTS, mode)
        table = torch.randint(1, 9999, (rows, layout.columns()), dtype=torch.int32)
        prev_col = None if mode is MambaCacheMode.NONE else computed.long() // layout.block_size
        slots, copies = SlotPlan.allocate(layout, rows, "cpu"), CopyPlan.allocate(rows, "cpu")
        args = (layout, table, computed, lens)
        add(f"plan_step {mode.value}", partial(plan_step, *args, accepted, slots, prev_col=prev_col))
        add(f"plan_copy {mode.value}", partial(plan_copy, *args, lens - 1, accepted, slots, copies))
    layout = layout_of(drafts, FOLD)
    table = torch.randint(1, 9999, (rows, layout.columns()), dtype=torch.int32)
    base, flags = computed.long() - 3, torch.zeros(rows, dtype=torch.bool)
    replay, fold = ReplayPlan.allocate(rows, "cpu"), FoldPlan.allocate(rows, "cpu")
    add("plan_replay", partial(plan_replay, layout, table, computed, lens, base, accepted, replay))
    done = partial(plan_fold, layout, replay, computed, lens, accepted, out=fold)
    add("plan_fold", done)
    add("plan_fold mixed", partial(done, flush=flags, scanned=flags))
    starts = np.arange(1 + rows, dtype=np.int32) * BLOCK
    calls["cut prompts"] = partial(PrefillChunker(layout, BLOCK // 2).split, starts, computed.numpy(), table)
    calls["gather"] = partial(states.gather, row)
    calls["scatter"] = partial(states.scatter, row, accepted, base=base)
    return calls


def planning(rows: int, drafts: int, rounds: int, repeats: int = 20) -> dict[str, float]:
    """Microseconds of each planner: median of the fastest half of interleaved rounds."""
    calls = planners(rows, drafts)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            times[name].append((time.perf_counter() - began) / repeats * 1e6)
    return {name: statistics.median(sorted(values)[: max(1, rounds // 2)]) for name, values in times.items()}


def print_counts(rows: list[dict[str, Any]]) -> None:
    print(f"{'MB per row and layer':<24}{'drafts':>7}{'update':>9}{'replay':>9}{'fold':>8}{'every':>6}"
          f"{'slots step':>12}{'fold step':>11}{'ratio':>7}{'MiB a request: slots':>22}{'fold':>8}")  # fmt: skip
    for row in rows:
        print(
            f"{row['model']:<24}{row['drafts']:>7}{row['state_update_MB']:9.3f}{row['replay_MB']:9.3f}"
            f"{row['fold_MB']:8.3f}{row['steps_between_folds']:>6}{row['slots_step_MB']:12.3f}{row['fold_step_MB']:11.3f}"
            f"{row['ratio']:7.2f}{row['request']['slots_none_MiB']:22.1f}{row['request']['fold_none_MiB']:8.1f}"
        )


def print_times(rows: list[dict[str, Any]]) -> None:
    print(f"{'us per layer (of bound)':<24}{'drafts':>7}{'batch':>6}{'update':>16}{'replay':>16}{'slots step':>16}"
          f"{'fold step':>16}{'bytes':>7}{'time':>7}{'copy GB/s':>11}")  # fmt: skip
    for row in rows:
        cells = "".join(
            f"{row['us'][name]:9.1f} ({100 * row['of_bound'][name]:3.0f}%)"
            for name in ("update", "replay", "slots", "fold")
        )
        print(
            f"{row['model']:<24}{row['drafts']:>7}{row['batch']:>6}{cells}{row['bytes_ratio']:7.2f}"
            f"{row['time_ratio']:7.2f}{row['copy_GB_per_s']:11.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="run a tiny model on any device, to test the script")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device, models = torch.device(args.device), TINY if args.quick else MODELS
    torch.set_num_threads(1)
    rounds = 3 if args.quick else args.rounds
    with torch.inference_mode():
        counts = [{"model": name, **counted(model, drafts)} for name, model in models.items() for drafts in DRAFTS]
        print_counts(counts)
        plans = {f"{drafts} drafts": planning(PLANNED_ROWS, drafts, 5 * rounds) for drafts in (0, 5)}
        for name, micros in plans.items():
            figures = ", ".join(f"{call} {us:.1f}" for call, us in micros.items())
            print(f"planning {PLANNED_ROWS} rows, {name}: {figures} us")
        measured = []
        if device.type == "cuda" or args.quick:
            working_set, batches = (1 << 16, (1, 4)) if args.quick else (WORKING_SET_BYTES, BATCHES)
            measured = [
                {"model": name, **measure(model, drafts, size, device, rounds, working_set)}
                for name, model in models.items()
                for drafts in DRAFTS
                for size in batches
            ]
            print_times(measured)
        beside: list[dict[str, Any]] = []
        if device.type == "cpu":
            import mamba_rival  # imported late: it imports models of transformers, which takes seconds

            sizes = models if args.quick else {name: models[name] for name in BESIDE_TRANSFORMERS}
            for name, model in sizes.items():
                beside += mamba_rival.race(name, partial(model.spec, act=torch.float32), args.quick)
            mamba_rival.print_race(beside)
    result = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "machine": f"{platform.machine()}, 1 thread, load {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "models": {
            name: {"layers": model.layers, "recurrence": model.kind.__name__, "sizes": model.sizes}
            for name, model in models.items()
        },
        "counted": counts,
        "planned_rows": PLANNED_ROWS,
        "planning_us": plans,
        "measured": measured,
        "beside_transformers": beside,
    }
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
