"""CUDA graph managers of a drafter: one for the first draft pass, over the target's metadata, and one for the passes
after it (the chain).

Both capture into a memory pool apart from the target's. So outputs of the target's graphs stay valid until the
target's next replay.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from bateleur.cudagraph import (
    BatchExecutionDescriptor,
    CapturedStateProducer,
    CapturedStates,
    CudagraphDispatcher,
    CudaGraphManager,
    CudaGraphMode,
    DispatchCoordinator,
    GraphBackend,
    LocalCoordinator,
    Phase,
    ReplayChecks,
    StagedBatch,
    UnpaddedBatch,
)
from bateleur.eagle.chain_steps import ChainSteps
from bateleur.eagle.passes import DraftState
from bateleur.metadata import GraphSupport


@dataclass(frozen=True, slots=True)
class DraftGraphs:
    """Configuration of the CUDA graphs of draft passes.

    backend: a graph backend of the drafter; not the object that the target captures with.
    sizes: numbers of requests of the graphs of passes after the first (the chain).
    fuse: whether one graph holds a whole chain, if its metadata can be refreshed in the graph; else one graph per pass.
    checks: level of the checks before a replay.
    coordinator: creates, for a dispatcher, the coordinator by which all ranks agree on the graph of the chain.
    """

    backend: GraphBackend
    sizes: tuple[int, ...]
    fuse: bool = True
    checks: ReplayChecks = ReplayChecks.CHEAP
    coordinator: Callable[[CudagraphDispatcher], DispatchCoordinator] = LocalCoordinator


class PrefillEagleCudaGraphManager(CudaGraphManager[DraftState, Tensor]):
    """Graphs of the first draft pass. They read the batch that the target stages for its own graph of the same key.

    They are captured over the target's captured states, so that no metadata is built before a replay.

    states: captured states that the target's `capture` returned.
    keys: keys to capture; each must be among `states`. None means all.

    Raises `NotCaptured`, a `KeyError` that names the nearest keys, for a key that the target has not captured, and
    `ValueError` if no key is left.
    """

    def __init__(
        self,
        states: CapturedStates[Any],
        backend: GraphBackend,
        *,
        keys: Iterable[BatchExecutionDescriptor] | None = None,
        checks: ReplayChecks = ReplayChecks.CHEAP,
    ) -> None:
        wanted = tuple(states if keys is None else dict.fromkeys(keys))
        self.target_states: CapturedStateProducer[Any] = CapturedStateProducer(states, wanted)
        # The plan has exactly these keys and makes no decision: a first pass runs on the target's key.
        plan = CudagraphDispatcher(CudaGraphMode.FULL, tuple(sorted(wanted, reverse=True)), MappingProxyType({}))
        super().__init__(plan, backend, checks=checks)


@dataclass(frozen=True, slots=True)
class DraftStateProducer:
    """Fills the input buffers of draft passes from those of a target step, so that both run in CUDA graphs.

    target_states: inputs of the target's graphs. adopt: function that fills the drafter's own buffers for a target
        step, with random values if a seed is given, and returns the inputs of the first draft pass. own: `ChainSteps`
        of those buffers.
    """

    target_states: CapturedStateProducer[Any]
    adopt: Callable[[Any, Phase, int | None], DraftState]
    own: ChainSteps

    @property
    def generation(self) -> int:
        """How often the target's buffers have been staged."""
        return self.target_states.generation

    def stage(self, key: BatchExecutionDescriptor, phase: Phase) -> StagedBatch[DraftState]:
        """Stage the target's captured state of `key` again, then the drafter's buffers; return the first pass."""
        return self.adopt(self.target_states.stage(key, phase).state, phase, None).staged(key)

    def fuzz(self, key: BatchExecutionDescriptor, seed: int) -> StagedBatch[DraftState]:
        """Stage a random step of the target, which must be `Fuzzable`, and random contents of the drafter's buffers."""
        return self.adopt(self.target_states.fuzz(key, seed).state, Phase.RUN, seed).staged(key)

    def poison(self) -> None:
        """Fill the buffers of the target and of the drafter with invalid values, for tests of stale reads."""
        self.target_states.poison()
        self.own.poison()

    def addresses(self) -> Mapping[str, int]:
        """Return addresses by name of the buffers of the target and of the drafter."""
        book = {f"target.{name}": address for name, address in self.target_states.addresses().items()}
        return book | {f"draft.{name}": address for name, address in self.own.addresses().items()}


class DecodeEagleCudaGraphManager(CudaGraphManager[DraftState, Tensor]):
    """Graphs of the draft passes after the first one: one token per request, with metadata of their own.

    A key with variant `(k,)` holds a whole chain of k drafts, one without a variant a single pass.
    """

    @classmethod
    def plan_for(
        cls, sizes: Iterable[int], max_num_reqs: int, chain: int | None, support: GraphSupport
    ) -> CudagraphDispatcher:
        """Return the dispatcher of graphs for `sizes` requests.

        chain: number of drafts of a whole chain in one graph; None for one graph per pass.
        support: batches that the draft's metadata can be captured for. No graph is piecewise: piecewise graphs pad
            tokens, not requests.
        """
        mode = CudaGraphMode.FULL_DECODE_ONLY if support >= GraphSupport.SINGLE_TOKEN else CudaGraphMode.NONE
        variant = () if chain is None else (chain,)
        return CudagraphDispatcher.make(mode, sizes, max_num_reqs=max_num_reqs, variants=(variant,))

    @staticmethod
    def ask(num_rows: int, chain: int | None) -> UnpaddedBatch:
        """Return the batch to dispatch: `num_rows` requests of one token.
        chain: number of drafts that one graph samples; None for graphs of one draft pass each.
        """
        return UnpaddedBatch(num_rows, num_rows, 1, 1, True, () if chain is None else (chain,))
