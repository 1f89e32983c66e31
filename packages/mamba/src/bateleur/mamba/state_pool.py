"""The tensors that hold the states of all Mamba layers, and what ends a step in all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bateleur.mamba.ops import copy_states, fold_ring
from bateleur.mamba.plan_commit import CommitPlan
from bateleur.mamba.plan_fold import FoldPlan, ReplayPlan
from bateleur.mamba.ring_pool import RingPool, Rings
from bateleur.mamba.spec import MambaSpec, StatePolicy


class StatePool:
    """One conv and one SSM tensor per layer, with the same slot numbers in all of them; under FOLD also the rings.

    Slot 0 is the null slot: reading it means a zero state, and it takes the writes that are dropped, so its contents
    are scratch. All tensors keep their addresses for life.

    Args:
        specs: the layers, all of one policy.
        num_slots: the null slot included.
        device: where the tensors live.
        num_rows: rows of rings under FOLD: those of the `RequestStates`, the null row included.
        ring_capacity: tokens in a ring, the layout's.

    Raises:
        ValueError: no specs, specs of two policies, fewer than two slots (the null slot and one to use), or fewer than
            two rows under FOLD.
    """

    def __init__(
        self,
        specs: Sequence[MambaSpec],
        num_slots: int,
        device: torch.device | str,
        *,
        num_rows: int = 0,
        ring_capacity: int = 16,
    ) -> None:
        if not specs:
            raise ValueError("specs is empty; a pool needs at least one layer")
        if len(policies := {spec.policy.value for spec in specs}) > 1:
            raise ValueError(f"specs have the policies {sorted(policies)}; all layers of a pool share one")
        if num_slots < 2:
            raise ValueError(f"num_slots is {num_slots}; it must be at least 2, of which slot 0 is null")
        self.specs = tuple(specs)
        self.num_slots = num_slots
        folds = specs[0].policy is StatePolicy.FOLD
        self._rings = RingPool(specs, ring_capacity, num_rows, device) if folds else None
        self._layers = [
            (
                torch.zeros((num_slots, *spec.conv_shape), dtype=spec.conv_dtype, device=device),
                torch.zeros((num_slots, *spec.ssm_shape), dtype=spec.ssm_dtype, device=device),
            )
            for spec in self.specs
        ]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """conv (num_slots, W-1+K, conv_dim) and ssm (num_slots, H, P, N) of Mamba layer `index`, counted from 0.

        Under FOLD conv is (num_slots, W-1, conv_dim).
        """
        return self._layers[index]

    def rings(self, index: int) -> Rings | None:
        """The rings of Mamba layer `index`; None under SLOTS."""
        return None if self._rings is None else self._rings.layer(index)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, the null slot and the null row included."""
        slots = self.num_slots * sum(spec.page_bytes for spec in self.specs)
        return slots + (0 if self._rings is None else self._rings.nbytes)

    def admit(self, rows: Tensor, slots: Tensor) -> None:
        """Requests begin in rows of the rings, with the state in `slots`, both (n,) int64; 0 for a zero state.

        A prompt's step starts from the slot itself; one that computes a single token runs through the ring, and finds
        its window there. Nothing to do under SLOTS.
        """
        if self._rings is None:
            return
        for index, (conv, _) in enumerate(self._layers):
            windows = conv.index_select(0, slots).masked_fill_((slots == 0)[:, None, None], 0)
            self._rings.layer(index).live[:, : windows.shape[1]].index_copy_(0, rows, windows)

    def copy(self, plan: CommitPlan) -> None:
        """Bring states to their boundaries, in all layers, as `plan_commit` says."""
        if _idle(plan.dst):
            return
        for conv, ssm in self._layers:
            copy_states(conv, ssm, plan.conv_src, plan.conv_bias, plan.ssm_src, plan.dst)

    def fold(self, plan: FoldPlan, replay: ReplayPlan, request_row: Tensor, A: Sequence[Tensor]) -> None:
        """Fold rings into checkpoints, in all layers, as `plan_fold` says.

        `replay` and `request_row` are those of the step; A holds each layer's (H,) float32.
        """
        if _idle(plan.dst):
            return
        assert self._rings is not None
        for index, ((conv, ssm), a) in enumerate(zip(self._layers, A, strict=True)):
            live, x, dt, B = self._rings.layer(index)
            at = (request_row, replay.ring_start, plan.count, replay.slot, plan.dst, plan.conv_offset)
            fold_ring(ssm, conv, live, x, dt, B, a, *at)


def _idle(dst: Tensor) -> bool:
    """Whether the host can see, without waiting for a device, that no row does anything: so in most steps."""
    return dst.is_cpu and not dst.any()
