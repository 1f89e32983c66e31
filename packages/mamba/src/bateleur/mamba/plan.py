"""Which slots a step reads and writes under SLOTS: a pure function of the batch, on the device.

Legend: R rows (padded ones included), K draft tokens, `computed` tokens of a row before the step,
accepted ones only, `accepted` tokens that survived of those the row computed in its previous step (1 to 1 + K; 1 when
nothing was drafted).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bateleur.mamba.spec import CacheLayout, MambaCacheMode, StatePolicy

_NO_COLUMN = torch.zeros(0, dtype=torch.int64)


class HostViews:
    """A plan that remembers what numpy sees of it: finding that takes longer than anything done with it."""

    __slots__ = ("_arrays",)
    _arrays: tuple[npt.NDArray[np.int64], ...]


@dataclass(frozen=True, slots=True)
class SlotPlan(HostViews):
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
    run_col: Tensor = _NO_COLUMN
    """(R,) column of `conv_write`, the next step's `prev_col`; (0,) in mode NONE, where it is always column 0."""

    @classmethod
    def allocate(cls, layout: CacheLayout, num_reqs: int, device: torch.device | str) -> SlotPlan:
        """A neutral plan of `num_reqs` rows, to be refilled in place through `plan_step(..., out=...)`."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        r = num_reqs
        write = zeros(r, 1 + layout.num_speculative_tokens)
        run_col = zeros(0 if layout.mode is MambaCacheMode.NONE else r)
        return cls(zeros(r), write, zeros(r), zeros(r), zeros(r), run_col)

    def written_columns(self, layout: CacheLayout) -> Tensor:
        """`run_col`; in mode NONE, where there is none, the slots of that column."""
        return self.conv_write if layout.mode is MambaCacheMode.NONE else self.run_col


def plan_step(
    layout: CacheLayout,
    table: Tensor,
    computed: Tensor,
    query_lens: Tensor,
    accepted: Tensor | None = None,
    out: SlotPlan | None = None,
    *,
    prev_col: Tensor | None = None,
    eager: bool = False,
) -> SlotPlan:
    """The slots of one step under SLOTS, in any cache mode.

    The step writes from column `run_col` on, that of its last token: the state after token i to column run_col + i,
    and the conv window, widened to hold every token's, to column run_col. So the next one reads both from the column
    that this one wrote, its `prev_col`, and not from the block of the last accepted token, which may come before it:
    the state from column prev_col + accepted - 1, the window from column prev_col at offset accepted - 1. A row
    without a previous step reads the column of its last token; a row with nothing computed starts from zeros. In mode
    NONE `run_col` is 0.

    Reads and writes being separate, nothing is copied before the step: neither out of a shared prefix nor into a new
    column.

    Args:
        layout: of the group the table belongs to.
        table: (R, columns) integer block table; at least `layout.columns()` columns, 0 where there is no slot.
        computed: (R,) tokens before the step, accepted ones only.
        query_lens: (R,) tokens of the step; 0 in padded rows.
        accepted: (R,) in rows with tokens and a state, ignored in others, and held to [1, 1 + K]; None means 1 in all.
        out: buffers to fill instead of allocating; their addresses are kept.
        prev_col: (R,) int64 `run_col` of the row's previous step, -1 where there is none; None means -1 in all. Ignored
            in mode NONE.
        eager: nothing is being captured, so a CPU may plan in numpy, to the same result. The default keeps to torch's
            operators, which a recorded graph has to see. On CUDA the planner is one Triton kernel either way.

    Raises:
        ValueError: the layout is FOLD's, the table is too narrow, a row count differs, a CPU that plans in numpy finds
            a row beyond `max_model_len`, or, on CUDA, `out` is strided.
    """
    rows, width = table.shape[0], 1 + layout.num_speculative_tokens
    plan = SlotPlan.allocate(layout, rows, table.device) if out is None else out
    if plan.ssm_write.shape != (rows, width):
        raise ValueError(f"out has shape {tuple(plan.ssm_write.shape)}; the step needs {(rows, width)}")
    of_rows = {"computed": computed, "query_lens": query_lens, "accepted": accepted, "prev_col": prev_col}
    require(layout, StatePolicy.SLOTS, table, of_rows | {"out": plan.written_columns(layout)})
    fill = form_of(_plan_step, table, eager)
    fill(layout, plan, table, computed, query_lens, accepted, prev_col)
    return plan


def _plan_step(
    layout: CacheLayout,
    plan: SlotPlan,
    table: Tensor,
    computed: Tensor,
    query_lens: Tensor,
    accepted: Tensor | None,
    prev_col: Tensor | None,
) -> None:
    """The specification of the other forms."""
    # Factors of 0 and 1 in place of masks: `has` a state to read, and hence also tokens. Whatever a padded row holds is
    # gone with the first product, so no index below leaves the table.
    tokens = query_lens.long()
    valid = tokens.sign()
    n = computed.long() * valid
    has = n.sign()
    if accepted is None:
        plan.conv_offset.zero_()
    else:
        torch.mul(accepted.clamp(1, plan.ssm_write.shape[1]).sub_(1), has, out=plan.conv_offset)
    anchor = run = torch.zeros_like(n)
    if layout.mode is not MambaCacheMode.NONE:
        last = torch.stack((n - has, n + tokens - valid))
        anchor, run = last.div_(layout.block_size, rounding_mode="trunc").unbind()
        plan.run_col.copy_(run)
        if prev_col is not None:  # never before the column of the last accepted token
            anchor = torch.maximum(anchor, prev_col).mul_(has)
    _fill(plan, table, anchor, run, has, tokens)


def _fill(plan: SlotPlan, table: Tensor, anchor: Tensor, run: Tensor, has: Tensor, tokens: Tensor) -> None:
    """Slots of the columns to read from `anchor` on, and to write from `run` on."""
    columns = torch.stack((anchor, anchor + plan.conv_offset))
    conv_read, ssm_read = table.t().gather(0, columns).long().mul_(has).unbind()
    plan.conv_read.copy_(conv_read)
    plan.ssm_read.copy_(ssm_read)
    steps = torch.arange(plan.ssm_write.shape[1], device=table.device)
    write = table.gather(1, run[:, None] + steps).mul_(tokens[:, None] > steps)
    plan.ssm_write.copy_(write)
    plan.conv_write.copy_(write[:, 0])


def form_of(torch_form: Callable[..., None], where: Tensor, eager: bool) -> Callable[..., None]:
    """The form of a planner for the device of `where`: Triton on CUDA, numpy on a CPU if `eager`, otherwise torch."""
    if where.is_cuda:
        return _other_form("kernels.plan", torch_form.__name__)
    if eager and where.is_cpu:
        return _other_form("_host_plan", torch_form.__name__)
    return torch_form


@cache
def _other_form(module: str, name: str) -> Callable[..., None]:
    """The form of `_name` in a module that the first call imports."""
    form: Callable[..., None] = getattr(import_module(f"bateleur.mamba.{module}"), name.removeprefix("_"))
    return form


def require(
    layout: CacheLayout, policy: StatePolicy, table: Tensor, rows: Mapping[str, Tensor | None]
) -> None:
    """Raise ValueError for a layout of another policy, a narrow table, or a row count that is not the table's."""
    require_policy(layout, policy)
    num_rows, columns = table.shape
    if columns < layout.columns():
        raise ValueError(
            f"table has {columns} columns; a layout of {layout.num_speculative_tokens} draft tokens and "
            f"{layout.max_model_len} tokens in blocks of {layout.block_size} needs {layout.columns()}"
        )
    require_rows("table", num_rows, rows)


def require_policy(layout: CacheLayout, policy: StatePolicy) -> None:
    """Raise ValueError for a layout of another policy."""
    if layout.policy is not policy:
        raise ValueError(f"layout has the policy {layout.policy.value!r}; this plan is for {policy.value!r}")


def require_rows(of: str, num_rows: int, rows: Mapping[str, Tensor | None]) -> None:
    """Raise ValueError for a tensor that has not the rows of `of`: it would broadcast, or resize what is lent."""
    shape = (num_rows,)
    for name, tensor in rows.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; the {of} has {num_rows} rows")
