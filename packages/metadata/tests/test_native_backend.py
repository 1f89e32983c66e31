"""C kernels: compiled once and cached; without a compiler, the reason is reported."""

from __future__ import annotations

import ctypes
import logging
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bateleur.metadata import native, ops
from bateleur.metadata.backends import _native_ops, _torch_ops

compiles = pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason()))
ADD = "void add(float *y, long n, float x, int twice) { for (long i = 0; i < n; i++) y[i] += twice ? 2 * x : x; }"
SIGNATURE = (("add", "plfi"),)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use a new compilation cache for each test."""
    monkeypatch.setenv("HOME", str(tmp_path))
    forget()
    yield tmp_path / ".cache/bateleur"
    forget()


def forget() -> None:
    native._announce.cache_clear()
    native._folder.cache_clear()
    native.kernels.cache_clear()
    native.unavailable_reason.cache_clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "add.c"
    path.write_text(ADD)
    return path


@compiles
def test_a_file_is_compiled_once(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = (ctypes.c_float * 3)(1, 2, 3)
    native.kernels(source, SIGNATURE)["add"](ctypes.addressof(numbers), 2, 0.5, 1)
    assert list(numbers) == [2, 3, 3]
    (made,) = folder.iterdir()
    native.kernels.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    native.kernels(source, SIGNATURE)["add"](ctypes.addressof(numbers), 3, 1.0, 0)
    assert list(numbers) == [3, 4, 4]
    assert list(folder.iterdir()) == [made]


@compiles
def test_compilation_is_announced_once(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, native.__name__)
    for text in (ADD, ADD, ADD.replace("2 * x", "3 * x")):  # compiled, cached, compiled
        source.write_text(text)
        native.kernels.cache_clear()
        native.kernels(source, SIGNATURE)
    assert caplog.messages == ["compiling CPU kernels once, about 7 s"]
    native._announce.cache_clear()
    native.kernels.cache_clear()
    native.kernels(source, SIGNATURE)
    assert len(caplog.messages) == 1, "a cached file needs no announcement"


@compiles
def test_another_text_is_another_file(source: Path, folder: Path) -> None:
    native.kernels(source, SIGNATURE)
    source.write_text(ADD.replace("2 * x", "3 * x"))
    native.kernels.cache_clear()
    numbers = (ctypes.c_float * 1)(1)
    native.kernels(source, SIGNATURE)["add"](ctypes.addressof(numbers), 1, 1.0, 1)
    assert list(numbers) == [4]
    assert len(list(folder.iterdir())) == 2


@compiles
def test_what_does_not_compile_is_told_and_leaves_nothing(source: Path, folder: Path) -> None:
    source.write_text("void add(")
    with pytest.raises(native.NoCompiler, match=r"gcc can't compile add\.c: (?s:.)*error"):
        native.kernels(source, SIGNATURE)
    assert list(folder.iterdir()) == []


@compiles
def test_a_folder_that_cannot_be_written_to_is_passed_over(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".cache").touch()
    assert native._folder() != tmp_path / ".cache/bateleur"
    assert "add" in native.kernels(source, SIGNATURE)


@compiles
@pytest.mark.parametrize("part", [0.0, 0.5, 0.999])
def test_a_file_that_was_cut_off_is_compiled_again(source: Path, part: float) -> None:
    """Loading a truncated library would end the process."""
    made = native._compiled(source)
    data = made.read_bytes()
    made.write_bytes(data[: int(part * len(data))])
    assert "add" in native.kernels(source, SIGNATURE)
    assert made.stat().st_size == len(data)


SECOND = """
import ctypes, shutil, torch
from bateleur.metadata import native
own = native._openmp()
ctypes.CDLL(shutil.copy(own, {!r}))
assert native._openmp() == own
"""


@compiles
def test_a_second_runtime_in_the_process_is_not_torchs(fresh: Callable[[str], str], tmp_path: Path) -> None:
    """A second OpenMP runtime, as scikit-learn ships one."""
    fresh(SECOND.format(str(tmp_path / "libgomp-other.so.1")))


@pytest.mark.parametrize("script", ["#!/nowhere/sh\n", "no program", "#!/bin/sh\nexit 0\n"])
def test_a_compiler_that_does_not_run_is_none(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gcc = tmp_path / "gcc"
    gcc.write_text(script)
    gcc.chmod(0o700)
    monkeypatch.setattr("shutil.which", lambda _: str(gcc))
    assert str(native.unavailable_reason()).startswith("probe.c can't be compiled and loaded: [Errno")


def test_where_nothing_can_be_written_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.TemporaryDirectory", full)
    assert "No usable temporary directory" in str(native.unavailable_reason())


def test_without_a_compiler_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr("sys.platform", "linux")
    assert native.unavailable_reason() == "there is no gcc"


def test_other_systems_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert native.unavailable_reason() == "C kernels need Linux, and this is darwin"


def test_another_runtime_than_gccs_is_no_place_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/true")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(Path, "read_text", lambda _: "7f00-7f01 r-xp 0 00:00 1  /lib/libiomp5.so\n")
    assert "OpenMP runtime" in str(native.unavailable_reason())


def test_what_the_kernels_do_not_read_is_torchs() -> None:
    """int64 tables, which C would misread, give the results of int32 tables."""
    make = torch.Generator().manual_seed(1)
    k_cache, v_cache, q = (torch.randn(*shape, generator=make) for shape in ((9, 4, 2, 8), (9, 4, 2, 8), (22, 4, 8)))
    table = torch.arange(1, 9, dtype=torch.int32).view(1, 8).repeat(3, 1)
    lens, starts = torch.tensor([5, 7, 30], dtype=torch.int32), torch.tensor([0, 1, 2, 22], dtype=torch.int32)
    want = _torch_ops.paged_attention(q, k_cache, v_cache, table, lens, starts, 2, 20, 30, 0.35, 0)
    for rows in ((table, lens, starts), (table.long(), lens.long(), starts.long())):
        got = _native_ops.paged_attention(q, k_cache, v_cache, *rows, 2, 20, 30, 0.35, 0)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_what_is_not_dense_is_torchs() -> None:
    """Interleaved keys and values, column-major tables, strided lengths and starts."""
    make = torch.Generator().manual_seed(1)
    blocks, tokens = torch.randn(9, 2, 4, 2, 8, generator=make), torch.randn(9, 4, 2, 16, generator=make)
    q, k = torch.randn(3, 4, 8, generator=make), torch.randn(3, 2, 8, generator=make)
    table = torch.arange(1, 9, dtype=torch.int32).view(1, 8).repeat(3, 1)
    lens, starts = torch.tensor([5, 7, 30], dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    slots, sizes = torch.tensor([4, 9, 35]), (3, 1, 30, 0.35, 0)
    halves = tokens[..., :8].contiguous(), tokens[..., 8:].contiguous()
    want = _torch_ops.paged_attention(q, *halves, table, lens, starts, *sizes)
    apart = table.t().contiguous().t(), *(torch.stack([x, x + 1], 1)[:, 0] for x in (lens, starts))
    for tables in ((apart[0], lens, starts), (table, apart[1], starts), (table, lens, apart[2])):
        torch.testing.assert_close(_native_ops.paged_attention(q, *halves, *tables, *sizes), want)
    torch.testing.assert_close(
        _native_ops.paged_attention(q, tokens[..., :8], tokens[..., 8:], table, lens, starts, *sizes), want
    )
    with pytest.raises(RuntimeError, match="view"):
        _native_ops.paged_attention(q, blocks[:, 0], blocks[:, 1], table, lens, starts, *sizes)
    with pytest.raises(RuntimeError, match="view"):
        _native_ops.write_kv(q, k, k, blocks[:, 0], blocks[:, 1], slots, None, None)
    _native_ops.write_kv(q, k, k, *halves, torch.stack([slots, slots + 1], 1)[:, 0], None, None)
    torch.testing.assert_close(halves[1].flatten(0, 1)[slots], k)


class Names(TorchDispatchMode):
    """Return the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_kernels_are_operators_for_whoever_records_them() -> None:
    cache, x = torch.zeros(2, 4, 1, 8), torch.ones(1, 1, 8)
    for names in (nullcontext(), Names()):
        with names as recorded:
            ops.native_write_kv(x.clone(), x, x, cache, cache, torch.tensor([5]), None, None)
        assert cache[1, 1].eq(1).all()
        cache.zero_()
    assert recorded.seen[-1] == "bateleur::native_write_kv"


@compiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 13])
@pytest.mark.parametrize("size", [24, 64, 300])
def test_a_query_has_the_same_bits_alone_and_within_a_prompt(size: int, window: int, dtype: torch.dtype) -> None:
    """Many queries share float32 copies of bfloat16 keys; wide heads process fewer tokens at once."""
    make = torch.Generator().manual_seed(size)
    long, scale = 2 + (1 << 16) // size, size**-0.5
    length, tokens = torch.tensor([150, long], dtype=torch.int32), [140, 70]
    blocks = -(-long // 8)
    k, v = (torch.randn(1 + 2 * blocks, 8, 2, size, generator=make).to(dtype) for _ in range(2))
    table = 1 + torch.randperm(2 * blocks, generator=make).int().view(2, blocks)
    q = torch.randn(sum(tokens), 6, size, generator=make).to(dtype)
    starts = torch.tensor([0, 140, 210], dtype=torch.int32)
    together = _native_ops.paged_attention(q, k, v, table, length, starts, 0, 140, long, scale, window)
    want = _torch_ops.paged_attention(
        *(each.double() for each in (q, k, v)), table, length, starts, 0, 140, long, scale, window
    )
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(together.double(), want, rtol=2 * eps, atol=20 * 2.0**-24)
    for row, t in ((0, 0), (0, 63), (0, 64), (0, 139), (1, 140), (1, 209)):
        seen = length[row : row + 1] - (starts[row + 1] - 1 - t)
        alone = _native_ops.paged_attention(
            q[t : t + 1], k, v, table[row : row + 1], seen.int(), torch.tensor([0, 1]).int(), 1, 1, long, scale, window
        )
        assert torch.equal(alone[0], together[t]), (row, t)


@compiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_and_blocks_outside_the_cache_are_refused(dtype: torch.dtype) -> None:
    """C would read outside of the tensors."""
    cache = torch.zeros(9, 4, 2, 8, dtype=dtype)
    q, k = torch.ones(2, 4, 8, dtype=dtype), torch.ones(2, 2, 8, dtype=dtype)
    with pytest.raises(IndexError, match=r"^slot_mapping: slot 36 is outside the 36 of the cache$"):
        _native_ops.write_kv(q, k, k, cache, cache, torch.tensor([3, 36]), None, None)
    assert not cache.any()
    _native_ops.write_kv(q, k, k, cache, cache, torch.tensor([-1, 35]), None, None)
    lens, starts = torch.tensor([3, 9], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
    table = torch.tensor([[1, 99, -7], [2, 3, 8]], dtype=torch.int32)

    def attend(lens: torch.Tensor, starts: torch.Tensor, window: int = 0) -> torch.Tensor:
        return _native_ops.paged_attention(q, cache, cache, table, lens, starts, 2, 1, 9, 0.3, window)

    assert attend(lens, starts).shape == q.shape, "keys after a row's length are not read"
    text = r"^block_table: row {}, of {} tokens in a table of 3 blocks, names a block outside the 9 of the cache, or "
    for block in (9, -1):
        table[1, 0] = block
        with pytest.raises(IndexError, match=text.format(1, 9)):
            attend(lens, starts)
        attend(lens, starts, 3)  # it sees no token of that block
    with pytest.raises(IndexError, match=text.format(0, 13)):
        attend(lens + 10, starts)
    with pytest.raises(IndexError, match=text.format(0, 3) + "tokens outside the 2 of q$"):
        attend(lens, torch.tensor([0, 3, 2], dtype=torch.int32))


FORKED = """
import os, signal, torch
from bateleur.metadata.backends import _native_ops
torch.set_num_threads(2)
q, cache = torch.randn(64, 4, 64), torch.randn(9, 16, 2, 64)
table, one = torch.arange(1, 9, dtype=torch.int32).view(1, 8), torch.tensor([64], dtype=torch.int32)
def attend():
    starts = torch.tensor([0, 64], dtype=torch.int32)
    return _native_ops.paged_attention(q, cache, cache, table, one, starts, 0, 64, 64, 0.2, 0)
want, child = attend(), os.fork()
if not child:
    signal.alarm(30)
    os._exit(0 if torch.equal(attend(), want) and torch.get_num_threads() == 1 else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.get_num_threads() == 2
"""


@compiles
def test_a_process_that_is_forked_off_computes_alone(fresh: Callable[[str], str]) -> None:
    """OpenMP threads do not survive a fork; waiting for them would hang."""
    fresh(FORKED)
