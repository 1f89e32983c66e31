"""Steps of rows that carry states, planned and ended on a CPU in C: one call each."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_not

from torch import Tensor

from bateleur.mamba.planners import CopyPlan, FoldPlan, ReplayPlan, SlotPlan, native
from bateleur.mamba.planners.native.folds import Folds, fold_call
from bateleur.mamba.request_states import RequestStates
from bateleur.mamba.spec import CacheLayout
from bateleur.mamba.step_buffers import StepBuffers
from bateleur.mamba.step_metadata import MambaMetadata
from bateleur.metadata import CommonAttentionMetadata


class StepCalls:
    """Calls that know where everything lies, which are made anew where tensors are others than in the last step; views
    of one size are made once.
    """

    def __init__(self, layout: CacheLayout, states: RequestStates) -> None:
        self._layout, self._states = layout, states
        self._begin: tuple[tuple[object, ...], Callable[[], bool]] = ((None,) * 4, bool)
        self._end: tuple[tuple[object, ...], int, Callable[[Tensor], bool]] = ((None,) * 4, 0, bool)
        self._fold: tuple[tuple[object, ...], Folds] = ((None,) * 4, lambda *_: None)

    def fold(
        self,
        meta: MambaMetadata,
        common: CommonAttentionMetadata,
        out: FoldPlan,
        accepted: Tensor,
        through: Tensor | None,
    ) -> int | None:
        """End a step under FOLD, see `fold_call`."""
        of = computed, starts, prompts, plan = (
            common.num_computed_tokens, common.query_start_loc, common.is_prefilling, meta.plan,
        )  # fmt: skip
        if any(map(is_not, of, self._fold[0])):
            assert isinstance(plan, ReplayPlan)
            assert meta.request_row is not None
            states, own = self._states.values, meta.request_row
            self._fold = of, fold_call(self._layout, states, computed, starts, prompts, own, plan, out)
        return self._fold[1](accepted, meta.num_decodes, through)

    def begin(self, views: StepBuffers, common: CommonAttentionMetadata, group: int) -> bool:
        """Plan a step into `views`, with the rows of its requests; False where there is no such call."""
        of = _planned_of(common, group)
        if any(map(is_not, of, self._begin[0])):
            args = (self._layout, *of[:2], self._states.values, *of[2:], views.request_row)
            if isinstance(views.plan, SlotPlan):
                self._begin = of, native.step_call(*args, views.plan)
            else:
                through = None if views.way is None else views.way.through
                self._begin = of, native.replay_call(*args, views.plan, through)
        return self._begin[1]()

    def begin_again(self, common: CommonAttentionMetadata, group: int) -> bool:
        """The same, into what it was done into last, if that was for the same tensors."""
        return not any(map(is_not, _planned_of(common, group), self._begin[0])) and self._begin[1]()

    def end(
        self,
        meta: MambaMetadata,
        common: CommonAttentionMetadata,
        group: int,
        out: CopyPlan,
        accepted: Tensor,
    ) -> bool:
        """End a step under SLOTS, of whose rows `accepted` (R,) tokens stay; False where there is no such call."""
        of = table, computed, starts, plan = (
            common.block_tables[group], common.num_computed_tokens, common.query_start_loc, meta.plan,
        )  # fmt: skip
        if meta.num_decodes != self._end[1] or any(map(is_not, of, self._end[0])):
            assert isinstance(plan, SlotPlan)
            assert meta.request_row is not None
            rows = (computed, starts, meta.num_decodes, meta.request_row)
            call = native.copy_call(self._layout, table, self._states.values, *rows, plan, out)
            self._end = of, meta.num_decodes, call
        return self._end[2](accepted)


def _planned_of(common: CommonAttentionMetadata, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tables = common.block_tables
    return tables[group], tables[group + 1], common.num_computed_tokens, common.query_start_loc
