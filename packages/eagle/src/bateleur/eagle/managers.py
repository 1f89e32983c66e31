"""The graphs of a drafter: a manager for the first pass, which borrows, and one for the chain, which has its own.

Both capture with a backend of the drafter's, so in a pool apart from the target's: what the target's graphs returned
stays until the target's next replay, whatever the drafter replays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from bateleur.cudagraph import (
    Ask,
    BatchExecutionDescriptor,
    Borrowed,
    CapturedStates,
    CapturePlan,
    Checks,
    Consensus,
    CudaGraphManager,
    CudaGraphMode,
    GraphBackend,
    LocalConsensus,
    Phase,
    Staged,
)
from bateleur.eagle.chain import ChainSteps
from bateleur.eagle.passes import DraftState
from bateleur.metadata import GraphSupport

Adopt = Callable[[Any, Phase, int | None], DraftState]
"""Makes the state of a first pass of the target's, and stages the drafter's own buffers: a dummy step, in which nothing
is left of an earlier one, or with a seed a random one."""


@dataclass(frozen=True, slots=True)
class DraftGraphs:
    """Which draft passes are captured, and how.

    backend: the drafter's own, never the object that the target captures with.
    sizes: rows of the chain's graphs.
    fuse: one graph for a whole chain, where the metadata can follow from pass to pass; else one for each pass.
    chains: numbers of drafts that get a fused graph of their own; others use the next longer one. () means only K.
    checks: what a replay proves.
    consensus: how ranks agree on the chain's graph, given its plan.
    """

    backend: GraphBackend
    sizes: tuple[int, ...]
    fuse: bool = True
    chains: tuple[int, ...] = ()
    checks: Checks = Checks.CHEAP
    consensus: Callable[[CapturePlan], Consensus] = LocalConsensus


class PrefillEagleCudaGraphManager(CudaGraphManager[DraftState, Tensor]):
    """Graphs of the first draft pass, which read what the target stages for its own graph of the same key.

    They are captured over the target's captured states, on loan, so no metadata is built before a replay.

    Args:
        states: what the target's capture returned.
        backend: the drafter's.
        keys: those to capture; each must be among `states`. None means all of them.

    Raises `NotCaptured`, a `KeyError` that tells the nearest keys, for a key that the target never captured, and
    `ValueError` if nothing is left.
    """

    def __init__(
        self,
        states: CapturedStates[Any],
        backend: GraphBackend,
        *,
        keys: Iterable[BatchExecutionDescriptor] | None = None,
        checks: Checks = Checks.CHEAP,
    ) -> None:
        wanted = tuple(states if keys is None else dict.fromkeys(keys))
        self.lender: Borrowed[Any] = Borrowed(states, wanted)
        # A plan of exactly these keys, which decides nothing: a first pass runs on the target's key.
        plan = CapturePlan(CudaGraphMode.FULL, tuple(sorted(wanted, reverse=True)), MappingProxyType({}))
        super().__init__(plan, backend, checks=checks)

    @property
    def generation(self) -> int:
        """How often the target's buffers have been staged."""
        return self.lender.generation


class LentSteps:
    """Stages the target's steps for draft passes: each loan of a captured state, seen as a `DraftState`.

    adopt: see `Adopt`. own: knows the drafter's own buffers.
    """

    def __init__(self, lender: Borrowed[Any], adopt: Adopt, own: ChainSteps) -> None:
        self._lender, self._adopt, self._own = lender, adopt, own

    @property
    def generation(self) -> int:
        """The target's."""
        return self._lender.generation

    def stage(self, key: BatchExecutionDescriptor, phase: Phase) -> Staged[DraftState]:
        """Borrow `key`, and stage the drafter's own buffers for it."""
        return self._adopt(self._lender.stage(key, phase).state, phase, None).staged(key)

    def fuzz(self, key: BatchExecutionDescriptor, seed: int) -> Staged[DraftState]:
        """A random step of the target, which must be `Fuzzable`, and random contents of what the drafter owns."""
        return self._adopt(self._lender.fuzz(key, seed).state, Phase.RUN, seed).staged(key)

    def poison(self) -> None:
        """Spoil the target's buffers and the drafter's."""
        self._lender.poison()
        self._own.poison()

    def addresses(self) -> Mapping[str, int]:
        """The target's buffers and the drafter's."""
        book = {f"target.{name}": address for name, address in self._lender.addresses().items()}
        return book | {f"draft.{name}": address for name, address in self._own.addresses().items()}


class DecodeEagleCudaGraphManager(CudaGraphManager[DraftState, Tensor]):
    """Graphs of the passes behind the first one: one token per row, with states of their own.

    A key with variant `(k,)` holds the whole chain of k drafts, one without a variant a single pass.
    """

    @classmethod
    def plan_for(
        cls,
        sizes: Iterable[int],
        max_num_reqs: int,
        chains: Sequence[int],
        support: GraphSupport,
    ) -> CapturePlan:
        """Lay out the graphs for `sizes` rows each.

        chains: numbers of drafts that get a graph of their own; () for one graph per pass. support: what the draft's
        metadata can be captured for. Nothing is piecewise: a piecewise graph pads tokens and not rows.
        """
        captures = support >= GraphSupport.SINGLE_TOKEN
        mode = CudaGraphMode.FULL_DECODE_ONLY if captures else CudaGraphMode.NONE
        variants = tuple((k,) for k in sorted(set(chains))) or ((),)
        return CapturePlan.make(mode, sizes, max_num_reqs=max_num_reqs, variants=variants)

    @staticmethod
    def ask(num_rows: int, chain: int | None) -> Ask:
        """What a batch of rows wants: a chain of so many drafts, or None for single passes."""
        return Ask(num_rows, num_rows, 1, 1, True, () if chain is None else (chain,))
