"""A Mamba-2 branch over decode rows in one call: see `branches`. Shapes: T tokens, M hidden size."""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch
from torch import Tensor

from bateleur.eagle.heads.spec import CProduct
from bateleur.mamba import Mamba2, Mixer, OnTheWay, ReplayPlan, Rings, SlotPlan
from bateleur.mamba.ops.native import in_c
from bateleur.metadata.native.structs import Struct, fields
from bateleur.runner.models.native.branches import REFUSED, Matrix, functions, no_memory

Kept = tuple[tuple[Tensor, Tensor | None], Rings | None]
"""States of a layer, and its rings under FOLD."""


class _Mamba(Struct):
    _fields_: ClassVar = [
        ("into", Matrix),
        ("out", Matrix),
        *fields(
            "placed conv update gated_norm conv_weight conv_bias A D dt_bias norm windows states",
            "window_stride state_stride num_windows slots slides taps heads groups channels size norm_weights "
            "norm_first",
        ),
        *((name, ctypes.c_double) for name in ("eps", "least", "most")),
    ]


class _Ringed(Struct):
    _fields_: ClassVar = [
        ("layer", _Mamba),
        *fields("replayable replay ring_x ring_step ring_B", "ring_rows capacity"),
    ]


class _Slots(Struct):
    _fields_: ClassVar = fields("starts conv_read conv_offset conv_write read write", "write_stride rows")


class _Replayed(Struct):
    _fields_: ClassVar = fields(
        "starts slot ring_row ring_start ring_len conv_offset through to layers", "rows"
    )


class Slots:
    """The rows of a pass under SLOTS, as its recurrent layers read them."""

    form: ClassVar = "mamba_rows"

    def __init__(self, starts: Tensor, plan: SlotPlan) -> None:
        """starts: (R + 1,) int32, dense; a plan of R rows that `takes` says is read."""
        self._held = starts, plan
        self._struct = _Slots(
            starts.data_ptr(),
            plan.conv_read.data_ptr(),
            plan.conv_offset.data_ptr(),
            plan.conv_write.data_ptr(),
            plan.ssm_read.data_ptr(),
            plan.ssm_write.data_ptr(),
            plan.ssm_write.stride(0),
            plan.ssm_read.shape[0],
        )
        self.at = ctypes.addressof(self._struct)

    @staticmethod
    def takes(plan: SlotPlan) -> bool:
        """Whether its tensors are of the kinds that are read."""
        by_row = plan.conv_read, plan.conv_offset, plan.conv_write, plan.ssm_read
        for each in by_row:
            if each.dtype != torch.int64 or not each.is_contiguous():
                return False
        return plan.ssm_write.dtype == torch.int64 and plan.ssm_write.stride(1) == 1


class RingRows:
    """The same under FOLD."""

    form: ClassVar = "ring_rows"

    def __init__(self, starts: Tensor, plan: ReplayPlan, request_row: Tensor, way: OnTheWay | None) -> None:
        """starts: (R + 1,) int32, dense; a plan of R rows, and their rings, that `takes` says are read. way: what they
        fold on the way.
        """
        self._held = starts, plan, request_row, way
        self._struct = _Replayed(
            starts.data_ptr(),
            plan.slot.data_ptr(),
            request_row.data_ptr(),
            plan.ring_start.data_ptr(),
            plan.ring_len.data_ptr(),
            plan.conv_offset.data_ptr(),
            None if way is None else way.through.data_ptr(),
            plan.fold_slot.data_ptr(),
            None if way is None else way.layers.data_ptr(),
            plan.slot.shape[0],
        )
        self.at = ctypes.addressof(self._struct)

    @staticmethod
    def takes(plan: ReplayPlan, request_row: Tensor) -> bool:
        """Whether its tensors are of the kinds that are read."""
        for each in (plan.slot, request_row, plan.ring_start, plan.ring_len, plan.conv_offset):
            if each.dtype != torch.int64 or not each.is_contiguous():
                return False
        return True


class MambaCall:
    """The branch over these states and rings, which stay where they are."""

    def __init__(self, described: _Mamba, ringed: _Ringed | None, kept: Kept, held: object) -> None:
        """ringed: as C takes it where there are rings. kept: states and rings. held: what else is pointed to."""
        self._kept, self._struct, self._held = kept, ringed or described, held
        self._form = Slots.form if ringed is None else RingRows.form
        self._at, into = ctypes.addressof(self._struct), described.into
        inner = described.heads * described.channels
        lanes = inner + 2 * described.groups * described.size
        self._columns, self._room, self._width = (
            into.columns,
            into.rows + lanes + 2 * inner,
            described.out.rows,
        )

    @classmethod
    def of(
        cls,
        into: CProduct,
        out: CProduct,
        mixer: Mixer,
        norm: Tensor,
        eps: float,
        norm_first: bool,
        kept: Kept,
    ) -> MambaCall | None:
        """None for a layer that its kernels do not take. norm: weight of the gated norm behind the mixer."""
        spec, ((windows, state), rings) = mixer.spec, kept
        if not isinstance(spec, Mamba2) or state is None:
            return None
        if rings is not None:
            windows = rings.live
            if not in_c.takes_rings(state, rings.entries):
                return None
        if not in_c.takes_layer(
            1 + spec.num_speculative_tokens,
            windows,
            state,
            mixer.conv_weight,
            mixer.conv_bias,
            mixer.params,
            norm,
            spec.num_groups,
        ):
            return None
        A, D, dt_bias = mixer.params
        made = _Mamba(Matrix.of(into), Matrix.of(out), eps=eps, least=spec.dt_min, most=spec.dt_max)
        made.point(
            **in_c.addresses(),
            conv_weight=mixer.conv_weight,
            conv_bias=mixer.conv_bias,
            A=A,
            D=D,
            dt_bias=dt_bias,
            norm=norm,
            windows=windows,
            states=state,
            window_stride=windows.stride(0),
            state_stride=state.stride(0),
            num_windows=len(windows),
            slots=len(state),
            slides=windows.shape[1] >= spec.conv_width,
            taps=spec.conv_width,
            heads=spec.num_heads,
            groups=spec.num_groups,
            channels=spec.head_dim,
            size=spec.state_size,
            norm_weights=norm.numel(),
            norm_first=norm_first,
        )
        ringed = None if rings is None else _ringed(made, rings)
        return cls(made, ringed, kept, (into, out, mixer, norm))

    def over(self, kept: Kept) -> bool:
        """Whether it is the branch over these."""
        return self._kept[0] is kept[0] and self._kept[1] is kept[1]

    def __call__(self, x_TM: Tensor, rows: Slots | RingRows) -> Tensor | None:
        """(T, M) of x (T, M) float32; None, and nothing is done, where a row is refused."""
        tokens = x_TM.shape[0]
        assert rows.form == self._form
        assert (x_TM.shape[1], x_TM.stride(1), x_TM.dtype) == (self._columns, 1, torch.float32)
        y_TM, room = x_TM.new_empty(tokens, self._width), x_TM.new_empty(tokens * self._room)
        failed = functions()[self._form](
            self._at, rows.at, x_TM.data_ptr(), x_TM.stride(0), tokens, room.data_ptr(),
            y_TM.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        if failed == REFUSED:
            return None
        if failed:
            raise no_memory(tokens)
        return y_TM


def _ringed(layer: _Mamba, rings: Rings) -> _Ringed:
    """The layer, whose windows are those of the rings."""
    x, step, B = rings.entries
    made = _Ringed(layer=layer)
    made.point(
        **in_c.ring_addresses(),
        ring_x=x,
        ring_step=step,
        ring_B=B,
        ring_rows=step.shape[0],
        capacity=step.shape[1],
    )
    return made
