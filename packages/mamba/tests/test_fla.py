"""Prompts of delta rules by fla-core: which steps, and what its kernels are given, on a double that has its signature.

The package itself is tested in `test_fla_package`, where it is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch.utils._python_dispatch import TorchDispatchMode

from bateleur.mamba import (
    CacheLayout,
    GatedDelta,
    KimiDelta,
    MambaCacheMode,
    Prompts,
    PromptScan,
    delta_scan_varlen,
)
from bateleur.mamba.conformance import check_recurrence
from bateleur.mamba.ops.delta_scan import fla
from bateleur.mamba.prompts import PromptCutter
from bateleur.mamba.recurrences import delta_rule
from bateleur.metadata.conformance._sync import is_composite, waits
from one_token import one_token

OWN, FLA = PromptScan
F32 = {"conv_dtype": torch.float32, "ssm_dtype": torch.float32}
SPECS = {
    "gated": GatedDelta(2, 4, 5, 3, **F32),
    "negative eigenvalues": GatedDelta(1, 3, 4, 3, True, **F32),
    "kimi": KimiDelta(2, 5, 3, **F32),
}


def cut(
    spans: list[tuple[int, int]],
    block: int = 0,
    scan: PromptScan = FLA,
    device: str = "cpu",
) -> tuple[Prompts, Tensor]:
    """The chunks of rows that go from some tokens to others, in blocks or none; and the table, slots from 1 on."""
    mode = MambaCacheMode.ALL if block else MambaCacheMode.NONE
    layout = CacheLayout(mode, block or 400, 0, 400)
    table = 1 + torch.arange(len(spans) * layout.columns(), dtype=torch.int32, device=device).view(
        len(spans), -1
    )
    before, after = (np.array(tokens, np.int32) for tokens in zip(*spans, strict=True))
    starts = np.append(0, np.add.accumulate(after - before)).astype(np.int32)
    return PromptCutter(layout, 48, len(spans), scan).cut(starts, before, table), table


def test_a_step_is_whole_where_no_state_inside_a_row_is_kept() -> None:
    inside = [(0, 64), (64, 127), (130, 192), (0, 0), (70, 71)]
    prompts, table = cut(inside, block=64)
    assert prompts.form is FLA
    assert prompts.whole is not None
    assert prompts.whole.tiles.tolist() == [[0, 0], [1, 0], [2, 0], [4, 0]]
    assert prompts.whole.write.tolist() == [
        int(table[0, 0]),
        int(table[1, 1]),
        int(table[2, 2]),
        0,
        int(table[4, 1]),
    ]
    for crossing in ([(0, 65)], [(0, 64), (63, 65)], [(0, 0), (0, 129), (0, 0)]):
        assert cut(crossing, block=64)[0].form is OWN
        assert cut(crossing, block=0)[0].form is FLA
    assert cut(inside, block=64, scan=OWN)[0].form is OWN


def test_tiles_begin_with_their_rows() -> None:
    prompts, _ = cut([(7, 7 + 130), (0, 0), (64, 128), (1, 2), (0, 65)])
    assert prompts.whole is not None
    assert prompts.whole.tiles.tolist() == [[0, 0], [0, 1], [0, 2], [2, 0], [3, 0], [4, 0], [4, 1]]
    assert prompts.whole.tiles.dtype == torch.int32
    assert prompts.whole.write.tolist() == [1, 0, 3, 4, 5]


class Double:
    """Both functions of fla-core, token by token in float64; they look at what they are given."""

    def __init__(self) -> None:
        self.calls = 0

    def chunk_gated_delta_rule(
        self, q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False,
        cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs,
    ):  # fmt: skip
        assert kwargs == {"chunk_size": 64}
        lens = cu_seqlens.diff().tolist()
        assert chunk_indices.tolist() == [[r, i] for r, n in enumerate(lens) for i in range(-(-n // 64))]
        assert (use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel) == (True, True)
        return self._run(q, k, v, g.unsqueeze(-1), beta, initial_state, cu_seqlens, 1 + allow_neg_eigval,
                         output_final_state and state_v_first)  # fmt: skip

    def chunk_kda(
        self, q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False,
        allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, use_graph=False, **kwargs,
    ):  # fmt: skip
        assert kwargs.keys() == {"chunk_size", "A_log", "dt_bias"}
        assert kwargs["chunk_size"] == 64
        heads, size = g.shape[2:]
        assert (kwargs["A_log"].shape, kwargs["dt_bias"].shape) == ((heads,), (heads * size,))
        assert use_graph  # else it makes its tiles from lengths on the host, or waits for them
        assert (use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel) == (True, True, True)
        g = -kwargs["A_log"].double().exp()[:, None] * softplus(
            g.double() + kwargs["dt_bias"].view(heads, size)
        )
        return self._run(q, k, v, g, beta, initial_state, cu_seqlens, 1 + allow_neg_eigval,
                         output_final_state and state_v_first)  # fmt: skip

    def _run(self, q, k, v, g, beta, initial, loc, beta_scale, final):
        self.calls += 1
        assert final
        assert all(len(x) == 1 and x.shape[1] == v.shape[1] for x in (q, k, v, g, beta))
        assert initial.dtype == torch.float32
        assert initial.shape == (len(loc) - 1, *v.shape[2:], k.shape[3])
        o, after, heads = torch.full_like(v[0], torch.nan), initial.clone(), v.shape[2]
        q, k = (x[0].double() / (x[0].double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q * q.shape[2] ** -0.5, k))
        for row, (first, end) in enumerate(zip(loc.tolist(), loc.tolist()[1:], strict=False)):
            s = initial[row].double()
            for t in range(first, end):
                s = s * g[0, t].double().exp().unsqueeze(1)
                u = (
                    beta_scale
                    * beta[0, t].double().sigmoid()[:, None]
                    * (v[0, t] - (s @ k[t, :, :, None])[:, :, 0])
                )
                s = s + u[:, :, None] * k[t, :, None]
                o[t] = (s @ q[t, :, :, None])[:, :, 0]
            after[row] = s
        return o[None], after


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[Double]:
    """In place of the package."""
    stand_in = Double()
    for home in fla.HOMES.values():
        module = ModuleType(home.module)
        setattr(module, home.name, getattr(stand_in, home.name))
        monkeypatch.setitem(sys.modules, home.module, module)
    fla.kernel.cache_clear()
    yield stand_in
    fla.kernel.cache_clear()


@pytest.mark.parametrize("kind", SPECS)
def test_a_scan_by_fla_conforms(kind: str, double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, own = SPECS[kind], []
    monkeypatch.setattr(
        delta_rule, "delta_scan_varlen", lambda *args: own.append(1) or delta_scan_varlen(*args)
    )
    check_recurrence(spec, one_token(spec), prompt_scan=FLA)
    assert double.calls > 5
    assert len(own) > 5


def arguments(
    spec: GatedDelta | KimiDelta, tokens: int, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Of `spec.scan`, but the prompts."""
    rng = torch.Generator().manual_seed(0)
    params = tuple(each.random(each.shape, rng).float() for each in spec.parameters)
    gates = tuple(each.random((tokens, *each.shape), rng).to(dtype) for each in spec.gates)
    channels = torch.randn(tokens, spec.conv_dim, generator=rng).to(dtype)
    state = torch.randn(9, *spec.state_shape, generator=rng)
    return {"params": params, "channels": channels, "gates": gates, "state": state, "chunk_size": 48}


@pytest.mark.parametrize("kind", SPECS)
def test_both_scans_agree_over_many_tiles(kind: str, double: Double) -> None:
    """Rows of several tiles, without tokens, from nothing and in place; tokens of no row behind them."""
    spans, read = [(3, 133), (0, 0), (0, 64), (9, 10)], torch.tensor([1, 0, 0, 4])
    found = []
    for scan in (OWN, FLA):
        given = arguments(SPECS[kind], 198)
        found.append(
            (SPECS[kind].scan(**given, prompts=cut(spans, scan=scan)[0], read=read)[:195], given["state"])
        )
    (y, state), (by_fla, its_state) = found
    assert double.calls == 1
    torch.testing.assert_close(by_fla, y, rtol=0, atol=1e-5)
    torch.testing.assert_close(its_state[1:], state[1:], rtol=0, atol=1e-5)


class NoWait(TorchDispatchMode):
    """Every tensor counts as one of a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_composite(func) and (made := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
            return made
        assert not waits(func, args, kwargs or {}, lambda tensor: True), func
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("grad", [False, True])
def test_m1_a_scan_by_fla_does_not_wait(
    kind: str, grad: bool, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, prompts = arguments(SPECS[kind], 130), cut([(0, 130)])[0]
    for home in fla.HOMES.values():  # the double would wait
        call = unlooked(getattr(double, home.name))
        monkeypatch.setattr(sys.modules[home.module], home.name, call)
    with torch.set_grad_enabled(grad), NoWait():
        SPECS[kind].scan(**given, prompts=prompts, read=torch.tensor([1]))


def unlooked(call: Callable[..., Any]) -> Callable[..., Any]:
    """With the signature of a call, and zeros for results."""

    def zeros(**given: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(given["v"]), torch.zeros_like(given["initial_state"])

    zeros.__wrapped__ = call  # type: ignore[attr-defined]
    return zeros


def test_a_version_with_another_signature_is_refused(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    def older(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **kwargs: Any) -> None:
        raise AssertionError("called")

    monkeypatch.setattr(sys.modules["fla.ops.kda"], "chunk_kda", older)
    monkeypatch.setattr(fla, "version", lambda: "0.3.2")
    given, prompts = arguments(SPECS["kimi"], 5), cut([(0, 5)])[0]
    with pytest.raises(
        ValueError, match=r"chunk_kda of fla-core 0\.3\.2 has no argument initial_state, .*use_graph; "
    ):
        SPECS["kimi"].scan(**given, prompts=prompts, read=torch.tensor([1]))


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    for home in fla.HOMES.values():
        monkeypatch.setitem(sys.modules, home.module, None)
    fla.kernel.cache_clear()
    given, prompts = arguments(SPECS["gated"], 5), cut([(0, 5)])[0]
    with pytest.raises(
        ValueError, match=r"fla\.ops\.gated_delta_rule.* can't be imported.*bateleur-mamba\[fla\]"
    ):
        SPECS["gated"].scan(**given, prompts=prompts, read=torch.tensor([1]))


def test_why_it_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla, "version", lambda: None)
    half = torch.bfloat16
    assert fla.why_not("cpu", half, 128) == "it runs on CUDA, and the device is cpu"
    assert "activations are float32" in (fla.why_not("cuda", torch.float32, 128) or "")
    assert "up to 256 channels, and these have 257" in (fla.why_not("cuda", half, 257) or "")
    assert (fla.why_not("cuda:1", half, 128) or "").startswith("it is not installed; bateleur-mamba[fla]")
    monkeypatch.setattr(fla, "version", lambda: "0.6.0")
    assert fla.why_not("cuda:1", half, 256) is None
