"""The tensors that hold the states of all recurrent layers, and what ends a step in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bateleur.mamba.ops import copy_states
from bateleur.mamba.planners import CopyPlan, FoldPlan, ReplayPlan
from bateleur.mamba.recurrence import FoldRows, Recurrence, Tensors
from bateleur.mamba.spec import StatePolicy, at_least
from bateleur.metadata.native.lazy_zeros import lazy_zeros


class Rings(NamedTuple):
    """What running requests keep beside their pages under FOLD, by request row; row 0 is null, its contents scratch."""

    live: Tensor
    """(rows, W - 1 + K, conv_dim) conv windows."""
    entries: Tensors
    """(rows, L, *shape) for each part of the recurrence's `ring_entry`."""

    def tensors(self) -> Tensors:
        """All of them."""
        return (self.live, *self.entries)


class StatePool:
    """Conv windows, states and, under FOLD, rings of all layers, with the same slots and rows in all of them.

    Slot 0 is the null slot: reading it means a zero state, and it takes the writes that are dropped, so its contents
    are scratch. All tensors keep their addresses for life. Layers of equal recurrences lie in one tensor, so that what
    ends a step is one operator for all of them. Pure convolutions have None in place of a tensor of states.

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
        specs: Sequence[Recurrence],
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
        kinds: dict[Recurrence, list[int]] = {}
        for index, spec in enumerate(specs):
            kinds.setdefault(spec, []).append(index)
        self.groups = tuple(kinds.values())
        """Layers of one recurrence, which lie in one tensor, counted from 0."""
        self._kinds = tuple(kinds)
        self._pages = [_zero_pages(spec, (len(group), num_slots), device) for spec, group in kinds.items()]
        self._rings = [
            _zero_rings(spec, (len(group), num_rows), ring_capacity, device)
            for spec, group in kinds.items()
            if folds
        ]
        self._place = {
            index: (kind, at) for kind, group in enumerate(self.groups) for at, index in enumerate(group)
        }

    def layer(self, index: int) -> tuple[Tensor, Tensor | None]:
        """Of layer `index`, counted from 0: conv (num_slots, W-1+K, conv_dim), and states (num_slots, *state_shape).

        Under FOLD conv is (num_slots, W-1, conv_dim). A pure convolution has no states, and None.
        """
        kind, at = self._place[index]
        conv, state = self._pages[kind]
        return conv[at], None if state is None else state[at]

    def rings(self, index: int) -> Rings | None:
        """The rings of layer `index`; None under SLOTS."""
        if not self._rings:
            return None
        kind, at = self._place[index]
        live, entries = self._rings[kind]
        return Rings(live[at], tuple(each[at] for each in entries))

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, the null slot and the null row included."""
        stacks = [*self._pages, *(rings.tensors() for rings in self._rings)]
        return sum(tensor.nbytes for stack in stacks for tensor in stack if tensor is not None)

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
        for conv, state in self._pages:
            copy_states(conv, state, plan.conv_src, plan.conv_bias, plan.ssm_src, plan.dst)

    def fold(
        self, plan: FoldPlan, replay: ReplayPlan, request_row: Tensor, params: Sequence[Tensors]
    ) -> None:
        """Fold rings into checkpoints, in all layers, as `plan_fold` says.

        `replay` and `request_row` are those of the step; params holds, for each of `groups`, the parameters of its
        layers: (layers, *shape) each.
        """
        at = FoldRows(request_row, replay.ring_start, plan.count, replay.slot, plan.dst, plan.page_offset)
        stacks = zip(self._kinds, params, self._pages, self._rings, strict=True)
        for spec, of_group, (conv, state), (live, entries) in stacks:
            spec.fold(of_group, conv, state, live, entries, at)


def _zero_pages(
    spec: Recurrence, size: tuple[int, int], device: torch.device | str
) -> tuple[Tensor, Tensor | None]:
    """Of `size` layers and slots."""
    conv = lazy_zeros((*size, *spec.conv_shape), dtype=spec.conv_dtype, device=device)
    if not spec.state_shape:
        return conv, None
    return conv, lazy_zeros((*size, *spec.state_shape), dtype=spec.ssm_dtype, device=device)


def _zero_rings(spec: Recurrence, size: tuple[int, int], capacity: int, device: torch.device | str) -> Rings:
    """Of `size` layers and rows."""
    live = lazy_zeros((*size, *spec.live_shape), dtype=spec.conv_dtype, device=device)
    entries = (
        lazy_zeros((*size, capacity, *each.shape), dtype=each.dtype, device=device)
        for each in spec.ring_entry
    )
    return Rings(live, tuple(entries))
