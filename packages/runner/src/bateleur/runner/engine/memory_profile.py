"""Measures the GPU memory that an engine needs in addition to its weights and caches, before caches are allocated.

Captured graphs contain the addresses of the caches, so the caches can't shrink after the captures. No formula knows the
memory of kernels, libraries and the driver. Therefore the engine is created twice:

1. A trial has the smallest caches and a few of the graphs, and runs the steps that allocate most. Its peak, less
   weights and caches, is what any engine with the same limits needs. Then the trial is dropped.
2. The engine itself gets caches in the memory that is left.

All graphs share the memory of activations, and the trial captures the largest ones. So each further graph costs what a
small graph cost in the trial: the memory that the driver keeps for it. The rest of the device, 10 % by default, is for
other processes and for fragmentation in torch's allocator.
"""

import gc
import math
import warnings
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import torch

from bateleur.eagle import Drafter, NGramDrafter
from bateleur.runner.engine.engine import Engine
from bateleur.runner.engine.setup import EngineSetup
from bateleur.runner.model_runner.graph_dispatcher import capture_sizes, make_dispatcher
from bateleur.runner.spec_decode.draft_head import DraftHead

_SMALL_SIZES = 4
"""Small capture sizes of the trial, besides the largest one; a further key costs what these cost on average."""


class DeviceMemory:
    """The memory of a CUDA device, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def settle(self) -> None:
        """Return unused memory to the device, and start to record the peak."""
        gc.collect()  # an engine has reference cycles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def used(self) -> int:
        """Return the memory in use by all processes, including torch's cache."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def reserved(self) -> int:
        """Return the memory that torch's allocator holds in this process, in use or cached."""
        return torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        """Return the maximum of `used` since `settle`; too low if memory of other allocators was freed since then."""
        return self.used() + torch.cuda.max_memory_reserved(self._device) - self.reserved()


def needed_bytes(setup: EngineSetup, memory: DeviceMemory | None = None) -> int:
    """Measure the bytes that an engine of `setup` needs in addition to its weights, which are loaded, and its caches.
    memory: memory of the device; None: of the model's device. Raises ValueError if the largest step does not fit.
    """
    memory = DeviceMemory(setup.model.device) if memory is None else memory
    memory.settle()
    used, reserved = memory.used(), memory.reserved()
    small = trial_setup(setup)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the engine itself warns of the same
            trial = Engine(small)
            trial.runner.run_largest()
        needed = memory.peak() + _further_graph_bytes(setup, trial) - used
        del trial
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
    sizes = sorted(capture_sizes(graphs, limits.buffers, setup.query_lens))
    few = replace(graphs, capture_sizes=tuple({*sizes[:_SMALL_SIZES], *sizes[-1:]}) or None)
    drafter = setup.drafter
    if not (drafter is None or isinstance(drafter, DraftHead | NGramDrafter)):
        # A drafter of the user must not take part. A trial has no requests, so it is asked for no drafts.
        known = SimpleNamespace(num_speculative_tokens=drafter.num_speculative_tokens, needs=drafter.needs)
        drafter = cast(Drafter, known)
    return replace(setup, cache_plan=least, graphs=few, drafter=drafter, host=None, disk=None)


def _further_graph_bytes(setup: EngineSetup, trial: Engine) -> int:
    """Estimate the bytes of the graphs that `setup` has and the trial has not, from the small graphs of the trial."""
    support, limits = trial.runner.model_state.graph_support, setup.limits.buffers
    full, _ = make_dispatcher(setup.graphs, limits, support, setup.query_lens)
    wanted, tried = (Counter(key.mode for key in plan.keys) for plan in (full, trial.runner.graphs.dispatcher))
    total = 0.0
    for report in trial.runner.graph_reports.values():
        for mode, count in tried.items():
            rows = [row.nbytes for row in report.captured if row.key.mode is mode]
            if rows:
                small = rows[1:] or rows
                total += len(rows) * (wanted[mode] / count - 1) * sum(small) / len(small)
    return math.ceil(total)
