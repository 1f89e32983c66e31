"""Splits a run over processes; the result does not depend on the number of processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import torch

from oracle.run import Report, run

RUNS_OF_A_PART = 100_000
"""Runs per part, about half a minute: many concurrent requests make a simulation fast."""
SEED_STEP = 1_000_003


def reports(runs: int, seed: int, jobs: int, runs_of_a_part: int = RUNS_OF_A_PART) -> Iterator[Report]:
    """Yield the report of each part of `runs`, in order. Each part has its own seed."""
    whole, rest = divmod(runs, runs_of_a_part)
    sizes = [runs_of_a_part] * whole + [rest] * (rest > 0)
    parts = [(size, seed + SEED_STEP * i) for i, size in enumerate(sizes)]
    if jobs == 1:
        yield from (run(*part) for part in parts)
        return
    # Fresh processes: a fork copies whatever locks torch's threads hold at that moment.
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(parts)), torch.set_num_threads, (1,)) as pool:
        done = [pool.apply_async(run, part) for part in parts]
        yield from (result.get() for result in done)
