"""What it takes to fetch a prefix's states from elsewhere, beside computing them again: arithmetic."""

from __future__ import annotations

import torch
from performance.published import H100, SHOWN, spec_of
from performance.results import table

from bateleur.runner.cache.costs import CacheCosts
from bateleur.runner.diagnose.part_facts import count_parts
from bateleur.runner.diagnose.step_costs import default_cache_costs
from bateleur.runner.models import HybridDecoder

TOKENS = (1024, 8192, 65536)
WAYS = {"host memory": 55e9, "network": 45e9, "disk": 6e9}
"""Bytes a second of PCIe 5 x16, of 400 Gbit/s and of an NVMe SSD, as far as they are ever reached: assumptions."""

_RATES = ", ".join(f"{name} {rate / 1e9:.0f} GB/s" for name, rate in WAYS.items())
HEAD = f"""\
## Transfer of a prefix, by arithmetic

A cached prefix is its keys and values, and one recurrent state. The table compares the time to transfer it from host
memory, another replica or a disk with the time to compute it. The rates are assumptions: {_RATES}. The
computation has the operations of matrix products and causal attention, at {H100.flops_per_s / 1e12:.0f} TFLOP/s, which
no prefill reaches. Both are for one device; with several ranks each transfers and computes its shard.
"""


def handover_section() -> str:
    """The section, one table."""
    rows = []
    for name in SHOWN:
        spec = spec_of(name)
        model = HybridDecoder(spec, dtype=torch.bfloat16, device="meta")
        caches = default_cache_costs(spec, torch.bfloat16, max(TOKENS), "cuda")
        active = sum(each.active_bytes for each in count_parts(model).values()) / model.dtype.itemsize
        for tokens in TOKENS:
            size = prefix_bytes(caches, tokens)
            pairs = sum(2.0 * tokens**2 * each.num_heads * each.head_dim for each in spec.attention)
            compute = (2.0 * active * tokens + pairs) / H100.flops_per_s
            moved = (f"{1e3 * size / rate:,.2f}" for rate in WAYS.values())
            rows.append([name, f"{tokens:,}", f"{size / 1e6:,.0f}", *moved, f"{1e3 * compute:,.1f}"])
    heads = ["model", "tokens", "MB", *(f"ms from {name}" for name in WAYS), "ms to compute, at least"]
    return f"{HEAD}\n{table(heads, rows)}"


def prefix_bytes(caches: CacheCosts, tokens: int) -> int:
    """Keys and values of so many tokens, and one state."""
    return tokens * caches.token_bytes + caches.page_bytes
