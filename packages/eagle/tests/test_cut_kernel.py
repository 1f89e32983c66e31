"""What truncation leaves, by thresholds in Triton: that of the whole law; and what it takes of a Hopper multiprocessor.

Triton decides whether to interpret when a kernel is defined, so the CPU tests of this file run in a process of
their own, which the last test starts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from bateleur.eagle import Law

triton = pytest.importorskip("triton", reason="triton is not installed")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from bateleur.eagle.kernels import cut as kernels  # noqa: E402
from compiled import usage_of  # noqa: E402

Recorder = Callable[[str, object], None]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INF, NAN = math.inf, math.nan
LAWS = [
    (0, 0, 3, 0.5),
    (1, 0, 0, 1),
    (0.7, 0.1, 0, 1),
    (1, 1, 0, 1),
    (1, 0, 1, 1),
    (1.3, 0, 20, 1),
    (0.8, 0, 0, 0.9),
    (2, 0, 0, 0.3),
    (1, 0, 0, 1e-30),
    (1, 0, 0, 0.99999),
    (0.9, 0.02, 15, 0.8),
    (0.9, 0, 40, 0.95),
    (1, 0, 10**6, 1),
]


@pytest.fixture(params=["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where kernels run."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device(request.param)


def law_of(laws: list[tuple[float, float, float, float]], device: torch.device) -> Law:
    with np.errstate(divide="ignore"):
        table = np.array([(t, np.log(np.float64(m)), k, p) for t, m, k, p in laws], np.float32)
    return Law(table, torch.from_numpy(table).to(device))


def logits_of(kind: str, size: int) -> Tensor:
    logits = torch.randn(len(LAWS), size, generator=torch.Generator().manual_seed(size)) * 3
    if kind == "ties":
        logits = logits.div(2).round()
    if kind == "equal":
        logits = torch.full_like(logits, -3.0)
    if kind == "few":
        logits.masked_fill_(torch.arange(size) % 37 != 5, -INF)
    if kind == "huge":
        logits *= 1e30
    if kind == "zeros":
        logits = logits.clamp_min(0).mul(torch.where(torch.arange(size) % 2 == 0, 1.0, -0.0))
    return logits


@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "few", "huge", "zeros"])
@pytest.mark.parametrize("size", [45, 300])
def test_leaves_what_the_whole_law_leaves(
    kind: str, size: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_BLOCK", 128)
    logits, law = logits_of(kind, size).to(device), law_of(LAWS, device)
    least, last = kernels.cut(logits, law.values)
    scaled = logits / law.temperature.where(law.temperature > 0, 1.0).unsqueeze(1)
    lane = torch.arange(size, device=device)
    kept = (scaled > least[:, None]) | ((scaled == least[:, None]) & (lane <= last[:, None]))
    want = law.apply(logits) > -INF
    assert torch.equal(kept & (scaled > -INF), want)
    assert (want.sum(1) < size).any()


def test_rows_that_are_no_law_are_left_as_they_are(device: torch.device) -> None:
    logits = torch.randn(3, 50, device=device)
    logits[0, 7], logits[1], logits[2, 9] = NAN, -INF, INF
    least, last = kernels.cut(logits, law_of([(1, 0.1, 4, 0.5)] * 3, device).values)
    assert least.tolist() == [-INF] * 3
    assert last.tolist() == [50] * 3


@pytest.mark.skipif(INTERPRETED, reason="nothing compiles in Triton's interpreter")
@pytest.mark.parametrize("logits", ["*fp32", "*bf16"])
def test_fits_a_hopper(logits: str, tmp_path: Path, record_property: Recorder) -> None:
    """Compiled for sm_90 without a GPU."""
    options, kernel = kernels.cut_options(128_256), kernels.cut_kernel
    constants = {name: options.pop(name) for name in kernel.arg_names if name in options}
    kinds = {"logits_ptr": logits, "law_ptr": "*fp32", "least_ptr": "*fp32", "last_ptr": "*i32"}
    kinds |= dict.fromkeys(constants, "constexpr")
    hints = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name.endswith("_ptr") or name in ("logits_row", "size")
    }
    source = ASTSource(kernel, {name: kinds.get(name, "i32") for name in kernel.arg_names}, constants, hints)
    usage = usage_of(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options), tmp_path)
    record_property("kernel", (f"eagle cut {logits}", *usage.recorded))
    assert usage.spilled == 0, "registers are spilled"
    assert usage.registers <= 128


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test starts")
def test_all_of_this_in_the_interpreter(in_interpreter: Callable[[str], int]) -> None:
    assert in_interpreter(__file__)
