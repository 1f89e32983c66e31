"""A test double of fla-core's two functions, and inputs for them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch.utils._python_dispatch import TorchDispatchMode

from bateleur.mamba import CacheLayout, GatedDelta, KimiDelta, MambaCacheMode, PrefillChunks, PromptScan
from bateleur.mamba.ops import fla
from bateleur.mamba.prefill_chunks import PrefillChunker
from bateleur.metadata.conformance._host_sync import is_composite, waits_for_device


class Double:
    """Both functions of fla-core, token by token in float64, with checks of their arguments."""

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
        g = -kwargs["A_log"].double().exp()[:, None] * softplus(g.double() + kwargs["dt_bias"].view(heads, size))
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
                u = beta_scale * beta[0, t].double().sigmoid()[:, None] * (v[0, t] - (s @ k[t, :, :, None])[:, :, 0])
                s = s + u[:, :, None] * k[t, :, None]
                o[t] = (s @ q[t, :, :, None])[:, :, 0]
            after[row] = s
        return o[None], after

    @classmethod
    def installed(cls, monkeypatch: pytest.MonkeyPatch) -> Double:
        """Install the double in place of the package; call `fla.kernel.cache_clear` afterwards."""
        made = cls()
        for home in fla.FUNCTIONS.values():
            module = ModuleType(home.module)
            setattr(module, home.name, getattr(made, home.name))
            monkeypatch.setitem(sys.modules, home.module, module)
        fla.kernel.cache_clear()
        return made


def cut(
    spans: list[tuple[int, int]], block: int = 0, scan: PromptScan = PromptScan.FLA, device: str = "cpu"
) -> tuple[PrefillChunks, Tensor]:
    """Return the chunks of rows with (first, last) tokens, and a block table with slots from 1 on."""
    mode = MambaCacheMode.ALL if block else MambaCacheMode.NONE
    layout = CacheLayout(mode, block or 400, 0, 400)
    table = 1 + torch.arange(len(spans) * layout.columns(), dtype=torch.int32, device=device).view(len(spans), -1)
    before, after = (np.array(tokens, np.int32) for tokens in zip(*spans, strict=True))
    starts = np.append(0, np.add.accumulate(after - before)).astype(np.int32)
    return PrefillChunker(layout, 48, scan).split(starts, before, table), table


def arguments(spec: GatedDelta | KimiDelta, tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Arguments of `spec.scan` except the chunks."""
    rng = torch.Generator().manual_seed(0)
    params = tuple(each.random(each.shape, rng).float() for each in spec.parameters)
    gates = tuple(each.random((tokens, *each.shape), rng).to(dtype) for each in spec.gates)
    channels = torch.randn(tokens, spec.conv_dim, generator=rng).to(dtype)
    state = torch.randn(9, *spec.state_shape, generator=rng)
    return {"params": params, "channels": channels, "gates": gates, "state": state, "chunk_size": 48}


class NoWait(TorchDispatchMode):
    """Make every tensor report a CUDA device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_composite(func):  # as they come in inference mode: what they are made of is to be looked at
            with self:
                if (made := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
                    return made
        assert not waits_for_device(func, args, kwargs or {}, lambda tensor: True), func
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def unlooked(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the signature of a call, which returns zeros."""

    def zeros(**given: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(given["v"]), torch.zeros_like(given["initial_state"])

    zeros.__wrapped__ = call  # type: ignore[attr-defined]
    return zeros
