"""Compiler of the C kernels: gcc compiles each file once, in about 0.5 s, and caches the result in `~/.cache/bateleur`.

Without a compiler all operators use torch, and `unavailable_reason` returns why. Kernels use the OpenMP runtime that
torch has loaded, because two runtimes would compete for the cores. OpenMP threads do not survive a fork, and waiting
for them would hang. Once a kernel is loaded, forked processes therefore run with `torch.set_num_threads(1)` and must
keep it.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_HEADERS = Path(__file__).parent
_FLAGS = ("-x", "c", "-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC", "-fopenmp")
_KINDS: Mapping[str, Any] = {
    "p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float, "d": ctypes.c_double,
}  # fmt: skip
_DIGEST = hashlib.sha256().digest_size
_ALL_SECONDS = 7  # of an engine with a draft head: measured, two cores of an AMD EPYC
_log = logging.getLogger(__name__)

Kernel = Callable[..., Any]


def entry(kernel: Any) -> int:
    """Return the address of a C function, for calls from C."""
    return ctypes.cast(kernel, ctypes.c_void_p).value or 0


def pointers(*tensors: Tensor | None) -> list[int]:
    """Return the data pointer of each tensor, and 0 (NULL) for None. The caller must keep the tensors alive."""
    return [0 if each is None else each.data_ptr() for each in tensors]


class Struct(ctypes.Structure):
    """Argument of a C kernel: a struct of pointers and int64 numbers. The caller must keep the tensors alive."""

    def point(self, **values: Tensor | int | None) -> None:
        """Set fields by name. A tensor sets its data pointer, None sets NULL."""
        for name, value in values.items():
            assert hasattr(type(self), name), f"{type(self).__name__} has no field {name}"
            setattr(self, name, value.data_ptr() if isinstance(value, Tensor) else value)


def fields(addresses: str, numbers: str) -> list[tuple[str, Any]]:
    """Return ctypes fields of a :class:`Struct`: pointers ``addresses``, int64 ``numbers``. Spaces separate names."""
    kinds = (addresses, ctypes.c_void_p), (numbers, ctypes.c_int64)
    return [(name, kind) for names, kind in kinds for name in names.split()]


class NoCompiler(RuntimeError):
    """C kernels cannot be compiled or loaded here; the message says why."""


@cache
def kernels(source: Path, signatures: tuple[tuple[str, str], ...]) -> Mapping[str, Kernel]:
    """Compile a C file at the first call and return its functions by name.

    signatures: (name, argument types) with p for pointer, l int64, i int, f float, d double. After a leading `=` the
    function returns int64, otherwise nothing. Calls release the GIL. Raises NoCompiler with the reason.
    """
    _alone_in_forks()
    try:
        library = ctypes.CDLL(str(_compiled(source)))
    except OSError as error:  # no writable folder, no /proc, or a noexec file system
        raise NoCompiler(f"{source.name} can't be compiled and loaded: {error}") from error
    found = {}
    for name, letters in signatures:
        function = getattr(library, name)
        function.argtypes = [_KINDS[letter] for letter in letters.removeprefix("=")]
        function.restype = ctypes.c_int64 if letters.startswith("=") else None
        found[name] = function
    return found


@cache
def unavailable_reason() -> str | None:
    """Return why C kernels are not available, or None if they are."""
    try:
        kernels(_HEADERS / "probe.c", (("probe", "p"),))
    except NoCompiler as error:
        return str(error)
    return None


@cache
def _announce() -> None:
    _log.info("compiling CPU kernels once, about %d s", _ALL_SECONDS)


@cache
def _alone_in_forks() -> None:
    os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


def _is_whole(library: Path) -> bool:
    """Return whether a file ends with the digest of its contents. Loading a truncated library would end the process."""
    data = library.read_bytes()
    return hashlib.sha256(data[:-_DIGEST]).digest() == data[-_DIGEST:]


def _compiled(source: Path) -> Path:
    if not sys.platform.startswith("linux"):
        raise NoCompiler(f"C kernels need Linux, and this is {sys.platform}")
    found = shutil.which("gcc") or shutil.which("cc")
    if found is None:
        raise NoCompiler("there is no gcc")
    compiler, runtime = Path(found), _openmp()
    headers = [*sorted(_HEADERS.glob("*.h")), *sorted(source.parent.glob("*.h"))]
    texts = [source.read_bytes(), *(each.read_bytes() for each in headers)]
    made_by = compiler.resolve().stat()
    facts = [*_FLAGS, str(compiler), made_by.st_mtime, made_by.st_size, runtime, _processor()]
    name = hashlib.sha256(b"\0".join([*texts, repr(facts).encode()])).hexdigest()[:32]
    folder = _folder()
    target = folder / f"{source.stem}-{name}.so"
    if target.exists() and _is_whole(target):
        return target
    _announce()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / target.name
        command = [str(compiler), *_FLAGS, f"-I{_HEADERS}", str(source), "-x", "none", runtime, "-lm"]
        command += ["-Wl,-z,defs", "-o", str(made)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        if done.returncode:
            raise NoCompiler(f"{compiler} can't compile {source.name}: {done.stderr.strip()[-400:]}")
        with made.open("r+b") as written:
            written.write(hashlib.sha256(written.read()).digest())
            written.flush()
            os.fsync(written.fileno())
        made.replace(target)  # atomic, because another process may compile the same file
    return target


def _openmp() -> str:
    """Return the path of torch's OpenMP runtime. Other libraries may have loaded another one."""
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    found = {each[-1].strip() for each in maps if Path(each[-1].strip()).name.startswith("libgomp")}
    if len(found) > 1:
        used = ctypes.cast(ctypes.CDLL(torch._C.__file__).omp_get_max_threads, ctypes.c_void_p).value or 0
        ends = [(tuple(int(end, 16) for end in each[0].split("-")), each[-1].strip()) for each in maps]
        found &= {path for (first, last), path in ends if first <= used < last}
    if len(found) != 1 or torch.__config__.parallel_info().find("OpenMP") < 0:
        raise NoCompiler(f"torch {torch.__version__} does not use gcc's OpenMP runtime")
    return found.pop()


def _processor() -> str:
    """Return a text of the CPU properties that `-march=native` depends on, for caches shared by several machines."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    kinds = ("model name", "flags", "CPU part", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))


@cache
def _folder() -> Path:
    """Return `~/.cache/bateleur`, or a temporary folder if that folder is not writable or another user's."""
    try:
        folder = Path("~/.cache/bateleur").expanduser()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK | os.X_OK) and folder.stat().st_uid == os.getuid():
            return folder
    except (OSError, RuntimeError):  # no usable home folder: compile again in each process
        pass
    _folders.append(tempfile.TemporaryDirectory(prefix="bateleur-"))
    return Path(_folders[-1].name)


_folders: list[tempfile.TemporaryDirectory[str]] = []
