"""Captures the graphs of a plan, hands out what they baked, and replays them against proof."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from time import perf_counter
from types import MappingProxyType
from typing import Generic, TypeAlias

import torch
from torch import Tensor

from bateleur.cudagraph._trees import remember
from bateleur.cudagraph.backends.base import GraphBackend, Recording
from bateleur.cudagraph.descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.errors import (
    AddressMoved,
    CaptureError,
    DanglingExternal,
    ReplayFailed,
    SharedState,
)
from bateleur.cudagraph.execution import Body, Execution, S, T
from bateleur.cudagraph.modes import CudaGraphMode
from bateleur.cudagraph.plan import CapturePlan
from bateleur.cudagraph.report import CaptureReport, KeyNote, KeyReport
from bateleur.cudagraph.staged import Phase, Producer, Staged, stage_checked
from bateleur.cudagraph.states import CapturedState, CapturedStates, Checks, Records, check_warm, nearest
from bateleur.cudagraph.verify import Also, Comparison, VerifyReport, copies, judge

Progress: TypeAlias = Callable[[Sequence[BatchExecutionDescriptor]], Iterable[BatchExecutionDescriptor]]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Record(CapturedState[S], Generic[S, T]):
    """A captured state with its graph; owns body and recording as well."""

    body: Body[S, T]
    recording: Recording[S, T]
    report: KeyReport

    def check_externals(self, staged: Staged[S]) -> None:
        """Prove that no memory of others has been freed or moved."""
        self.recording.check_externals()


class CudaGraphManager(Generic[S, T]):
    """The graphs of one plan, captured with one backend.

    S is the state that the producer stages and the body reads, T what the body returns. Managers that share a backend
    object share its memory: a replay may then spoil what another one returned, so copy what must outlive it.

    Args:
        plan: the keys, in capture order.
        backend: how to capture.
        checks: what every replay proves before it runs.
    """

    def __init__(self, plan: CapturePlan, backend: GraphBackend, *, checks: Checks = Checks.CHEAP) -> None:
        self.plan = plan
        self._backend = backend
        self._poison = checks >= Checks.PARANOID
        # Chosen once: a replay runs what is here, and at OFF nothing is.
        levels = (
            (Checks.CHEAP, _Record.check_staged),
            (Checks.ADDRESSES, _Record.check_addresses),
            (Checks.ADDRESSES, _Record.check_externals),
            (Checks.PARANOID, _Record.check_tensors),
            (Checks.PARANOID, self._spoil_outputs),
        )
        self._checks: tuple[Callable[[_Record[S, T], Staged[S]], None], ...] = tuple(
            check for level, check in levels if checks >= level
        )
        self.producer: Producer[S] | None = None
        """The one that the latest `capture` bound."""
        self._body: Body[S, T] | None = None
        self._records: Records[_Record[S, T]] = Records(self._why_missing)
        self._failures: dict[BatchExecutionDescriptor, str] = {}
        self._releases: dict[BatchExecutionDescriptor, KeyNote] = {}
        self.states: CapturedStates[S] = MappingProxyType(self._records)
        """What is captured, live."""

    @property
    def ready(self) -> Set[BatchExecutionDescriptor]:
        """The keys that can be replayed, live: for `CapturePlan.decide`."""
        return self._records.keys()

    @property
    def pending(self) -> tuple[BatchExecutionDescriptor, ...]:
        """The keys of the plan that are neither captured nor failed, in capture order."""
        return tuple(key for key in self.plan.keys if key not in self._records and key not in self._failures)

    @property
    def report(self) -> CaptureReport:
        """Costs, failures and releases up to now."""
        return CaptureReport(
            self._backend.name,
            len(self.plan.keys),
            tuple(record.report for record in self._records.values()),
            tuple(KeyNote(key, reason) for key, reason in self._failures.items()),
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
        """Capture `body` over what `producer` stages, the largest key first, and bind both for later captures.

        Each key is staged and run eagerly once, then staged anew and captured. What was captured before stays with the
        producer and the body it was captured with.

        Args:
            producer: stages a dummy batch for each key.
            body: the forward pass.
            keys: keys of the plan that are not captured, in any order; None means all of these. () only binds.
            progress: goes through the keys and shows how far it is, such as `tqdm`.
            keep_going: note a key that fails in the report and go on, instead of raising.

        Returns:
            All that is captured now, live.

        Raises:
            CaptureError: a key failed; what was captured before it stays, and the manager stays usable.
        """
        wanted = self._wanted(keys)
        self.producer, self._body = producer, body
        for key in wanted:
            self._failures.pop(key, None)
        return self._capture(wanted, None, progress, keep_going)

    def capture_pending(
        self, budget_s: float, *, progress: Progress = iter, keep_going: bool = False
    ) -> CapturedStates[S]:
        """Capture pending keys with the bound producer and body: one, and more while `budget_s` seconds are not over.

        Arguments, result and errors are those of `capture`. A key that failed is not tried again.
        """
        if not budget_s >= 0:
            raise ValueError(f"budget_s={budget_s} must be at least 0")
        return self._capture(self.pending, budget_s, progress, keep_going)

    def replay(self, key: BatchExecutionDescriptor, staged: Staged[S]) -> T:
        """Replay the graph of `key` on what was staged for it.

        Returns:
            What the body returned under capture: tensors of the graph, overwritten by its next replay.

        Raises:
            NotCaptured: there is no graph for `key`.
            KeyMismatch, StaleState, SignatureMismatch: `staged` may not replay it; nothing was run.
            AddressMoved, DanglingExternal: the graph is out of date, `release` it; nothing was run.
            ReplayFailed: the graph raised, and the key was released. Run the step eagerly: what an earlier replay
                returned has been partly overwritten.
        """
        record = self._records[key]
        for check in self._checks:
            check(record, staged)
        try:
            return record.recording.replay(staged.state)
        except (AddressMoved, DanglingExternal):
            raise
        except Exception as error:
            self._drop(key, f"its replay failed: {error!r}")
            raise ReplayFailed(f"{key}: {error!r}; the key was released, run the step eagerly") from error

    def verify(
        self,
        key: BatchExecutionDescriptor | None = None,
        *,
        fuzz: int = 3,
        rtol: float | None = None,
        atol: float = 1e-5,
        also: Also[S] = MappingProxyType({}),
    ) -> VerifyReport:
        """Compare replays with eager runs of the same body on random contents, staged anew for each of the two.

        Args:
            key: None means all that are captured, the largest first, so that stale tails show.
            fuzz: number of random batches per key; their seeds are 0, 1, ...
            rtol, atol: bounds of floating-point differences, |replay - eager| <= atol + rtol * the largest |eager| of
                a row. None allows for the rounding of a few sums in the coarsest dtype among them. Integers must be
                equal.
            also: tensors that the body writes in place, such as caches, compared like what it returns; or a function
                from the staged state to such tensors.

        Raises:
            TypeError: the producer is not `Fuzzable`.
        """
        if fuzz < 1:
            raise ValueError(f"fuzz={fuzz} must be at least 1")
        keys = sorted(self._records, key=lambda k: k.num_tokens, reverse=True) if key is None else [key]
        return VerifyReport(tuple(self._verify_key(k, fuzz, rtol, atol, also) for k in keys))

    def release(self, keys: Iterable[BatchExecutionDescriptor] | None = None, *, reason: str) -> None:
        """Free graphs, for instance before memory that they bake moves; their keys are pending again.

        Args:
            keys: captured keys, else `NotCaptured` and nothing is released; None means all.
            reason: kept in the report and told to whoever asks for the key.
        """
        if not reason:
            raise ValueError(f"reason={reason!r} must say why")
        wanted = {key: self._records[key] for key in (self._records if keys is None else keys)}
        for key in wanted:
            self._drop(key, reason)

    def _drop(self, key: BatchExecutionDescriptor, reason: str) -> None:
        record = self._records.pop(key)
        before = self._releases.pop(key, None)  # the latest goes last
        self._releases[key] = KeyNote(key, reason, 1 if before is None else before.times + 1)
        record.recording.release()

    def _wanted(
        self, keys: Iterable[BatchExecutionDescriptor] | None
    ) -> tuple[BatchExecutionDescriptor, ...]:
        """Put the keys to capture in the order of the plan."""
        if keys is None:
            return tuple(key for key in self.plan.keys if key not in self._records)
        asked, planned = set(keys), set(self.plan.keys)
        for key in asked:
            if key not in planned:
                raise ValueError(f"keys: {key} is not in the plan; {nearest(key, self.plan.keys)}")
            if key in self._records:
                raise ValueError(f"keys: {key} is captured; release it to capture it again")
        return tuple(key for key in self.plan.keys if key in asked)

    def _capture(
        self,
        keys: tuple[BatchExecutionDescriptor, ...],
        budget_s: float | None,
        progress: Progress,
        keep_going: bool,
    ) -> CapturedStates[S]:
        if not keys:
            return self.states
        if self.producer is None or self._body is None:
            raise CaptureError("nothing to capture with; bind it: capture(producer, body, keys=())")
        start = perf_counter()
        with self._backend.session():
            for index, key in enumerate(progress(keys)):
                if index and budget_s is not None and perf_counter() - start >= budget_s:
                    break
                try:
                    self._records[key] = self._capture_key(key, self.producer, self._body)
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
    ) -> _Record[S, T]:
        start = perf_counter()
        warm = stage_checked(producer, key, Phase.WARMUP, poison=self._poison)
        filled_part_of = remember(warm.state, into_objects=key.mode is CudaGraphMode.FULL)
        with torch.no_grad():
            body(Execution(key, warm.state))
        warmed = perf_counter()
        staged = stage_checked(producer, key, Phase.CAPTURE, poison=self._poison)
        shared = "state" if staged.state is warm.state else filled_part_of(staged.state)
        if shared is not None:
            raise SharedState(
                f"{key}: {shared} is the same object in warm-up and capture; what the warm-up filled in it would not "
                "be in the graph"
            )
        check_warm(warm, staged)
        self._check_earlier(producer)
        addresses = MappingProxyType(dict(producer.addresses()))
        recording = self._backend.capture(body, key, staged.state)
        seconds = perf_counter() - warmed
        externals = recording.externals
        return _Record(
            key=key,
            addresses=addresses,
            externals=externals,
            producer=producer,
            staged=staged,
            poison=self._poison,
            body=body,
            recording=recording,
            report=KeyReport(
                key, warmed - start, seconds, recording.nbytes, recording.num_graphs, len(externals)
            ),
        )

    def _check_earlier(self, producer: Producer[S]) -> None:
        """Prove that this staging moved no buffer of an earlier capture of `producer`.

        The latest record is enough. Its address book was taken after the same check, so it has every buffer of the
        records before it, at the addresses that these records baked.
        """
        latest = next((each for each in reversed(self._records.values()) if each.producer is producer), None)
        if latest is not None:
            latest.check_addresses()

    def _verify_key(
        self,
        key: BatchExecutionDescriptor,
        num_seeds: int,
        rtol: float | None,
        atol: float,
        also: Also[S],
    ) -> Comparison:
        record = self._records[key]

        def stage(seed: int) -> Staged[S]:
            return stage_checked(record.producer, key, Phase.RUN, poison=self._poison, seed=seed)

        def eager(seed: int) -> dict[str, Tensor]:
            staged = stage(seed)
            with torch.no_grad():
                return copies(record.body(Execution(key, staged.state)), also, staged.state)

        def replay(seed: int) -> dict[str, Tensor]:
            staged = stage(seed)
            self._spoil_outputs(record, staged)  # what this graph doesn't write itself shows
            return copies(self.replay(key, staged), also, staged.state)

        return judge(key, eager, replay, num_seeds, rtol, atol)

    def _why_missing(self, key: BatchExecutionDescriptor) -> str:
        if key not in self.plan.keys:
            return "it is not in the plan"
        if key in self._failures:
            return f"its capture failed: {self._failures[key]}"
        released = self._releases.get(key)
        return f"it was released: {released.reason}" if released else "it is planned and not captured yet"

    def _spoil_outputs(self, record: _Record[S, T], staged: Staged[S]) -> None:
        for any_record in self._records.values():
            any_record.recording.poison()
