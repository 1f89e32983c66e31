"""Delta-rule prefills by fla-core: when it is used, and its arguments, with a test double.

The package itself is tested in `test_fla_package`, where it is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from bateleur.mamba import GatedDelta, KimiDelta, PromptScan, delta_scan_varlen
from bateleur.mamba.conformance import check_recurrence
from bateleur.mamba.ops import fla
from bateleur.mamba.recurrences import delta_rule
from fla_double import Double, NoWait, arguments, cut, unlooked
from one_token import one_token

OWN, FLA = PromptScan
F32 = {"conv_dtype": torch.float32, "ssm_dtype": torch.float32}
SPECS = {
    "gated": GatedDelta(2, 4, 5, 3, **F32),
    "negative eigenvalues": GatedDelta(1, 3, 4, 3, True, **F32),
    "kimi": KimiDelta(2, 5, 3, **F32),
}


def test_a_step_is_whole_where_no_state_inside_a_row_is_kept() -> None:
    inside = [(0, 64), (64, 127), (130, 192), (0, 0), (70, 71)]
    prompts, table = cut(inside, block=64)
    assert prompts.prompt_scan is FLA
    assert prompts.fla_tiles is not None
    assert prompts.fla_tiles.tiles.tolist() == [[0, 0], [1, 0], [2, 0], [4, 0]]
    assert prompts.fla_tiles.write.tolist() == [
        int(table[0, 0]),
        int(table[1, 1]),
        int(table[2, 2]),
        0,
        int(table[4, 1]),
    ]
    for crossing in ([(0, 65)], [(0, 64), (63, 65)], [(0, 0), (0, 129), (0, 0)]):
        assert cut(crossing, block=64)[0].prompt_scan is OWN
        assert cut(crossing, block=0)[0].prompt_scan is FLA
    assert cut(inside, block=64, scan=OWN)[0].prompt_scan is OWN


def test_tiles_begin_with_their_rows() -> None:
    prompts, _ = cut([(7, 7 + 130), (0, 0), (64, 128), (1, 2), (0, 65)])
    assert prompts.fla_tiles is not None
    assert prompts.fla_tiles.tiles.tolist() == [[0, 0], [0, 1], [0, 2], [2, 0], [3, 0], [4, 0], [4, 1]]
    assert prompts.fla_tiles.tiles.dtype == torch.int32
    assert prompts.fla_tiles.write.tolist() == [1, 0, 3, 4, 5]


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[Double]:
    """In place of the package."""
    yield Double.installed(monkeypatch)
    fla.kernel.cache_clear()


@pytest.mark.parametrize("kind", SPECS)
def test_a_scan_by_fla_conforms(kind: str, double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, own = SPECS[kind], []
    monkeypatch.setattr(delta_rule, "delta_scan_varlen", lambda *args: own.append(1) or delta_scan_varlen(*args))
    check_recurrence(spec, one_token(spec), prompt_scan=FLA)
    assert double.calls > 5
    assert len(own) > 5


@pytest.mark.parametrize("kind", SPECS)
def test_both_scans_agree_over_many_tiles(kind: str, double: Double) -> None:
    """Rows of several tiles, an empty row, zero and in-place states, and padding tokens."""
    spans, read = [(3, 133), (0, 0), (0, 64), (9, 10)], torch.tensor([1, 0, 0, 4])
    found = []
    for scan in (OWN, FLA):
        given = arguments(SPECS[kind], 198)
        found.append((SPECS[kind].scan(**given, chunks=cut(spans, scan=scan)[0], read=read)[:195], given["state"]))
    (y, state), (by_fla, its_state) = found
    assert double.calls == 1
    torch.testing.assert_close(by_fla, y, rtol=0, atol=1e-5)
    torch.testing.assert_close(its_state[1:], state[1:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("grad", [False, True])
def test_m1_a_scan_by_fla_does_not_wait(kind: str, grad: bool, double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    given, prompts = arguments(SPECS[kind], 130), cut([(0, 130)])[0]
    for home in fla.FUNCTIONS.values():  # the double would wait
        call = unlooked(getattr(double, home.name))
        monkeypatch.setattr(sys.modules[home.module], home.name, call)
    with torch.set_grad_enabled(grad), NoWait():
        SPECS[kind].scan(**given, chunks=prompts, read=torch.tensor([1]))


def test_a_version_with_another_signature_is_refused(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    def older(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **kwargs: Any) -> None:
        raise AssertionError("called")

    monkeypatch.setattr(sys.modules["fla.ops.kda"], "chunk_kda", older)
    monkeypatch.setattr(fla, "version", lambda: "0.3.2")
    given, prompts = arguments(SPECS["kimi"], 5), cut([(0, 5)])[0]
    with pytest.raises(ValueError, match=r"chunk_kda of fla-core 0\.3\.2 has no argument initial_state, .*use_graph; "):
        SPECS["kimi"].scan(**given, chunks=prompts, read=torch.tensor([1]))


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    for home in fla.FUNCTIONS.values():
        monkeypatch.setitem(sys.modules, home.module, None)
    fla.kernel.cache_clear()
    given, prompts = arguments(SPECS["gated"], 5), cut([(0, 5)])[0]
    with pytest.raises(ValueError, match=r"fla\.ops\.gated_delta_rule.* can't be imported.*bateleur-mamba\[fla\]"):
        SPECS["gated"].scan(**given, chunks=prompts, read=torch.tensor([1]))


def test_why_it_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla, "version", lambda: None)
    half = torch.bfloat16
    assert fla.why_not("cpu", half, 128) == "it runs on CUDA, and the device is cpu"
    assert "activations are float32" in (fla.why_not("cuda", torch.float32, 128) or "")
    assert "up to 256 channels, and these have 257" in (fla.why_not("cuda", half, 257) or "")
    assert (fla.why_not("cuda:1", half, 128) or "").startswith("it is not installed; bateleur-mamba[fla]")
    monkeypatch.setattr(fla, "version", lambda: "0.6.0")
    assert fla.why_not("cuda:1", half, 256) is None
