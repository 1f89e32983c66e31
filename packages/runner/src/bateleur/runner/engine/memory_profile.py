"""How much memory an engine needs on a GPU beside its weights and caches: measured, before the caches are allocated.

Graphs bake the addresses of the caches, so caches must be allocated before the captures, and can't shrink after them.
What steps and graphs take depends on the model, its kernels, the libraries and the driver, so no formula is safe.
Therefore an engine is made twice. The first one, the trial, has the least caches and a few of the graphs. It runs the
steps that allocate most, and is thrown away. What it took beside its caches does not depend on how large caches are, so
the second one, with caches of the rest, takes the same. Graphs that the trial did not capture are added: keys share the
memory of activations (`bateleur.cudagraph`), so a further key takes what a small one took in the trial, which is what
the driver keeps for its graphs.

So weights, caches, steps and graphs together stay within `gpu_memory_utilization` of the device. The rest, a tenth by
default, is for other processes, and for what the allocator of torch loses between blocks.
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
from bateleur.runner.model_runner.graph_dispatcher import capture_sizes, make_plan, query_lens_of
from bateleur.runner.spec_decode.draft_head import DraftHead

_SMALL_SIZES = 4
"""Capture sizes of the trial beside the largest: their mean is the cost of each further key."""


class _SilentDrafter(Drafter):
    """In place of a drafter of the user's own, which must not be told of requests of the trial. It proposes nothing."""

    def __init__(self, drafter: Drafter) -> None:
        self.num_speculative_tokens = drafter.num_speculative_tokens
        self._needs = drafter.needs

    @property
    def needs(self) -> TargetNeeds:
        """Those of the user's, so that steps keep what it wants to see."""
        return self._needs

    def admit(self, row: int, token_ids: list[int]) -> None:
        """A trial has no requests."""

    def propose(self, context: DraftContext) -> Tensor:
        """A trial has no steps that anybody drafts for."""
        raise AssertionError("a trial has no requests")


class DeviceMemory(Protocol):
    """The memory of one device, in bytes."""

    def settle(self) -> None:
        """Give back what nobody uses, and watch the peak from here on."""

    def used(self) -> int:
        """In use by all processes, with what torch keeps for itself."""

    def reserved(self) -> int:
        """Kept by torch in this process, in use or not."""

    def peak(self) -> int:
        """The most that `used` came to since `settle`, if nothing but torch gave memory back."""


class CudaMemory(DeviceMemory):
    """The memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def settle(self) -> None:
        """Collect garbage, since an engine has circular references, and empty torch's cache."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def used(self) -> int:
        """What the driver says."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def reserved(self) -> int:
        """By the caching allocator."""
        return torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        """What is used now, and what the caching allocator has given back since its peak."""
        return self.used() + torch.cuda.max_memory_reserved(self._device) - self.reserved()


def needed_bytes(setup: EngineSetup, memory: DeviceMemory | None = None) -> int:
    """Measure what an engine of `setup` takes beside its weights, which are loaded, and its caches; in bytes.

    memory: of the model's device by default.

    Raises ValueError if not even one step fits beside the weights.
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
    # One more copy of all logits, for log probabilities that the trial does not ask for.
    logits = setup.limits.max_num_seqs * setup.limits.max_query_len * setup.spec.vocab_size * 4
    return max(needed - small.cache_plan.total_bytes, 0) + lost + logits


def trial_setup(setup: EngineSetup) -> EngineSetup:
    """The least caches for as many rows, the largest capture size and a few small ones, and nothing offloaded."""
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
    """The peak of an engine of `small`, with what the further graphs of `setup` would add. The engine is gone then."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the engine itself says the same
        engine = Engine(small)
        engine.run_largest()
    return memory.peak() + _further_graph_bytes(setup, engine)


def _further_graph_bytes(setup: EngineSetup, trial: Engine) -> int:
    """What the graphs take that `setup` has and the trial has not, by what small keys of the same kind took."""
    support, limits = trial.model_state.graph_support, setup.limits.buffers
    options = setup.graphs
    full, _ = make_plan(options.mode, options.capture_sizes, limits, support, _query_lens(setup))
    wanted, tried = (Counter(key.mode for key in plan.keys) for plan in (full, trial.graphs.plan))
    total = 0.0
    for report in trial.all_graphs.reports.values():
        for mode, count in tried.items():
            rows = [row.nbytes for row in report.captured if row.key.mode is mode]
            if rows:
                small = rows[1:] or rows
                total += len(rows) * (wanted[mode] / count - 1) * sum(small) / len(small)
    return math.ceil(total)
