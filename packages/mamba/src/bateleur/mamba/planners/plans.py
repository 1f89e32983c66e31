"""Results of the planners: int64 tensors on the device, one entry per row, that can be refilled in place.

Legend: R rows (requests, and padded rows), K draft tokens, `computed` tokens of a request before the step
(without rejected tokens), `accepted` accepted tokens of the request's previous step (1 to 1 + K), counting the step's
first token, which is no draft.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from bateleur.mamba.spec import CacheLayout, StatePolicy
from bateleur.metadata.dispatch import Implementations

FORMS: dict[str, Implementations[Any]] = {}
"""The forms (torch, Triton) of every planner, by name."""


class Plan:
    """Base class of plans: dataclasses of int64 tensors whose first dimension is the row (request) of the batch."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the plan by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def rows(self, first: int, end: int) -> Self:
        """Return views of the plan for rows `first` to `end - 1`."""
        return type(self)(*[getattr(self, name)[first:end] for name in self.__dataclass_fields__])

    def fill(self, **values: Tensor) -> None:
        """Copy new values to the tensors, all given by name."""
        for name, tensor in self.tensors().items():
            tensor.copy_(values[name])


class RowPlan(Plan):
    """Base class of plans whose tensors are all (R,), one number per row of the batch."""

    __slots__ = ()

    @classmethod
    def allocate(cls, num_reqs: int, device: torch.device | str) -> Self:
        """Allocate a zeroed plan of `num_reqs` rows, to be filled through the planner's argument `out`."""
        even = num_reqs + num_reqs % 2  # aligns every field to 16 bytes, so Triton compiles one kernel
        lines = torch.zeros((len(fields(cls)), even), dtype=torch.int64, device=device)
        return cls(*lines[:, :num_reqs])


@dataclass(frozen=True, slots=True)
class SlotPlan(Plan):
    """State slots that each request of a step reads and writes, state policy SLOTS (a slot per draft); all int64.

    Slot 0 is null: reading it gives a zero state, and a write to it is dropped. All fields of a row without tokens are
    0. Fields are (R,), but `ssm_write` is (R, 1 + K): a slot per token. `conv_offset` is the first entry of the initial
    window in slot `conv_read`, `run_col` the block-table column of `conv_write`.
    """

    ssm_read: Tensor
    """(R,) slot of the initial SSM state."""
    ssm_write: Tensor
    """(R, 1 + K) slot for the SSM state after each token; a prefill writes only its final state, to column 0."""
    conv_read: Tensor
    """(R,) slot of the initial conv window."""
    conv_offset: Tensor
    """(R,) first entry of the initial window in that slot: accepted - 1."""
    conv_write: Tensor
    """(R,) slot for the conv window."""
    run_col: Tensor
    """(R,) block-table column of `conv_write`, which is the next step's `prev_col`; 0 in mode NONE."""

    @classmethod
    def allocate(cls, layout: CacheLayout, num_reqs: int, device: torch.device | str) -> SlotPlan:
        """Allocate a zeroed plan of `num_reqs` rows, to be filled through `plan_step(..., out=...)`."""
        read, *others = (torch.zeros(num_reqs, dtype=torch.int64, device=device) for _ in range(5))
        return cls(read, read.new_zeros(num_reqs, 1 + layout.num_speculative_tokens), *others)


@dataclass(frozen=True, slots=True)
class CopyPlan(RowPlan):
    """State copies after a step, at most one per row, state policy SLOTS (a slot per draft); all (R,) int64.

    The first four fields are the arguments of `copy_states`: slot `dst` gets the conv window of `conv_src` without its
    first `conv_bias` entries, and the SSM state of `ssm_src`. They are 0 in rows without a copy. `accepted` and
    `prev_col` are arguments of the next `plan_step`.
    """

    conv_src: Tensor
    conv_bias: Tensor
    ssm_src: Tensor
    dst: Tensor
    accepted: Tensor
    """Argument `accepted` of the next step; 1 if the state was copied to `prev_col`, and in padded rows."""
    prev_col: Tensor
    """Argument `prev_col` of the next step; 0 in padded rows and in mode NONE."""


@dataclass(frozen=True, slots=True)
class ReplayPlan(RowPlan):
    """Slot of the saved state, and ring of later inputs, of each request; all (R,) int64. State policy FOLD.

    All fields but `fold_slot` are 0 in rows without tokens. A prefill reads `slot` and no ring. `fold_slot` is
    the slot that a fold after the step would write, `conv_offset` the first entry of the initial conv window.
    """

    slot: Tensor
    """Slot of the saved state, only read by the step; 0 for a zero state. Argument `src` of `fold_ring`."""
    fold_slot: Tensor
    """Slot that a fold after this step would write; may be `slot`. Undefined in padded rows."""
    ring_start: Tensor
    """Tokens in the saved state (`base`). The first ring entry after the saved state is ring_start % L."""
    ring_len: Tensor
    """Number of ring entries after the saved state."""
    conv_offset: Tensor
    """First entry of the initial window in the request conv window: accepted - 1."""


@dataclass(frozen=True, slots=True)
class FoldPlan(RowPlan):
    """Entries of rings (later inputs) to add to saved states, and values for the next step; all (R,) int64.

    State policy FOLD. `dst`, `count` and `page_offset` are arguments of `fold_ring`, `base` and `accepted` of the next
    `plan_replay`. All fields are 0 in rows without tokens.
    """

    dst: Tensor
    """Slot for the new saved state; 0 in rows without a fold."""
    count: Tensor
    """Number of ring entries to fold."""
    page_offset: Tensor
    """First entry of the request conv window that belongs to the new saved state."""
    base: Tensor
    """Tokens in the saved state after the fold."""
    accepted: Tensor
    """Argument `accepted` of the next step."""


def require(layout: CacheLayout, policy: StatePolicy, first: tuple[str, Tensor], **rows: Tensor | None) -> None:
    """Raise ValueError if the layout has another policy, the block table is too narrow, or one of `rows` is not (R,).

    first: name and tensor of the block table (R, columns), or of a plan (R,). rows: arguments by name. One of another
    shape would be broadcast, or resize `out`.
    """
    name, table = first
    if layout.policy is not policy:
        raise ValueError(f"layout has the policy {layout.policy.value!r}; this plan is for {policy.value!r}")
    if table.dim() == 2 and table.shape[1] < layout.columns():
        raise ValueError(
            f"table has {table.shape[1]} columns; a layout of {layout.num_speculative_tokens} draft tokens and "
            f"{layout.max_model_len} tokens in blocks of {layout.block_size} needs {layout.columns()}"
        )
    for each, tensor in rows.items():
        if tensor is not None and tensor.shape != table.shape[:1]:
            raise ValueError(f"{each} has shape {tuple(tensor.shape)}; the {name} has {len(table)} rows")


def slots_at(table: Tensor, columns: Tensor, real: Tensor) -> Tensor:
    """Return the state slots in block-table columns (R,), 0 in rows that are not `real`."""
    return torch.where(real, table.gather(1, torch.where(real, columns, 0)[:, None]).squeeze(1), 0)
