"""What the kernels of a step take of a Hopper GPU, as tables: compiled, and by arithmetic."""

from __future__ import annotations

from typing import Any

from performance.published import MODELS
from performance.results import result, source, table

KERNELS = """\
## Kernels

Kernels of six published models, each with one layer of every kind and real widths, compiled for sm_90 with the
arguments of their launches ({source}). The tables compare kernels before and after their redesign in November 2026.
Registers are those of ptxas. "Blocks" is the occupancy of a multiprocessor. "Instructions" is the length of the
machine code. The record has every kernel of every step. No value is a time.

"""
TRUNCATION = ("cut_kernel", "stats_kernel", "bracket_kernel", "collect_kernel", "threshold_kernel")
SHOWN = {
    "top_k and top_p of 64 rows": ("Qwen3.5-9B", "decode of 64 rows, top_k 20, top_p 0.95", TRUNCATION),
    "attention, 64 rows decode": (
        "Llama-3.1-8B",
        "decode of 64 rows, greedy",
        ("work_kernel", "attention_kernel", "join_kernel"),
    ),
    "gated delta rule, 64 rows decode": (
        "Qwen3.5-9B",
        "decode of 64 rows, greedy",
        ("replay_plan_kernel", "replay_kernel", "update_kernel", "fold_plan_kernel", "fold_kernel"),
    ),
    "gated delta rule, a prompt": (
        "Qwen3.5-9B",
        "prompt",
        ("pairs_kernel", "walk_kernel", "walk_tiles_kernel", "join_kernel"),
    ),
    "fold of Mamba-2, 64 rows decode": ("Nemotron-3-Nano-30B-A3B", "decode of 64 rows, greedy", ("fold_kernel",)),
}
"""By what they are for: model, step and kernels."""
BYTES = """
Minimum bytes that these steps read or write, by arithmetic:

"""


def kernel_section() -> str:
    """The section: the redesigned kernels before and after, and the bytes they move."""
    record = result("kernels-sm90")
    rows = [
        [what, when, *cells]
        for what, (model, step, names) in SHOWN.items()
        for when, models in (("before", record["before"]), ("after", record["models"]))
        for cells in map(_cells, models[model][step])
        if cells[0] in names
    ]
    heads = ["for", "", "kernel", "launches", "programs", "threads", "registers", "blocks", "instructions"]
    return (
        KERNELS.format(source=source("kernels-sm90"))
        + table(heads, rows)
        + BYTES
        + table(["for", "before", "after"], _bytes())
    )


def _cells(row: dict[str, Any]) -> list[str]:
    names = ("launches", "programs", "threads", "registers", "blocks_per_multiprocessor", "instructions")
    return [row["kernel"], *(f"{row[name]:,}" for name in names)]


def _bytes() -> list[list[str]]:
    """Of steps of 64 rows: the logits of a vocabulary in bfloat16, and float32 states of one layer."""
    qwen = MODELS["Qwen3.5-9B"]
    text = qwen.get("text_config", qwen)
    logits = 64 * text["vocab_size"] * 2
    heads, key, value = (text["linear_num_value_heads"], text["linear_key_head_dim"], text["linear_value_head_dim"])
    state = 64 * heads * key * value * 4
    return [
        ["top_k and top_p: passes over the logits", f"24 x {logits / 1e6:.0f} MB", f"2 x {logits / 1e6:.0f} MB"],
        [
            "gated delta rule, a layer: states",
            f"{state / 1e6:.0f} MB read, and read and written at folds",
            f"{2 * state / 1e6:.0f} MB: read and written",
        ],
    ]
