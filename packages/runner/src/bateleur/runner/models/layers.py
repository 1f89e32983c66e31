"""The norm, and the three kinds of branch behind it: attention, MLP, Mamba-2.

Plain classes rather than `nn.Module`: a module looks parameters up in a second dictionary and wraps every call, and
nothing here trains.

Shapes: T tokens of all requests in one row, M hidden size, Hq/Hk query and key heads, D head size, F intermediate
size, I Mamba inner size, C conv channels (I + 2GN), H Mamba heads, P their size, G groups, N state size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.mamba import Mixer, gated_rms_norm
from bateleur.runner.models.context import LayerStep, StepContext
from bateleur.runner.models.matrix import Projection, empty_projection
from bateleur.runner.models.rope import rotate
from bateleur.runner.models.spec import AttentionLayer, MambaLayer, MlpLayer


class RMSNorm:
    """`y = x / sqrt(mean(x^2) + eps) * weight` over the last dimension, the mean taken in float32.

    `F.rms_norm` is one kernel on CUDA and eight on CPU; there, for float32, five operators are 1.3 to 1.7 times
    faster, and a decode step has a norm per branch.
    """

    def __init__(self, size: int, eps: float, like: Tensor) -> None:
        self.weight = like.new_empty(size)
        self._eps = eps
        self._shape = (size,)
        short = like.device.type == "cpu" and like.dtype == torch.float32
        self._eps_1 = like.new_full((1,), eps) if short else None

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise x (T, size) of the layer's dtype."""
        if self._eps_1 is None:
            return F.rms_norm(x, self._shape, self.weight, self._eps)
        length_T1 = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale_T1 = torch.addcmul(self._eps_1, length_T1, length_T1, value=1.0 / self._shape[0]).rsqrt_()
        return x.mul(scale_T1).mul_(self.weight)


class Branch:
    """What a residual branch does after its norm, between projections into it and out of it.

    Each is made `like` a tensor (any, M): of its width, its dtype and on its device.
    """

    @property
    def projections(self) -> dict[str, Projection]:
        """By the names of their weights."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Projection)}

    def weights(self) -> dict[str, Tensor]:
        """Tensors to be loaded, by name."""
        found = {name: projection.weight for name, projection in self.projections.items()}
        biases = {name.replace("proj", "bias"): each.bias for name, each in self.projections.items()}
        return found | {name: bias for name, bias in biases.items() if bias is not None}


class Attention(Branch):
    """Grouped-query attention over the paged KV cache; query, key and value come from one projection."""

    def __init__(self, spec: AttentionLayer, like: Tensor, index: int, rope: int) -> None:
        """`index` is the attention layer's cache, `rope` its entry in `LayerStep.rotary` (ignored without one)."""
        self.spec = spec
        self._index = index
        self._rope = rope
        self._rotated = spec.num_heads + spec.num_kv_heads
        self._heads = spec.num_heads + 2 * spec.num_kv_heads
        hidden, rows = like.shape[1], self._heads * spec.head_dim
        self.qkv_proj = empty_projection(rows, hidden, like, bias=spec.qkv_bias)
        self.o_proj = empty_projection(hidden, spec.num_heads * spec.head_dim, like, bias=spec.o_bias)

    def forward(self, x_TM: Tensor, step: LayerStep) -> Tensor:
        """Write this step's keys and values, attend, project back: (T, M)."""
        spec = self.spec
        qkv_THD = self.qkv_proj(x_TM).view(-1, self._heads, spec.head_dim)
        qk_THD = qkv_THD[:, : self._rotated]
        rotary: tuple[Tensor, ...] = ()
        if spec.rope is not None:
            rotary = step.rotary[self._rope]
            if not step.execution.state.backend.fuses_rotary:
                qk_THD, rotary = rotate(qk_THD, *rotary), ()
        q, k, v = qk_THD[:, : spec.num_heads], qk_THD[:, spec.num_heads :], qkv_THD[:, self._rotated :]
        out_THD = step.execution.eager(self._attend, q, k, v, *rotary)
        return self.o_proj(out_THD.flatten(1))

    def _attend(self, context: StepContext, q: Tensor, k: Tensor, v: Tensor, *rotary: Tensor) -> Tensor:
        assert context.attention is not None
        cache, meta, spec = context.kv[self._index], context.attention, self.spec
        turn = (rotary[0], rotary[1]) if rotary else None
        return context.backend.attend(q, k, v, cache, meta, spec.scale, spec.sliding_window, turn)


class Mlp(Branch):
    """Feed-forward branch; gate and up come from one projection, the gate in the upper rows."""

    def __init__(self, spec: MlpLayer, like: Tensor) -> None:
        self.spec = spec
        hidden, inner = like.shape[1], spec.intermediate_size
        self.up_proj = empty_projection(2 * inner if spec.gated else inner, hidden, like, bias=spec.bias)
        self.down_proj = empty_projection(hidden, inner, like, bias=spec.bias)

    def forward(self, x_TM: Tensor, step: LayerStep) -> Tensor:
        """`down(act(up(x)))`, gated or not: (T, M)."""
        size = self.spec.intermediate_size
        wide = self.up_proj(x_TM)
        inner_TF = wide[:, :size] if self.spec.gated else wide
        inner_TF = F.silu(inner_TF) if self.spec.activation == "silu" else F.relu(inner_TF).square_()
        if self.spec.gated:
            inner_TF.mul_(wide[:, size:])
        return self.down_proj(inner_TF)


class Mamba(Branch):
    """Mamba-2 layer: projection to z | x B C | dt, the mixer over x B C and dt, gated norm, projection back."""

    def __init__(self, spec: MambaLayer, like: Tensor, index: int, A: Tensor) -> None:
        """`index` is the Mamba layer's entry in the state pool; A (H,) float32 is where its decays are to be."""
        self.spec = spec
        self._index = index
        state, hidden = spec.state, like.shape[1]
        self._parts = [state.inner_size, state.conv_dim, state.num_heads]
        self.in_proj = empty_projection(sum(self._parts), hidden, like, bias=spec.proj_bias)
        conv = like.new_empty(state.conv_dim, state.conv_width)
        conv_bias = like.new_empty(state.conv_dim) if spec.conv_bias else None
        # The recurrence multiplies these over the whole sequence, so they keep full precision in any model dtype.
        D, dt_bias = torch.empty_like(A), torch.empty_like(A)
        self.mixer = Mixer(state, conv, A, D, dt_bias, conv_bias, spec.dt_min, spec.dt_max)
        self.norm = like.new_empty(state.inner_size)
        self.out_proj = empty_projection(hidden, state.inner_size, like, bias=spec.proj_bias)

    def weights(self) -> dict[str, Tensor]:
        """Tensors to be loaded, by name; A is -exp(A_log)."""
        mixer = self.mixer
        found = super().weights() | {"conv": mixer.weight, "norm": self.norm}
        found |= {"A": mixer.A, "D": mixer.D, "dt_bias": mixer.dt_bias}
        return found if mixer.bias is None else found | {"conv_bias": mixer.bias}

    def forward(self, x_TM: Tensor, step: LayerStep) -> Tensor:
        """Advance every row's state by its tokens: (T, M). Decode rows come first, prompts follow."""
        gate_TI, xbc_TC, dt_TH = self.in_proj(x_TM).split(self._parts, -1)
        y_THP = step.execution.eager(self._mix, xbc_TC, dt_TH)
        groups = self.spec.state.num_groups
        y_TI = gated_rms_norm(y_THP.flatten(1), gate_TI, self.norm, groups, self.spec.norm_eps)
        return self.out_proj(y_TI)

    def _mix(self, context: StepContext, xbc_TC: Tensor, dt_TH: Tensor) -> Tensor:
        """Everything that reads or writes states: (T, H, P)."""
        assert context.mamba_rows is not None
        states, rings = context.states[self._index], context.rings[self._index]
        return self.mixer.mix(xbc_TC, dt_TH, context.mamba_rows, states, rings)
