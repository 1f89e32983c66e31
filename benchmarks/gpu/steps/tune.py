"""Launch configurations of products with quantised weights and of prompt attention: each is checked and timed.

A case's first configuration is the default. Configurations come in the order of what they are expected to bring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.metadata.backends import _launch_config
from bateleur.runner.models.quantized import Layout, Scheme

from ..job import Job, relative_error
from .attention import Heads, Problem, backend_for
from .kernels import WORKING_SET, all_products, random_matrix

Options = dict[str, Any]
SECONDS = 0.03
"""Time of replays of a configuration."""
BOUND = 1e-2
"""Relative error, as in `attention.BOUNDS`."""


def run(job: Job) -> None:
    """Tune the kernels of the case."""
    if job.needs_cuda():
        {"quantized": quantized, "attention": attention}[job.case](job)


class Case:
    """The configurations of one size: their times, and a key figure of the best one."""

    def __init__(self, job: Job, name: str, reference_us: float, wanted: Tensor, **facts: float) -> None:
        self._job, self._name, self._reference_us, self._wanted, self._facts = job, name, reference_us, wanted, facts
        self._us: dict[str, float] = {}
        self._first: Tensor | None = None

    def add(self, options: Options, call: Callable[[], Tensor], timed: Callable[[], object], count: int = 1) -> None:
        """Check the result of `call` and time `timed`, which makes `count` such calls. A wrong one is no candidate.

        The figure's `same_bits`: whether the result has the bits of the first configuration.
        """
        title = " ".join(f"{name.removeprefix('BLOCK_')}={value}" for name, value in options.items()) or "default"
        name = f"{self._name}: {title}"
        if not self._job.has_time(name, 2):
            return
        with self._job.part(name):
            got = call()
            us = self._job.microseconds(timed, seconds=SECONDS) / count
            error = relative_error(got, self._wanted)
            if error > BOUND:
                self._job.record.check(name, False, f"relative error {error:.3g} is above {BOUND}")
                return
            self._first = got if self._first is None else self._first
            same, self._us[title] = torch.equal(got, self._first), us
            self._job.record.figure(
                name, us=us, of_reference=self._reference_us / us, same_bits=same, error=error, **options
            )

    def close(self) -> None:
        """Record the best configuration, compared with the default and with the library's kernel."""
        if "default" in self._us:
            best = min(self._us, key=lambda title: self._us[title])
            us, default = self._us[best], self._us["default"]
            self._job.record.figure(
                self._name, key=True, best=best, us=us, over_default=default / us, of_reference=self._reference_us / us,
                default_us=default, reference_us=self._reference_us, **self._facts,
            )  # fmt: skip


# --- products with quantised weights --------------------------------------------------------------------------

SCHEMES = {
    "FP8 blocks": Scheme(Layout.F8, 128),
    "FP8 rows": Scheme(Layout.F8, 1 << 20, torch.bfloat16),
    "INT4": Scheme(Layout.I4, 128, torch.bfloat16),
    "NVFP4": Scheme(Layout.F4, 16, torch.uint8),
}
SHAPES = ((4096, 14336), (28672, 4096), (6144, 4096), (24576, 4096))
"""Rows and columns: Llama-3.1-8B's down, gate and up, and QKV projections; Qwen3.5-9B's gate and up projections."""
TOKENS = (2048, 1, 64, 256, 16)
NEVER, ALWAYS = 1 << 30, 0
FEW: tuple[Options, ...] = (
    {"programs": 528},
    {"programs": 792},
    {"programs": 528, "num_stages": 4},
    {"programs": 528, "num_stages": 5},
    {"num_stages": 5},
    {"BLOCK_N": 128, "num_warps": 8},
    {"BLOCK_N": 128, "num_warps": 8, "programs": 528},
    {"BLOCK_N": 128, "num_warps": 4, "programs": 528},
    {"BLOCK_K": 64, "num_stages": 5, "programs": 528},
)
SOME: tuple[Options, ...] = (
    {"programs": 528},
    {"programs": 528, "num_stages": 2},
    {"num_stages": 2},
    {"num_stages": 4},
    {"BLOCK_N": 128, "num_warps": 8},
    {"BLOCK_N": 128, "num_warps": 8, "num_stages": 2},
    {"BLOCK_T": 32, "programs": 528},
    {"BLOCK_T": 128, "num_stages": 2},
    {"BLOCK_T": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 2},
    {"many": ALWAYS},
    {"many": ALWAYS, "BLOCK_N": 64, "num_warps": 4},
)
MANY: tuple[Options, ...] = (
    {"num_stages": 3},
    {"BAND": 4},
    {"BAND": 16},
    {"BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
    {"BLOCK_T": 64, "num_warps": 4, "num_stages": 3},
    {"BLOCK_K": 128, "num_stages": 2},
    {"many": NEVER},
)
WIDE: tuple[Options, ...] = (
    {"BLOCK_T": 256, "num_stages": 3},
    {"BLOCK_N": 256, "num_stages": 3},
    {"BLOCK_T": 256, "num_stages": 3, "BAND": 16},
)
"""For matrices whose columns are not cut: with parts, these tiles would spill registers."""


def quantized(job: Job) -> None:
    """Products of published sizes against torch's product with the dequantised matrix."""
    for index, (rows, columns) in enumerate(SHAPES):
        for name, scheme in list(SCHEMES.items())[: 1 if index else None]:
            with job.part(f"{name} {rows} x {columns}"):
                tune_matrix(job, f"{name} {rows} x {columns}", scheme, rows, columns)


def tune_matrix(job: Job, name: str, scheme: Scheme, rows: int, columns: int) -> None:
    """Record the configurations of one matrix for all numbers of tokens."""
    from bateleur.runner.models.kernels import dequantized, quantized

    weight = random_matrix(scheme, rows, columns, job.device)
    copies = -(-WORKING_SET // sum(each.nbytes for each in weight.tensors().values()))
    weights = [weight, *(random_matrix(scheme, rows, columns, job.device) for _ in range(copies - 1))]
    exact = weight.dequantize().to(torch.bfloat16)
    dense = [exact, *(exact.clone() for _ in range(WORKING_SET // exact.nbytes))]
    parts, _ = quantized.cut(rows, columns)
    constants = quantized._constants(scheme, columns, weight.scales.shape[1])
    room = torch.empty(rows, columns, dtype=torch.bfloat16, device=job.device)
    dequantize_us = job.microseconds(partial(dequantized.dequantize, weight, constants, room), seconds=SECONDS)
    for tokens in TOKENS:
        if not job.has_time(f"{name}, {tokens} tokens", 5):
            continue
        x = torch.randn(tokens, columns, device=job.device).to(torch.bfloat16)
        torch_us = job.microseconds(partial(all_dense, x, dense), seconds=SECONDS) / len(dense)
        case = Case(job, f"{name}, {tokens} tokens", torch_us, F.linear(x, exact), dequantize_us=dequantize_us)
        count = 2 if tokens > 256 else copies
        more: Iterable[Options] = FEW if tokens <= 16 else SOME if tokens <= 256 else (*WIDE * (parts == 1), *MANY)
        for options in ({}, *more):
            with product_options(options):
                case.add(options, partial(weight.product, x, None), partial(all_products, x, weights[:count]), count)
        case.close()


def all_dense(x: Tensor, weights: Sequence[Tensor]) -> None:
    """Multiply x with each matrix by torch."""
    for weight in weights:
        F.linear(x, weight)


@contextmanager
def product_options(options: Options) -> Iterator[None]:
    """Replace launch options of products with quantised weights.

    programs: programs to reach by cutting columns. many: number of tokens above which weights are dequantised first.
    """
    from bateleur.runner.models.kernels import dequantized, quantized

    tile = {name: value for name, value in options.items() if name not in ("programs", "many")}
    with ExitStack() as stack:
        for name, key in (("_PROGRAMS", "programs"), ("_MANY", "many")):
            if key in options:
                stack.enter_context(patch.object(quantized, name, options[key]))
        for module in (dequantized, quantized):
            stack.enter_context(patch.object(module, "tile_options", overriding(module.tile_options, tile)))
        yield


def overriding(function: Callable[..., Options], options: Options) -> Callable[..., Options]:
    """Return `function` with some of its results replaced."""
    return lambda *args, **named: function(*args, **named) | options


# --- prompt attention -----------------------------------------------------------------------------------------

HEADS = (Heads(32, 8, 128), Heads(16, 4, 256), Heads(32, 4, 128), Heads(16, 2, 256))
"""Of Llama-3.1-8B, Qwen3.5-9B, and the same head dimensions with 8 query heads of a key head."""
LENGTHS = (2048, 8192)
TILES: dict[int, tuple[Options, ...]] = {
    128: (
        {"BLOCK_N": 64},
        {"num_stages": 2},
        {"num_stages": 4},
        {"BLOCK_N": 64, "num_stages": 2},
        {"BLOCK_N": 64, "num_stages": 4},
        {"BLOCK_M": 64, "num_warps": 4, "BLOCK_N": 64},
        {"BLOCK_N": 32},
    ),
    256: (
        {"BLOCK_N": 64},
        {"num_stages": 2},
        {"num_stages": 4},
        {"BLOCK_N": 64, "num_stages": 2},
        {"BLOCK_M": 64, "num_warps": 8},
    ),
}


def attention(job: Job) -> None:
    """Prompts against torch's causal attention over the same tokens."""
    for heads in HEADS:
        for length in LENGTHS:
            name = f"{heads.queries} and {heads.keys} heads of {heads.dim}, {length} tokens"
            if job.has_time(name, 4):
                with job.part(name):
                    tune_prompt(job, name, heads, length)


def tune_prompt(job: Job, name: str, heads: Heads, length: int) -> None:
    """Record the configurations of the launch of long rows, for one prompt."""
    problem = Problem(heads, [length], [0], torch.bfloat16, job.device)
    backend, scale = backend_for(job, torch.bfloat16, heads.dim), heads.dim**-0.5
    q, k, v = (each.transpose(0, 1)[None].contiguous() for each in (problem.q, problem.k, problem.v))
    torch_call = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
    case = Case(job, name, job.microseconds(torch_call, seconds=SECONDS), torch_call()[0].transpose(0, 1))
    for options in ({}, *TILES[heads.dim]):
        with prompt_options(options):
            meta = backend.builder().build(problem.batch, 0)
            call = partial(backend.attend, problem.q, problem.k, problem.v, problem.caches, meta, scale)
            case.add(options, call, call)
    case.close()


@contextmanager
def prompt_options(options: Options) -> Iterator[None]:
    """Replace tile options of the attention launch of rows with more than 16 tokens."""
    default = _launch_config.tile_options

    def changed(tile_rows: int, *args: Any) -> Options:
        return default(tile_rows, *args) | (options if tile_rows >= 128 else {})

    _launch_config._work_shape.cache_clear()
    with patch.object(_launch_config, "tile_options", changed):
        yield
    _launch_config._work_shape.cache_clear()
