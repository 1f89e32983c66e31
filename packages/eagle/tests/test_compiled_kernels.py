"""Every kernel of this package compiled for sm_90 as it is launched: no spills, and the occupancy that it states."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bateleur.eagle import HashedVocab, Keys, Penalties, Role, SamplingMetadata
from bateleur.eagle.buffers import DraftBuffers
from bateleur.eagle.rules import Coupled, Drafts, Rows
from bateleur.metadata import BatchLimits, BatchShape, InputBuffers, KVCacheGroup, StepRows

triton = pytest.importorskip("triton", reason="triton is not installed")

import numpy as np  # noqa: E402

from bateleur.eagle.kernels import geometry, rejection_sampler, truncation, vocab_shard  # noqa: E402
from sm90 import Compiled, Kernel, compiling, faults_of, slow_unless  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="nothing compiles in Triton's interpreter"
)
Recorder = Callable[[str, object], None]
F32, BF16 = torch.float32, torch.bfloat16
INF = float("inf")
VOCABULARIES = (32_768, 131_072, 152_064, 248_320)
TRUNCATION = ("stats_kernel", "bracket_kernel", "collect_kernel", "threshold_kernel")
PLAIN, TRUNCATED = (0.8, -INF, 0.0, 1.0), (0.8, -3.0, 20.0, 0.95)


def on_cuda(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A fake tensor of a CUDA device."""
    return torch.empty(shape, dtype=dtype, device="cuda:0")


def penalties_of(num_rows: int, size: int, kind: int) -> Penalties | None:
    """None, or those of the KIND of kernels."""
    if kind == 0:
        return None
    values, owners = on_cuda(num_rows, 3), on_cuda(num_rows, dtype=torch.int64)
    tables = on_cuda(64, size, dtype=torch.int32), on_cuda(64, size, dtype=torch.bool)
    before = on_cuda(num_rows, 4, dtype=torch.int64) if kind == 2 else None
    return Penalties(values, owners, *tables, before)


def metadata_of(num_rows: int, row: tuple[float, ...], penalties: Penalties | None = None) -> SamplingMetadata:
    """Of rows that the host knows."""
    return SamplingMetadata(np.tile(np.float32(row), (num_rows, 1)), on_cuda(num_rows, 4), penalties)


def check(found: Compiled, names: set[str], record: Recorder, what: str) -> dict[str, Kernel]:
    """The kernels that were launched, by name: these, and without a fault."""
    assert {kernel.name for kernel in found.kernels} == names
    for kernel in found.kernels:
        record("kernel", (f"eagle {kernel.name} {what}", kernel.registers, kernel.spilled_bytes, kernel.shared_bytes))
    assert [fault for kernel in found.kernels for fault in faults_of(kernel)] == []
    return {kernel.name: kernel for kernel in found.kernels}


@pytest.mark.parametrize(
    ("size", "dtype", "kind"),
    slow_unless([(152_064, BF16, 0), (32_768, F32, 2)], itertools.product(VOCABULARIES, [F32, BF16], [0, 1, 2])),
    ids=str,
)
def test_a_draw_from_a_law_that_truncates(size: int, dtype: torch.dtype, kind: int, record_property: Recorder) -> None:
    """Two launches that read all of the rows, one that samples them, one of candidates, and the two of a draw."""
    with FakeTensorMode(), compiling(on_device=True) as found:
        for num in (64, 1):
            keys = Keys(on_cuda(num, dtype=torch.int64), on_cuda(num, dtype=torch.int64))
            metadata = metadata_of(num, TRUNCATED, penalties_of(num, size, kind))
            logits, vocab = on_cuda(num, size, dtype=dtype), HashedVocab(on_cuda(size, dtype=torch.int32))
            rejection_sampler.sample(logits, metadata, keys, Role.TARGET, vocab)
    kernels = check(found, {*TRUNCATION, "draw_kernel", "emit_kernel"}, record_property, f"{size} {dtype} {kind}")
    names = [launch.kernel.name for launch in found.launches]
    assert names == 2 * [*TRUNCATION, "draw_kernel", "emit_kernel"]
    programs = [launch.programs for launch in found.launches]
    assert programs[:4] == [64 * -(-size // 2048), 64, 64 * -(-size // 1024), 64]
    assert programs[6:10] == [each // 64 for each in programs[:4]]
    # exp and log1p of CUDA, as torch takes them there: `tl.exp` rounds no multiplication down, and a Gumbel variate
    # without log1p takes two logarithms.
    assert "fma.rm" in kernels["collect_kernel"].ptx
    values_of_a_thread = kernels["draw_kernel"].options["BLOCK"] // 32
    assert kernels["draw_kernel"].ptx.count("lg2.approx") <= values_of_a_thread
    assert kernels["draw_kernel"].instructions["barriers"] == 0, "one warp needs no barrier"
    assert kernels["stats_kernel"].instructions["wide loads"] >= 2


@pytest.mark.parametrize(
    ("dtype", "row", "kind", "greedy"),
    [
        (torch.float32, None, 0, True),
        (torch.bfloat16, None, 0, True),
        (torch.float32, PLAIN, 0, False),
        (torch.bfloat16, PLAIN, 2, False),
        (torch.float32, TRUNCATED, 1, False),
    ],
    ids=str,
)
@pytest.mark.parametrize(("size", "num_reqs"), [(131_072, 64), (128_256, 1), (50_000, 256)])
def test_verification_of_four_drafts(
    size: int,
    num_reqs: int,
    dtype: torch.dtype,
    row: tuple[float, ...] | None,
    kind: int,
    greedy: bool,
    record_property: Recorder,
) -> None:
    with FakeTensorMode(), compiling(on_device=True) as found:
        num = num_reqs * 5
        seeds, first = (on_cuda(num_reqs, dtype=torch.int64) for _ in range(2))
        rows = Rows(on_cuda(num_reqs + 1, dtype=torch.int32), seeds, first, on_cuda(num_reqs))
        drafts = Drafts(on_cuda(num_reqs, 4, dtype=torch.int64), Coupled())
        metadata = None if row is None else metadata_of(num, row, penalties_of(num, size, kind))
        vocab = HashedVocab(on_cuda(size, dtype=torch.int32))
        rejection_sampler.coupled(
            on_cuda(num, size, dtype=dtype), drafts, rows, vocab, greedy=greedy, metadata=metadata
        )
    truncates = TRUNCATION if row == TRUNCATED else ()
    kernels = check(found, {*truncates, "draw_kernel", "emit_kernel"}, record_property, f"{size} {dtype} {kind}")
    assert kernels["draw_kernel"].instructions["wide loads"] >= 2, "logits are not read by 16 bytes a thread"


@pytest.mark.parametrize("size", [62_080, 64_128])
@pytest.mark.parametrize("truncates", [False, True])
def test_a_part_of_a_vocabulary(size: int, truncates: bool, record_property: Recorder) -> None:
    with FakeTensorMode(), compiling(on_device=True) as found:
        num = 64
        scaled, order = on_cuda(num, size), on_cuda(num, dtype=torch.int64)
        least, last = on_cuda(num), on_cuda(num, dtype=torch.int32)
        vocab_shard.histogram_rows(scaled, None, order, 24)
        vocab_shard.histogram_rows(scaled, scaled, order, 0)
        vocab_shard.last_tie_rows(scaled, least, order, order)
        kept = (least, last) if truncates else (None, None)
        words = on_cuda(size, dtype=torch.int32)
        vocab_shard.perturbed_max_rows(
            on_cuda(num, size, dtype=torch.bfloat16), on_cuda(num, 4), words, order, order, *kept
        )
    check(found, {"histogram_kernel", "last_tie_kernel", "draw_kernel"}, record_property, f"part of {size}")


@pytest.mark.parametrize("rows", [4, 256, 1024, 4096])
def test_staging_of_drafts(rows: int, record_property: Recorder) -> None:
    limits, group = BatchLimits(rows, 8192, 4096), KVCacheGroup(16, 256)
    step = StepRows(
        query_lens=np.ones(rows, np.int32),
        num_computed_tokens=np.zeros(rows, np.int32),
        is_prefilling=np.zeros(rows, bool),
        token_ids=np.zeros(rows, np.int32),
        block_tables=(np.ones((rows, group.max_blocks), np.int32),),
    )
    batch = InputBuffers(limits, (group,), "cpu").stage(step, BatchShape(rows, rows, rows, rows, 1))
    buffers, token = DraftBuffers(limits, 5, "cpu"), torch.zeros(rows, dtype=torch.int64)
    with compiling() as found:
        geometry.stage_first(buffers, batch, batch.slot_mappings[0], token, token)
        geometry.stage_next(buffers, token, batch.block_tables[0], 16, True)
        geometry.stage_next(buffers, token.int(), batch.block_tables[0], 16, False)
    check(found, {"first_kernel", "chain_kernel"}, record_property, f"of {rows} rows")


@pytest.mark.parametrize("size", [1, 100, 8193, 50_257])
def test_truncation_of_a_vocabulary_of_any_size(size: int, record_property: Recorder) -> None:
    """Also one that is no multiple of 16, and one that Triton takes for a constant."""
    with FakeTensorMode(), compiling(on_device=True) as found:
        truncation.truncation_thresholds(on_cuda(3, size), on_cuda(3, 4))
    check(found, {*TRUNCATION}, record_property, f"of {size}")


def test_tensors_of_a_cpu_compile_the_same_kernels() -> None:
    """What is compiled depends on the interpreter alone, not on the device of the logits."""
    with FakeTensorMode(), compiling() as found:
        for device in ("cuda:0", "cpu"):
            truncation.truncation_thresholds(torch.empty(4, 32_768, device=device), torch.empty(4, 4, device=device))
    assert len(found.launches) == 2 * len(found.kernels) == 8
