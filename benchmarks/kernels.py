"""What attention costs on a Hopper GPU, without one: launches, bytes, registers, shared memory, spills, occupancy.

    uv run python benchmarks/kernels.py --json benchmarks/results/kernels-sm90.json

Kernels are compiled for sm_90 as a launch would choose them, and registers read from what ptxas made. All else is
arithmetic: bytes that must move (keys and values once, queries, outputs, parts of split rows), and how many blocks of
threads a multiprocessor holds at once, with what limits them. Nothing here is a time.
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

from bateleur.metadata.kernels import attention

HOPPER = {
    "sms": 132,
    "registers": 65536,
    "shared_bytes": 228 << 10,
    "threads": 2048,
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
INTEGERS = ("table", "seq_lens", "starts", "counter")


def compiled(options: dict[str, Any], folder: Path) -> dict[str, int]:
    """Registers, spilled bytes, shared bytes and threads of a kernel with these constants and launch options."""
    kernel = attention.attention_kernel
    signature, hints = {}, {}
    for index, name in enumerate(kernel.arg_names):
        pointed = name.removesuffix("_ptr")
        kind = "i32" if pointed in INTEGERS else "fp32" if pointed in ("part", "lse") else "bf16"
        signature[name] = "*" + kind if name.endswith("_ptr") else "fp32" if name == "scale" else "i32"
        if name in options:
            signature[name] = "constexpr"
        elif name not in ("num_rows", "num_tokens", "table_row", "scale"):
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
        usage = compiled(options | sizes | {"SPLITS": splits, "LEAST": least, "MOST": most}, folder)
        blocks, limit = occupancy(usage)
        tiles, size = -(-queries * group // options["BLOCK_M"]), options["MIN_KEYS"]
        while size * splits < rows * tiles * keys:
            size *= 2
        cuts = -(-keys // size)
        parts = rows * queries * heads * cuts * (4 * dim + 4) * 2 if cuts > 1 else 0
        moved = 2 * rows * keys * kv_heads * dim * 2 + 2 * rows * queries * heads * dim * 2 + parts
        entries.append(
            {"kernel": "attention", "case": name, "launches": len(launches), "tile": options["BLOCK_M"]}
            | {"programs": rows * tiles * cuts * kv_heads if taken else 0, "splits": cuts if taken else 0}
            | {"bytes": moved if taken else 0, "bytes_of_parts": parts if taken else 0}
            | usage
            | {"blocks_per_sm": blocks, "limit": limit}
        )
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one case: shows that the script works")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        names = list(CASES)[:1] if args.quick else CASES
        rows = [entry for name in names for entry in row(name, Path(folder))]
    for each in rows:
        print(
            f"{each['case']:<44} tile {each['tile']:>3}: {each['programs']:>5} programs, {each['splits']:>2} splits, "
            f"{each['bytes'] / 1e6:>7.1f} MB ({each['bytes_of_parts'] / 1e6:.1f} parts), {each['registers']} "
            f"registers, {each['spilled']} spilled, {each['shared_bytes']:,} shared, "
            f"{each['blocks_per_sm']} a multiprocessor ({each['limit']})"
        )
    if args.json is not None:
        command = " ".join(["python", *sys.argv])
        head = {"date": date.today().isoformat(), "command": command, "triton": triton.__version__}
        result = head | {"target": "sm_90", "hopper": HOPPER, "rows": rows}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
