"""What planners say of each row of a step: integers on the device, in buffers that can be filled again.

Legend: R rows (padded ones included), K draft tokens, `computed` tokens of a row before the step, accepted ones only,
`accepted` tokens that survived of those the row computed in its previous step (1 to 1 + K; 1 when nothing was drafted).
"""

from __future__ import annotations

from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.mamba.spec import CacheLayout


class Plan:
    """What the plans have in common: they are dataclasses of int64 tensors, with an entry for each row."""

    __slots__ = ("_addresses", "_arrays")
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    _arrays: tuple[NDArray[np.int64], ...]
    _addresses: tuple[int, ...]

    def tensors(self) -> dict[str, Tensor]:
        """The fields, by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def rows(self, first: int, end: int) -> Self:
        """Some of the rows, as views."""
        return type(self)(*[getattr(self, name)[first:end] for name in self.__dataclass_fields__])

    def arrays(self) -> tuple[NDArray[np.int64], ...]:
        """The fields as numpy sees them, the same memory; kept, for finding it takes longer than planning with it."""
        try:
            return self._arrays
        except AttributeError:
            found = tuple(tensor.numpy() for tensor in self.tensors().values())
            object.__setattr__(self, "_arrays", found)  # a plan is frozen, and this is not part of its value
            return found

    def addresses(self) -> tuple[int, ...]:
        """Where the fields lie, in their order; kept."""
        try:
            return self._addresses
        except AttributeError:
            found = tuple(tensor.data_ptr() for tensor in self.tensors().values())
            object.__setattr__(self, "_addresses", found)
            return found


class RowPlan(Plan):
    """A plan whose fields are all (R,)."""

    __slots__ = ()

    @classmethod
    def allocate(cls, num_reqs: int, device: torch.device | str) -> Self:
        """A neutral plan of `num_reqs` rows, to be refilled in place through the planner's `out`."""
        even = (
            num_reqs + num_reqs % 2
        )  # every field begins at 16 bytes, so that Triton compiles a kernel once
        lines = torch.zeros((len(fields(cls)), even), dtype=torch.int64, device=device)
        return cls(*lines[:, :num_reqs])


@dataclass(frozen=True, slots=True)
class SlotPlan(Plan):
    """Read and write slots of every row of a step, all int64 on the device of the block table.

    Slot 0 is null: reading it means a zero state, writing it means dropping the write. A row without tokens has 0
    everywhere, so padded rows are neutral whatever their other fields hold.
    """

    ssm_read: Tensor
    """(R,) slot of the SSM state to start from."""
    ssm_write: Tensor
    """(R, 1 + K) slot for the SSM state after each token; a prompt writes its final state to column 0 alone."""
    conv_read: Tensor
    """(R,) slot of the conv window to start from."""
    conv_offset: Tensor
    """(R,) entry of that slot where the window begins: accepted - 1."""
    conv_write: Tensor
    """(R,) slot for the conv window."""
    run_col: Tensor
    """(R,) column of `conv_write`, the next step's `prev_col`; 0 in mode NONE."""

    @classmethod
    def allocate(cls, layout: CacheLayout, num_reqs: int, device: torch.device | str) -> SlotPlan:
        """A neutral plan of `num_reqs` rows, to be refilled in place through `plan_step(..., out=...)`."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        r = num_reqs
        write = zeros(r, 1 + layout.num_speculative_tokens)
        return cls(zeros(r), write, zeros(r), zeros(r), zeros(r), zeros(r))


@dataclass(frozen=True, slots=True)
class CopyPlan(RowPlan):
    """Copies of one step, at most one page a row, and what the row's next step needs; all (R,) int64.

    The arguments of `copy_states`: the conv window of slot `dst` becomes that of slot `conv_src` without its first
    `conv_bias` entries, the SSM state of `dst` that of `ssm_src`. Rows with nothing to copy have 0 in all four.
    """

    conv_src: Tensor
    conv_bias: Tensor
    ssm_src: Tensor
    dst: Tensor
    accepted: Tensor
    """The next step's `accepted`: 1 where the copy brought the state to `prev_col`; 1 in padded rows."""
    prev_col: Tensor
    """The next step's `prev_col`; 0 in padded rows and in mode NONE."""


@dataclass(frozen=True, slots=True)
class ReplayPlan(RowPlan):
    """Where each row's state is, all (R,) int64 on the device of the block table; 0 in rows without tokens.

    A prompt's step, which has no ring, reads `slot` as well.
    """

    slot: Tensor
    """Slot of the checkpoint, which is only read; 0 for a zero state. The `src` of `fold_ring`."""
    fold_slot: Tensor
    """Slot of the column that a fold after this step would write; it may be `slot`. Not masked in padded rows."""
    ring_start: Tensor
    """Tokens in the checkpoint, `base`; entry ring_start % L of the ring is the first one not in it."""
    ring_len: Tensor
    """Entries of the ring that follow the checkpoint."""
    conv_offset: Tensor
    """Entry of the live window where the step's window begins: accepted - 1."""


@dataclass(frozen=True, slots=True)
class FoldPlan(RowPlan):
    """What each row folds after a step, and what its next step needs; all (R,) int64, 0 in rows without tokens."""

    dst: Tensor
    """Slot that the new checkpoint is written to; 0 in rows that fold nothing, as most do."""
    count: Tensor
    """Entries of the ring to fold."""
    page_offset: Tensor
    """Entry of the live window where the window at the new checkpoint begins."""
    base: Tensor
    """Tokens in the checkpoint from now on."""
    accepted: Tensor
    """The next step's `accepted`."""
