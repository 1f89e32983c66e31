"""The kernels of layers beside attention, with the constants that published models give them, for `kernels.py`.

Bytes are of bfloat16 activations; weights that all tokens share are counted once. Operators are those of torch forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bateleur.metadata.kernels import write_kv
from bateleur.runner.models.kernels import activation, grouped, latent, norm, router


@dataclass(frozen=True, slots=True)
class Case:
    """A launch: its constants and launch options, programs, bytes, and how many operators it stands for."""

    name: str
    kernel: Any
    options: dict[str, Any]
    programs: int
    moved: int
    operators: int


def _norms(tokens: int, size: int) -> list[Case]:
    options, row, found = norm.tile_options(size), 2 * tokens * size, []
    for terms, operators in ((0, 1), (1, 2), (2, 3)):
        moved = row * (2 + terms + (terms > 0)) + 2 * size
        name = f"norm of {tokens} x {size}, {terms} terms"
        found.append(
            Case(name, norm.norm_kernel, options | {"SIZE": size, "TERMS": terms}, tokens, moved, operators)
        )
    moved = 3 * row + 2 * size
    name = f"norm added to {tokens} x {size}"
    return [*found, Case(name, norm.add_normed_kernel, options | {"SIZE": size}, tokens, moved, 2)]


def _activations(tokens: int, size: int) -> list[Case]:
    options = activation.tile_options(size) | {"SIZE": size, "SILU": True}
    programs = tokens * -(-size // options["BLOCK_F"])
    moved = 3 * 2 * tokens * size
    wide, gate = activation.activation_kernel, activation.gate_kernel
    return [
        Case(f"silu and gate of {tokens} x {size}", wide, options | {"GATED": True}, programs, moved, 2),
        Case(f"gate of {tokens} x {size}", gate, options | {"SILU": False}, programs, moved, 2),
    ]


def _write(tokens: int, heads: int, kv_heads: int, dim: int, turning: int, kind: int) -> Case:
    options = write_kv.tile_options(heads, kv_heads, dim, turning, kind)
    sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": dim, "ROTARY_DIM": turning}
    queries = 2 * 2 * tokens * heads * (dim if kind else turning)
    moved = queries + 4 * 2 * tokens * kv_heads * dim + 2 * 2 * tokens * turning + 8 * tokens
    name = (
        f"{tokens} x ({heads} + 2 x {kv_heads}) of {dim}, {turning} turn, "
        + ("no norm", "head norms", "whole norms")[kind]
    )
    operators = (
        6 + (3 if turning else 0) + (0 < turning < dim) + (3 if kind else 0)
    )  # writes, rotation, norms
    constants = options | sizes | {"BLOCK_SIZE": 16, "NORM": kind}
    return Case(
        name,
        write_kv.write_kernel,
        constants,
        tokens * (options["Q_TILES"] + options["K_TILES"]),
        moved,
        operators,
    )


def _experts(tokens: int, experts: int, top_k: int, size: int, groups: int, *, sigmoid: bool) -> list[Case]:
    places, tiles = tokens * top_k, -(-size // router.COMBINE_OPTIONS["BLOCK_L"])
    route = router.route_options(experts, groups, top_k) | {
        "EXPERTS": experts, "TOP_K": top_k, "GROUPS": groups, "TOP_GROUPS": max(1, groups // 2),
        "SIGMOID": sigmoid, "NORMALISED": True, "CORRECTED": sigmoid,
    }  # fmt: skip
    combine = router.COMBINE_OPTIONS | {"TOP_K": top_k, "SIZE": size, "SHARED": True, "GATED": not sigmoid}
    scored = 2 if not sigmoid else 8 + 6 * (groups > 1)
    read, summed = 4 * tokens * experts, 2 * (places + 2 * tokens) * size
    name = f"{tokens} x {top_k} of {experts} experts"
    sort = router.SORT_OPTIONS | {"TOP_K": top_k}
    return [
        Case(f"{name}, {groups} groups", router.route_kernel, route, tokens, read + 12 * places, scored),
        Case(name, router.sort_kernel, sort, experts, 24 * places + 4 * experts, 3),
        Case(
            f"{name}, {size} lanes",
            router.combine_kernel,
            combine,
            tokens * tiles,
            summed + 12 * places,
            5 if sigmoid else 7,
        ),
    ]


def _grouped(tokens: int, experts: int, top_k: int, inner: int, hidden: int) -> Case:
    """Where torch's own would wait for the host; every expert is some token's."""
    rows = tokens * top_k
    options = grouped.tile_options(rows, experts, torch.float16)
    sizes = {"GROUPS": experts, "COLUMNS": inner, "DEPTH": hidden}
    tiles = rows // options["BLOCK_S"] + min(experts, rows)
    programs = tiles * -(-inner // options["BLOCK_N"])
    moved = 2 * (experts * inner * hidden + rows * (inner + hidden))
    name = f"{rows} rows, {experts} x {inner} x {hidden}"
    return Case(name, grouped.grouped_kernel, options | sizes, programs, moved, 1)


def _latent(tokens: int, heads: int, key: int, shared: int, value: int) -> Case:
    dim = max(key + shared, value)
    options = latent.tile_options(heads, dim)
    sizes = {"HEADS": heads, "KEY": key, "SHARED": shared, "VALUE": value, "HEAD_DIM": dim}
    moved = 2 * tokens * (heads * (key + value + 2 * dim) + shared)
    programs = tokens * -(-heads // options["BLOCK_H"])
    return Case(
        f"{tokens} x {heads} heads of a latent", latent.join_kernel, options | sizes, programs, moved, 2
    )


def cases(tokens: int) -> list[Case]:
    """Of a decode step of so many rows, with sizes of Nemotron-3-Nano, Qwen3.5-35B-A3B, Llama-3.1-8B, Kimi Linear."""
    return [
        *_norms(tokens, 2688),
        *_norms(tokens, 4096)[1:2],
        *_activations(tokens, 14336)[:1],
        *_activations(tokens, 4096)[1:],
        _write(tokens, 32, 2, 128, 0, 0),
        _write(tokens, 32, 8, 128, 128, 0),
        _write(tokens, 16, 2, 256, 64, 1),
        _write(tokens, 30, 30, 128, 0, 2),
        *_experts(tokens, 128, 6, 2688, 1, sigmoid=True),
        _grouped(tokens, 128, 6, 1856, 2688),
        *_experts(tokens, 256, 8, 2048, 1, sigmoid=False),
        _latent(tokens, 32, 128, 64, 128),
    ]
