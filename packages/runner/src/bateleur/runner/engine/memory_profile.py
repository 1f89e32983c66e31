"""Measures the GPU memory that an engine needs in addition to its weights and caches, before caches are allocated.

Captured graphs contain the addresses of the caches, so the caches must be allocated before the captures and can't
shrink after them. The memory of steps and graphs depends on the model, its kernels, the libraries and the driver, so a
formula can't guarantee an upper bound. Therefore the engine is created twice:

1. The trial has the smallest caches and a few of the graphs. It runs the steps that allocate most. Its peak, less
   weights and caches, is what any engine with the same limits needs, because steps and graphs do not grow with the
   caches. Then the trial is dropped.
2. The engine itself gets caches in the memory that is left.

The graphs that the trial did not capture are added to the peak. All graphs share the memory of activations
(`bateleur.cudagraph`), and the trial captures the largest ones. So a further graph costs what a small graph cost in the
trial: the memory that the driver keeps for it.

So weights, caches, steps and graphs together stay within `gpu_memory_utilization` of the device. The rest, 10 % by
default, is for other processes and for fragmentation in torch's allocator.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections import Counter
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from bateleur.eagle import DraftContext, Drafter, NGramDrafter, TargetNeeds
from bateleur.runner.engine.engine import Engine
from bateleur.runner.engine.setup import EngineSetup
from bateleur.runner.model_runner.graph_dispatcher import capture_sizes, make_dispatcher, query_lens_of
from bateleur.runner.spec_decode.draft_head import DraftHead

_SMALL_SIZES = 4
"""Small capture sizes of the trial, besides the largest one; a further key costs what these cost on average."""


class _SilentDrafter(Drafter):
    """Replaces a drafter of the user, which must not take part in the trial. It proposes nothing."""

    def __init__(self, drafter: Drafter) -> None:
        self.num_speculative_tokens = drafter.num_speculative_tokens
        self._needs = drafter.needs

    @property
    def needs(self) -> TargetNeeds:
        """Return the needs of the user's drafter, so that steps of the trial store the hidden states it would read."""
        return self._needs

    def admit(self, row: int, token_ids: list[int]) -> None:
        """Do nothing: a trial has no requests."""

    def propose(self, context: DraftContext) -> Tensor:
        """Never called: a trial has no requests."""
        raise AssertionError("a trial has no requests")


class DeviceMemory(Protocol):
    """Interface to the memory of one device, in bytes."""

    def settle(self) -> None:
        """Return unused memory to the device, and start to record the peak."""

    def used(self) -> int:
        """Return the memory in use by all processes, including torch's cache."""

    def reserved(self) -> int:
        """Return the memory that torch's allocator holds in this process, in use or cached."""

    def peak(self) -> int:
        """Return the maximum of `used` since `settle`; too low if memory of other allocators was freed since then."""


class CudaMemory(DeviceMemory):
    """The memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def settle(self) -> None:
        """Collect garbage, because an engine has reference cycles, and empty torch's cache."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def used(self) -> int:
        """Return the memory in use, as the driver reports it."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def reserved(self) -> int:
        """Return the memory that torch's allocator holds."""
        return torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        """Return the memory in use now, plus the memory that torch's allocator has returned since its own peak."""
        return self.used() + torch.cuda.max_memory_reserved(self._device) - self.reserved()


def needed_bytes(setup: EngineSetup, memory: DeviceMemory | None = None) -> int:
    """Measure the bytes that an engine of `setup` needs in addition to its weights, which are loaded, and its caches.

    memory: memory of the device; None: of the model's device.

    Raises ValueError if the largest step does not fit.
    """
    memory = CudaMemory(setup.model.device) if memory is None else memory
    memory.settle()
    used, reserved = memory.used(), memory.reserved()
    small = trial_setup(setup)
    try:
        needed = _run_trial(setup, small, memory) - used
    except torch.OutOfMemoryError as error:
        limits = setup.limits
        raise ValueError(
            f"max_num_batched_tokens={limits.max_num_batched_tokens}, max_num_seqs={limits.max_num_seqs}: a step does "
            f"not fit into what the weights leave of the device ({error}); choose smaller ones, or more ranks"
        ) from None
    memory.settle()
    lost = max(memory.reserved() - reserved, 0)
    # One more copy of all logits, for log probabilities: the trial computes none.
    logits = setup.limits.max_num_seqs * setup.limits.max_query_len * setup.spec.vocab_size * 4
    return max(needed - small.cache_plan.total_bytes, 0) + lost + logits


def trial_setup(setup: EngineSetup) -> EngineSetup:
    """Return the setup of a trial: the smallest caches for the same number of requests, and no offloading.

    The trial captures the largest graph size and a few small ones.
    """
    plan, graphs, limits = setup.cache_plan, setup.graphs, setup.limits
    least = replace(
        plan,
        num_blocks=min(plan.num_blocks, 2),
        num_state_slots=min(plan.num_state_slots, 1 + plan.max_num_seqs * plan.costs.pages_per_request),
    )
    sizes = sorted(capture_sizes(graphs.mode, graphs.capture_sizes, limits.buffers, _query_lens(setup)))
    few = replace(graphs, capture_sizes=tuple({*sizes[:_SMALL_SIZES], *sizes[-1:]}) or None)
    drafter = setup.drafter
    if not (drafter is None or isinstance(drafter, DraftHead | NGramDrafter)):
        drafter = _SilentDrafter(drafter)
    return replace(setup, cache_plan=least, graphs=few, drafter=drafter, host=None, disk=None)


def _query_lens(setup: EngineSetup) -> tuple[int, ...]:
    return query_lens_of(setup.policy, setup.limits.num_speculative_tokens)


def _run_trial(setup: EngineSetup, small: EngineSetup, memory: DeviceMemory) -> int:
    """Return the peak bytes of an engine of `small`, plus the bytes of the graphs that only `setup` has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the engine itself warns of the same
        engine = Engine(small)
        engine.runner.run_largest()
    return memory.peak() + _further_graph_bytes(setup, engine)


def _further_graph_bytes(setup: EngineSetup, trial: Engine) -> int:
    """Estimate the bytes of the graphs that `setup` has and the trial has not, from the small graphs of the trial."""
    support, limits = trial.runner.model_state.graph_support, setup.limits.buffers
    options = setup.graphs
    full, _ = make_dispatcher(options.mode, options.capture_sizes, limits, support, _query_lens(setup))
    wanted, tried = (Counter(key.mode for key in plan.keys) for plan in (full, trial.runner.graphs.dispatcher))
    total = 0.0
    for report in trial.runner.all_graphs.reports.values():
        for mode, count in tried.items():
            rows = [row.nbytes for row in report.captured if row.key.mode is mode]
            if rows:
                small = rows[1:] or rows
                total += len(rows) * (wanted[mode] / count - 1) * sum(small) / len(small)
    return math.ceil(total)
