"""Paged attention with a model's heads against products in float32: decodes, drafts, prompts, windows, graphs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from performance.published import spec_of
from torch import Tensor

from bateleur.metadata import (
    AttentionBackend,
    BatchLimits,
    BatchShape,
    CommonAttentionMetadata,
    InputBuffers,
    KVCacheGroup,
    StepRows,
    get_backend,
)

from ..job import CompileWatch, Job, graph_of
from ..plan import LLAMA

BLOCK = 16
EXTRA = 7
"""Padded tokens after the tokens of the rows."""
CASES = {
    "decode": ([1] * 9, [0, 5, 511, 512, 4000, 77, 8191, 1, 300]),
    "drafts": ([5, 5, 2, 5, 1], [900, 1, 64, 0, 3000]),
    "mixed": ([1, 1, 700, 129, 17, 5], [2500, 3, 900, 0, 40, 6000]),
    "prompt": ([1500], [600]),
}
"""Query lengths, and computed tokens before them."""
QUICK_CASES = {"decode": ([1] * 3, [0, 37, 64]), "mixed": ([1, 20, 5], [40, 3, 0])}
BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-6}
"""Relative errors: some units in the last place of the dtype."""
REPLAYS = 50


@dataclass(frozen=True)
class Heads:
    """Heads of queries and of keys, and lanes of a head."""

    queries: int
    keys: int
    dim: int

    @classmethod
    def of(cls, name: str) -> Heads:
        """Those of a published model."""
        layer = spec_of(name).attention[0]
        return cls(layer.num_heads, layer.num_kv_heads, layer.head_dim)


class Problem:
    """Ragged rows with random queries, keys and values; NaN wherever no row may read.

    Tensors: q (T, queries, dim), k and v (T, keys, dim), caches (blocks, 16, keys, dim). extra: padded tokens.
    model_len: longest row that the block tables have room for.
    """

    def __init__(
        self,
        heads: Heads,
        lens: list[int],
        computed: list[int],
        dtype: torch.dtype,
        device: torch.device,
        extra: int = 0,
        model_len: int = 0,
    ) -> None:
        self.heads, self.lens, self.computed, self.total = heads, lens, computed, sum(lens)
        self.batch, self.tables = _staged(lens, computed, device, extra, model_len)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device).to(dtype)

        tokens = self.total + extra
        self.q = random(tokens, heads.queries, heads.dim)
        self.k, self.v = (random(tokens, heads.keys, heads.dim) for _ in "kv")
        for each in (self.q, self.k, self.v):
            each[self.total :] = torch.nan
        blocks = 1 + int(self.tables.max())
        self.caches = (random(blocks, BLOCK, heads.keys, heads.dim), random(blocks, BLOCK, heads.keys, heads.dim))
        for cache in self.caches:
            cache[0] = torch.nan
            cache[0, 0] = 0

    def attend(self, backend: AttentionBackend, window: int | None = None) -> Tensor:
        """Call the backend; q stays as it is."""
        meta = backend.builder().build(self.batch, 0)
        scale = self.heads.dim**-0.5
        return backend.attend(self.q.clone(), self.k, self.v, self.caches, meta, scale, window)

    def reference(self, window: int | None = None) -> Tensor:
        """Attention (T, queries, dim) in float32, row by row, over the caches that `attend` has written to."""
        group = self.heads.queries // self.heads.keys
        found, at = [], 0
        for row, (n, before) in enumerate(zip(self.lens, self.computed, strict=True)):
            blocks = torch.from_numpy(self.tables[row, : -(-(n + before) // BLOCK)].astype(np.int64))
            k, v = (
                cache[blocks.to(cache.device)].flatten(0, 1)[: n + before].float().repeat_interleave(group, 1)
                for cache in self.caches
            )
            for first in range(0, n, 256):
                q = self.q[at + first : at + min(first + 256, n)].float()
                query = before + first + torch.arange(len(q), device=q.device)[:, None]
                key = torch.arange(n + before, device=q.device)[None]
                hidden = (key > query) | (key <= query - (window or n + before))
                score = torch.einsum("qhd,khd->hqk", q, k) * self.heads.dim**-0.5
                weight = score.masked_fill(hidden, -torch.inf).softmax(-1)
                found.append(torch.einsum("hqk,khd->qhd", weight, v))
            at += n
        return torch.cat(found)


def _staged(
    lens: list[int], computed: list[int], device: torch.device, extra: int, model_len: int
) -> tuple[CommonAttentionMetadata, np.ndarray[tuple[int, int], np.dtype[np.int32]]]:
    """Metadata of ragged rows, and their block tables (R, blocks): blocks in random order.

    model_len: longest row that the tables have room for; at least that of the batch.
    """
    rows, total = len(lens), sum(lens)
    longest = max(model_len, *(n + before for n, before in zip(lens, computed, strict=True)))
    width = -(-longest // BLOCK)
    used = [-(-(n + before) // BLOCK) for n, before in zip(lens, computed, strict=True)]
    blocks = 1 + np.random.default_rng(0).permutation(sum(used)).astype(np.int32)
    tables = np.zeros((rows, width), np.int32)
    for row, count in enumerate(used):
        tables[row, :count], blocks = blocks[:count], blocks[count:]
    buffers = InputBuffers(BatchLimits(rows, total + extra, width * BLOCK), [KVCacheGroup(BLOCK, width)], device)
    query_lens = np.array(lens, np.int32)
    step = StepRows(query_lens, np.array(computed, np.int32), query_lens > 8, np.zeros(total, np.int32), (tables,))
    return buffers.stage(step, BatchShape(rows, total, rows, total + extra, max(lens))), tables


def backend_for(job: Job, dtype: torch.dtype, dim: int, window: int | None = None) -> AttentionBackend:
    """The Triton backend on a GPU; on a CPU the one that an engine takes."""
    name = "triton" if job.cuda else "auto"
    return get_backend(name, device=job.device, dtype=dtype, head_dim=dim, sliding_window=window)


def run(job: Job) -> None:
    """Compare every case in bfloat16; with one model's heads also other dtypes and a window."""
    watch = CompileWatch()
    heads = Heads(4, 2, 32) if job.quick else Heads.of(job.case)
    every = job.case == LLAMA
    for dtype in (torch.bfloat16, torch.float16, torch.float32) if every else (torch.bfloat16,):
        for case, (lens, computed) in (QUICK_CASES if job.quick else CASES).items():
            for window in (None, 20 if job.quick else 700) if every and dtype == torch.bfloat16 else (None,):
                name = f"{case} {str(dtype)[6:]}" + (f" window {window}" if window else "")
                if job.has_time(name, 15):
                    with job.part(name):
                        compare(job, name, Problem(heads, lens, computed, dtype, job.device, EXTRA), window)
    if job.cuda:
        with job.part("captured"):
            captured(job, heads)
    watch.record(job)


def compare(job: Job, name: str, problem: Problem, window: int | None) -> None:
    """Compare a call with the reference, its padding with zeros, and a second call with the first."""
    backend = backend_for(job, problem.q.dtype, problem.heads.dim, window)
    first, second = (problem.attend(backend, window) for _ in range(2))
    real = problem.total
    job.compare(name, first[:real], problem.reference(window), BOUNDS[problem.q.dtype])
    job.same(f"{name}: padding", first[real:], torch.zeros_like(first[real:]), "tokens of no row must give 0")
    job.same(f"{name}: twice", first[:real], second[:real], "two calls must agree bit for bit; else there is a race")


def captured(job: Job, heads: Heads) -> None:
    """Replay a captured call, and compare all replays with an eager call."""
    lens, computed = (QUICK_CASES if job.quick else CASES)["mixed"]
    problem = Problem(heads, lens, computed, torch.bfloat16, job.device)
    backend = backend_for(job, torch.bfloat16, heads.dim)
    meta = backend.builder().build(problem.batch, 0)
    found: list[Tensor] = []

    def call() -> None:
        q = problem.q.clone()
        found.append(backend.attend(q, problem.k, problem.v, problem.caches, meta, heads.dim**-0.5))

    graph = graph_of(call)
    out, want, same = found[-1], problem.attend(backend), 0
    for _ in range(REPLAYS):
        graph.replay()
        same += torch.equal(out, want)
    job.record.check("captured", same == REPLAYS, f"{REPLAYS - same} of {REPLAYS} replays differ from an eager call")
