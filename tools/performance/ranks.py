"""What several ranks of a model hold, read and tell each other: arithmetic on published sizes."""

from __future__ import annotations

import torch
from performance.published import H100, SHOWN, spec_of
from performance.results import table

from bateleur.runner.diagnose.step_costs import StepPart, default_cache_costs, step_costs, total
from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.sharding import num_sums
from bateleur.runner.models.spec import ModelSpec

SIZES = (1, 2, 4, 8)
BATCHES = (1, 16, 64, 256)
CONTEXT = 4096
NVLINK = 450e9
"""Bytes a second that an H100 sends, and as many that it receives: its data sheet's 900 GB/s are both together."""
COLLECTIVE_US = 8.0
"""What a short sum over ranks takes, however short: an assumption, between 5 and 15 us in what others report."""

HEAD = f"""\
## Ranks of a model, by arithmetic

Each layer reads the whole residual stream and ends with one sum over the ranks (`bateleur.runner.models.sharding`). The
embedding has a sum, too, and a norm over lanes of several ranks has one more, of squares. A sum over N ranks moves
2 (N - 1) / N of its bytes into and out of each rank, at {NVLINK / 1e9:.0f} GB/s each way. It takes at least
{COLLECTIVE_US:.0f} us, which is an assumption. The bytes that a rank reads are counted as in
[performance.md](performance.md), for its shard of the model, in bfloat16 with {CONTEXT:,} tokens of context per
request, at {H100.bytes_per_s / 1e12:.2f} TB/s. Sums and reads do not overlap here. Nothing of this was measured.

All weights except norms and routers divide evenly. Keys and values divide by heads; with fewer heads than ranks,
several ranks hold the same head. States of Mamba-2 divide, except B and C if there are fewer groups than ranks.
"""


def ranks_section() -> str:
    """The section, a table for each model."""
    parts = [HEAD]
    for name in SHOWN:
        held, rows = [], []
        for size in SIZES:
            model = HybridDecoder(
                spec_of(name), dtype=torch.bfloat16, device="meta", ranks=Ranks(0, size, "of a table")
            )
            caches = default_cache_costs(model.spec, torch.bfloat16, 2 * CONTEXT, "cuda")
            weights = sum(weight.nbytes for weight in model.weights().values())
            held.append(
                [
                    str(size),
                    f"{weights / 1e9:.1f}",
                    f"{caches.token_bytes / 1024:.1f}",
                    f"{caches.page_bytes / 2**20:.2f}" if model.spec.recurrent else "-",
                    str(num_sums(model.spec)) if size > 1 else "0",
                ]
            )
            steps = [total(step_costs(model, caches, batch, CONTEXT)) for batch in BATCHES]
            rows.append([str(size), *(_cell(model.spec, size, *pair) for pair in zip(BATCHES, steps, strict=True))])
        parts.append(f"\n### {name}\n\nMemory of each rank:\n\n")
        parts.append(table(_HELD, held))
        parts.append("\nMinimum time of a decode step, for reads and sums:\n\n")
        parts.append(table(["ranks", *(f"batch {batch}" for batch in BATCHES)], rows))
    return "".join(parts)


_HELD = ["ranks", "GB of weights", "KiB of keys and values per token", "MiB of states per row", "sums per step"]


def _cell(spec: ModelSpec, size: int, batch: int, step: StepPart) -> str:
    reads = step.bound_us(H100.bytes_per_s, H100.flops_per_s)
    if size == 1:
        return f"{reads:,.0f} us"
    sums = num_sums(spec) * sum_us(batch * spec.hidden_size * 2, size)
    return f"{reads:,.0f} + {sums:,.0f} us"


def sum_us(num_bytes: int, size: int) -> float:
    """Microseconds of a sum of so many bytes over the ranks."""
    return COLLECTIVE_US + 1e6 * 2 * (size - 1) / size * num_bytes / NVLINK
