"""Plans of a step in C, on a CPU with a compiler: under FOLD, `replay.c`; under SLOTS, with what follows acceptance,
`slots.c`; and of state pages, `pages.c`. One call each for some twenty of numpy's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from bateleur.mamba.planners.plans import CopyPlan, ReplayPlan, SlotPlan
from bateleur.mamba.spec import CacheLayout, MambaCacheMode
from bateleur.metadata.native import finder

kernel = finder(
    __file__,
    {
        "replay.c": {"replay_rows": "=" + "pll" + "pl" + "pl" + "pp" + "lll" + "pp" + "ppppp"},
        "slots.c": {"step_rows": "=" + "p" + "plpl" + "pppppp", "copy_rows": "=" + "pl" + "ppp" + "pppppp"},
        "pages.c": {"cover_pages": "=" + "pppppl", "turn_pages": "=" + "pppppl"},
    },
)


class _Rows(ctypes.Structure):
    """`rows` of `slots.c`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("table", "computed", "starts")),
        *(
            (name, ctypes.c_int64)
            for name in ("stride", "columns", "n", "block_size", "longest", "num_states")
        ),
        ("states", ctypes.c_void_p),
    ]


def replay_call(
    layout: CacheLayout,
    table: Tensor,
    owners: Tensor,
    states: Tensor,
    computed: Tensor,
    starts: Tensor,
    request_row: Tensor,
    out: ReplayPlan,
    through: Tensor | None = None,
) -> Callable[[], bool]:
    """`plan_replay` into `out`, of the rows of `states` that `owners` (R, 1) int32 names, see `RequestStates.values`;
    these are written to `request_row` (R,) int64, too, and how far each may be folded on the way to `through` (R,)
    int64. With each call, of what is in these tensors then.

    False, where there is no compiler, for tensors of other dtypes, and for a row that is not what the torch form takes:
    that says why.
    """
    replay = kernel("replay_rows")
    if replay is None or not _narrow(table, owners, computed, starts):
        return bool
    num_rows, columns = table.shape
    args = (
        table.data_ptr(), table.stride(0), columns, owners.data_ptr(), owners.stride(0), states.data_ptr(),
        states.shape[1], computed.data_ptr(), starts.data_ptr(), num_rows, layout.block_size, layout.max_model_len,
        request_row.data_ptr(), None if through is None else through.data_ptr(), *out.addresses(),
    )  # fmt: skip
    return lambda: bool(replay(*args) == num_rows)


def step_call(
    layout: CacheLayout,
    table: Tensor,
    owners: Tensor,
    states: Tensor,
    computed: Tensor,
    starts: Tensor,
    request_row: Tensor,
    out: SlotPlan,
) -> Callable[[], bool]:
    """`plan_step` into `out`, behind what `states` says of the rows' last steps. Otherwise as `replay_call`."""
    step = kernel("step_rows")
    if step is None or not _narrow(table, owners, computed, starts):
        return bool
    num_rows, rows = len(table), _rows(layout, table, computed, starts, states)
    args = (
        ctypes.byref(rows), owners.data_ptr(), owners.stride(0), request_row.data_ptr(), out.ssm_write.shape[1],
        *out.addresses(),
    )  # fmt: skip
    return lambda: bool(step(*args) == num_rows)


def copy_call(
    layout: CacheLayout,
    table: Tensor,
    states: Tensor,
    computed: Tensor,
    starts: Tensor,
    num_decodes: int,
    request_row: Tensor,
    plan: SlotPlan,
    out: CopyPlan,
) -> Callable[[Tensor], bool]:
    """`plan_copy` into `out` of steps of `plan`, and into `states` what is carried on from there; with each call
    of the tokens that stay then, `accepted` (R,) int64. request_row: (R,) int64.

    In the first `num_decodes` rows all tokens behind the first are drafts. False as of `replay_call`.
    """
    copy = kernel("copy_rows")
    if copy is None or not _narrow(table, computed, starts):
        return lambda accepted: False
    num_rows, rows = len(table), _rows(layout, table, computed, starts, states)
    known, kept = ctypes.byref(rows), (request_row.data_ptr(), plan.addresses()[-1], *out.addresses())

    def call(accepted: Tensor) -> bool:
        if accepted.dtype != torch.int64 or not accepted.is_contiguous():
            return False
        return bool(copy(known, num_decodes, accepted.data_ptr(), *kept) == num_rows)

    return call


def _narrow(table: Tensor, *rows: Tensor) -> bool:
    """Whether these are integers as the kernels read them."""
    if table.dtype != torch.int32 or table.stride(1) != 1:
        return False
    return all(each.dtype == torch.int32 for each in rows)


def _rows(layout: CacheLayout, table: Tensor, computed: Tensor, starts: Tensor, states: Tensor) -> _Rows:
    size = 0 if layout.mode is MambaCacheMode.NONE else layout.block_size
    return _Rows(
        table.data_ptr(), computed.data_ptr(), starts.data_ptr(), table.stride(0), table.shape[1], len(table), size,
        layout.max_model_len, states.shape[1], states.data_ptr(),
    )  # fmt: skip
