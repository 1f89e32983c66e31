"""Plans of a step in C, on a CPU with a compiler: under FOLD, `replay.c`, and of state pages, `pages.c`. One call each
for some twenty of numpy's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from bateleur.mamba.planners.plans import ReplayPlan
from bateleur.mamba.spec import CacheLayout
from bateleur.metadata.native import Kernel, kernels, missing

_FILES = {
    "replay.c": (("replay_rows", "=" + "pll" + "pl" + "pl" + "pp" + "lll" + "pppppp"),),
    "pages.c": (
        ("cover_pages", "=" + "pppppl"),
        ("turn_pages", "=" + "pppppl"),
    ),
}


def replay_call(
    layout: CacheLayout,
    table: Tensor,
    owners: Tensor,
    states: Tensor,
    computed: Tensor,
    starts: Tensor,
    request_row: Tensor,
    out: ReplayPlan,
) -> Callable[[], bool]:
    """`plan_replay` into `out`, of the rows of `states` that `owners` (R, 1) int32 names, see `RequestStates.values`;
    these are written to `request_row` (R,) int64, too. With each call, of what is in these tensors then.

    False, where there is no compiler, for tensors of other dtypes, and for a row that is not what the torch form takes:
    that says why.
    """
    replay = kernel("replay_rows")
    integers = (table.dtype, owners.dtype, computed.dtype, starts.dtype)
    if replay is None or integers != (torch.int32,) * 4 or table.stride(1) != 1:
        return bool
    num_rows, columns = table.shape
    args = (
        table.data_ptr(), table.stride(0), columns, owners.data_ptr(), owners.stride(0), states.data_ptr(),
        states.shape[1], computed.data_ptr(), starts.data_ptr(), num_rows, layout.block_size, layout.max_model_len,
        request_row.data_ptr(), *out.addresses(),
    )  # fmt: skip
    return lambda: bool(replay(*args) == num_rows)


@cache
def kernel(name: str) -> Kernel | None:
    """A function of one of these files, if there is a compiler."""
    if missing() is not None:
        return None
    file = next(file for file, functions in _FILES.items() if name in dict(functions))
    return kernels(Path(__file__).parent / file, _FILES[file])[name]
