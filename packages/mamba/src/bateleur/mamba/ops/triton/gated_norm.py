"""The gated RMS norm: one program per token and group of channels."""

import torch
import triton
import triton.language as tl

from bateleur.mamba.ops.gated_norm import require_gate
from bateleur.mamba.ops.triton.tiles import LAUNCH, require_dense, silu
from bateleur.metadata.dispatch import next_power_of_2


@triton.jit
def norm_kernel(
    x_ptr, z_ptr, weight_ptr, y_ptr, x_token, z_token, eps,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, NORM_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Compute the RMS norm of x * act(z) over each group of SIZE channels, times weight. Grid (tokens, groups).

    Reads x, z and weight; writes y. NORM_FIRST: norm(x) * weight * act(z) instead. SIGMOID: act is the sigmoid, else
    SiLU. SHARED: one weight for all groups. Occupancy on sm_90: at least 3 blocks per SM.
    """
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    real, channel = lane < SIZE, group * SIZE + lane
    x = tl.load(x_ptr + token * x_token + channel, mask=real, other=0).to(tl.float32)
    z = tl.load(z_ptr + token * z_token + channel, mask=real, other=0).to(tl.float32)
    weight = tl.load(weight_ptr + (lane if SHARED else channel), mask=real, other=0).to(tl.float32)
    gate = tl.sigmoid(z) if SIGMOID else silu(z)
    y = x if NORM_FIRST else x * gate
    y *= tl.rsqrt(tl.sum(y * y, 0) / SIZE + eps)
    element = y_ptr.dtype.element_ty
    if NORM_FIRST:
        y *= weight * gate
    else:
        y = y.to(element).to(tl.float32) * weight
    tl.store(y_ptr + token * (GROUPS * SIZE) + channel, y.to(element), mask=real)


def gated_rms_norm(x, z, weight, groups, eps, norm_first=False, activation="silu"):
    """RMS norm of x * act(z) over each of ``groups`` groups of channels, times weight, as `ops.gated_rms_norm`."""
    require_gate(activation)
    require_dense(1, x=x, z=z, weight=weight)
    num_tokens, inner = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_tokens:
        size = inner // groups
        block = next_power_of_2(size)
        launch = LAUNCH | {"num_warps": max(1, min(8, block // 512))}
        norm_kernel[(num_tokens, groups)](
            x, z, weight, y, x.stride(0), z.stride(0), eps, GROUPS=groups, SIZE=size, NORM_FIRST=norm_first,
            SIGMOID=activation == "sigmoid", SHARED=weight.shape[0] < inner, BLOCK=block, **launch,
        )  # fmt: skip
    return y
