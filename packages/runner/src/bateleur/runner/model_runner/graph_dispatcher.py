"""Chooses the CUDA graph of each step, captures the graphs of forward passes, and runs them."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from bateleur.cudagraph import (
    BatchExecutionDescriptor,
    Body,
    CudagraphDispatcher,
    CudaGraphManager,
    CudaGraphMode,
    DispatchCounter,
    DispatchDecision,
    Execution,
    Phase,
    Producer,
    UnpaddedBatch,
)
from bateleur.cudagraph.backends import get_backend
from bateleur.eagle import DraftPolicy, EagleSpeculator, UniformPolicy
from bateleur.metadata import BatchLimits, GraphSupport
from bateleur.runner.config.graph_options import GraphOptions
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.distributed.agreement import keep_common_graphs
from bateleur.runner.distributed.expert_parallel import DataParallelSync
from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.model_runner.model_state import StagedStep
from bateleur.runner.model_runner.step_producer import StepProducer
from bateleur.runner.models import HybridDecoder, StepContext

S = TypeVar("S")
T = TypeVar("T")

_MIXED_TOKENS = 512
"""Tokens of the largest default capture size, unless decoding takes more."""
_PROMPTS = (64, 16, 8, 4, 2)
"""Prompt lengths of the warm-up: a long one, and short ones, whose tiles are powers of two."""


def default_capture_sizes(max_num_tokens: int, decode_tokens: int = 0) -> tuple[int, ...]:
    """Return the default token counts to capture, dense for small batches, where padding costs most.
    They go up to 512, or to `decode_tokens` (the tokens of all running requests with their drafts) if that is more, but
    never above `max_num_tokens`.
    """
    most = min(max(_MIXED_TOKENS, decode_tokens), max_num_tokens)
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, _MIXED_TOKENS + 1, 32)]
    if most > _MIXED_TOKENS:
        sizes += [*range(_MIXED_TOKENS + 64, most, 64), most]
    return tuple(size for size in sizes if size <= most) or (most,)


def query_lens_of(policy: DraftPolicy, num_drafts: int) -> tuple[int, ...]:
    """Return the query lengths of decode steps to capture: 1, and 1 + each number of drafts.
    The numbers of drafts are `num_drafts`, and every number that `policy` may give to all requests of a batch.
    """
    often = policy.draft_counts(num_drafts) if isinstance(policy, UniformPolicy) else ()
    return tuple(sorted({1, 1 + num_drafts, *(1 + n for n in often)}))


def capture_sizes(options: GraphOptions, limits: BatchLimits, query_lens: Sequence[int]) -> tuple[int, ...]:
    """Return the token counts to capture: those of `options` or the default sizes; () if its mode captures nothing."""
    if options.mode is CudaGraphMode.NONE:
        return ()
    if options.capture_sizes is not None:
        return tuple(options.capture_sizes)
    most, largest = _most_tokens(limits), limits.max_num_reqs * max(query_lens)
    if options.mode.mixed_mode is not CudaGraphMode.NONE:
        return default_capture_sizes(most, largest)
    found = default_capture_sizes(min(most, largest), largest)
    return found if largest in found else (*found, largest)  # the full batch is the one that counts


def largest_capture(options: GraphOptions, limits: EngineLimits) -> int:
    """Return the number of tokens of the largest graph; 0 if nothing is captured."""
    return max(capture_sizes(options, limits.buffers, (limits.max_query_len,)), default=0)


def _most_tokens(limits: BatchLimits) -> int:
    return min(limits.max_num_tokens, limits.max_num_reqs * (limits.max_model_len - 1))


def make_dispatcher(
    options: GraphOptions, limits: BatchLimits, support: GraphSupport, query_lens: Sequence[int]
) -> tuple[CudagraphDispatcher, str | None]:
    """Return the dispatcher for metadata builders with this support, and the reason if its mode is not the one of
    `options`, else None.
    query_lens: query lengths of decode steps: 1, and 1 + each number of drafts that all requests may have.
    """
    mode, reason = options.mode.resolve(support, query_len=max(query_lens))
    dispatcher = CudagraphDispatcher.make(
        mode,
        capture_sizes(replace(options, mode=mode), limits, query_lens),
        max_num_reqs=limits.max_num_reqs,
        max_num_tokens=_most_tokens(limits),
        query_lens=tuple(query_lens),
    )
    return dispatcher, reason


def gaps_of_drafts(dispatcher: CudagraphDispatcher, max_num_reqs: int, query_len: int) -> str | None:
    """Return a warning if some batch sizes have no graph for `query_len` tokens per request (a token and its drafts).
    None if there is no such size, or if some batch sizes have no graph even without drafts.
    """
    plain, drafted = (dispatcher.coverage(max_num_reqs, length) for length in (1, query_len))
    missing = sum(span.num_sizes for span in drafted.gaps)
    if plain.gaps or not missing:
        return None
    return (
        f"{missing} of {max_num_reqs} batch sizes have no graph for rows of {query_len} tokens, drafts included: "
        f"cudagraph_capture_sizes count tokens, up to {max_num_reqs * query_len} here"
    )


class GraphDispatcher:
    """Chooses the CUDA graph of each step, and runs staged steps in it or eagerly."""

    def __init__(
        self,
        model: HybridDecoder,
        producer: StepProducer,
        options: GraphOptions,
        query_lens: Sequence[int] = (1,),
        taps: tuple[int, ...] = (),
    ) -> None:
        """producer: stages dummy steps. query_lens: see `make_dispatcher`. taps: see `HybridDecoder.run`."""
        self.model, self._producer, self._taps = model, producer, taps
        support, limits = producer.model_state.graph_support, producer.buffers.limits
        self.dispatcher, reason = make_dispatcher(options, limits, support, query_lens)
        if reason is not None:
            warnings.warn(f"cudagraph_mode is {self.dispatcher.mode.name}: {reason}", RuntimeWarning, stacklevel=2)
        gaps = gaps_of_drafts(self.dispatcher, limits.max_num_reqs, max(query_lens))
        if gaps is not None:
            warnings.warn(gaps, RuntimeWarning, stacklevel=2)
        self.decisions = DispatchCounter()
        self.sync: DataParallelSync | None = None
        self.manager: CudaGraphManager[StepContext, tuple[Tensor, ...]] | None = None
        if self.dispatcher.keys:
            backend = get_backend(options.backend, model.device)
            self.manager = CudaGraphManager(self.dispatcher, backend, checks=options.checks)

    def warm_up(self, drafter: EagleSpeculator | None) -> None:
        """Run dummy prompts through the model and the drafter, if any, so that later runs find kernels loaded.
        Does nothing on a CPU if no graph is captured.
        """
        if self.model.device.type == "cpu" and self.manager is None:
            return
        with torch.inference_mode():
            for length in _PROMPTS:
                prompt = self._producer.stage_prompts(min(length, self._producer.buffers.limits.max_model_len))
                self.run(prompt)
                self._producer.model_state.commit(prompt.state, None)
                if drafter is not None:
                    drafter.warm_up(prompt.state)

    def capture(self) -> None:
        """Capture all graphs. A key whose capture fails runs eagerly from then on, with a warning."""
        if (manager := self.manager) is not None:
            self.model.reserve_positions(self._producer.buffers.limits.max_model_len)
            capture_graphs(manager, self._producer, self._body, self.model.peers, "no graph")
        if (exchange := self.model.exchange) is not None:
            self.sync = DataParallelSync(exchange, self.dispatcher, () if manager is None else manager.ready)

    def capture_draft(self, drafter: EagleSpeculator) -> None:
        """Capture the first draft pass after each captured graph of the target, and the later draft passes. A pass
        whose capture fails runs eagerly, with a warning. Without graphs of the target, all draft passes run eagerly.
        If one graph can hold all passes of a proposal (`drafter.fuses_proposals`), first passes after uniform decode
        steps are left out here: `ProposalGraphs` captures whole proposals for these steps.
        """
        if self.manager is None or not self.manager.states or drafter.decode is None:
            return
        states = self.manager.states
        keys = [key for key in states if not drafter.fuses_proposals or key.uniform_query_len is None]
        drafter.capture(states, keys=keys, keep_going=True)
        for manager in (drafter.prefill, drafter.decode):
            if manager is not None:
                _keep_captured(manager, self.model.peers, "no graph of the draft")

    def decide(self, request: UnpaddedBatch) -> DispatchDecision:
        """Choose the graph of a step, or none and the reason. All data-parallel ranks call this or `idle` together."""
        if self.sync is not None:
            return self.sync.dispatch(request).decision_for(request)
        return self.dispatcher.dispatch(request, None if self.manager is None else self.manager.ready)

    def idle(self) -> bool:
        """Take part in a step of other data-parallel ranks, on a rank without a step; returns whether there was one.
        Dummy requests run with null blocks and slots, as many as the graph of the step holds, and sample nothing.
        Without a graph one dummy token runs; experts pad it to the number of tokens that the ranks agreed on.
        """
        if self.sync is None or (agreed := self.sync.dispatch(None)).batch is None:
            return False
        self._take_part(agreed.descriptor)
        return True

    def _take_part(self, key: BatchExecutionDescriptor | None) -> None:
        self.run(self._producer.stage_prompts(1) if key is None else self._producer.stage(key, Phase.RUN))

    def run(self, staged: StagedStep) -> tuple[Tensor, ...]:
        """Run a staged step. Returns hidden states (padded tokens, hidden size): final, then those for a drafter.
        The next replay overwrites results of a graph. Raises ReplayFailed if the graph failed; its key runs eagerly
        from then on.
        """
        if staged.key is None:
            return self._body(Execution(None, staged.state))
        assert self.manager is not None
        return self.manager.replay(staged.key, staged)

    def _body(self, execution: Execution[StepContext]) -> tuple[Tensor, ...]:
        return self.model.run(execution, self._taps)


def capture_graphs(
    manager: CudaGraphManager[S, T], producer: Producer[S], body: Body[S, T], peers: Ranks, missing: str
) -> None:
    """Capture all graphs of a manager. A key whose capture fails on any rank runs eagerly from then on, with
    a warning that starts with `missing`. producer: stages dummy batches. body: the function to capture. peers: the
    ranks that run each forward pass together, see `HybridDecoder.peers`.
    """
    if manager.dispatcher.keys:
        with torch.inference_mode():
            manager.capture(producer, body, keep_going=True)
    _keep_captured(manager, peers, missing)


def _keep_captured(manager: CudaGraphManager[Any, Any], peers: Ranks, missing: str) -> None:
    for failure in manager.report.failures:
        warnings.warn(f"{missing} for {failure.key}: {failure.reason}", RuntimeWarning, stacklevel=3)
    keep_common_graphs(manager, peers)
