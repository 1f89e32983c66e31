"""Which steps run on CUDA graphs, and running them: the plan, the manager, and the body they capture."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bateleur.cudagraph import (
    BatchExecutionDescriptor,
    CudagraphDispatcher,
    CudaGraphManager,
    CudaGraphMode,
    DispatchCounter,
    DispatchDecision,
    Execution,
    Phase,
    StagedBatch,
    UnpaddedBatch,
    VerifyReport,
)
from bateleur.cudagraph.backends import get_backend
from bateleur.eagle import DraftPolicy, EagleSpeculator, UniformPolicy
from bateleur.metadata import BatchLimits, GraphSupport
from bateleur.runner.config.graph_options import GraphOptions
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.distributed.common_graphs import keep_common
from bateleur.runner.distributed.data_parallel_sync import DataParallelSync
from bateleur.runner.model_runner.step_producer import StepProducer
from bateleur.runner.models import HybridDecoder, StepContext

_MIXED_TOKENS = 512
"""Tokens of the largest default capture size, unless decoding takes more."""
_PROMPTS = (64, 16, 8, 4, 2)
"""Tokens of a row that all kernels take for a long one, and of short ones, whose tiles are powers of two."""


def default_capture_sizes(max_num_tokens: int, decode_tokens: int = 0) -> tuple[int, ...]:
    """Token counts worth a graph: dense for small batches, where padding weighs most.

    Up to 512, or up to `decode_tokens` if that is more: the tokens of all running requests with all their drafts. Never
    above `max_num_tokens`.
    """
    most = min(max(_MIXED_TOKENS, decode_tokens), max_num_tokens)
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, _MIXED_TOKENS + 1, 32)]
    if most > _MIXED_TOKENS:
        sizes += [*range(_MIXED_TOKENS + 64, most, 64), most]
    return tuple(size for size in sizes if size <= most) or (most,)


def query_lens_of(policy: DraftPolicy, num_drafts: int) -> tuple[int, ...]:
    """Tokens of each row in steps that are worth a graph: 1, and with as many drafts as `policy` gives all rows.

    A policy that gives rows different numbers has graphs for steps in which they happen to be equal.
    """
    often = policy.numbers(num_drafts) if isinstance(policy, UniformPolicy) else ()
    return tuple(sorted({1, 1 + num_drafts, *(1 + n for n in often)}))


def capture_sizes(
    mode: CudaGraphMode, sizes: Sequence[int] | None, limits: BatchLimits, query_lens: Sequence[int] = (1,)
) -> tuple[int, ...]:
    """Token counts to capture: `sizes` if given, else the default sizes; () if `mode` captures nothing."""
    if mode is CudaGraphMode.NONE:
        return ()
    if sizes is not None:
        return tuple(sizes)
    most, largest = _most_tokens(limits), limits.max_num_reqs * max(query_lens)
    if mode.mixed_mode is not CudaGraphMode.NONE:
        return default_capture_sizes(most, largest)
    found = default_capture_sizes(min(most, largest), largest)
    return found if largest in found else (*found, largest)  # the full batch is the one that counts


def largest_capture(options: GraphOptions, limits: EngineLimits) -> int:
    """Number of tokens of the largest graph; 0 if nothing is captured."""
    sizes = capture_sizes(options.mode, options.capture_sizes, limits.buffers, (limits.max_query_len,))
    return max(sizes, default=0)


def _most_tokens(limits: BatchLimits) -> int:
    return min(limits.max_num_tokens, limits.max_num_reqs * (limits.max_model_len - 1))


def make_plan(
    mode: CudaGraphMode,
    sizes: Sequence[int] | None,
    limits: BatchLimits,
    support: GraphSupport,
    query_lens: Sequence[int] = (1,),
) -> tuple[CudagraphDispatcher, str | None]:
    """The plan of a model whose builders support `support`, and why its mode is not the one asked for, if so.

    `query_lens`: tokens of each row in the steps that decode: 1, and 1 + the drafts that all rows may have.
    """
    mode, reason = mode.resolve(support, query_len=max(query_lens))
    plan = CudagraphDispatcher.make(
        mode,
        capture_sizes(mode, sizes, limits, query_lens),
        max_num_reqs=limits.max_num_reqs,
        max_num_tokens=_most_tokens(limits),
        query_lens=tuple(query_lens),
    )
    return plan, reason


def gaps_of_drafts(plan: CudagraphDispatcher, max_num_reqs: int, query_len: int) -> str | None:
    """Which batches have no graph with all their drafts, `query_len` tokens a row, if all have one without; else None.

    Sizes count tokens: those of every batch without drafts are those of few batches with some.
    """
    plain, drafted = (plan.coverage(max_num_reqs, length) for length in (1, query_len))
    missing = sum(span.num_sizes for span in drafted.gaps)
    if plain.gaps or not missing:
        return None
    return (
        f"{missing} of {max_num_reqs} batch sizes have no graph for rows of {query_len} tokens, drafts included: "
        f"cudagraph_capture_sizes count tokens, up to {max_num_reqs * query_len} here"
    )


class StepGraphs:
    """Runs staged steps: on the graph they were staged for, or eagerly."""

    def __init__(
        self,
        model: HybridDecoder,
        producer: StepProducer,
        options: GraphOptions,
        query_lens: Sequence[int] = (1,),
        taps: tuple[int, ...] = (),
    ) -> None:
        """Capture nothing yet; `capture` does. `query_lens`: see `make_plan`; `taps`: boundaries to keep."""
        self._taps = taps
        self.model = model
        self._producer = producer
        support = producer.model_state.graph_support
        limits = producer.buffers.limits
        self.plan, reason = make_plan(options.mode, options.capture_sizes, limits, support, query_lens)
        if reason is not None:
            warnings.warn(f"cudagraph_mode is {self.plan.mode.name}: {reason}", RuntimeWarning, stacklevel=2)
        gaps = gaps_of_drafts(self.plan, limits.max_num_reqs, max(query_lens))
        if gaps is not None:
            warnings.warn(gaps, RuntimeWarning, stacklevel=2)
        self.decisions = DispatchCounter()
        self._lockstep: DataParallelSync | None = None
        self.manager: CudaGraphManager[StepContext, tuple[Tensor, ...]] | None = None
        if self.plan.keys:
            backend = get_backend(options.backend, model.device)
            self.manager = CudaGraphManager(self.plan, backend, checks=options.checks)

    def warm_up(self, drafter: EagleSpeculator | None) -> None:
        """Run prompts of nobody, whose kernels are those of all, so that neither a capture nor a step loads one; and
        let a head see them.

        An engine on a CPU without graphs has nothing to load.
        """
        if self.model.device.type == "cpu" and self.manager is None:
            return
        with torch.inference_mode():
            for length in _PROMPTS:
                prompt = self._producer.stage_prompt(length)
                self.run(prompt)
                self._producer.model_state.commit(prompt.state, None)
                if drafter is not None:
                    drafter.warm_up(prompt.state)

    def capture(self) -> None:
        """Capture every key of the plan. A key that fails runs eagerly from then on, and is warned about."""
        if (manager := self.manager) is not None:
            self.model.reserve_positions(self._producer.buffers.limits.max_model_len)
            with torch.inference_mode():
                manager.capture(self._producer, self._body, keep_going=True)
            _warn_of_failures(manager, "no graph")
            keep_common(manager, self.model.peers)
        if (exchange := self.model.exchange) is not None:
            self._lockstep = DataParallelSync(exchange, self.plan, () if manager is None else manager.ready)

    def capture_draft(self, drafter: EagleSpeculator) -> None:
        """Capture the passes of a draft head over the target's captured states, and warn as `capture` does; those
        behind steps of decoding rows are parts of whole proposals, where such can be captured.

        Where nothing of the target could be captured, there is nothing to lend, and the draft runs eagerly as well.
        """
        if self.manager is None or not self.manager.states or drafter.decode is None:
            return
        states = self.manager.states
        keys = [key for key in states if drafter.whole is None or key.uniform_query_len is None]
        drafter.capture(states, keys=keys, keep_going=True)
        for manager in (drafter.prefill, drafter.decode):
            if manager is not None:
                _warn_of_failures(manager, "no graph of the draft")
                keep_common(manager, self.model.peers)

    @property
    def decides_alone(self) -> bool:
        """Whether what a step runs on follows from it, and not from what other ranks have to do, too."""
        return self._lockstep is None

    def decide(self, ask: UnpaddedBatch) -> DispatchDecision:
        """What a step of this shape and state runs on; data-parallel ranks all ask together, or are idle."""
        if self._lockstep is not None:
            return self._lockstep.of(ask).decision_for(ask)
        return self.plan.dispatch(ask, None if self.manager is None else self.manager.ready)

    def idle(self) -> bool:
        """Without a step, take part in that of other ranks, if there is one; whether there was. Nothing remains of it.

        The rows are nobody's: their tables name null blocks and null slots, what is stored there is dropped, and
        nothing is drawn. On a graph they fill it; else it is a token, and to the experts it brings rows of nobody.
        """
        if self._lockstep is None or (agreed := self._lockstep.of(None)).batch is None:
            return False
        self._take_part(agreed.descriptor)
        return True

    def _take_part(self, key: BatchExecutionDescriptor | None) -> None:
        self.run(self._producer.stage_prompt(1) if key is None else self._producer.stage(key, Phase.RUN))

    def run(self, staged: StagedBatch[StepContext]) -> tuple[Tensor, ...]:
        """Hidden states (padded tokens, M) of a staged step, then the taps; the next replay overwrites a graph's.

        Raises ReplayFailed if the graph failed; its key runs eagerly from then on.
        """
        if staged.key is None:
            return self._body(Execution(None, staged.state))
        assert self.manager is not None
        return self.manager.replay(staged.key, staged)

    def verify(self, fuzz: int) -> VerifyReport:
        """Show that replays equal eager runs on random steps, over the caches. Raises ValueError without graphs."""
        if self.manager is None:
            raise ValueError("key: there are no graphs, the mode captures nothing")
        with torch.inference_mode():
            return self.manager.verify(fuzz=fuzz, extra_tensors=self._producer.written)

    def _body(self, execution: Execution[StepContext]) -> tuple[Tensor, ...]:
        return self.model.run(execution, self._taps)


def _warn_of_failures(manager: CudaGraphManager[Any, Any], what: str) -> None:
    for failure in manager.report.failures:
        warnings.warn(f"{what} for {failure.key}: {failure.reason}", RuntimeWarning, stacklevel=3)
