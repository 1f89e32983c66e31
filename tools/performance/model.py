"""The cost model of a decode step, in tables: arithmetic on published sizes, and operators that were counted."""

from __future__ import annotations

import torch
from performance.published import H100, SHOWN, spec_of
from performance.results import result, source, table

from bateleur.runner.diagnose.part_facts import count_parts
from bateleur.runner.diagnose.step_costs import StepPart, default_cache_costs, experts_met, step_costs, total
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.spec import ExpertsLayer

BATCHES = (1, 4, 16, 64, 256)
CONTEXT = 4096
LAUNCH_US = 5.0
"""What a launch takes a host, if nothing waits: between 3 and 8 us through torch's dispatcher."""

STEP = f"""\
## A decode step by arithmetic

The tables show the bytes that a decode step moves, in bfloat16 with float32 states and {CONTEXT:,} tokens of context
per request (`bateleur.runner.diagnose.step_costs`). The bound is the minimum time on an {H100.name} with the
{H100.bytes_per_s / 1e12:.2f} TB/s and {H100.flops_per_s / 1e12:.0f} TFLOP/s of its data sheet. No part of this was
measured. The counted bytes are

* weights, once for all rows; of experts only those that a step uses, with random routing;
* reads of the keys and values of all rows, and writes of those of the new tokens;
* recurrent states under the default policy. Without drafts it is `slots`: one state is read and written. With drafts it
  is `fold`: one state and its ring are read, a ring entry is written, and every {{steps}}th step the state is written;
* activations: inputs and outputs of every product, the residual stream once per branch, and float32 logits.

Transfers and operations overlap, so the bound is the larger of the two. Here it is always the bytes. The last column is
the memory of weights, keys, values and states, of {H100.memory_bytes / 1e9:.0f} GB.
"""


def step_section() -> str:
    """The section, a table for each model."""
    steps = 0
    parts = []
    for name in SHOWN:
        spec = spec_of(name)
        model = HybridDecoder(spec, dtype=torch.bfloat16, device="meta")
        caches = default_cache_costs(spec, torch.bfloat16, 2 * CONTEXT, "cuda")
        if caches.layout is not None:
            steps = caches.layout.ring_capacity
        facts = count_parts(model)
        held = sum(each.parameters for each in facts.values())
        active = sum(each.active_bytes for each in facts.values()) / 2
        layers = ", ".join(f"{each.layers} {kind}" for kind, each in facts.items() if each.layers)
        weights = sum(each.weight_bytes for each in facts.values())
        row_bytes = CONTEXT * caches.token_bytes + caches.state_bytes_per_request
        rows = [
            _row(batch, total(step_costs(model, caches, batch, CONTEXT)), weights + batch * row_bytes)
            for batch in BATCHES
        ]
        parts.append(
            f"\n### {name}\n\n"
            f"{held / 1e9:.1f} billion parameters, {active / 1e9:.1f} billion per token; {layers}. "
            f"A token of context takes {caches.token_bytes / 1024:.0f} KiB"
            + (f", states take {caches.page_bytes / 2**20:.0f} MiB per row at any length" if spec.recurrent else "")
            + f".{_met(spec.mixers)}\n\n"
        )
        parts.append(table(_HEADS, rows))
    return STEP.format(steps=steps) + "".join(parts)


_HEADS = [
    *("batch", "weights", "keys, values", "states", "activations", "GB in all", "TFLOP"),
    *("bound", "tokens/s at most", "GB held"),
]


def _row(batch: int, step: StepPart, held: float) -> list[str]:
    bound = step.bound_us(H100.bytes_per_s, H100.flops_per_s)
    assert bound == step.bound_us(H100.bytes_per_s), "the page says that bytes bound every step"
    kinds = (step.weight_bytes, step.kv_bytes, step.state_bytes, step.activation_bytes)
    return [
        str(batch),
        *(f"{100 * each / step.total_bytes:.1f} %" for each in kinds),
        f"{step.total_bytes / 1e9:.2f}",
        f"{step.flops / 1e12:.3f}",
        f"{bound:,.0f} us",
        f"{1e6 * batch / bound:,.0f}",
        f"{held / 1e9:.0f}" + (", too much" if held > H100.memory_bytes else ""),
    ]


def _met(mixers: tuple[object, ...]) -> str:
    layers = [each for each in mixers if isinstance(each, ExpertsLayer)]
    if not layers:
        return ""
    layer = layers[0]
    met = ", ".join(f"{experts_met(layer, batch):.0f} at batch {batch}" for batch in BATCHES)
    return f" Each token uses {layer.top_k} of {layer.num_experts} experts per layer; a step uses {met}."


LAUNCHES = f"""\
## Launches

A step in one CUDA graph is one launch. Without graphs the host launches every kernel, which limits short steps. The
operators of the network were counted on narrow models with the same layers ({{source}}). {LAUNCH_US:.0f} us per launch
is an assumption.

"""


def launch_section() -> str:
    """The section: counted operators beside the bounds of a step of one row."""
    rows = []
    for row in result("launches")["results"]:
        spec = spec_of(row["model"])
        model = HybridDecoder(spec, dtype=torch.bfloat16, device="meta")
        step = total(step_costs(model, default_cache_costs(spec, torch.bfloat16, 2 * CONTEXT, "cuda"), 1, CONTEXT))
        bound, eager = step.bound_us(H100.bytes_per_s, H100.flops_per_s), row["operators"] * LAUNCH_US
        rows.append(
            [row["model"], f"{row['operators']:,}", f"{eager:,.0f} us", f"{bound:,.0f} us", f"{eager / bound:.1f}"]
        )
    heads = ["model", "operators per step (counted)", "launched one by one", "bound at batch 1", "ratio"]
    return LAUNCHES.format(source=source("launches")) + table(heads, rows)
