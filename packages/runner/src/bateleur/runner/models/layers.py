"""The three kinds of branch: attention, MLP, Mamba-2.

Plain classes rather than `nn.Module`: a module looks parameters up in a second dictionary and wraps every call, and
nothing here trains.

Shapes: T tokens of all requests in one row, M hidden size, Hq/Hk query and key heads, D head size, F intermediate
size, I Mamba inner size, C conv channels (I + 2GN), H Mamba heads, P their size, G groups, N state size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.eagle.heads.projection import Projection
from bateleur.mamba import (
    ReplayPlan,
    Rings,
    causal_conv1d_update,
    causal_conv1d_varlen,
    gated_rms_norm,
    replay_update,
    selective_state_update,
    ssd_scan_varlen,
)
from bateleur.runner.models.context import DecodeRows, LayerStep, PrefillRows, StepContext
from bateleur.runner.models.matrix import empty_projection
from bateleur.runner.models.rope import rotate
from bateleur.runner.models.spec import AttentionLayer, MambaLayer, MlpLayer


class Attention:
    """Grouped-query attention over the paged KV cache; query, key and value come from one projection."""

    def __init__(
        self,
        spec: AttentionLayer,
        hidden: int,
        index: int,
        rope: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`index` is the attention layer's cache, `rope` its entry in `LayerStep.rotary` (ignored without one)."""
        self.spec = spec
        self._index = index
        self._rope = rope
        self._rotated = spec.num_heads + spec.num_kv_heads
        self._heads = spec.num_heads + 2 * spec.num_kv_heads
        rows, inner = self._heads * spec.head_dim, spec.num_heads * spec.head_dim
        self.qkv_proj = empty_projection(rows, hidden, dtype, device, bias=spec.qkv_bias)
        self.o_proj = empty_projection(hidden, inner, dtype, device, bias=spec.o_bias)

    def weights(self) -> dict[str, Tensor]:
        """Tensors to be loaded, by name."""
        return _present(
            qkv_proj=self.qkv_proj.weight,
            qkv_bias=self.qkv_proj.bias,
            o_proj=self.o_proj.weight,
            o_bias=self.o_proj.bias,
        )

    @property
    def projections(self) -> tuple[Projection, Projection]:
        """Into the branch, and out of it."""
        return self.qkv_proj, self.o_proj

    def forward(self, x_TM: Tensor, step: LayerStep) -> Tensor:
        """Write this step's keys and values, attend, project back: (T, M)."""
        spec = self.spec
        qkv_THD = self.qkv_proj(x_TM).view(-1, self._heads, spec.head_dim)
        qk_THD = qkv_THD[:, : self._rotated]
        rotary: tuple[Tensor, ...] = ()
        if spec.rope is not None:
            rotary = step.rotary[self._rope]
            if not step.fuses_rotary:
                qk_THD, rotary = rotate(qk_THD, *rotary), ()
        q, k, v = qk_THD[:, : spec.num_heads], qk_THD[:, spec.num_heads :], qkv_THD[:, self._rotated :]
        out_THD = step.eager(self._attend, q, k, v, *rotary)
        return self.o_proj(out_THD.flatten(1))

    def _attend(self, context: StepContext, q: Tensor, k: Tensor, v: Tensor, *rotary: Tensor) -> Tensor:
        assert context.attention is not None
        spec = self.spec
        return context.backend.attend(
            q,
            k,
            v,
            context.kv[self._index],
            context.attention,
            spec.scale,
            spec.sliding_window,
            (rotary[0], rotary[1]) if rotary else None,
        )


class Mlp:
    """Feed-forward branch; gate and up come from one projection, the gate in the upper rows."""

    def __init__(self, spec: MlpLayer, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        rows = spec.intermediate_size * (2 if spec.gated else 1)
        self.up_proj = empty_projection(rows, hidden, dtype, device, bias=spec.bias)
        self.down_proj = empty_projection(hidden, spec.intermediate_size, dtype, device, bias=spec.bias)

    def weights(self) -> dict[str, Tensor]:
        """Tensors to be loaded, by name."""
        return _present(
            up_proj=self.up_proj.weight,
            up_bias=self.up_proj.bias,
            down_proj=self.down_proj.weight,
            down_bias=self.down_proj.bias,
        )

    @property
    def projections(self) -> tuple[Projection, Projection]:
        """Into the branch, and out of it."""
        return self.up_proj, self.down_proj

    def forward(self, x_TM: Tensor, step: LayerStep) -> Tensor:
        """`down(act(up(x)))`, gated or not: (T, M)."""
        size = self.spec.intermediate_size
        wide = self.up_proj(x_TM)
        inner_TF = wide[:, :size] if self.spec.gated else wide
        inner_TF = F.silu(inner_TF) if self.spec.activation == "silu" else F.relu(inner_TF).square_()
        if self.spec.gated:
            inner_TF.mul_(wide[:, size:])
        return self.down_proj(inner_TF)


class Mamba:
    """Mamba-2 mixer: projection to z | x B C | dt, causal convolution over x B C, state update, gated norm."""

    def __init__(
        self, spec: MambaLayer, hidden: int, index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`index` is the Mamba layer's entry in the state pool."""
        self.spec = spec
        self._index = index
        state = spec.state
        self._inner, self._channels = state.inner_size, state.conv_dim
        self._group_lanes = state.num_groups * state.state_size
        rows = self._inner + self._channels + state.num_heads
        self.in_proj = empty_projection(rows, hidden, dtype, device, bias=spec.proj_bias)
        self.conv = torch.empty(self._channels, state.conv_width, dtype=dtype, device=device)
        self.conv_bias = torch.empty(self._channels, dtype=dtype, device=device) if spec.conv_bias else None
        # The recurrence multiplies these over the whole sequence, so they keep full precision in any model dtype.
        self.A = torch.empty(state.num_heads, dtype=torch.float32, device=device)
        self.D = torch.empty(state.num_heads, dtype=torch.float32, device=device)
        self.dt_bias = torch.empty(state.num_heads, dtype=torch.float32, device=device)
        self.norm = torch.empty(self._inner, dtype=dtype, device=device)
        self.out_proj = empty_projection(hidden, self._inner, dtype, device, bias=spec.proj_bias)

    def weights(self) -> dict[str, Tensor]:
        """Tensors to be loaded, by name; A is -exp(A_log)."""
        return _present(
            in_proj=self.in_proj.weight,
            in_bias=self.in_proj.bias,
            conv=self.conv,
            conv_bias=self.conv_bias,
            A=self.A,
            D=self.D,
            dt_bias=self.dt_bias,
            norm=self.norm,
            out_proj=self.out_proj.weight,
            out_bias=self.out_proj.bias,
        )

    @property
    def projections(self) -> tuple[Projection, Projection]:
        """Into the branch, and out of it."""
        return self.in_proj, self.out_proj

    def forward(self, x_TM: Tensor, step: LayerStep) -> Tensor:
        """Advance every row's state by its tokens: (T, M). Decode rows come first, prefill rows follow."""
        wide = self.in_proj(x_TM)
        inner, end = self._inner, self._inner + self._channels
        gate_TI, xbc_TC, dt_TH = wide[:, :inner], wide[:, inner:end], wide[:, end:]
        y_THP = step.eager(self._mix, xbc_TC, dt_TH)
        groups = self.spec.state.num_groups
        y_TI = gated_rms_norm(y_THP.flatten(1), gate_TI, self.norm, groups, self.spec.norm_eps)
        return self.out_proj(y_TI)

    def _mix(self, context: StepContext, xbc_TC: Tensor, dt_TH: Tensor) -> Tensor:
        """Everything that reads or writes states: (T, H, P)."""
        decode, prefill = context.decode, context.prefill
        if prefill is None:
            assert decode is not None
            return self._decode(context, xbc_TC, dt_TH, decode)
        if decode is None:
            return self._prefill(context, xbc_TC, dt_TH, prefill)
        n = decode.num_tokens
        decoded = self._decode(context, xbc_TC[:n], dt_TH[:n], decode)
        return torch.cat((decoded, self._prefill(context, xbc_TC[n:], dt_TH[n:], prefill)))

    def _decode(self, context: StepContext, xbc: Tensor, dt: Tensor, rows: DecodeRows) -> Tensor:
        conv_state, ssm_state = context.states[self._index]
        if isinstance(rows.plan, ReplayPlan):
            rings = context.rings[self._index]
            assert rings is not None
            assert rows.request_row is not None
            return self._replay(ssm_state, rings, xbc, dt, rows, rows.plan, rows.request_row)
        plan, loc, longest = rows.plan, rows.query_start_loc, rows.max_query_len
        window = (plan.conv_read, plan.conv_offset, plan.conv_write)
        xbc = causal_conv1d_update(xbc, self.conv, self.conv_bias, conv_state, loc, longest, *window, "silu")
        x, b, c = self._split(xbc)
        weights = (self.D, self.dt_bias)
        slots = (plan.ssm_read, plan.ssm_write)
        limits = (self.spec.dt_min, self.spec.dt_max)
        return selective_state_update(ssm_state, x, dt, self.A, b, c, *weights, loc, longest, *slots, *limits)

    def _replay(
        self,
        ssm_state: Tensor,
        rings: Rings,
        xbc: Tensor,
        dt: Tensor,
        rows: DecodeRows,
        plan: ReplayPlan,
        request_row: Tensor,
    ) -> Tensor:
        loc, longest = rows.query_start_loc, rows.max_query_len
        window = (request_row, plan.conv_offset, request_row)
        xbc = causal_conv1d_update(xbc, self.conv, self.conv_bias, rings.live, loc, longest, *window, "silu")
        x, b, c = self._split(xbc)
        weights = (self.D, self.dt_bias)
        ring = (plan.slot, request_row, plan.ring_start, plan.ring_len)
        limits = (self.spec.dt_min, self.spec.dt_max)
        kept = (ssm_state, rings.x, rings.dt, rings.B)
        return replay_update(*kept, x, dt, self.A, b, c, *weights, loc, longest, *ring, *limits)

    def _prefill(self, context: StepContext, xbc: Tensor, dt: Tensor, rows: PrefillRows) -> Tensor:
        conv_state, ssm_state = context.states[self._index]
        rings = context.rings[self._index]
        cut = rows.prompts
        xbc = causal_conv1d_varlen(
            xbc,
            self.conv,
            self.conv_bias,
            conv_state,
            None if rings is None else rings.live,
            cut.query_start_loc,
            rows.conv_read,
            cut.chunk_start_loc,
            cut.chunk_row,
            cut.chunk_write,
            rows.live_write,
            "silu",
        )
        x, b, c = self._split(xbc)
        return ssd_scan_varlen(
            x,
            dt,
            self.A,
            b,
            c,
            self.D,
            self.dt_bias,
            ssm_state,
            cut.query_start_loc,
            cut.chunk_start_loc,
            cut.chunk_row,
            cut.row_chunk_loc,
            cut.max_chunks_per_row,
            rows.chunk_size,
            rows.ssm_read,
            cut.chunk_write,
            self.spec.dt_min,
            self.spec.dt_max,
        )

    def _split(self, xbc_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views x (T, H, P), B (T, G, N), C (T, G, N) of the convolved channels."""
        state = self.spec.state
        middle = self._inner + self._group_lanes
        x = xbc_TC[:, : self._inner].unflatten(1, (state.num_heads, state.head_dim))
        b = xbc_TC[:, self._inner : middle].unflatten(1, (state.num_groups, state.state_size))
        c = xbc_TC[:, middle:].unflatten(1, (state.num_groups, state.state_size))
        return x, b, c


def _present(**weights: Tensor | None) -> dict[str, Tensor]:
    return {name: weight for name, weight in weights.items() if weight is not None}
