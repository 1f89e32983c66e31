"""The delta rules over prefills by the chunked kernels of fla-core, an optional dependency.

The kernels process tiles of 64 tokens, counted from the start of each row, and return the last state of a row in
float32. Inside a tile they round keys, queries, corrected values and states to the dtype of the activations, while the
kernels of this package keep float32. Outputs therefore depend, within the rounding of that dtype, on where the
scheduler splits a prompt, and so may sampled tokens. For this reason they are used only with `PromptScan.FLA`.

fla-core caches index tensors by tensor identity (`fla.utils.tensor_cache`). The tensors of a `PrefillChunks` are
therefore allocated for each step and never written to. Only the first call of a shape synchronizes, for autotuning.
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

from bateleur.mamba.ops.delta_rule import gates
from bateleur.mamba.ops.slots import load_slots, store_slots
from bateleur.mamba.prefill_chunks import FLA_TILE, PrefillChunks

Kernel = Callable[..., tuple[Tensor, Tensor]]

MOST_KEY_CHANNELS = 256
DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes of activations. float32 is excluded because the kernels would round products to TF32."""

_SHARED = (
    "q k v g beta initial_state output_final_state use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel "
    "allow_neg_eigval state_v_first cu_seqlens"
)
_INSTALL = "bateleur-mamba[fla] installs a supported version"


class _Function(NamedTuple):
    module: str
    name: str
    arguments: tuple[str, ...]
    """Arguments that it must have: its `**kwargs` would silently accept others."""


FUNCTIONS = {
    False: _Function("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", (*_SHARED.split(), "chunk_indices")),
    True: _Function("fla.ops.kda", "chunk_kda", (*_SHARED.split(), "use_gate_in_kernel", "use_graph")),
}
"""By whether each key channel has its own decay."""


@cache
def kernel(per_channel: bool) -> Kernel:
    """Import and return fla-core's scan function, for one decay per key channel or per head. The first call takes
    seconds.

    Raises ValueError if fla-core is not installed, or if the function lacks an argument.
    """
    home = FUNCTIONS[per_channel]
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


def version() -> str | None:
    """Return the version of fla-core, None if it is not installed. Does not import it."""
    if find_spec("fla") is None:
        return None
    try:
        return metadata.version("fla-core")
    except metadata.PackageNotFoundError:
        return "of unknown version"


def why_not(device: torch.device | str, dtype: torch.dtype, key_dim: int) -> str | None:
    """Return why fla-core cannot scan layers with this device, dtype and key size, or None. Does not import it."""
    if (kind := torch.device(device).type) != "cuda":
        return f"it runs on CUDA, and the device is {kind}"
    if dtype not in DTYPES:
        return f"it computes in bfloat16 or float16, and activations are {str(dtype).removeprefix('torch.')}"
    if key_dim > MOST_KEY_CHANNELS:
        return f"it takes keys of up to {MOST_KEY_CHANNELS} channels, and these have {key_dim}"
    return None if version() else f"it is not installed; {_INSTALL}"


def delta_scan_fla(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A: Tensor, dt_bias: Tensor, state: Tensor,
    chunks: PrefillChunks, read: Tensor, beta_scale: float,
) -> Tensor:  # fmt: skip
    """Run a delta rule over prefills with fla-core, as `delta_scan_varlen`. `chunks.fla_tiles` must be set, and
    beta_scale be 1 or 2.

    Raises ValueError if fla-core is not installed or lacks an argument.
    """
    assert chunks.fla_tiles is not None
    assert beta_scale in (1.0, 2.0)
    if v.shape[0] == 0:
        return torch.zeros_like(v)
    if per_channel := a.dim() == 3:  # use_graph: the kernel computes its tiles on the device, without synchronization
        own: dict[str, Any] = {"use_gate_in_kernel": True, "A_log": A.neg().log(), "dt_bias": dt_bias.flatten()}
        own |= {"g": a[None], "use_graph": True}
    else:
        g, _ = gates(a, b, A, dt_bias, 1.0, torch.float32)
        own = {"g": g.squeeze(2)[None], "chunk_indices": chunks.fla_tiles.tiles}
    o, after = kernel(per_channel)(
        q=q[None], k=k[None], v=v[None], beta=b[None], initial_state=load_slots(state, read, torch.float32),
        output_final_state=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=beta_scale == 2.0, state_v_first=True, cu_seqlens=chunks.query_start_loc, chunk_size=FLA_TILE,
        **own,
    )  # fmt: skip
    store_slots(state, chunks.fla_tiles.write, after)
    return o[0]
