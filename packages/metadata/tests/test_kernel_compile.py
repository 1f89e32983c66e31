"""Every kernel compiled for Hopper without a GPU: what it takes of a multiprocessor. ``-rP`` shows the table."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from bateleur.metadata.kernels import attention, expand, write_kv  # noqa: E402
from compiled import usage_of  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="nothing compiles in Triton's interpreter"
)

TARGET = GPUTarget("cuda", 90, 32)
MAX_SHARED_BYTES = 227 * 1024
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}
INTEGERS = {"table": "i32", "seq_lens": "i32", "starts": "i32", "slots": "i64", "counter": "i32"}
POINTERS = INTEGERS | {"positions": "i64", "part": "fp32", "lse": "fp32", "q_norm": "fp32", "k_norm": "fp32"}
UNALIGNED = {
    "num_reqs",
    "rows_end",
    "tokens_end",
    "max_reqs",
    "first_id",
    "width",
    "num_cells",
    "num_rows",
    "num_tokens",
    "table_row",
    "scale",
    "eps",
}


def _attention(
    head_dim: int, rows: int, dtype: torch.dtype, shared: int = MAX_SHARED_BYTES
) -> dict[str, Any]:
    sizes = {
        "GROUP": 4,
        "BLOCK_SIZE": 16,
        "HEAD_DIM": head_dim,
        "WINDOW": 0,
        "SPLITS": 33,
        "LEAST": 1,
        "MOST": 0,
    }
    return sizes | attention.tile_options(rows, head_dim, dtype, shared)


def _cases() -> dict[str, tuple[Any, dict[str, Any], torch.dtype]]:
    """Kernel, constants with launch options, and type of the tensors, as the launchers choose them."""
    cases: dict[str, tuple[Any, dict[str, Any], torch.dtype]] = {}
    bf16, fp32 = torch.bfloat16, torch.float32
    for dtype, head_dim, group, window, rows in (
        (bf16, 64, 4, 0, 4),
        (bf16, 128, 4, 0, 4),
        (bf16, 128, 4, 0, 20),
        (bf16, 128, 4, 0, 64),
        (bf16, 128, 16, 0, 80),
        (bf16, 256, 4, 0, 64),
        (bf16, 64, 4, 0, 128),
        (bf16, 128, 4, 0, 128),
        (bf16, 128, 4, 4096, 128),
        (bf16, 256, 4, 0, 128),
        (fp32, 128, 4, 0, 4),
        (fp32, 128, 4, 0, 32),
    ):
        constants = _attention(head_dim, rows, dtype) | {"GROUP": group, "WINDOW": window}
        name = f"attention {SHORT[dtype]} D={head_dim} G={group} W={window} rows={rows}"
        cases[name] = attention.attention_kernel, constants, dtype
    for heads, kv_heads, head_dim, rotary_dim, norm in (
        (32, 8, 128, 0, 0),
        (32, 8, 128, 128, 0),
        (16, 2, 256, 64, 1),
        (32, 8, 128, 128, 1),
        (32, 32, 128, 0, 2),
    ):
        sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "ROTARY_DIM": rotary_dim}
        constants = sizes | {"BLOCK_SIZE": 16, "NORM": norm}
        constants |= write_kv.tile_options(heads, kv_heads, head_dim, rotary_dim, norm)
        cases[f"write bf16 D={head_dim} R={rotary_dim} N={norm}"] = write_kv.write_kernel, constants, bf16
    i32 = torch.int32
    tile = {"BLOCK": expand._TILE, **expand._OPTIONS}
    for starts, block_size in ((False, 16), (True, 16), (True, 0)):
        constants = {"STARTS": starts, "FIELDS": True, "BLOCK_SIZE": block_size, "FILL": 0, "SEARCH": 9}
        cases[f"expand starts={starts} B={block_size}"] = expand.expand_kernel, constants | tile, i32
    cases["gather"] = expand.gather_kernel, tile, i32
    cases["cells"] = expand.cells_kernel, tile, i32
    return cases


CASES = _cases()


def _compile(kernel: Any, constants: dict[str, Any], dtype: torch.dtype, target: Any = TARGET) -> Any:
    options = {key: value for key, value in constants.items() if key not in kernel.arg_names}
    signature, hints = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = "fp32" if name in ("scale", "eps") else "i32"
        if name.endswith("_ptr"):
            signature[name] = "*" + POINTERS.get(name.removesuffix("_ptr"), SHORT[dtype])
        if name not in UNALIGNED:  # what a launch finds out about aligned pointers and strides
            hints[index,] = [["tt.divisibility", 16]]
    constexprs = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return triton.compile(ASTSource(kernel, signature, constexprs, hints), target=target, options=options)


@pytest.mark.parametrize("name", CASES)
def test_kernel_fits_hopper(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    kernel, constants, dtype = CASES[name]
    compiled = _compile(kernel, constants, dtype)
    usage = usage_of(compiled, tmp_path)
    tile = "x".join(str(constants[size]) for size in ("BLOCK_M", "BLOCK_N", "BLOCK_D") if size in constants)
    print(f"{name}: tile {tile}, {usage}")
    record_property("kernel", (f"metadata {name}", *usage.recorded))
    assert usage.registers <= 255
    assert usage.spilled == 0, "registers are spilled"
    assert usage.shared <= MAX_SHARED_BYTES
    assert usage.registers * usage.threads <= 65536
    if "bf16" in name and constants.get("BLOCK_M"):
        products = "wgmma" if constants["BLOCK_M"] >= 64 else "mma"
        assert usage.instructions[products], "tensor cores stand still"
        assert usage.instructions["fetches ahead"], "keys and values are not fetched ahead"


@pytest.mark.parametrize(("capability", "kib", "head_dim"), [(80, 163, 256), (89, 99, 256), (89, 99, 128)])
def test_attention_fits_devices_with_less_shared_memory(capability: int, kib: int, head_dim: int) -> None:
    """sm_86 and sm_120 have as much as sm_89; float32 takes less, and heads of 192 lanes have the tile of 256."""
    constants = _attention(head_dim, 128, torch.bfloat16, kib << 10)
    target = GPUTarget("cuda", capability, 32)
    compiled = _compile(attention.attention_kernel, constants, torch.bfloat16, target)
    assert compiled.metadata.shared <= kib << 10
