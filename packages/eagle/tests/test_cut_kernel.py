"""What truncation leaves, by thresholds in Triton: that of the whole law; and what it takes of a Hopper multiprocessor.

Triton decides whether to interpret when a kernel is defined, so the CPU tests of this file run in a process of
their own, which the last test starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bateleur.eagle.law import by_order

triton = pytest.importorskip("triton", reason="triton is not installed")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from bateleur.eagle.kernels import cut as kernels  # noqa: E402
from compiled import usage_of  # noqa: E402
from eagle_doubles.laws import HOSTILE, INF, LAWS, NAN, law_of, left_by, normal  # noqa: E402

Recorder = Callable[[str, object], None]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where kernels run."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device(request.param)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("size", [45, 200])
def test_leaves_what_an_order_leaves(
    kind: str, size: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_BLOCK", 128)
    laws = LAWS if size < 100 else LAWS[::2]
    logits, law = HOSTILE[kind](normal(len(laws), size, 3.0, size)).to(device), law_of(*laws, device=device)
    left, want = (left_by(logits, *f(logits, law.values), law.temperature) for f in (kernels.cut, by_order))
    assert torch.equal(left, want)


def test_rows_that_are_no_law_are_left_as_they_are(device: torch.device) -> None:
    logits = torch.randn(3, 50, device=device)
    logits[0, 7], logits[1], logits[2, 9] = NAN, -INF, INF
    least, last = kernels.cut(logits, law_of(*[(1, 0.1, 4, 0.5)] * 3, device=device).values)
    assert least.tolist() == [-INF] * 3
    assert last.tolist() == [50] * 3


@pytest.mark.skipif(INTERPRETED, reason="nothing compiles in Triton's interpreter")
@pytest.mark.parametrize(("logits", "kind"), [("*fp32", 0), ("*bf16", 0), ("*fp32", 2)])
def test_fits_a_hopper(logits: str, kind: int, tmp_path: Path, record_property: Recorder) -> None:
    """Compiled for sm_90 without a GPU."""
    options, kernel = kernels.cut_options(128_256) | {"KIND": kind}, kernels.cut_kernel
    constants = {name: options.pop(name) for name in kernel.arg_names if name in options}
    kinds = {"logits_ptr": logits, "law_ptr": "*fp32", "least_ptr": "*fp32", "last_ptr": "*i32"}
    kinds |= {"values_ptr": "*fp32", "owners_ptr": "*i64", "counts_ptr": "*i32", "prompts_ptr": "*i1"}
    kinds |= {"before_ptr": "*i64"} | dict.fromkeys(constants, "constexpr")
    hints = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name.endswith("_ptr") or name in ("logits_row", "size")
    }
    source = ASTSource(kernel, {name: kinds.get(name, "i32") for name in kernel.arg_names}, constants, hints)
    usage = usage_of(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options), tmp_path)
    record_property("kernel", (f"eagle cut {logits}{' penalties' * kind}", *usage.recorded))
    assert usage.spilled == 0, "registers are spilled"
    assert usage.registers <= 128


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test starts")
def test_all_of_this_in_the_interpreter(in_interpreter: Callable[[str], int]) -> None:
    assert in_interpreter(__file__)
