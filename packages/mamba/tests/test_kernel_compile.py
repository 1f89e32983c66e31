"""Every kernel compiled for Hopper without a GPU: what it takes of a multiprocessor ends up in the summary of a run."""

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

from bateleur.mamba.ops.conv_update import triton as conv_update  # noqa: E402
from bateleur.mamba.ops.conv_varlen import triton as conv_varlen  # noqa: E402
from bateleur.mamba.ops.copy import triton as copy  # noqa: E402
from bateleur.mamba.ops.delta_fold import triton as delta_fold  # noqa: E402
from bateleur.mamba.ops.delta_replay import triton as delta_replay  # noqa: E402
from bateleur.mamba.ops.delta_scan import triton as delta_scan  # noqa: E402
from bateleur.mamba.ops.delta_update import triton as delta_update  # noqa: E402
from bateleur.mamba.ops.fold import triton as fold  # noqa: E402
from bateleur.mamba.ops.fold_window import triton as fold_window  # noqa: E402
from bateleur.mamba.ops.gated_norm import triton as gated_norm  # noqa: E402
from bateleur.mamba.ops.replay import triton as replay  # noqa: E402
from bateleur.mamba.ops.ssd_scan import triton as ssd_scan  # noqa: E402
from bateleur.mamba.ops.state_update import triton as state_update  # noqa: E402
from bateleur.mamba.planners import triton as plan  # noqa: E402
from compiled import usage_of  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="nothing compiles in Triton's interpreter"
)

TARGET = GPUTarget("cuda", 90, 32)
MAX_SHARED_BYTES = 227 * 1024
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# heads, channels of one, state size, groups, tokens of a chunk
MODELS = {
    "Nemotron-Nano-9B-v2": (128, 80, 128, 8, 128),
    "Nemotron-3-Nano-30B": (64, 64, 128, 8, 128),
    "Granite-4.0-H-350M": (48, 32, 128, 1, 256),
}
# key heads, value heads; decays of a head; heads have 128 key and 128 value channels
DELTA_MODELS = {"Qwen3.5-9B": (16, 32, 1), "Kimi-Linear-48B": (32, 32, 128)}
DRAFTS, CAPACITY, WIDTH = 5, 16, 4
# What is not of the activations' type.
INT32 = ("starts", "chunk_starts", "row_chunk", "chunk_row")
INT64 = (
    "read", "write", "offset", "slot", "ring_row", "ring_start", "ring_len", "count", "src", "dst", "conv_src",
    "ssm_src", "chunk_write", "live_write",
)  # fmt: skip
PLANNERS = (
    plan.step_plan_kernel, plan.copy_plan_kernel, plan.replay_plan_kernel, plan.fold_plan_kernel,
)  # fmt: skip
PLANNED = {
    "table": "i32",
    "computed": "i32",
    "lens": "i32",
    "flush": "i1",
    "scanned": "i1",
}  # the others are int64
FLOAT = ("A", "D", "ring_dt", "ring_u", "ring_g", "step", "sum", "added", "inverse", "query")
UNALIGNED = {"num_rows", "num_tokens", "num_chunks", "max_query_len", "write_row", "write_token"}
_STATES = ", states "
SCALARS = ("dt_min", "dt_max", "eps", "beta_scale")


def _cases() -> dict[str, tuple[Any, dict[str, Any], torch.dtype]]:
    """Kernel, constants with launch options, and type of the activations, as the launchers choose them."""
    cases: dict[str, tuple[Any, dict[str, Any], torch.dtype]] = {}
    for model, (heads, head_dim, size, groups, chunk) in MODELS.items():
        layer = {"HEADS": heads, "GROUP": heads // groups, "HEAD_DIM": head_dim, "STATE": size}
        inner, first = heads * head_dim, model == next(iter(MODELS))
        conv = {"CHANNELS": inner + 2 * groups * size, "WIDTH": WIDTH}
        for dtype in (torch.bfloat16, torch.float32)[: 2 if first else 1]:
            name = f"{model} {SHORT[dtype]}"
            options = replay.tile_options(head_dim, size, CAPACITY, 1 + DRAFTS, dtype)
            cases[f"replay {name}"] = replay.replay_kernel, layer | {"CAPACITY": CAPACITY} | options, dtype
            options = fold.tile_options(head_dim, size, CAPACITY, WIDTH - 1, dtype)
            page = {"CAPACITY": CAPACITY, "KEEP": WIDTH - 1, "CHANNELS": conv["CHANNELS"]}
            cases[f"fold {name}"] = fold.fold_kernel, layer | page | options, dtype
            for part, options in ssd_scan.tile_options(head_dim, size, chunk, dtype).items():
                more = {
                    "steps": {"HEADS": heads},
                    "adds": layer,
                    "passes": {"SIZE": head_dim * size},
                    "outputs": layer | {"TILES": triton.cdiv(chunk, options.get("BLOCK_M", 1))},
                }[part]
                if part in ("adds", "outputs") or (first and dtype == torch.bfloat16):
                    cases[f"scan {part} {name}"] = getattr(ssd_scan, f"{part}_kernel"), more | options, dtype
        dtype, name = torch.bfloat16, f"{model} bf16"
        options = state_update.tile_options(head_dim, size)
        cases[f"state_update {name}"] = state_update.update_kernel, layer | options, dtype
        if first:
            cases |= _of_narrow_states(cases)
        options = {"GROUPS": groups, "SIZE": inner // groups, **gated_norm.tile_options(inner // groups)}
        options |= {"NORM_FIRST": first, "SIGMOID": first, "SHARED": first}
        cases[f"norm {name}"] = gated_norm.norm_kernel, options, dtype
        if not first:
            continue
        for tokens in (1, 1 + DRAFTS):
            options = {"HAS_BIAS": True, "SILU": True, **conv_update.tile_options(WIDTH, tokens)}
            cases[f"conv_update {name} T={tokens}"] = conv_update.conv_update_kernel, conv | options, dtype
        options = conv_varlen.tile_options(WIDTH)
        more = {"HAS_BIAS": True, "SILU": True}
        cases[f"conv {name}"] = conv_varlen.conv_kernel, conv | more | options, dtype
        cases[f"conv windows {name}"] = conv_varlen.window_kernel, conv | options, dtype
        page = {"ENTRIES": WIDTH - 1 + DRAFTS, "CHANNELS": conv["CHANNELS"], "SIZE": inner * size}
        options = copy.tile_options(page["ENTRIES"], page["SIZE"])
        cases[f"copy {name}"] = copy.copy_kernel, page | options, dtype
    for name, sizes in {"LFM2-8B-A1B": {"CHANNELS": 2048}}.items():
        window, options = {"KEEP": 2, **sizes}, fold_window.tile_options(2)
        cases[f"fold_window {name}"] = fold_window.window_kernel, window | options, torch.bfloat16
        window, options = {"ENTRIES": 2 + DRAFTS, "SIZE": 0, **sizes}, copy.tile_options(2 + DRAFTS, 0)
        cases[f"copy {name}"] = copy.copy_kernel, window | options, torch.bfloat16
    return cases | _delta_rules() | _planners()


def _delta_rules() -> dict[str, tuple[Any, dict[str, Any], torch.dtype]]:
    cases: dict[str, tuple[Any, dict[str, Any], torch.dtype]] = {}
    for model, (key_heads, heads, decays) in DELTA_MODELS.items():
        sizes = (128, 128, decays)
        layer = {"HEADS": heads, "GROUP": heads // key_heads}
        layer |= dict(zip(("VALUE_DIM", "KEY_DIM", "DECAYS"), sizes, strict=True))
        page = {"CAPACITY": CAPACITY, "KEEP": WIDTH - 1, "CHANNELS": 128 * (2 * key_heads + heads)}
        for dtype in (torch.bfloat16, torch.float32)[: 1 if decays > 1 else 2]:
            name = f"{model} {SHORT[dtype]}"
            options = delta_fold.tile_options(*sizes, CAPACITY, WIDTH - 1, dtype)
            cases[f"delta_fold {name}"] = delta_fold.fold_kernel, layer | page | options, dtype
            ring = {"CAPACITY": CAPACITY} | delta_replay.tile_options(*sizes, CAPACITY, 1 + DRAFTS, dtype)
            cases[f"delta_replay {name}"] = delta_replay.replay_kernel, layer | ring, dtype
            for part, options in delta_scan.tile_options(*sizes, dtype).items():
                tiles = {"TILES": 8} if part == "pairs" else {}
                kernel = getattr(delta_scan, f"{part}_kernel")
                constants = {k: v for k, v in layer.items() if k in kernel.arg_names} | tiles
                cases[f"delta_scan {part} {name}"] = kernel, constants | options, dtype
        replays = cases[f"delta_replay {model} bf16"]
        cases |= {f"delta_replay {model} bf16{_STATES}bf16": replays} if decays == 1 else {}
        options = delta_update.tile_options(*sizes)
        cases[f"delta_update {model} bf16"] = delta_update.update_kernel, layer | options, torch.bfloat16
    return cases


def _of_narrow_states(cases: dict[str, Any]) -> dict[str, Any]:
    """The same with states of 16 bits: bfloat16, and float16 where a state is only carried on."""
    moving = (replay.replay_kernel, fold.fold_kernel, state_update.update_kernel, ssd_scan.passes_kernel)
    return {
        f"{name}{_STATES}{narrow}": case
        for name, case in cases.items()
        if case[0] in moving and case[2] == torch.bfloat16
        for narrow in (("bf16",) if case[0] in (replay.replay_kernel, fold.fold_kernel) else ("bf16", "fp16"))
    }


def _planners() -> dict[str, tuple[Any, dict[str, Any], torch.dtype]]:
    cases: dict[str, tuple[Any, dict[str, Any], torch.dtype]] = {}
    for kernel in PLANNERS:
        for there in (False, True):  # the arguments that may be missing, and boundaries
            for size in (256, 1000):
                sizes = {"WIDTH": 1 + DRAFTS, "SIZE": size, "MOST_KEPT": CAPACITY - 1 - DRAFTS}
                switches = {
                    name: there for name in kernel.arg_names if name.startswith(("HAS_", "BOUNDARIES"))
                }
                constants = {name: value for name, value in sizes.items() if name in kernel.arg_names}
                options = constants | switches | plan.tile_options()
                cases[f"{kernel.__name__} {size} {there}"] = kernel, options, torch.int64
    return cases


CASES = _cases()
STREAMS = (
    state_update.update_kernel, replay.replay_kernel, fold.fold_kernel, delta_update.update_kernel,
    delta_fold.fold_kernel, delta_replay.replay_kernel,
)  # fmt: skip
"""Their time is that of reading states."""


def _pointer(kernel: Any, name: str, dtype: torch.dtype, states: str) -> str:
    if name in ("state", "ssm"):
        return f"*{states}"
    if kernel in PLANNERS:
        return f"*{PLANNED.get(name, 'i64')}"
    if name == "bias" and kernel is copy.copy_kernel:
        return "*i64"
    if name == "bias" and "A_ptr" in kernel.arg_names:
        return "*fp32"
    for kind, names in (("i32", INT32), ("i64", INT64), ("fp32", FLOAT)):
        if name in names:
            return f"*{kind}"
    return f"*{SHORT[dtype]}"


def _compile(kernel: Any, constants: dict[str, Any], dtype: torch.dtype, states: str) -> Any:
    options = {k: v for k, v in constants.items() if k in ("num_warps", "num_stages", "enable_fp_fusion")}
    signature, hints = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        # Layers may lie further apart than 32 bits count.
        signature[name] = "fp32" if name in SCALARS else "i64" if name.endswith("_layer") else "i32"
        if name.endswith("_ptr"):
            signature[name] = _pointer(kernel, name.removesuffix("_ptr"), dtype, states)
        # What a launch finds out about pointers and strides.
        aligned = not kernel.params[index].do_not_specialize_on_alignment
        if aligned and name not in UNALIGNED and name not in SCALARS:
            hints[index,] = [["tt.divisibility", 16]]
    constexprs = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return triton.compile(ASTSource(kernel, signature, constexprs, hints), target=TARGET, options=options)


@pytest.mark.parametrize("name", CASES)
def test_kernel_fits_hopper(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    kernel, constants, dtype = CASES[name]
    compiled = _compile(kernel, constants, dtype, name.partition(_STATES)[2] or "fp32")
    usage = usage_of(compiled, tmp_path)
    print(f"| {name} | {constants} | {usage} |")
    record_property("kernel", (f"mamba {name}", *usage.recorded))
    assert usage.registers <= 255
    assert usage.spilled == 0, "registers are spilled"
    assert usage.shared <= MAX_SHARED_BYTES
    assert usage.registers * usage.threads <= 65536
    if kernel in STREAMS:
        assert usage.instructions["wide loads"], "the state is not read by 16 bytes a thread"


def test_every_kernel_is_compiled_at_some_size() -> None:
    modules = (
        conv_update, conv_varlen, copy, delta_fold, delta_replay, delta_scan, delta_update, fold, fold_window,
        gated_norm, plan, replay, ssd_scan, state_update,
    )  # fmt: skip
    public = {
        id(value) for module in modules for key, value in vars(module).items()
        if key.endswith("_kernel") and value.__module__ == module.__name__
    }  # fmt: skip
    assert public == {id(kernel) for kernel, _, _ in CASES.values()}
