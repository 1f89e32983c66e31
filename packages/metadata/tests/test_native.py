"""Kernels in C: compiled once, kept, and missing for a reason that is told."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bateleur.metadata import native
from bateleur.metadata.backends import _forms, _native

compiles = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
ADD = "void add(float *y, long n, float x, int twice) { for (long i = 0; i < n; i++) y[i] += twice ? 2 * x : x; }"
SIGNATURE = (("add", "plfi"),)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own for each test."""
    monkeypatch.setenv("HOME", str(tmp_path))
    forget()
    yield tmp_path / ".cache/bateleur"
    forget()


def forget() -> None:
    native._folder.cache_clear()
    native.kernels.cache_clear()
    native.missing.cache_clear()


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


def test_without_a_compiler_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr("sys.platform", "linux")
    assert native.missing() == "there is no gcc"


def test_other_systems_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert native.missing() == "kernels are compiled on Linux alone, and this is darwin"


def test_another_runtime_than_gccs_is_no_place_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/true")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(Path, "read_text", lambda _: "7f00-7f01 r-xp 0 00:00 1  /lib/libiomp5.so\n")
    assert "another OpenMP runtime" in str(native.missing())


def test_what_the_kernels_do_not_read_is_torchs() -> None:
    """Tables of int64, which C would take for others; and prompts beside decodes, each computed once."""
    make = torch.Generator().manual_seed(1)
    k_cache, v_cache, q = (
        torch.randn(*shape, generator=make) for shape in ((9, 4, 2, 8), (9, 4, 2, 8), (22, 4, 8))
    )
    table = torch.arange(1, 9, dtype=torch.int32).view(1, 8).repeat(3, 1)
    lens, starts = torch.tensor([5, 7, 30], dtype=torch.int32), torch.tensor([0, 1, 2, 22], dtype=torch.int32)
    want = _forms.paged_attention(q, k_cache, v_cache, table, lens, starts, 2, 20, 30, 0.35, 0)
    for rows in ((table, lens, starts), (table.long(), lens.long(), starts.long())):
        got = _native.paged_attention(q, k_cache, v_cache, *rows, 2, 20, 30, 0.35, 0)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
