"""Launches at published sizes, compiled for sm_90 without a GPU: spills, shared memory, occupancy, instructions."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import sm90
from bateleur.metadata._device_fields import DeviceFields, DeviceStep
from bateleur.metadata.backends import _launch_config
from bateleur.metadata.kernels import cuda_ops, device_fields

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="nothing compiles in Triton's interpreter"
)

Compile = Callable[[], Any]
KEYS = 8192
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
SHAPES = {  # query heads, key heads, lanes of a head
    "Llama-3.1-8B": (32, 8, 128),
    "Nemotron-3-Nano-30B-A3B": (32, 2, 128),
    "Qwen3.5-9B": (16, 4, 256),
    "Qwen3.5-35B-A3B": (16, 2, 256),
    "Kimi-Linear-48B-A3B": (32, 32, 192),
    "shipped": (4, 2, 64),
}
QUERY_LENS = (1, 5, 16, 64)
"""max_query_len of decodes, drafts, the longest short rows, and mixed batches: all tile sizes of a model."""


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """132 multiprocessors with 227 KiB of shared memory for a block."""
    monkeypatch.setattr(_launch_config, "device_sizes", lambda device: (sm90.MULTIPROCESSORS, sm90.SHARED_BYTES))
    _launch_config._work_shape.cache_clear()
    yield
    _launch_config._work_shape.cache_clear()


def attend(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    query_len: int,
    window: int = 0,
    block_size: int = 16,
    with_sinks: bool = False,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Attention of 3 rows; queries are a part of a projection, as in a model. Caches of ``kv_dtype`` have scales."""
    heads, kv_heads, lanes = shape
    rows = 3
    q = torch.empty(rows * query_len, heads + 2 * kv_heads, lanes, dtype=dtype)[:, :heads]
    cache = torch.empty(2, block_size, kv_heads, lanes, dtype=kv_dtype or dtype)
    table = torch.zeros(rows, KEYS // block_size, dtype=torch.int32)
    lengths = torch.zeros(rows, dtype=torch.int32)
    starts = torch.zeros(rows + 1, dtype=torch.int32)
    sinks = torch.zeros(heads) if with_sinks else None
    bounds = 0, query_len, KEYS, lanes**-0.5, window
    scales = None if kv_dtype is None else torch.empty(2, kv_heads)
    cuda_ops.paged_attention(q, cache, cache, table, lengths, starts, *bounds, None, sinks, scales)


def checked(found: sm90.Compiled, record: Callable[[str, object], None], name: str) -> list[sm90.Kernel]:
    """Return the launched kernels after checking that none has a fault."""
    for kernel in found.kernels:
        assert not sm90.faults_of(kernel)
        tile = "x".join(str(size) for key, size in kernel.options.items() if key.startswith("BLOCK_"))
        usage = kernel.registers, kernel.spilled_bytes, kernel.shared_bytes
        record("kernel", (f"metadata {kernel.name} {name} {tile}", *usage))
    return found.kernels


@pytest.mark.parametrize(
    ("model", "dtype"),
    sm90.slow_unless(
        [("Qwen3.5-9B", BF16), ("shipped", FP32)],
        [(model, BF16) for model in SHAPES] + [(model, FP32) for model in ("Llama-3.1-8B", "Qwen3.5-9B", "shipped")],
    ),
    ids=str,
)
def test_attention_fits_hopper(model: str, dtype: torch.dtype, record_property: Callable[[str, object], None]) -> None:
    with sm90.compiling() as found:
        for query_len in QUERY_LENS:
            attend(SHAPES[model], dtype, query_len)
    kernels = checked(found, record_property, f"{model} {dtype}")
    assert {kernel.name for kernel in kernels} == {"work_kernel", "attention_kernel", "join_kernel"}
    for kernel in kernels:
        if kernel.name == "attention_kernel":
            assert kernel.instructions["fetches ahead"], f"{kernel}: keys and values are not fetched ahead"
            if dtype != FP32:
                products = "wgmma" if kernel.options["BLOCK_M"] >= 64 else "mma"
                assert kernel.instructions[products], f"{kernel}: tensor cores are not used"


@pytest.mark.parametrize(
    ("dtype", "window", "block_size"),
    sm90.slow_unless([(BF16, 4096, 16)], [(FP16, 0, 16), (BF16, 4096, 16), (FP32, 4096, 16), (BF16, 0, 64)]),
    ids=str,
)
def test_other_attention_fits_hopper(
    dtype: torch.dtype, window: int, block_size: int, record_property: Callable[[str, object], None]
) -> None:
    """Half precision, sliding windows, and blocks as long as a loop iteration."""
    with sm90.compiling() as found:
        for query_len in QUERY_LENS:
            attend(SHAPES["Llama-3.1-8B"], dtype, query_len, window, block_size)
    checked(found, record_property, f"{dtype} window {window} block {block_size}")


@pytest.mark.parametrize(
    ("dtype", "window"), sm90.slow_unless([(BF16, 128)], itertools.product([BF16, FP32], [0, 128])), ids=str
)
def test_attention_with_sinks_fits_hopper(
    dtype: torch.dtype, window: int, record_property: Callable[[str, object], None]
) -> None:
    """Both kinds of layers of gpt-oss."""
    with sm90.compiling() as found:
        for query_len in QUERY_LENS:
            attend((64, 8, 64), dtype, query_len, window, with_sinks=True)
    kernels = checked(found, record_property, f"gpt-oss {dtype} window {window}")
    assert {kernel.name for kernel in kernels} == {"work_kernel", "attention_kernel", "join_kernel"}


@pytest.mark.parametrize(
    ("model", "dtype", "kv_dtype"),
    sm90.slow_unless(
        [("Nemotron-3-Nano-30B-A3B", BF16, FP8)],
        [(model, BF16, FP8) for model in SHAPES]
        + [(model, FP32, FP8) for model in ("Llama-3.1-8B", "Qwen3.5-9B", "shipped")]
        + [("Llama-3.1-8B", FP16, FP8), ("Qwen3.5-9B", BF16, FP32), ("Qwen3.5-9B", FP32, BF16)],
    ),
    ids=str,
)
def test_attention_over_caches_of_another_dtype_fits_hopper(
    model: str, dtype: torch.dtype, kv_dtype: torch.dtype, record_property: Callable[[str, object], None]
) -> None:
    with sm90.compiling() as found:
        for query_len in QUERY_LENS:
            attend(SHAPES[model], dtype, query_len, kv_dtype=kv_dtype)
    for kernel in checked(found, record_property, f"{model} {dtype} over {kv_dtype}"):
        if kernel.name == "attention_kernel" and dtype != FP32:
            assert kernel.instructions["fetches ahead"], f"{kernel}: keys and values are not fetched ahead"
            products = "wgmma" if kernel.options["BLOCK_M"] >= 64 else "mma"
            assert kernel.instructions[products], f"{kernel}: tensor cores are not used"


def test_a_program_reaches_its_first_key_without_a_barrier() -> None:
    """A program reads one entry of the work list, so there is no search with barriers before the first key."""
    with sm90.compiling() as found:
        attend(SHAPES["Llama-3.1-8B"], BF16, 1)
    (kernel,) = (each for each in found.kernels if each.name == "attention_kernel")
    first = next(i for i, line in enumerate(kernel.sass) if line.startswith("LDGSTS") or " LDGSTS" in line)
    assert not [line for line in kernel.sass[:first] if "BAR.SYNC" in line]
    assert first < 400


@pytest.mark.slow
@pytest.mark.published_sizes
def test_one_specialisation_makes_the_work_lists_of_all_models() -> None:
    with sm90.compiling() as found:
        for shape in SHAPES.values():
            for query_len in QUERY_LENS:
                attend(shape, BF16, query_len, window=query_len)
    assert [kernel.name for kernel in found.kernels].count("work_kernel") == 1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "lanes", "rotary", "norm"),
    [
        (32, 8, 128, 128, ""),
        (32, 2, 128, 0, ""),
        (16, 4, 256, 64, "head"),
        (16, 2, 256, 64, "head"),
        (32, 32, 192, 0, ""),
        (32, 8, 128, 128, "head"),
        (30, 30, 128, 0, "whole"),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(BF16, None), (FP16, None), (FP32, None), (BF16, FP8), (FP32, FP8)], ids=str
)
def test_write_fits_hopper(
    heads: int,
    kv_heads: int,
    lanes: int,
    rotary: int,
    norm: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    record_property: Callable[[str, object], None],
) -> None:
    tokens = 3
    sizes = [heads, kv_heads, kv_heads]
    q, k, v = torch.empty(tokens, sum(sizes), lanes, dtype=dtype).split(sizes, 1)
    caches = [torch.empty(2, 16, kv_heads, lanes, dtype=kv_dtype or dtype) for _ in range(2)]
    slots = torch.zeros(tokens, dtype=torch.int64)
    turns = [torch.empty(tokens, 1, rotary, dtype=dtype) if rotary else None for _ in range(2)]
    weights: list[Any] = [None, None]
    if norm:
        weights = [torch.empty(lanes * (count if norm == "whole" else 1)) for count in (heads, kv_heads)]
    kv_scales = None if kv_dtype is None else torch.empty(2, kv_heads)
    with sm90.compiling() as found:
        cuda_ops.rotate_and_write_kv(q, k, v, *caches, slots, *turns, *weights, 1e-6, kv_scales)
    checked(found, record_property, f"{heads}, {kv_heads} of {lanes}, {rotary} turn, {norm} {dtype}")


def test_staging_fits_hopper(record_property: Callable[[str, object], None]) -> None:
    rows, tokens, columns = 256, 8192, 512
    ints = {name: torch.zeros(size, dtype=torch.int32) for name, size in (("rows", rows), ("tokens", tokens))}
    table, places = torch.zeros(rows, columns, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    slots = torch.zeros(tokens, dtype=torch.int64)
    starts = torch.zeros(rows + 1, dtype=torch.int32)
    with sm90.compiling() as found:
        for groups in ((), ((slots, table, 16),), ((slots, table, 16), (slots, table, 32))):
            fields = DeviceFields(ints["tokens"], slots, starts, ints["rows"], ints["rows"], groups, 0)
            device_fields.expand(fields, DeviceStep(3, 7, places[:3], starts[:4], places))
        device_fields.gather_block_tables(table, table, ints["rows"], places, 33)
        device_fields.write_cells(table, table, ints["rows"], places, places)
    names = {kernel.name for kernel in checked(found, record_property, "")}
    assert names == {"device_fields_kernel", "gather_block_tables_kernel", "write_block_ids_kernel"}


@pytest.mark.parametrize(
    ("capability", "kib", "lanes"),
    sm90.slow_unless([(89, 99, 256)], [(80, 163, 128), (80, 163, 256), (89, 99, 128), (89, 99, 256)]),
)
def test_attention_fits_devices_with_less_shared_memory(
    monkeypatch: pytest.MonkeyPatch, capability: int, kib: int, lanes: int
) -> None:
    """sm_86 and sm_120 have as much shared memory as sm_89. float32 needs less. Head dimension 192 uses the tile of
    256.
    """
    monkeypatch.setattr(_launch_config, "device_sizes", lambda device: (108, kib << 10))
    _launch_config._work_shape.cache_clear()
    monkeypatch.setitem(sm90._PROPERTIES, "max_shared_mem", kib << 10)
    with sm90.compiling(capability=capability) as found:
        for query_len in (1, 64):
            attend((16, 4, lanes), BF16, query_len)
    assert max(kernel.shared_bytes for kernel in found.kernels) > 64 << 10, "the largest tiles"
