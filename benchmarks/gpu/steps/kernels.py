"""Kernels alone, as CUDA graphs over more memory than the L2 cache holds, against the copy rate or torch's kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mamba
import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.eagle import HashedVocab, sample
from bateleur.runner.models.grouped import grouped_product
from bateleur.runner.models.quantized import Layout, QuantizedMatrix, Scheme
from bateleur.runner.models.router import sort_places

from ..job import Job
from ..plan import MODELS
from .attention import Heads, Problem, backend_for
from .recurrences import CHUNK, Rows
from .sampling import LAWS, keys_of, law_of

TIMED_RECURRENCES = ("Nemotron-3-Nano-30B", "Qwen3.5-9B")
WORKING_SET = 1 << 28
"""Bytes that a timed graph reads at least: the L2 cache of an H100 has 50 MiB."""


def run(job: Job) -> None:
    """Time the kernels of the case."""
    cases = {
        "attention": attention,
        "recurrences": recurrences,
        "sampling": sampling,
        "experts": experts,
        "quantized": quantized,
    }
    cases[job.case](job)


# --- attention ------------------------------------------------------------------------------------------------


def attention(job: Job) -> None:
    """Decodes against the bytes of their keys and values, prompts against torch's attention, and a loose bound."""
    shapes = ((1, 64), (3, 32)) if job.quick else ((1, 8192), (8, 4096), (64, 2048), (256, 1024))
    for model in MODELS:
        heads = Heads(4, 2, 32) if job.quick else Heads.of(model)
        for rows, context in shapes:
            name = f"decode, {model}: {rows} x {context}"
            if job.has_time(name, 6):
                with job.part(name):
                    decode_time(job, name, heads, rows, context)
        with job.part(f"prompt, {model}"):
            prompt_time(job, f"prompt, {model}", heads)
    with job.part("loose bound"):
        loose_bound(job)


def decode_call(job: Job, heads: Heads, rows: int, context: int, backend: Any) -> tuple[Callable[[], None], int, int]:
    """Return a decode of `rows` rows with `context` tokens each in several layers, their number, and bytes of one."""
    dtype = torch.bfloat16 if job.cuda else torch.float32
    problem = Problem(heads, [1] * rows, [context] * rows, dtype, job.device)
    one = 2 * rows * (context + 1) * heads.keys * heads.dim * dtype.itemsize
    layers = 1 if job.quick else -(-WORKING_SET // one)
    caches = [problem.caches, *((problem.caches[0].clone(), problem.caches[1].clone()) for _ in range(layers - 1))]
    meta, scale = backend.builder().build(problem.batch, 0), heads.dim**-0.5

    def call() -> None:
        for kv in caches:
            backend.attend(problem.q, problem.k, problem.v, kv, meta, scale)

    return call, layers, one


def decode_time(job: Job, name: str, heads: Heads, rows: int, context: int) -> None:
    """Record microseconds of a layer's decode against what its bytes take."""
    backend = backend_for(job, torch.bfloat16 if job.cuda else torch.float32, heads.dim)
    call, layers, one = decode_call(job, heads, rows, context, backend)
    job.moved(name, job.microseconds(call) / layers, one)


def prompt_time(job: Job, name: str, heads: Heads) -> None:
    """Record a prompt's time and that of torch's causal attention over the same tokens."""
    length, dtype = (64, torch.float32) if job.quick else (4096, torch.bfloat16)
    problem = Problem(heads, [length], [0], dtype, job.device)
    backend = backend_for(job, dtype, heads.dim)
    meta = backend.builder().build(problem.batch, 0)
    us = job.microseconds(
        lambda: backend.attend(problem.q, problem.k, problem.v, problem.caches, meta, heads.dim**-0.5)
    )
    q, k, v = (each.transpose(0, 1)[None].contiguous() for each in (problem.q, problem.k, problem.v))
    torch_us = job.microseconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    flops = 2 * length**2 * heads.queries * heads.dim
    job.record.figure(
        name, key=True, us=us, torch_us=torch_us, of_torch=torch_us / us, TFLOP_per_s=flops / us / 1e6,
        copy_GB_per_s=job.copy_rate / 1e9,
    )  # fmt: skip


def loose_bound(job: Job) -> None:
    """Check that a decode's time follows the lengths of its rows and not the bound that a captured graph has."""
    rows, context, bound = (2, 60, 256) if job.quick else (4, 2000, 131_072)
    heads = Heads(4, 2, 32) if job.quick else Heads(32, 8, 128)
    dtype = torch.bfloat16 if job.cuda else torch.float32
    problem = Problem(heads, [1] * rows, [context] * rows, dtype, job.device, model_len=bound)
    backend = backend_for(job, dtype, heads.dim)
    tight = backend.builder().build(problem.batch, 0)
    attend = partial(backend.attend, problem.q, problem.k, problem.v, problem.caches, scale=heads.dim**-0.5)
    metas = {"tight": tight, "loose": replace(tight, max_seq_len=bound)}
    us = {name: job.microseconds(partial(attend, meta=meta)) for name, meta in metas.items()}
    ratio, why = us["loose"] / us["tight"], "a decode takes longer under a bound far above its rows' lengths"
    holds = ratio < 1.5 or not job.cuda
    job.record.check("loose bound", holds, f"{ratio:.2f} times as long: {why}", key=True, **us, ratio=ratio)


# --- recurrences ----------------------------------------------------------------------------------------------


def recurrences(job: Job) -> None:
    """Decode steps by policy against their bytes, and scans of one prompt."""
    models = mamba.TINY if job.quick else {name: mamba.MODELS[name] for name in TIMED_RECURRENCES}
    cases = ((0, 1), (3, 2)) if job.quick else ((0, 1), (0, 8), (0, 64), (0, 256), (3, 8), (3, 64))
    for model, sizes in models.items():
        for drafts, rows in cases:
            name = f"{model}, {rows} rows, {drafts} drafts"
            if job.has_time(name, 6):
                with job.part(name):
                    found = mamba.measure(sizes, drafts, rows, job.device, 7, 1 << 16 if job.quick else WORKING_SET)
                    job.record.figure(
                        name, key=True, us=found["us"], of_bound=found["of_bound"], slots_over_fold=found["time_ratio"],
                        copy_GB_per_s=found["copy_GB_per_s"],
                    )  # fmt: skip
        with job.part(f"scan, {model}"):
            scan_time(job, f"scan, {model}", sizes)


def scan_time(job: Job, name: str, sizes: mamba.Model) -> None:
    """Record the time of a layer's scan of one prompt, which keeps its last state alone."""
    tokens = 2 * CHUNK if job.quick else 4096
    dtype = torch.bfloat16 if job.cuda else torch.float32
    spec = sizes.spec(0, mamba.SLOTS, dtype)
    rows = Rows.random(spec, [tokens], job.device)
    us = job.microseconds(rows.scan_call(tokens))
    gates = sum(math.prod(gate.shape) for gate in spec.gates)
    lanes = spec.conv_dim + gates + math.prod(spec.output_shape)
    job.moved(f"{name}: {tokens} tokens", us, tokens * lanes * dtype.itemsize, ns_per_token=us * 1e3 / tokens)


# --- sampling and experts -------------------------------------------------------------------------------------


def sampling(job: Job) -> None:
    """Draws by law against the bytes of the logits, compared with torch's argmax and sort."""
    for size in (1_000,) if job.quick else (131_072, 248_320):
        for rows in (1, 64, 256):
            name = f"{rows} x {size}"
            if job.has_time(name, 6):
                with job.part(name):
                    sampling_times(job, name, rows, size)


def sampling_times(job: Job, name: str, rows: int, size: int) -> None:
    """Record the times of all laws."""
    logits, vocab = torch.randn(rows, size, device=job.device) * 3, HashedVocab.of(size, job.device)
    keys, times = keys_of(rows, job.device), {}
    for law, values in LAWS.items():
        made = law_of(values, rows, job.device)
        times[law] = job.microseconds(partial(sample, logits, made, keys, vocab=vocab), seconds=0.05)
    times["torch argmax"] = job.microseconds(lambda: logits.argmax(-1), seconds=0.05)
    times["torch sort"] = job.microseconds(lambda: logits.sort(-1), seconds=0.05)
    job.moved(name, times["T 0.8"], logits.nbytes, us_by_law={law: round(us, 1) for law, us in times.items()})


def experts(job: Job) -> None:
    """Grouped products against the bytes of the experts that tokens meet."""
    count, top_k, inner, hidden = (8, 2, 48, 64) if job.quick else (128, 6, 1856, 2688)
    dtype = torch.bfloat16 if job.cuda else torch.float32
    weight = torch.randn(count, inner, hidden, device=job.device).to(dtype)
    for tokens in (1, 8, 64, 256, 2048):
        with job.part(f"{tokens} tokens"):
            chosen = torch.rand(tokens, count, device=job.device).topk(top_k, 1).indices
            token, _, ends = sort_places(chosen, count)
            x = torch.randn(tokens, hidden, device=job.device).to(dtype).index_select(0, token)
            us = job.microseconds(partial(grouped_product, x, weight, ends))
            sort_us = job.microseconds(partial(sort_places, chosen, count))
            met = len(chosen.unique())
            flops = 2 * len(x) * inner * hidden
            moved = met * inner * hidden * dtype.itemsize + len(x) * (inner + hidden) * dtype.itemsize
            job.moved(f"{tokens} tokens", us, moved, experts=met, sort_us=sort_us, TFLOP_per_s=flops / us / 1e6)


# --- quantised weights ----------------------------------------------------------------------------------------

SCHEMES = {
    "FP8 blocks": Scheme(Layout.F8, 128),
    "INT8 rows": Scheme(Layout.I8, 1 << 20, torch.bfloat16),
    "INT4 groups": Scheme(Layout.I4, 128, torch.bfloat16, zeros=True),
    "NVFP4": Scheme(Layout.F4, 16, torch.uint8),
}


def quantized(job: Job) -> None:
    """Products against their bytes and torch's product in bfloat16; weights and rows against the rules of products."""
    rows, columns = (72, 256) if job.quick else (5120, 17408)
    dtype = torch.bfloat16 if job.cuda else torch.float32
    for name, scheme in SCHEMES.items():
        weight = random_matrix(scheme, rows, columns, job.device)
        with job.part(name):
            exact = weight.dequantize().to(dtype)
            first = torch.eye(columns, dtype=dtype, device=job.device)[:300]
            same = torch.equal(weight.product(first, None), exact.T[:300])
            job.record.check(
                f"{name}: weights", same, "a product with unit vectors is not the dequantised matrix", key=True
            )
            x = torch.randn(300, columns, device=job.device).to(dtype)
            whole = weight.product(x, None)
            differ = [
                n for n in (1, 2, 16, 17, 64, 256, 257) if not torch.equal(weight.product(x[:n], None), whole[:n])
            ]
            why = f"rows of {differ} tokens have other bits than those of 300"
            job.record.check(f"{name}: bits", not differ, why, key=True)
        held = sum(each.nbytes for each in weight.tensors().values())
        copies = 1 if job.quick else -(-WORKING_SET // held)
        weights = [weight, *(random_matrix(scheme, rows, columns, job.device) for _ in range(copies - 1))]
        for tokens in (1, 8, 64, 256, 2048):
            part = f"{name}, {tokens} tokens"
            if job.has_time(part, 4):
                with job.part(part):
                    x = torch.randn(tokens, columns, device=job.device).to(dtype)
                    us = job.microseconds(partial(all_products, x, weights)) / copies
                    torch_us = job.microseconds(partial(F.linear, x, exact))
                    moved = held + tokens * (rows + columns) * dtype.itemsize
                    job.moved(part, us, moved, torch_us=torch_us, TFLOP_per_s=2 * tokens * rows * columns / us / 1e6)


def all_products(x: Tensor, weights: Sequence[QuantizedMatrix]) -> None:
    """Multiply x with each matrix."""
    for weight in weights:
        weight.product(x, None)


def random_matrix(scheme: Scheme, rows: int, columns: int, device: torch.device) -> QuantizedMatrix:
    """Return a matrix of random codes, with scales that are powers of two."""
    made = QuantizedMatrix.empty(scheme, (rows, columns), None, device)
    made.codes.copy_(torch.randint(0, 120, made.codes.shape, device=device))
    for each in (made.zeros, made.factors):
        if each is not None:
            each.fill_(3)
    made.scales.fill_(0x28 if scheme.layout is Layout.F4 else 2.0**-4)  # e4m3 0x28 is 0.25
    return made
