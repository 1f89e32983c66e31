"""The real kernels of fla-core, if it is installed: `uv sync --extra fla` in packages/mamba."""

from __future__ import annotations

import builtins
import gc
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bateleur.mamba import GatedDelta, KimiDelta, PromptScan
from bateleur.mamba.conformance import check_recurrence
from bateleur.mamba.ops import fla
from fla_double import NoWait, arguments, cut
from one_token import one_token

pytestmark = [
    pytest.mark.skipif(fla.version() is None, reason="fla-core is not installed"),
    # Of the package and of what it imports, on a machine without a GPU.
    pytest.mark.filterwarnings("ignore"),
]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OWN, FLA = PromptScan
# The interpreter has no products of bfloat16.
HALF = {"conv_dtype": torch.float16 if INTERPRETED else torch.bfloat16, "ssm_dtype": torch.float32}
SPECS = {
    "gated": GatedDelta(2, 4, 20, 12, **HALF),
    "negative eigenvalues": GatedDelta(1, 3, 16, 8, True, **HALF),
    "kimi": KimiDelta(2, 20, 12, **HALF),
}
SPANS = [(3, 133), (0, 0), (0, 64), (9, 10)]


def test_its_functions_take_what_they_are_given() -> None:
    assert fla.kernel(False).__name__ == "chunk_gated_delta_rule"
    assert fla.kernel(True).__name__ == "chunk_kda"


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="launches nothing: there is no GPU")
@pytest.mark.parametrize("kind", SPECS)
def test_m1_its_host_side_does_not_wait(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.jit import KernelInterface

    launches = []
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda self, grid: lambda *_, **__: launches.append(self))
    given = arguments(SPECS[kind], 198, torch.bfloat16)
    prompts, _ = cut(SPANS)
    fla.kernel(kind == "kimi")
    with torch.inference_mode(), NoWait():
        SPECS[kind].scan(**given, prompts=prompts, read=torch.tensor([1, 0, 0, 4]))
    assert len(launches) > 5


@pytest.fixture
def interpretable() -> Iterator[None]:
    """Patch the interpreter: autotuning without timing, and loop counters."""
    fla.kernel(False), fla.kernel(True)
    from triton import language as tl
    from triton.runtime.autotuner import Autotuner

    for tuner in [each for each in gc.get_objects() if isinstance(each, Autotuner)]:
        tuner.configs = tuner.configs[:1]
    loops: Any = sys.modules["fla.ops.common.chunk_delta_h"]
    loops.range = lambda *ends: (tl.full([], i, tl.int32) for i in builtins.range(*map(int, ends)))
    yield
    del loops.range


def both(kind: str, device: str, dtype: torch.dtype = torch.bfloat16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return outputs and states of both scans for the same arguments."""
    found = []
    for scan in (OWN, FLA):
        given = arguments(SPECS[kind], 198, dtype)
        given = {name: _moved(value, device) for name, value in given.items()}
        prompts, read = cut(SPANS, scan=scan, device=device)[0], torch.tensor([1, 0, 0, 4], device=device)
        y = SPECS[kind].scan(**given, prompts=prompts, read=read)[:195]
        found.append((y.float(), given["state"][1:]))
    return found


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, tuple):
        return tuple(each.to(device) for each in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


@pytest.mark.skipif(not INTERPRETED, reason="kernels run on a CPU in Triton's interpreter alone")
@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float16, 3e-3)])
def test_its_scan_is_ours_interpreted(interpretable: None, kind: str, dtype: torch.dtype, atol: float) -> None:
    ours, theirs = both(kind, "cpu", dtype)
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(its, mine, rtol=0, atol=atol)


@pytest.mark.skipif(not INTERPRETED, reason="kernels run on a CPU in Triton's interpreter alone")
@pytest.mark.parametrize("kind", SPECS)
def test_a_scan_by_it_conforms_interpreted(interpretable: None, kind: str) -> None:
    check_recurrence(SPECS[kind], one_token(SPECS[kind]), prompt_scan=FLA)


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test starts")
def test_all_of_this_in_the_interpreter(in_interpreter: Callable[[str], int]) -> None:
    assert in_interpreter(__file__) >= 9


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SPECS)
def test_its_scan_is_ours_on_a_gpu(kind: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    ours, theirs = both(kind, "cuda")
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(its, mine, rtol=0, atol=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SPECS)
def test_a_scan_by_it_conforms_on_a_gpu(kind: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    check_recurrence(SPECS[kind], one_token(SPECS[kind]), prompt_scan=FLA, device="cuda")
