"""The driver double that compiles launches for sm_90 finds the faults that it should find."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl  # noqa: E402
from sass import faults_of_products  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from bateleur.metadata._device_fields import gather_block_tables  # noqa: E402
from sm90 import SHARED_BYTES, Compiled, compiling, faults_of  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="nothing compiles in Triton's interpreter"
)


@triton.jit
def add_kernel(x_ptr, y_ptr, size, BLOCK: tl.constexpr):
    """Occupancy on sm_90: at least 4 blocks per SM."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + lane, tl.load(x_ptr + lane, mask=lane < size) + 1.0, mask=lane < size)


@triton.jit
def dead_code_kernel(x_ptr, BLOCK: tl.constexpr):
    """Occupancy on sm_90: at least 1 block per SM. Types code after a return: indexes a float as a pointer."""
    if BLOCK == 16:
        return
    tl.store(tl.load(x_ptr) + tl.arange(0, BLOCK), 0)


@triton.jit
def wide_kernel(x_ptr, y_ptr, SIDE: tl.constexpr):
    """Occupancy on sm_90: at least 9 blocks per SM, it says."""
    i = tl.arange(0, SIDE)
    at = i[:, None] * SIDE + i[None, :]
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, tl.dot(x, tl.trans(x), input_precision="tf32"))


@pytest.fixture
def compiled() -> Iterator[Compiled]:
    with compiling() as found:
        yield found


def test_a_launch_compiles_with_its_arguments_and_runs_nothing(compiled: Compiled) -> None:
    x, y = torch.ones(64), torch.zeros(64)
    add_kernel[(2,)](x, y, 64, BLOCK=32, num_warps=1, enable_fp_fusion=True)
    add_kernel[(2,)](x, y, 64, BLOCK=32, num_warps=1, enable_fp_fusion=True)
    assert not y.any()
    assert [launch.grid for launch in compiled.launches] == [(2, 1, 1)] * 2
    (kernel,) = compiled.kernels
    assert (kernel.name, kernel.options, kernel.threads) == ("add_kernel", {"BLOCK": 32}, 32)
    assert 0 < kernel.registers < 64
    assert any(line.startswith("EXIT") for line in kernel.sass)
    assert faults_of(kernel) == []
    assert compiled.launches[0].tensors["x_ptr"] == ((64,), torch.float32)


def test_specialisations_follow_alignment_of_fake_tensors(compiled: Compiled) -> None:
    """A view that begins 4 bytes later is another specialisation, as on a device."""
    with FakeTensorMode():
        x = torch.empty(65, device="cuda")
        for each in (x[:64], x[16:64], x[1:]):
            add_kernel[(2,)](each, x, 64, BLOCK=32, num_warps=1, enable_fp_fusion=True)
    first, second = compiled.kernels
    assert first is not second
    assert compiled.kernels_since(2) == [second]
    assert compiled.kernels_since(3) == []


def test_an_operator_launches_for_fake_tensors_of_a_device() -> None:
    """`Implementations.on` asks for the current device, which is the double's."""
    with FakeTensorMode(), compiling(on_device=True) as found:
        table = torch.empty(2, 16, dtype=torch.int32, device="cuda")
        gather_block_tables(table, table, table[:, 0], table[:, 0], 16)
    assert [kernel.name for kernel in found.kernels] == ["gather_block_tables_kernel"]


def test_an_error_that_only_real_arguments_show_is_raised(compiled: Compiled) -> None:
    from triton.compiler.errors import CompilationError

    with pytest.raises((CompilationError, TypeError)):
        dead_code_kernel[(1,)](torch.ones(16), BLOCK=16, enable_fp_fusion=True)


def test_grids_and_devices_are_checked() -> None:
    x = torch.ones(64)
    with compiling() as found:
        with pytest.raises(ValueError, match="grid y is 65536"):
            add_kernel[(1, 65536)](x, x, 64, BLOCK=32, enable_fp_fusion=True)
        assert not found.launches
    with compiling(on_device=True), pytest.raises(ValueError, match="x_ptr, y_ptr must be on a CUDA device"):
        add_kernel[(1,)](x, x, 64, BLOCK=32, enable_fp_fusion=True)


def test_too_much_shared_memory_is_refused(compiled: Compiled) -> None:
    from triton.runtime.errors import OutOfResources

    x = torch.ones(256, 256)
    with pytest.raises(OutOfResources, match=str(SHARED_BYTES)):
        wide_kernel[(1,)](x, x, SIDE=256, num_warps=8, enable_fp_fusion=True)


def test_spills_and_occupancy_below_the_docstring_are_faults(compiled: Compiled) -> None:
    x = torch.ones(128, 128)
    wide_kernel[(1,)](x, x, SIDE=128, num_warps=1, enable_fp_fusion=True)
    spilled, few = faults_of(compiled.kernels[0])
    assert "bytes of registers are spilled" in spilled
    assert "its docstring states 9" in few


SHARED_PRODUCT = "HGMMA.64x16x16.F32.BF16 R24, gdesc[UR48].tnspB, R24, gsb0"
REGISTER_PRODUCT = "HGMMA.64x16x16.F32.BF16 R24, R64, gdesc[UR48].tnspB, R24, gsb0"
UNENDED_PRODUCT = REGISTER_PRODUCT.removesuffix(", gsb0")
WAIT, WAIT_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (["S2R R0, SR_TID.X", "IADD3 R13, P2, R0.reuse, 0x20, RZ", "R2UR UR50, R13", SHARED_PRODUCT], "UR50"),
        (["S2R R0, SR_CgaCtaId", "LEA R84, R0, R84, 0x18", "R2UR UR50, R84", SHARED_PRODUCT], None),
        (["S2R R0, SR_TID.X", "SHFL.IDX PT, R1, R0, RZ, 0x1f", "R2UR UR48, R1", SHARED_PRODUCT], None),
        # Eight warps choose their operands by the number of the warp.
        (["S2R R0, SR_TID.X", "SHF.R.U32.HI R1, RZ, 0x5, R0", "R2UR UR48, R1", SHARED_PRODUCT], None),
        (["S2R R0, SR_TID.X", "LOP3.LUT R1, R0, 0x60, RZ, 0xc0, !PT", "R2UR UR48, R1", SHARED_PRODUCT], None),
        (["S2R R0, SR_TID.X", "LOP3.LUT R1, R0, 0x70, RZ, 0xc0, !PT", "R2UR UR48, R1", SHARED_PRODUCT], "UR48"),
        # Of a branch that ends, the values do not count; of a loop, those of its end do.
        (["S2R R0, SR_TID.X", "@P0 BRA 0x40", "MOV R0, RZ", "EXIT", "R2UR UR49, R0", SHARED_PRODUCT], "UR49"),
        (["S2R R0, SR_TID.X", SHARED_PRODUCT, "R2UR UR51, R0", "@P0 BRA 0x10", "EXIT"], "UR51"),
        ([REGISTER_PRODUCT, "LDS.128 R64, [R4]", WAIT, "EXIT"], "R64, R65, R66, R67"),
        ([REGISTER_PRODUCT, "MOV R68, R4", WAIT, "LDS.128 R64, [R4]", "EXIT"], None),
        ([REGISTER_PRODUCT, WAIT_BUT_ONE, "MOV R67, R4", "EXIT"], "R67"),
        # A wait for all groups but one is for the older product.
        ([REGISTER_PRODUCT, SHARED_PRODUCT, WAIT_BUT_ONE, "MOV R67, R4", "EXIT"], None),
        ([SHARED_PRODUCT, REGISTER_PRODUCT, WAIT_BUT_ONE, "MOV R67, R4", "EXIT"], "R67"),
        ([UNENDED_PRODUCT, SHARED_PRODUCT, WAIT_BUT_ONE, "MOV R67, R4", "EXIT"], "R67"),
        ([UNENDED_PRODUCT, SHARED_PRODUCT, WAIT, "MOV R67, R4", "EXIT"], None),
        ([UNENDED_PRODUCT, WAIT, "MOV R67, R4", "EXIT"], "R67"),
        # In a loop, the product of a round is waited for in the next one: too late as in #9433, and in time.
        (["MOV R64, R4", REGISTER_PRODUCT, WAIT_BUT_ONE, "@P0 BRA 0x0", "EXIT"], "R64"),
        ([SHARED_PRODUCT, WAIT_BUT_ONE, "MOV R64, R4", REGISTER_PRODUCT, "@P0 BRA 0x0", "EXIT"], None),
    ],
)
def test_wrong_matrix_products_are_faults(code: list[str], fault: str | None) -> None:
    """A descriptor that depends on the thread, and an operand that is overwritten before the product is waited for."""
    found = faults_of_products(code if code[-1] == "EXIT" else [*code, "EXIT"])
    assert len(found) == (fault is not None)
    assert fault is None or f"({fault})" in found[0]


def test_the_driver_is_put_back() -> None:
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    def replaced() -> tuple[Any, ...]:
        return driver._active, JITFunction.run, torch.accelerator.current_device_index

    before = replaced()
    with pytest.raises(RuntimeError, match="on purpose"), compiling():
        raise RuntimeError("on purpose")
    assert before == replaced()
