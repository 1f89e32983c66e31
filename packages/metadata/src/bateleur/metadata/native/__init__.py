"""Kernels in C for a CPU, compiled where they run: by gcc, in half a second, once; the result is kept in
`~/.cache/bateleur`.

Who has no compiler runs the torch form of everything, and `unavailable_reason` says why. The rest of the process
knows no more of
this than which functions there are: C sees addresses and sizes, and has no headers but its own and the compiler's.

Kernels share the OpenMP runtime that torch has loaded, and so its threads: two runtimes would wait for each other's.
A process that is forked off has none of them, and would wait for them for ever, here and in torch. So once a kernel is
loaded, forks begin with `torch.set_num_threads(1)`, and have to stay with that.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

_HEADERS = Path(__file__).parent
_FLAGS = ("-x", "c", "-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC", "-fopenmp")
_KINDS: Mapping[str, Any] = {
    "p": ctypes.c_void_p,
    "l": ctypes.c_int64,
    "i": ctypes.c_int,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}
_DIGEST = hashlib.sha256().digest_size

Kernel = Callable[..., Any]


_BYTE = ctypes.c_char


def address(array: npt.NDArray[Any]) -> int:
    """Where a dense array begins that has an entry; `array.ctypes.data` takes five times as long."""
    if not array.flags.writeable:
        return array.ctypes.data
    buffer: Any = array
    return ctypes.addressof(_BYTE.from_buffer(buffer))


def entry(kernel: Kernel) -> int:
    """Where a function in C begins, for whoever calls it from C."""
    function: Any = kernel
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found


class NoCompiler(RuntimeError):
    """Why nothing can be compiled here."""


@cache
def kernels(source: Path, signatures: tuple[tuple[str, str], ...]) -> Mapping[str, Kernel]:
    """The functions of a C file, by name, compiled with the first call.

    signatures: of each its name and a letter for each argument: p an address, l int64, i int, f float, d double; those
    behind a `=` return an int64, the others nothing. They run without Python's lock.

    Raises NoCompiler, saying why.
    """
    _alone_in_forks()
    try:
        library = _library(source)
    except OSError as error:  # nowhere to write to, no /proc, a file system from which nothing may run
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
    """Why there are no kernels here, or None if there are."""
    try:
        kernels(_HEADERS / "probe.c", (("probe", "p"),))
    except NoCompiler as error:
        return str(error)
    return None


def finder(module: str, files: Mapping[str, Mapping[str, str]]) -> Callable[[str], Kernel | None]:
    """What finds a function by its name, None where nothing is compiled, for who has another form of it.

    module: the `__file__` of the module beside which the C files are. files: of each its functions, with their letters.
    """
    source_of = {
        name: (Path(module).with_name(file), tuple(functions.items()))
        for file, functions in files.items()
        for name in functions
    }

    @cache
    def kernel(name: str) -> Kernel | None:
        return None if unavailable_reason() is not None else kernels(*source_of[name])[name]

    return kernel


@cache
def _alone_in_forks() -> None:
    os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


def _library(source: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(_compiled(source)))


def _is_whole(library: Path) -> bool:
    """Whether a file ends with the digest of what comes before: loading one that was cut off ends the process."""
    data = library.read_bytes()
    return hashlib.sha256(data[:-_DIGEST]).digest() == data[-_DIGEST:]


def _compiled(source: Path) -> Path:
    compiler, runtime = _compiler(), _openmp()
    headers = [*sorted(_HEADERS.glob("*.h")), *sorted(source.parent.glob("*.h"))]
    texts = [source.read_bytes(), *(each.read_bytes() for each in headers)]
    made_by = compiler.resolve().stat()
    facts = [*_FLAGS, str(compiler), made_by.st_mtime, made_by.st_size, runtime, _processor()]
    name = hashlib.sha256(b"\0".join([*texts, repr(facts).encode()])).hexdigest()[:32]
    folder = _folder()
    target = folder / f"{source.stem}-{name}.so"
    if target.exists() and _is_whole(target):
        return target
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / target.name
        command = [str(compiler), *_FLAGS, f"-I{_HEADERS}", str(source), "-x", "none", runtime, "-lm"]
        command += ["-Wl,-z,defs", "-o", str(made)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
        if done.returncode:
            raise NoCompiler(f"{compiler} can't compile {source.name}: {done.stderr.strip()[-400:]}")
        with made.open("r+b") as written:
            written.write(hashlib.sha256(written.read()).digest())
            written.flush()
            os.fsync(written.fileno())
        made.replace(target)  # at once, whoever else compiles the same
    return target


def _compiler() -> Path:
    if not sys.platform.startswith("linux"):
        raise NoCompiler(f"kernels are compiled on Linux alone, and this is {sys.platform}")
    found = shutil.which("gcc") or shutil.which("cc")
    if found is None:
        raise NoCompiler("there is no gcc")
    return Path(found)


def _openmp() -> str:
    """The file of the runtime that torch runs on, whatever it is called: the linker notes its name. Other libraries may
    have brought one of their own.
    """
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    found = {each[-1].strip() for each in maps if Path(each[-1].strip()).name.startswith("libgomp")}
    if len(found) > 1:
        used = ctypes.cast(ctypes.CDLL(torch._C.__file__).omp_get_max_threads, ctypes.c_void_p).value or 0
        ends = [(tuple(int(end, 16) for end in each[0].split("-")), each[-1].strip()) for each in maps]
        found &= {path for (first, last), path in ends if first <= used < last}
    if len(found) != 1 or torch.__config__.parallel_info().find("OpenMP") < 0:
        raise NoCompiler(f"torch {torch.__version__} runs on another OpenMP runtime than gcc's")
    return found.pop()


def _processor() -> str:
    """What `-march=native` looks at, for caches that several machines share."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    kinds = ("model name", "flags", "CPU part", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))


@cache
def _folder() -> Path:
    """Where compiled files are kept; one that ends with the process where nothing else can be written to."""
    try:
        folder = Path("~/.cache/bateleur").expanduser()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK | os.X_OK) and folder.stat().st_uid == os.getuid():
            return folder
    except (OSError, RuntimeError):  # no home, or one that is not ours: slower, not wrong
        pass
    _folders.append(tempfile.TemporaryDirectory(prefix="bateleur-"))
    return Path(_folders[-1].name)


_folders: list[tempfile.TemporaryDirectory[str]] = []
