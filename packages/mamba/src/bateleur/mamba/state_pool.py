"""The tensors that hold the states of all Mamba layers, and what ends a step in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bateleur.mamba.ops import copy_states, fold_ring
from bateleur.mamba.planners import CopyPlan, FoldPlan, ReplayPlan
from bateleur.mamba.spec import MambaSpec, StatePolicy, at_least


class Rings(NamedTuple):
    """What running requests keep beside their pages under FOLD, by request row; row 0 is null, its contents scratch.

    The arguments of `replay_update` with these names; those of `fold_ring` have the layers in front.
    """

    live: Tensor
    """(rows, W - 1 + K, conv_dim) conv windows."""
    x: Tensor
    """(rows, L, H, P), `ring_x`."""
    dt: Tensor
    """(rows, L, H), `ring_dt`: float32 (float64 beside float64 inputs)."""
    B: Tensor
    """(rows, L, G, N), `ring_B`."""


class StatePool:
    """Conv windows, SSM states and, under FOLD, rings of all layers, with the same slots and rows in all of them.

    Slot 0 is the null slot: reading it means a zero state, and it takes the writes that are dropped, so its contents
    are scratch. All tensors keep their addresses for life. Layers of one shape lie in one tensor, so that what ends a
    step is one operator for all of them.

    Args:
        specs: the layers, all of one policy.
        num_slots: the null slot included.
        device: where the tensors live.
        num_rows: rows of rings under FOLD: those of the `RequestStates`, the null row included.
        ring_capacity: tokens in a ring, the layout's.

    Raises:
        ValueError: no specs, specs of two policies, fewer than two slots (the null slot and one to use), and under FOLD
            fewer than two rows, or rings too short for what a fold may leave and a whole step.
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
        at_least("num_slots", num_slots, 2)
        folds = specs[0].policy is StatePolicy.FOLD
        if folds:
            at_least("num_rows", num_rows, 2)
            at_least(
                "ring_capacity", ring_capacity, max(1 + 2 * spec.num_speculative_tokens for spec in specs)
            )
        self.specs = tuple(specs)
        self.num_slots = num_slots
        kinds: dict[MambaSpec, list[int]] = {}
        for index, spec in enumerate(specs):
            kinds.setdefault(spec, []).append(index)
        self.groups = tuple(kinds.values())
        """Layers of one shape, which lie in one tensor, counted from 0."""
        self._pages = [_zero_pages(spec, (len(group), num_slots), device) for spec, group in kinds.items()]
        self._rings = [
            _zero_rings(spec, (len(group), num_rows), ring_capacity, device)
            for spec, group in kinds.items()
            if folds
        ]
        self._place = {
            index: (kind, at) for kind, group in enumerate(self.groups) for at, index in enumerate(group)
        }

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """conv (num_slots, W-1+K, conv_dim) and ssm (num_slots, H, P, N) of Mamba layer `index`, counted from 0.

        Under FOLD conv is (num_slots, W-1, conv_dim).
        """
        kind, at = self._place[index]
        conv, ssm = self._pages[kind]
        return conv[at], ssm[at]

    def rings(self, index: int) -> Rings | None:
        """The rings of Mamba layer `index`; None under SLOTS."""
        if not self._rings:
            return None
        kind, at = self._place[index]
        return Rings(*(tensor[at] for tensor in self._rings[kind]))

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, the null slot and the null row included."""
        return sum(tensor.nbytes for stack in (*self._pages, *self._rings) for tensor in stack)

    def admit(self, rows: Tensor, slots: Tensor) -> None:
        """Requests begin in rows of the rings, with the state in `slots`, both (n,) int64; 0 for a zero state.

        A prompt's step starts from the slot itself; one that computes a single token runs through the ring, and finds
        its window there. Nothing to do under SLOTS.
        """
        for (conv, _), rings in zip(self._pages, self._rings, strict=False):
            windows = conv.index_select(1, slots).masked_fill_((slots == 0)[:, None, None], 0)
            rings.live[:, :, : windows.shape[2]].index_copy_(1, rows, windows)

    def copy(self, plan: CopyPlan) -> None:
        """Bring states to their boundaries, in all layers, as `plan_copy` says."""
        for conv, ssm in self._pages:
            copy_states(conv, ssm, plan.conv_src, plan.conv_bias, plan.ssm_src, plan.dst)

    def fold(self, plan: FoldPlan, replay: ReplayPlan, request_row: Tensor, A: Sequence[Tensor]) -> None:
        """Fold rings into checkpoints, in all layers, as `plan_fold` says.

        `replay` and `request_row` are those of the step; A holds (layers, H) float32 of each of `groups`.
        """
        at = (request_row, replay.ring_start, plan.count, replay.slot, plan.dst, plan.page_offset)
        for (conv, ssm), (live, x, dt, B), a in zip(self._pages, self._rings, A, strict=True):
            fold_ring(ssm, conv, live, x, dt, B, a, *at)


def _zero_pages(spec: MambaSpec, size: tuple[int, int], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Of `size` layers and slots."""
    conv = torch.zeros((*size, *spec.conv_shape), dtype=spec.conv_dtype, device=device)
    return conv, torch.zeros((*size, *spec.ssm_shape), dtype=spec.ssm_dtype, device=device)


def _zero_rings(spec: MambaSpec, size: tuple[int, int], capacity: int, device: torch.device | str) -> Rings:
    """Of `size` layers and rows."""

    def zeros(*shape: int, dtype: torch.dtype = spec.conv_dtype) -> Tensor:
        return torch.zeros((*size, *shape), dtype=dtype, device=device)

    return Rings(
        zeros(*spec.live_shape),
        zeros(capacity, spec.num_heads, spec.head_dim),
        zeros(capacity, spec.num_heads, dtype=spec.step_dtype),
        zeros(capacity, spec.num_groups, spec.state_size),
    )
