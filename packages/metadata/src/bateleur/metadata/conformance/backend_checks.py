"""Compares an attention backend with the reference, with garbage in all memory that must not be read."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.metadata.backends._torch_ops import quantize
from bateleur.metadata.backends.base import AttentionBackend, AttentionOptions, KVCache, LayerConfig
from bateleur.metadata.backends.reference import ReferenceBackend
from bateleur.metadata.common_attention_metadata import BatchShape, CommonAttentionMetadata
from bateleur.metadata.conformance._random_steps import StepMaker
from bateleur.metadata.conformance.errors import ConformanceError, Violation
from bateleur.metadata.input_buffers import InputBuffers
from bateleur.metadata.seq_len_bound import I32Array
from bateleur.metadata.step_inputs import BatchLimits, KVCacheGroup

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

_STEPS = {torch.float8_e4m3fn: 0.125, torch.bfloat16: 0.01, torch.float16: 1e-3}
"""Relative distance of neighbouring values by dtype of the cache: the smallest allowed error of a stored value."""

_BATCHES = {
    "mixed": ((1, 1, 1, 7, 1, 19), (9, 40, 0, 50, 12, 0)),
    "chunked": ((5, 17, 3), (44, 11, 60)),
    "verifying": ((3, 3, 3), (20, 1, 57)),
    "decode": ((1, 1, 1), (0, 61, 17)),
}
"""(query lengths, computed tokens) by name, larger batches first."""

_MAX_LEN = 70
_LARGE = 3e4


@dataclass(frozen=True, slots=True)
class BackendReport:
    """Result of :func:`check_backend`: number of compared batches, and reasons why configurations are unsupported."""

    backend: str
    num_cases: int
    refused: tuple[str, ...]


def check_backend(
    backend: AttentionBackend,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    heads: Sequence[tuple[int, int]] = ((4, 4), (6, 2)),
    head_dims: Sequence[int] = (16, 64),
    block_sizes: Sequence[int] = (16,),
    sliding_windows: Sequence[int | None] = (None, 6),
    rtol: float | None = None,
    kv_dtype: torch.dtype | None = None,
) -> BackendReport:
    """Compare ``backend`` with the reference on ragged batches.

    Padded tokens, free blocks, the null block after its first slot, and the ends of last blocks hold NaN in one run and
    large numbers in another. Real rows must be equal bit for bit in both runs, padded rows must be zero. If the class
    variable ``backend.needs_finite_cache`` is True, the backend need not tolerate NaN in the cache. Large negative
    numbers then replace NaN.

    Args:
        kv_dtype: dtype of KV caches, if it is another than ``dtype``. Each head then has scales of its own.
        heads: (query heads, key heads).
        head_dims, block_sizes, sliding_windows: all combinations are checked, without sinks and with them if the
            backend supports these; None is no window.
        rtol: allowed error relative to the largest value; default by dtype.

    Raises:
        ConformanceError: lists every violation, by letter. A: memory that must not be read changes a real row, or a
            padded row is not zero. N: a result differs from the reference. W: a key or value is in a wrong slot.
        ValueError: the backend supports none of the configurations.
    """
    violations: list[Violation] = []
    refused: list[str] = []
    num_cases, with_sinks = 0, (False, True) if backend.supports_sinks else (False,)
    for dim, window in product(head_dims, sliding_windows):
        reason = backend.unsupported_reason(LayerConfig(dim, dtype, torch.device(device), window, kv_dtype))
        if reason is not None:
            refused.append(f"head_dim {dim}, sliding_window {window}: {reason}")
            continue
        for block_size, pair, sinks in product(block_sizes, heads, with_sinks):
            sizes = pair, dim, block_size, window
            case = _Case(backend, torch.device(device), dtype, *sizes, sinks, kv_dtype)
            violations += case.check(_TOLERANCES[dtype] if rtol is None else rtol)
            num_cases += len(_BATCHES)
    if violations:
        raise ConformanceError(backend.name, violations)
    if not num_cases:
        raise ValueError(f"backend: {backend.name} supports none of the configurations; {'; '.join(refused)}")
    return BackendReport(backend.name, num_cases, tuple(refused))


@dataclass(frozen=True, slots=True)
class _Case:
    """One configuration of the attention call; all its batches use one set of buffers."""

    backend: AttentionBackend
    device: torch.device
    dtype: torch.dtype
    heads: tuple[int, int]
    dim: int
    block_size: int
    window: int | None
    sinks: bool
    kv_dtype: torch.dtype | None

    def check(self, tolerance: float) -> Iterator[Violation]:
        group = KVCacheGroup(self.block_size, -(-_MAX_LEN // self.block_size))
        fill = self.backend.builder().seq_len_fill
        buffers = InputBuffers(BatchLimits(9, 40, _MAX_LEN), (group,), self.device, fill)
        for name, (query_lens, computed) in _BATCHES.items():
            where = f"{name} batch, {self.heads} heads of {self.dim}, blocks of {self.block_size}, window {self.window}"
            where += ", with sinks" * self.sinks
            buffers.poison()
            batch = _stage(buffers, np.array(query_lens, np.int32), np.array(computed, np.int32))
            for letter, text in self.faults(batch, tolerance):
                yield Violation(letter, f"{text} ({where})")

    def faults(self, batch: CommonAttentionMetadata, tolerance: float) -> Iterator[tuple[str, str]]:
        real, outs = batch.num_actual_tokens, []
        for garbage in (-_LARGE if self.backend.needs_finite_cache else float("nan"), _LARGE):
            out, *caches = self.attend(self.backend, batch, garbage)
            outs.append(out)
            # The reference reads what the backend stored: a last bit before rounding to 8 bits may be a step after it.
            read = (caches[0], caches[1]) if self.kv_dtype else None
            expected, *stored = self.attend(ReferenceBackend(), batch, garbage, read)
            allowed = max(tolerance, _STEPS.get(caches[0].dtype, 0.0))
            if not all(_close(mine, theirs, allowed) for mine, theirs in zip(caches, stored, strict=True)):
                yield "W", "the caches differ from the reference's"
        if not _close(outs[0][:real], expected[:real], tolerance):
            error = (outs[0][:real] - expected[:real]).abs().max().item()
            yield "N", f"rows are off the reference by up to {error:.2g}"
        elif not torch.equal(outs[0][:real], outs[1][:real]):
            yield "A", "real rows depend on memory that must not be read"
        if any(bool((out[real:] != 0).any()) for out in outs):
            yield "A", "padded rows are not zero"

    def attend(
        self, backend: AttentionBackend, batch: CommonAttentionMetadata, garbage: float, read: KVCache | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return output and both caches of ``backend``. ``garbage``: in unused entries. ``read``: caches to use."""
        q, k, v, k_cache, v_cache = self.inputs(batch, garbage)
        rotary, lanes = _rotary(batch, self.dim, self.dtype), torch.arange(self.dim, device=self.device) / self.dim
        norm = 1.5 - lanes, 0.5 + lanes, 1e-6  # weights of queries and keys, and epsilon
        fused: dict[str, Any] = {}
        if backend.fuses_norm:
            fused["norm"] = norm
        else:
            q, k = (_normed(x, weight, norm[2]) for x, weight in zip((q, k), norm[:2], strict=True))
        if backend.fuses_rotary:
            fused["rotary"] = rotary
        else:
            q, k = _rotated(q, *rotary), _rotated(k, *rotary)
        if self.sinks:
            fused["sinks"] = torch.linspace(-2.0, 3.0, self.heads[0], device=self.device)
        meta, scale = backend.builder().build(batch, 0), self.dim**-0.5
        scales: dict[str, Any] = {} if self.kv_dtype is None else {"kv_scales": self.kv_scales}
        out = backend.attend(q, k, v, (k_cache, v_cache), meta, scale, self.window, **fused, **scales)
        if read is not None:
            options = AttentionOptions(scale, self.window, sinks=fused.get("sinks"), **scales)
            out = backend.attend_cache(q, read, meta, options)
        return out, k_cache, v_cache

    @property
    def kv_scales(self) -> Tensor:
        """Scales of keys and of values, (2, Hkv) float32."""
        count = 2 * self.heads[1]
        return (0.4 + torch.arange(count, device=self.device) / count).view(2, -1)

    def inputs(self, batch: CommonAttentionMetadata, garbage: float) -> list[Tensor]:
        """Return queries, keys, values and both caches, with ``garbage`` in all entries that belong to no request."""
        generator = torch.Generator().manual_seed(0)
        table, (num_heads, num_kv_heads) = batch.block_tables[0].cpu(), self.heads
        tokens = torch.arange(batch.num_tokens) < batch.num_actual_tokens
        slots = torch.zeros(int(table.max()) + 2, self.block_size, dtype=torch.bool)
        for row, length in enumerate(batch.num_computed_tokens.tolist()):
            at = torch.arange(length)
            slots[table[row][at // self.block_size].long(), at % self.block_size] = True

        def random(owned: Tensor, count: int) -> Tensor:
            values = torch.randn(*owned.shape, count, self.dim, generator=generator).to(self.dtype)
            return torch.where(owned[..., None, None], values, garbage).to(self.device)

        caches = [random(slots, num_kv_heads) for _ in range(2)]
        for i, cache in enumerate(caches):
            cache[0, 0] = 0
            if self.kv_dtype is not None:
                caches[i] = quantize(cache, self.kv_dtype, self.kv_scales[i])
        return [random(tokens, count) for count in (num_heads, num_kv_heads, num_kv_heads)] + caches


def _stage(buffers: InputBuffers, query_lens: I32Array, computed: I32Array) -> CommonAttentionMetadata:
    """Stage a batch with padding, and put stale block ids after each request's last block."""
    num_reqs, num_tokens, longest = len(query_lens), int(query_lens.sum()), int(query_lens.max())
    group = buffers.groups[0]
    rows = StepMaker(buffers.limits, buffers.groups).rows(query_lens, computed, query_lens > 1)
    promise = longest if longest == 1 else longest + 2
    batch = buffers.stage(rows, BatchShape(num_reqs, num_tokens, num_reqs + 3, num_tokens + 5, promise))
    table = batch.block_tables[0].clone()
    unused = torch.arange(group.max_blocks) * group.block_size >= batch.seq_lens[:num_reqs, None].cpu()
    table[:num_reqs][unused.to(table.device)] = int(table.max()) + 1
    return dataclasses.replace(batch, block_tables=(table,))


def _rotary(batch: CommonAttentionMetadata, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine (T, 1, R) of the batch's positions in ``dtype``; the first R/2 sines are negated.

    R is half of ``dim``, rounded down to an even number. :meth:`AttentionBackend.attend` has the rotation's formula.
    """
    width = max(2, dim // 4 * 2)
    rate = 100.0 ** -(torch.arange(width // 2, device=batch.positions.device) / width)
    angle = (batch.positions[:, None] % 128) * torch.cat((rate, rate))
    sign = torch.ones(width, device=angle.device)
    sign[: width // 2] = -1
    return angle.cos()[:, None].to(dtype), (angle.sin() * sign)[:, None].to(dtype)


# Written out here, because the checked backends call `rms_norm` and `apply_rotary` of `_torch_ops`.
def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    return torch.cat((turned * cos + turned.roll(width // 2, -1) * sin, rest), -1)


def _close(mine: Tensor, reference: Tensor, tolerance: float) -> bool:
    """Return whether values differ by at most ``tolerance`` times the largest one, with NaN in the same places."""
    mine, reference = mine.float(), reference.float()
    finite = reference[reference.isfinite()].abs()
    # Garbage is larger than any value of the batch: 448 in FP8.
    scale = float(finite[finite < 400].max()) if bool((finite < 400).any()) else 1.0
    return torch.allclose(mine, reference, rtol=0, atol=tolerance * scale, equal_nan=True)
