"""`CudaGraphManager`: captures the graphs of a dispatcher, replays them after checks, and verifies them."""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import Generic, TypeAlias

import torch
from torch import Tensor

from bateleur.cudagraph._trees import watch_lazy_changes
from bateleur.cudagraph.backends.base import CapturedBody, GraphBackend
from bateleur.cudagraph.batch_descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.capture_report import CaptureCost, CaptureReport, KeyEvent
from bateleur.cudagraph.captured_state import CapturedKeys, CapturedState, CapturedStates, check_addresses, nearest
from bateleur.cudagraph.dispatcher import CudagraphDispatcher
from bateleur.cudagraph.errors import AddressMoved, CaptureError, DanglingExternal, ReplayFailed, SharedState
from bateleur.cudagraph.execution import Body, Execution, S, T
from bateleur.cudagraph.modes import CudaGraphMode
from bateleur.cudagraph.replay_checks import ReplayChecks, check_staged, check_tensors, check_warmup
from bateleur.cudagraph.staging import Phase, Producer, StagedBatch, stage_batch
from bateleur.cudagraph.verify import ExtraTensors, ReplayComparison, VerifyReport, compare_runs, copy_tensors

Progress: TypeAlias = Callable[[Sequence[BatchExecutionDescriptor]], Iterable[BatchExecutionDescriptor]]
"""Yields the keys in order and shows the progress, such as `tqdm`."""


@dataclass(frozen=True, slots=True, eq=False)
class _CapturedKey(CapturedState[S], Generic[S, T]):
    body: Body[S, T]
    graph: CapturedBody[S, T]
    cost: CaptureCost


class CudaGraphManager(Generic[S, T]):
    """Captures and replays the graphs of one dispatcher by one capture backend.

    The body is the captured function. S is the type of the state that the producer stages and the body reads. T is the
    type that the body returns. Managers with the same backend object share memory, so a replay of one manager may
    overwrite the outputs of another. Copy an output that must stay valid.

    Attributes:
        producer: the producer of the latest `capture`. None before.
        states: a live view of the captured keys.
    """

    def __init__(
        self, dispatcher: CudagraphDispatcher, backend: GraphBackend, *, checks: ReplayChecks = ReplayChecks.CHEAP
    ) -> None:
        self.dispatcher = dispatcher
        self._backend = backend
        self._poison = checks >= ReplayChecks.PARANOID
        levels = (
            (ReplayChecks.CHEAP, check_staged),
            (ReplayChecks.ADDRESSES, lambda captured, _: check_addresses(captured)),
            (ReplayChecks.ADDRESSES, lambda captured, _: captured.graph.check_externals()),
            (ReplayChecks.PARANOID, check_tensors),
            (ReplayChecks.PARANOID, self._poison_outputs),
        )
        self._checks: tuple[Callable[[_CapturedKey[S, T], StagedBatch[S]], None], ...] = tuple(
            check for level, check in levels if checks >= level
        )
        self.producer: Producer[S] | None = None
        self._body: Body[S, T] | None = None
        self._captured: CapturedKeys[_CapturedKey[S, T]] = CapturedKeys(self._missing_reason)
        self._failures: dict[BatchExecutionDescriptor, str] = {}
        self._releases: dict[BatchExecutionDescriptor, KeyEvent] = {}
        self.states: CapturedStates[S] = MappingProxyType(self._captured)

    @property
    def ready(self) -> Set[BatchExecutionDescriptor]:
        """A live view of the captured keys, for `CudagraphDispatcher.dispatch`."""
        return self._captured.keys()

    @property
    def pending(self) -> tuple[BatchExecutionDescriptor, ...]:
        """Keys of the dispatcher that are neither captured nor failed, in capture order."""
        return tuple(key for key in self.dispatcher.keys if key not in self._captured and key not in self._failures)

    @property
    def report(self) -> CaptureReport:
        """A snapshot of costs, failures and releases of all captures."""
        return CaptureReport(
            self._backend.name,
            len(self.dispatcher.keys),
            tuple(captured.cost for captured in self._captured.values()),
            tuple(KeyEvent(key, reason) for key, reason in self._failures.items()),
            tuple(self._releases.values()),
        )

    def capture(
        self,
        producer: Producer[S],
        body: Body[S, T],
        *,
        keys: Iterable[BatchExecutionDescriptor] | None = None,
        progress: Progress = iter,
        keep_going: bool = False,
    ) -> CapturedStates[S]:
        """Capture the function `body` on dummy batches of `producer`, in capture order.

        Each key is staged and run eagerly once (warm-up), then staged again and captured. The manager keeps `producer`
        and `body` for `capture_pending`. Keys that were captured before keep their own producer and body.

        Args:
            keys: keys of the dispatcher that are not captured yet. None: all of them. `()`: capture nothing, but keep
                `producer` and `body`.
            progress: yields the keys and shows the progress, such as `tqdm`.
            keep_going: if a key fails, record it in the report and continue, instead of raising.

        Returns a live view of all captured keys.

        Raises `CaptureError` if a key failed; keys that were captured before stay captured. Raises ValueError for a key
        that is not in the dispatcher or is captured already.
        """
        ordered = self._in_capture_order(keys)
        self.producer, self._body = producer, body
        for key in ordered:
            self._failures.pop(key, None)
        return self._capture(ordered, None, progress, keep_going)

    def capture_pending(
        self, budget_s: float, *, progress: Progress = iter, keep_going: bool = False
    ) -> CapturedStates[S]:
        """Capture pending keys with the producer and body of the latest `capture`, for about `budget_s` seconds.

        At least one key is captured, and no capture begins after `budget_s` seconds. Otherwise as `capture`.
        """
        if not budget_s >= 0:
            raise ValueError(f"budget_s={budget_s} must be at least 0")
        return self._capture(self.pending, budget_s, progress, keep_going)

    def replay(self, key: BatchExecutionDescriptor, staged: StagedBatch[S]) -> T:
        """Replay the graph of `key` on the batch `staged`.

        Returns the output of the captured function. The next replay of any graph of the backend may overwrite it.

        Raises:
            NotCaptured: there is no graph for `key`.
            KeyMismatch, StaleState, SignatureMismatch: `staged` does not fit the graph. Nothing ran.
            AddressMoved, DanglingExternal: memory of the graph moved or was freed. Nothing ran. Release the key.
            ReplayFailed: the graph raised, and the key was released. Run the step eagerly.
        """
        captured = self._captured[key]
        for check in self._checks:
            check(captured, staged)
        try:
            return captured.graph.replay(staged.state)
        except (AddressMoved, DanglingExternal):
            raise
        except Exception as error:
            self._release_key(key, f"its replay failed: {error!r}")
            raise ReplayFailed(f"{key}: {error!r}; the key was released, run the step eagerly") from error

    def verify(
        self,
        key: BatchExecutionDescriptor | None = None,
        *,
        fuzz: int = 3,
        rtol: float | None = None,
        atol: float = 1e-5,
        extra_tensors: ExtraTensors[S] = MappingProxyType({}),
    ) -> VerifyReport:
        """Compare replays with eager runs of the same function on random batches. Each run stages its batch again.

        Args:
            key: None: all captured keys, large ones first, to find contents that a large batch leaves in the buffers.
            fuzz: number of random batches per key, at least 1.
            rtol, atol: tolerance of floating-point differences:
                |replay - eager| <= `atol` + `rtol` * the largest |eager| of the row (the last dimension of the tensor).
                Integers must be equal. `rtol=None` allows for the rounding of a few sums in the least precise dtype of
                the compared tensors: 2 * eps for a dtype of at most 16 bits, 11 * eps for a wider one.
            extra_tensors: tensors to compare besides the output, by name, such as caches that the captured function
                writes in place. Also accepts a function that returns them for a staged state.

        Raises `NotCaptured` if `key` is not captured, and TypeError if the producer is not `Fuzzable`.
        """
        if fuzz < 1:
            raise ValueError(f"fuzz={fuzz} must be at least 1")
        keys = sorted(self._captured, key=lambda k: k.num_tokens, reverse=True) if key is None else [key]
        return VerifyReport(tuple(self._verify_key(k, fuzz, rtol, atol, extra_tensors) for k in keys))

    def release(self, keys: Iterable[BatchExecutionDescriptor] | None = None, *, reason: str) -> None:
        """Free graphs, for example before a buffer that they use is moved. The keys are pending again.

        If a key is not captured, nothing is released. `reason` is shown in the report and in `NotCaptured`.
        """
        if not reason:
            raise ValueError(f"reason={reason!r} must not be empty")
        released = {key: self._captured[key] for key in (self._captured if keys is None else keys)}
        for key in released:
            self._release_key(key, reason)

    def _release_key(self, key: BatchExecutionDescriptor, reason: str) -> None:
        captured = self._captured.pop(key)
        before = self._releases.pop(key, None)  # popped, so that the latest release is the last entry
        self._releases[key] = KeyEvent(key, reason, 1 if before is None else before.times + 1)
        captured.graph.release()

    def _in_capture_order(
        self, keys: Iterable[BatchExecutionDescriptor] | None
    ) -> tuple[BatchExecutionDescriptor, ...]:
        if keys is None:
            return tuple(key for key in self.dispatcher.keys if key not in self._captured)
        given, planned = set(keys), set(self.dispatcher.keys)
        for key in given:
            if key not in planned:
                raise ValueError(f"keys: {key} is not in the dispatcher; {nearest(key, self.dispatcher.keys)}")
            if key in self._captured:
                raise ValueError(f"keys: {key} is captured; release it to capture it again")
        return tuple(key for key in self.dispatcher.keys if key in given)

    def _capture(
        self, keys: tuple[BatchExecutionDescriptor, ...], budget_s: float | None, progress: Progress, keep_going: bool
    ) -> CapturedStates[S]:
        if not keys:
            return self.states
        if self.producer is None or self._body is None:
            raise CaptureError("there is no producer and body; call capture(producer, body, keys=()) first")
        start = perf_counter()
        with self._backend.session():
            for index, key in enumerate(progress(keys)):
                if index and budget_s is not None and perf_counter() - start >= budget_s:
                    break
                try:
                    self._captured[key] = self._capture_key(key, self.producer, self._body)
                except Exception as error:
                    self._failures[key] = repr(error)
                    if keep_going:
                        continue
                    if isinstance(error, CaptureError):
                        raise
                    raise CaptureError(f"{key}: {error!r}") from error
        return self.states

    def _capture_key(
        self, key: BatchExecutionDescriptor, producer: Producer[S], body: Body[S, T]
    ) -> _CapturedKey[S, T]:
        start = perf_counter()
        warmup = stage_batch(producer, key, Phase.WARMUP, poison=self._poison)
        changed_part_of = watch_lazy_changes(warmup.state, into_objects=key.mode is CudaGraphMode.FULL)
        with torch.no_grad():
            body(Execution(key, warmup.state))
        warmed = perf_counter()
        staged = stage_batch(producer, key, Phase.CAPTURE, poison=self._poison)
        shared = "state" if staged.state is warmup.state else changed_part_of(staged.state)
        if shared is not None:
            raise SharedState(
                f"{key}: {shared} is the same object in warm-up and capture, so a value that the warm-up cached in it "
                "would not be in the graph; make a new object in each staging"
            )
        check_warmup(warmup, staged)
        self._check_earlier_captures(producer)
        addresses = MappingProxyType(dict(producer.addresses()))
        graph = self._backend.capture(body, key, staged.state)
        seconds = perf_counter() - warmed
        externals = graph.externals
        cost = CaptureCost(key, warmed - start, seconds, graph.nbytes, graph.num_graphs, len(externals))
        return _CapturedKey(key, addresses, externals, producer, staged, self._poison, body, graph, cost)

    def _check_earlier_captures(self, producer: Producer[S]) -> None:
        """Raise `AddressMoved` if the latest staging moved a buffer of an earlier capture of `producer`."""
        # The addresses of the latest captured key include those of the keys before it.
        latest = next((each for each in reversed(self._captured.values()) if each.producer is producer), None)
        if latest is not None:
            check_addresses(latest)

    def _verify_key(
        self, key: BatchExecutionDescriptor, num_seeds: int, rtol: float | None, atol: float, extra: ExtraTensors[S]
    ) -> ReplayComparison:
        captured = self._captured[key]

        def run(seed: int, replays: bool) -> dict[str, Tensor]:
            staged = stage_batch(captured.producer, key, Phase.RUN, poison=self._poison, seed=seed)
            if replays:
                self._poison_outputs(captured, staged)  # shows elements that the graph does not write
                output = self.replay(key, staged)
            else:
                output = captured.body(Execution(key, staged.state))
            return copy_tensors(output, extra, staged.state)

        with torch.no_grad():
            return compare_runs(key, partial(run, replays=False), partial(run, replays=True), num_seeds, rtol, atol)

    def _missing_reason(self, key: BatchExecutionDescriptor) -> str:
        if key not in self.dispatcher.keys:
            return "it is not in the dispatcher"
        if key in self._failures:
            return f"its capture failed: {self._failures[key]}"
        released = self._releases.get(key)
        return f"it was released: {released.reason}" if released else "it is not captured yet"

    def _poison_outputs(self, captured: _CapturedKey[S, T], staged: StagedBatch[S]) -> None:
        for each in self._captured.values():
            each.graph.poison()
