"""What a step's own kernels cost on a Hopper GPU, without one: launches, bytes, registers, shared memory, occupancy.

    uv run python benchmarks/kernels.py --json benchmarks/results/kernels-sm90.json

Kernels are compiled for sm_90 as a launch would choose them, and registers read from what ptxas made. All else is
arithmetic: bytes that must move (keys and values once, queries, outputs, parts of split rows; of other kernels what
they read and write once), and how many blocks of threads a multiprocessor holds at once, with what limits them. Nothing
here is a time. `operators` is how many of torch's a kernel stands for; the recurrences' own kernels are left out.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.append(str(Path(__file__).parent))
import layer_kernels as layers

from bateleur.metadata.kernels import attention

HOPPER = {
    "sms": 132,
    "registers": 65536,
    "shared_bytes": 228 << 10,
    "threads": 2048,
    "blocks": 32,
    "reserved_shared_bytes": 1024,
}
BLOCK_SIZE = 16
CASES = {  # rows, tokens of each, keys of each, query heads, key heads, head size
    "decode 1 x 1 over 4096": (1, 1, 4096, 32, 8, 128),
    "decode 64 x 1 over 4096": (64, 1, 4096, 32, 8, 128),
    "verify 8 x 5 over 4096": (8, 5, 4096, 32, 8, 128),
    "verify 8 x 5 over 4096, 16 heads a key head": (8, 5, 4096, 32, 2, 128),
    "prompt 1 x 2048": (1, 2048, 2048, 32, 8, 128),
}
KINDS = {
    **dict.fromkeys(("table", "seq_lens", "starts", "counter", "ends"), "i32"),
    **dict.fromkeys(("slots", "experts", "token", "place"), "i64"),
    **dict.fromkeys(("part", "lse", "scale", "eps", "sum_eps", "factor", "z_factor"), "fp32"),
    **dict.fromkeys(("q_norm", "k_norm", "logits", "correction", "weights"), "fp32"),
}
"""Of arguments that are neither bfloat16 behind a pointer nor int32."""
UNALIGNED = ("num_rows", "num_tokens", "num_places", "table_row", "gate_token")


def compiled(kernel: Any, options: dict[str, Any], folder: Path) -> dict[str, int]:
    """Registers, spilled bytes, shared bytes and threads of a kernel with these constants and launch options."""
    signature, hints = {}, {}
    for index, name in enumerate(kernel.arg_names):
        kind = KINDS.get(name.removesuffix("_ptr"), "bf16" if name.endswith("_ptr") else "i32")
        signature[name] = "*" + kind if name.endswith("_ptr") else kind
        if name in options:
            signature[name] = "constexpr"
        elif name.endswith("_ptr") or (kind == "i32" and name not in UNALIGNED):
            hints[index,] = [["tt.divisibility", 16]]
    constants = {name: value for name, value in options.items() if name in kernel.arg_names}
    launch = {name: value for name, value in options.items() if name not in constants}
    source = ASTSource(kernel, signature, constants, hints)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)
    path = folder / "kernel.cubin"
    path.write_bytes(made.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return {
        "registers": int(found[1]),
        "spilled": int(found[2]),
        "shared_bytes": made.metadata.shared,
        "threads": 32 * made.metadata.num_warps,
    }


def occupancy(usage: dict[str, int]) -> tuple[int, str]:
    """Blocks of threads that a multiprocessor holds at once, and what limits them."""
    registers = -(-usage["registers"] // 8) * 8 * usage["threads"]
    limits = {
        "registers": HOPPER["registers"] // registers,
        "shared memory": HOPPER["shared_bytes"] // (usage["shared_bytes"] + HOPPER["reserved_shared_bytes"]),
        "threads": HOPPER["threads"] // usage["threads"],
        "blocks": HOPPER["blocks"],
    }
    limit = min(limits, key=lambda name: limits[name])
    return limits[limit], limit


def row(name: str, folder: Path) -> list[dict[str, Any]]:
    """One entry for each launch of a case."""
    rows, queries, keys, heads, kv_heads, dim = CASES[name]
    group, splits = heads // kv_heads, attention.split_limit(kv_heads, HOPPER["sms"])
    entries = []
    launches = attention.launches_of(queries, group)
    for least, most, tile_rows in launches:
        taken = queries >= least and not 0 < most < queries
        options = attention.tile_options(tile_rows, dim, torch.bfloat16, 227 << 10)
        sizes = {"GROUP": group, "BLOCK_SIZE": BLOCK_SIZE, "HEAD_DIM": dim, "WINDOW": 0}
        usage = compiled(
            attention.attention_kernel,
            options | sizes | {"SPLITS": splits, "LEAST": least, "MOST": most},
            folder,
        )
        blocks, limit = occupancy(usage)
        tiles, size = -(-queries * group // options["BLOCK_M"]), options["MIN_KEYS"]
        while size * splits < rows * tiles * keys:
            size *= 2
        cuts = -(-keys // size)
        parts = rows * queries * heads * cuts * (4 * dim + 4) * 2 if cuts > 1 else 0
        moved = 2 * rows * keys * kv_heads * dim * 2 + 2 * rows * queries * heads * dim * 2 + parts
        entries.append(
            {
                "kernel": "attention",
                "case": name,
                "launches": len(launches),
                "operators": 1,
                "tile": options["BLOCK_M"],
            }
            | {"programs": rows * tiles * cuts * kv_heads if taken else 0, "splits": cuts if taken else 0}
            | {"bytes": moved if taken else 0, "bytes_of_parts": parts if taken else 0}
            | usage
            | {"blocks_per_sm": blocks, "limit": limit}
        )
    return entries


def layer_row(case: layers.Case, folder: Path) -> dict[str, Any]:
    """The entry of a kernel that has one launch."""
    usage = compiled(case.kernel, case.options, folder)
    blocks, limit = occupancy(usage)
    name = case.kernel.__name__.removesuffix("_kernel")
    return (
        {"kernel": name, "case": case.name, "launches": 1, "operators": case.operators}
        | {"programs": case.programs, "bytes": case.moved}
        | usage
        | {"blocks_per_sm": blocks, "limit": limit}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one case: shows that the script works")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        names = list(CASES)[:1] if args.quick else CASES
        rows = [entry for name in names for entry in row(name, Path(folder))]
        cases = layers.cases(64)
        rows += [layer_row(case, Path(folder)) for case in (cases[:1] if args.quick else cases)]
    for each in rows:
        print(
            f"{each['kernel']:<11}{each['case']:<46}{each['programs']:>5} programs, {each.get('splits', 1):>2} splits, "
            f"for {each['operators']:>2} operators, {each['bytes'] / 1e6:>7.3f} MB, {each['registers']:>3} registers, "
            f"{each['spilled']} spilled, {each['shared_bytes']:>6,} shared, {each['blocks_per_sm']:>2} a "
            f"multiprocessor ({each['limit']})"
        )
    if args.json is not None:
        command = " ".join(["python", *sys.argv])
        head = {"date": date.today().isoformat(), "command": command, "triton": triton.__version__}
        result = head | {"target": "sm_90", "hopper": HOPPER, "rows": rows}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
