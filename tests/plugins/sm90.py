"""Triton without a GPU: every launch compiles its kernel for sm_90 with its real arguments, and runs nothing.

`compiling()` replaces Triton's driver. A compile error, a wrong argument type, too much shared memory and a grid out of
bounds raise, as on an H100 or H200. Registers, spilled bytes and occupancy are read from ptxas's output. Tensors may be
on a CPU, or fake. No tensor is written, so only shapes and exceptions of a run are meaningful.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from sass import faults_of_products
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import ty_to_cpp
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

MULTIPROCESSORS = 132
SHARED_BYTES = 227 << 10
"""Limit per block. A multiprocessor has 228 KiB, of which each block reserves 1 KiB."""
_GRID = (2**31 - 1, 65535, 65535)
_PROPERTIES = {
    "max_shared_mem": SHARED_BYTES,
    "multiprocessor_count": MULTIPROCESSORS,
    "max_num_regs": 65536,
    "warpSize": 32,
    "sm_clock_rate": 1980000,
    "mem_clock_rate": 2619000,
    "mem_bus_width": 5120,
}
INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async\b",
    "mma": r"\bmma\.sync\b",
    "fetches ahead": r"\bcp\.async\.c[ag]\b",
    "barriers": r"\bbar(?:rier)?\.",
    "wide loads": r"\bld\.global[\w.:]*\.v(?:4\.b32|2\.b64)\b",
}
"""Instructions that matter for speed, by their PTX names."""


@dataclass(eq=False)
class Kernel:
    """One specialisation of a kernel, compiled for sm_90.

    Attributes:
        fn: the function under `triton.jit`.
        options: values of its constants, by name.
        cubin, ptx: the code.
        threads: of a block.
        shared_bytes: of a block.
        compile_seconds: 0 if it came from Triton's cache on disk.
    """

    fn: JITFunction[Any]
    options: dict[str, Any]
    cubin: bytes
    ptx: str
    threads: int
    shared_bytes: int
    compile_seconds: float

    @property
    def name(self) -> str:
        """Name of the function."""
        return str(self.fn.__name__)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.options.items())})"

    @cached_property
    def _usage(self) -> tuple[int, int]:
        text = _tool("cuobjdump", "-res-usage", self.cubin)
        found = re.search(r"REG:(\d+) STACK:(\d+)", text)
        assert found, text
        return int(found[1]), int(found[2])

    @property
    def registers(self) -> int:
        """Registers per thread."""
        return self._usage[0]

    @property
    def spilled_bytes(self) -> int:
        """Stack bytes per thread: in Triton's kernels, only spilled registers."""
        return self._usage[1]

    @property
    def occupancy(self) -> tuple[int, str]:
        """Blocks that a multiprocessor holds at once, and the resource that limits them."""
        warps = self.threads // 32
        limits = {
            "registers": 65536 // (-(-self.registers * 32 // 256) * 256 * warps),
            "shared memory": (228 << 10) // (self.shared_bytes + 1024),
            "threads": 2048 // self.threads,
            "blocks": 32,
        }
        limit = min(limits, key=lambda name: limits[name])
        return limits[limit], limit

    @cached_property
    def instructions(self) -> dict[str, int]:
        """Number of occurrences of each of `INSTRUCTIONS`."""
        return {name: len(re.findall(code, self.ptx)) for name, code in INSTRUCTIONS.items()}

    @cached_property
    def sass(self) -> list[str]:
        """The machine instructions in order, without their encoding."""
        text = _tool("cuobjdump", "-sass", self.cubin)
        return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", text, re.MULTILINE)

    @property
    def usage(self) -> dict[str, Any]:
        """Resources as numbers, for a record."""
        blocks, limit = self.occupancy
        return {
            "registers": self.registers,
            "spilled_bytes": self.spilled_bytes,
            "shared_bytes": self.shared_bytes,
            "threads": self.threads,
            "blocks_per_multiprocessor": blocks,
            "limit": limit,
        }


def _tool(name: str, flag: str, cubin: bytes) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, flag, file.name], capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class Launch:
    """One launch: its kernel, its grid, and its tensor arguments as (shape, dtype) by name."""

    kernel: Kernel
    grid: tuple[int, int, int]
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]

    @property
    def programs(self) -> int:
        """Number of blocks of the grid."""
        x, y, z = self.grid
        return x * y * z


@dataclass
class Compiled:
    """The launches since `compiling` began.

    launches: in order. on_device: whether tensors that are not on CUDA raise, as on a GPU.
    """

    launches: list[Launch] = field(default_factory=list)
    on_device: bool = False
    _by_function: dict[int, Kernel] = field(default_factory=dict)

    @property
    def kernels(self) -> list[Kernel]:
        """Each launched specialisation once, in the order of first launches."""
        return list(dict.fromkeys(launch.kernel for launch in self.launches))

    def kernels_since(self, begin: int) -> list[Kernel]:
        """The specialisations whose first launch is at or after number ``begin``."""
        before = {launch.kernel for launch in self.launches[:begin]}
        return [each for each in dict.fromkeys(x.kernel for x in self.launches[begin:]) if each not in before]


class _Address:
    """Replaces a tensor in a launch: its dtype, and an address aligned as on a device."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._address = tensor.storage_offset() * tensor.element_size()  # torch aligns allocations to 512 bytes

    def data_ptr(self) -> int:
        return self._address


class _Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return _PROPERTIES

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[object, str, int, int, int]:
        return object(), name, 0, 0, 1024


class _Launcher:
    """Replaces the code that calls the driver."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._name = metadata.name

    def __call__(self, x: int, y: int, z: int, *arguments: Any) -> None:
        for axis, size, most in zip("xyz", (x, y, z), _GRID, strict=True):
            if not 0 <= size <= most:
                raise ValueError(f"{self._name}: grid {axis} is {size}; CUDA allows 0 to {most}")


class _Driver:
    """Replaces Triton's GPU driver."""

    def __init__(self, capability: int) -> None:
        self.utils, self.launcher_cls = _Utils(), _Launcher
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # Triton caches compiled kernels by device

    def set_current_device(self, device: int) -> None:
        assert device == self._capability, device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        return divmod(self._capability, 10)

    def map_python_to_cpp_type(self, name: str) -> str:
        return str(ty_to_cpp(name))

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


_KERNELS: dict[tuple[int, str], Kernel] = {}
"""By function and hash: Triton compiles a specialisation once per process."""


def _kernel_of(fn: JITFunction[Any], compiled: Any, seconds: float) -> Kernel:
    known = _KERNELS.get((id(fn), compiled.hash))
    if known is None:
        constants = {fn.arg_names[path[0]]: value for path, value in compiled.src.constants.items()}
        known = Kernel(
            fn=fn,
            options=constants,
            cubin=compiled.asm["cubin"],
            ptx=compiled.asm["ptx"],
            threads=32 * compiled.metadata.num_warps,
            shared_bytes=compiled.metadata.shared,
            compile_seconds=seconds,
        )
        _KERNELS[id(fn), compiled.hash] = known
    return known


@contextmanager
def naming() -> Iterator[set[JITFunction[Any]]]:
    """Record which kernels are launched, without compiling or running them."""
    found: set[JITFunction[Any]] = set()
    run = JITFunction.run
    JITFunction.run = lambda fn, *_, **__: found.add(fn)  # type: ignore[method-assign]
    try:
        yield found
    finally:
        JITFunction.run = run  # type: ignore[method-assign]


@contextmanager
def compiling(*, on_device: bool = False, capability: int = 90) -> Iterator[Compiled]:
    """Compile launches for sm_90, or another ``capability``, in place of running them.

    on_device: refuse tensors that are not on CUDA, for runs on fake tensors of a CUDA device.

    Raises (from launches): `ValueError` for a grid out of bounds or a tensor on the wrong device; Triton's
    `CompilationError` and `OutOfResources`.
    """
    found, run, seconds = Compiled(on_device=on_device), JITFunction.run, [0.0]

    def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
        stages = sum(micros for _, micros in times.lowering_stages)
        seconds[0] = 0.0 if cache_hit else (stages + times.ir_initialization + times.store_results) / 1e6

    def launch(fn: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        tensors = dict(zip(fn.arg_names, args, strict=False)) | named
        tensors = {name: each for name, each in tensors.items() if isinstance(each, Tensor)}
        if on_device and (wrong := [name for name, each in tensors.items() if not each.is_cuda]):
            raise ValueError(f"{fn.__name__}: {', '.join(wrong)} must be on a CUDA device")
        seconds[0] = 0.0
        args = tuple(_address(each) for each in args)
        compiled = run(fn, *args, grid=grid, warmup=warmup, **{k: _address(v) for k, v in named.items()})
        sizes = tuple(grid(named) if callable(grid) else grid)
        x, y, z = (*sizes, 1, 1)[:3]
        shapes = {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}
        found.launches.append(Launch(_kernel_of(fn, compiled, seconds[0]), (x, y, z), shapes))
        return compiled

    listener, active = knobs.compilation.listener, driver._active
    current_device = torch.accelerator.current_device_index
    driver.set_active(_Driver(capability))
    torch.accelerator.current_device_index = lambda: 0  # fake tensors are on cuda:0
    knobs.compilation.listener = listen
    JITFunction.run = launch  # type: ignore[method-assign]
    try:
        yield found
    finally:
        JITFunction.run = run  # type: ignore[method-assign]
        knobs.compilation.listener = listener
        driver._active = active
        torch.accelerator.current_device_index = current_device


def _address(argument: Any) -> Any:
    return _Address(argument) if isinstance(argument, FakeTensor) else argument


SWEEP = (pytest.mark.slow, pytest.mark.published_sizes)
"""Marks of tests that compile kernels at further published sizes."""


def slow_unless(fast: Collection[tuple[Any, ...]], cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return the cases for `parametrize`: those of ``fast``, and the others with the marks of `SWEEP`."""
    cases = list(cases)
    assert set(fast) <= set(cases), "a fast case is none of the cases"
    return [pytest.param(*each, marks=() if each in fast else SWEEP) for each in cases]


_STATED = re.compile(r"Occupancy on sm_90: at least (\d+) blocks? per SM")


def stated_occupancy(kernel: Kernel) -> int | None:
    """The occupancy in the kernel's docstring, ``Occupancy on sm_90: at least N blocks per SM``; None without it."""
    found = _STATED.search(kernel.fn.__doc__ or "")
    return int(found[1]) if found else None


def faults_of(kernel: Kernel) -> list[str]:
    """Faults of a compiled kernel: wrong matrix products, spilled registers, and a lower occupancy than it states."""
    faults = []
    if kernel.instructions["wgmma"]:  # disassembling takes a third as long as compiling
        faults += [f"{kernel}: {fault}" for fault in faults_of_products(kernel.sass)]
    if kernel.spilled_bytes:
        faults.append(f"{kernel}: {kernel.spilled_bytes} bytes of registers are spilled")
    blocks, limit = kernel.occupancy
    stated = stated_occupancy(kernel)
    if stated is None:
        faults.append(f"{kernel.name}: its docstring must state 'Occupancy on sm_90: at least N blocks per SM'")
    elif blocks < stated:
        faults.append(f"{kernel}: {blocks} blocks per SM ({limit}); its docstring states {stated}")
    return faults
