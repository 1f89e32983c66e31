"""The delta rules over whole prompts by the chunked kernels of fla-core, which is optional.

They take tiles of 64 tokens from the begin of each row and give the state after it, in float32. Inside of them keys,
queries, corrected values and what later tiles see of a state have the dtype of the activations, where bateleur's own
scan keeps float32: outputs are as close as that dtype allows, but what a prompt gets depends on where its parts begin
modulo 64 by as much, and so may a token. That is why they have to be asked for (`PromptScan.FLA`).

What they look up by identity they keep (`fla.utils.tensor_cache`): the tensors of a `Prompts` are made anew for every
step and never written to, or a step would run on the tiles of another. No call waits for the device, but the first one
of a shape, which times configurations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bateleur.mamba.ops.shared import load, store
from bateleur.mamba.ops.shared.delta import gates
from bateleur.mamba.prompts import FLA_TILE, Prompts

Kernel = Callable[..., tuple[Tensor, Tensor]]

MOST_KEY_CHANNELS = 256
DTYPES = (torch.bfloat16, torch.float16)
"""Of activations; products of float32 would be rounded to TF32."""

_SHARED = (
    "q k v g beta initial_state output_final_state use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel "
    "allow_neg_eigval state_v_first cu_seqlens"
)


class _Home(NamedTuple):
    module: str
    name: str
    arguments: tuple[str, ...]
    """That it must name: others would pass through its `**kwargs` unread."""


HOMES = {
    False: _Home("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", (*_SHARED.split(), "chunk_indices")),
    True: _Home("fla.ops.kda", "chunk_kda", (*_SHARED.split(), "use_gate_in_kernel", "use_graph")),
}
"""By whether each key channel has a decay of its own."""


@cache
def kernel(per_channel: bool) -> Kernel:
    """The function of fla-core; the first call imports it, which takes seconds.

    Raises ValueError if it is not installed, or takes other arguments than it is given here.
    """
    home = HOMES[per_channel]
    try:
        found: Kernel = getattr(import_module(home.module), home.name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{home.module}.{home.name} can't be imported ({error}); {_INSTALL}") from error
    known = inspect.signature(found).parameters
    if missing := [name for name in home.arguments if name not in known]:
        raise ValueError(
            f"{home.module}.{home.name} of fla-core {version()} has no argument {', '.join(missing)}; {_INSTALL}"
        )
    return found


_INSTALL = "bateleur-mamba[fla] is the extra that installs a version that serves"


def version() -> str | None:
    """Of fla-core; None if it is not installed. Imports nothing."""
    if find_spec("fla") is None:
        return None
    try:
        return metadata.version("fla-core")
    except metadata.PackageNotFoundError:
        return "of unknown version"


def why_not(device: torch.device | str, dtype: torch.dtype, key_dim: int) -> str | None:
    """Why it does not serve delta rules with these activations and keys there; None if it does. Imports nothing."""
    if (kind := torch.device(device).type) != "cuda":
        return f"it runs on CUDA, and the device is {kind}"
    if dtype not in DTYPES:
        return f"it computes in bfloat16 or float16, and activations are {str(dtype).removeprefix('torch.')}"
    if key_dim > MOST_KEY_CHANNELS:
        return f"it takes keys of up to {MOST_KEY_CHANNELS} channels, and these have {key_dim}"
    return None if version() else f"it is not installed; {_INSTALL}"


def scan_whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    prompts: Prompts,
    read: Tensor,
    beta_scale: float,
) -> Tensor:
    """As `delta_scan_varlen`, of `prompts` that have `whole`; beta_scale is 1 or 2.

    Raises ValueError as `kernel`.
    """
    assert prompts.whole is not None
    assert beta_scale in (1.0, 2.0)
    if v.shape[0] == 0:
        return torch.zeros_like(v)
    per_channel = a.dim() == 3
    call = kernel(per_channel)
    if per_channel:  # tiles are made on the device: given lengths on the host, it would wait
        own = {"use_gate_in_kernel": True, "A_log": A.neg().log(), "dt_bias": dt_bias.flatten()}
        own |= {"g": a[None], "use_graph": True, "chunk_size": FLA_TILE}
    else:
        g, _ = gates(a, b, A, dt_bias, 1.0, torch.float32)
        own = {"g": g.squeeze(2)[None], "chunk_indices": prompts.whole.tiles, "chunk_size": FLA_TILE}
    o, after = _call(call, q, k, v, b, load(state, read, torch.float32), prompts, beta_scale, own)
    store(state, prompts.whole.write, after)
    return o[0]


def _call(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    initial: Tensor,
    prompts: Prompts,
    beta_scale: float,
    own: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """What both have in common: raw keys and queries, betas before the sigmoid, states (rows, H, Dv, Dk)."""
    return kernel(
        q=q[None],
        k=k[None],
        v=v[None],
        beta=b[None],
        initial_state=initial,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=beta_scale == 2.0,
        state_v_first=True,
        cu_seqlens=prompts.query_start_loc,
        **own,
    )
