"""What a compiled kernel takes of a multiprocessor, and how many it has of the instructions that matter."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async\b",
    "mma": r"\bmma\.sync\b",
    "fetches ahead": r"\bcp\.async\.c[ag]\b",
    "barriers": r"\bbar(?:rier)?\.",
    "wide loads": r"\bld\.global[\w.:]*\.v(?:4\.b32|2\.b64)\b",
}
"""As PTX names them: ptxas keeps their kinds in every kernel here, and its own code takes half a second to print."""


@dataclass(frozen=True)
class Usage:
    """Registers a thread; bytes of its stack, which is where spilled registers go; shared bytes and threads a block."""

    registers: int
    spilled: int
    shared: int
    threads: int
    instructions: dict[str, int]

    @property
    def recorded(self) -> tuple[int, int, int]:
        """What the summary of a run tells of a kernel."""
        return self.registers, self.spilled, self.shared


def usage_of(compiled: Any, folder: Path) -> Usage:
    """Of what `triton.compile` returned for a CUDA target; `folder` is for the file that a tool reads."""
    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    printed = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert found, printed
    counts = {name: len(re.findall(code, compiled.asm["ptx"])) for name, code in INSTRUCTIONS.items()}
    launch = compiled.metadata
    return Usage(int(found[1]), int(found[2]), launch.shared, 32 * launch.num_warps, counts)


def hopper(kernel: Any, constants: Mapping[str, Any], types: Mapping[str, str], folder: Path) -> Usage:
    """Of a kernel that is compiled for sm_90 with constants and launch options.

    types: of pointers, without the star, and of scalars that are no int32. Pointers and int32 are multiples of 16.
    """
    names = kernel.arg_names
    constexprs = {name: value for name, value in constants.items() if name in names}
    options = {name: value for name, value in constants.items() if name not in names}
    signature = {name: types.get(name, "i32") for name in names}
    signature |= {name: f"*{types[name]}" for name in names if name.endswith("_ptr")}
    signature |= dict.fromkeys(constexprs, "constexpr")
    hints = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names)
             if signature[name] == "i32" or name.endswith("_ptr")}  # fmt: skip
    source = ASTSource(kernel, signature, constexprs, hints)
    return usage_of(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options), folder)
