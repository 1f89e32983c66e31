"""The conformance check of drafters; see `check_drafter`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bateleur.eagle.conformance.toy_engine import DTYPE, HEAD_DIM, ToyEngine, ToyRequest, ToyTarget
from bateleur.eagle.drafter import DraftContext, Drafter
from bateleur.metadata import BatchLimits, get_backend
from bateleur.metadata.conformance import ConformanceError, Violation
from bateleur.metadata.conformance._spy import NoSync, device_tensors

MakeDrafter = Callable[[ToyEngine], Drafter]

_LIMITS = BatchLimits(max_num_reqs=4, max_num_tokens=64, max_model_len=96)
_MOST_DRAFTS = 8
_NUM_STEPS = 12
_CHUNK = 3


@dataclass(frozen=True, slots=True)
class DrafterReport:
    """Counts of a check: proposals and verifications (`num_steps`), one per request and step, and accepted drafts."""

    drafter: str
    num_proposals: int
    num_steps: int
    num_accepted: int

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens that a request with drafts emits in a step: accepted drafts and one more. NaN without drafts."""
        return 1 + self.num_accepted / self.num_steps if self.num_steps else float("nan")


def check_drafter(
    make_drafter: MakeDrafter,
    *,
    reads_device: bool = False,
    target: Callable[[], ToyTarget] = ToyTarget,
    engine: type[ToyEngine] = ToyEngine,
) -> DrafterReport:
    """Check that a drafter fulfils the contract of `Drafter`, on which engines rely.

    Four requests, one of them in a reused row of the request table, run through chunked prompts and verification: all
    in one batch, each alone, in another order, with padding that holds NaN, and with fewer drafts than K.

    Args:
        make_drafter: creates a new drafter, with K at most 8, for an engine, whose `groups`, `limits`, `target` and
            `backend` it may read.
        reads_device: whether the drafter may wait for the device; for drafters in tests.
        target, engine: target model and engine that the drafter drafts for.

    Raises:
        ConformanceError: with every violation found; each starts with the letter of its class. P: shape, dtype or ids
            of a proposal. N: more drafts than requested. W: inputs are written to. S: it waits for the device.
            B: drafts depend on the other requests, on their order, or on an earlier request. D: on padding. K: on the
            earlier number of drafts. T: emitted tokens differ from those of plain decoding.
    """
    run = _Check(make_drafter, reads_device, target, engine)
    base = run.run(_JOBS, plain=True)
    for job in _JOBS:
        run.compare(base, run.run((job._replace(start=0),)), "B", "when it is alone")
    run.compare(base, run.run(_JOBS, reverse=True), "B", "in another order of the batch")
    run.compare(base, run.run(_JOBS, padded=True), "D", "when the step is padded")
    run.compare(base, run.run(_JOBS, asked=(None, 0, 1, None, 0)), "K", "after steps with fewer drafts")
    if run.violations:
        raise ConformanceError(run.name, list(run.violations.values()))
    return DrafterReport(run.name, run.num_proposals, run.num_steps, run.num_accepted)


class _Job(NamedTuple):
    """A request of the check: its row in the request table, and the step at which it arrives (`start`)."""

    name: str
    row: int
    start: int
    prompt: tuple[int, ...]
    seed: int
    temperature: float


_JOBS = (
    _Job("greedy", 0, 0, (3, 1, 18, 0, 9), 2, 0.0),
    _Job("warm", 1, 0, (1, 2, 3, 4, 5, 6, 7), 7, 0.8),
    _Job("late", 2, 3, (5, 5, 5, 6), 3, 1.2),
    _Job("second in its row", 0, 6, (8, 2, 8, 2), 5, 0.8),
)


class _Seen(NamedTuple):
    """Results of a run. drafts: by (name of request, number of its tokens so far). texts: all its tokens, by name."""

    drafts: dict[tuple[str, int], list[int]]
    texts: dict[str, list[int]]


@dataclass
class _Check:
    make: MakeDrafter
    reads_device: bool
    target: Callable[[], ToyTarget]
    engine: type[ToyEngine]
    name: str = "drafter"
    num_proposals: int = 0
    num_steps: int = 0
    num_accepted: int = 0
    violations: dict[tuple[str, str], Violation] = field(default_factory=dict)

    def note(self, letter: str, text: str) -> None:
        """Record a violation, if it is the first with this letter and this text before the first colon.

        letter: class of the violation, see `check_drafter`.
        """
        self.violations.setdefault((letter, text.split(":")[0]), Violation(letter, text))

    def watched(self, drafter: Drafter, vocab_size: int, *, reads: bool) -> Any:
        """Return `drafter` with every proposal checked, see `sound`. reads: whether it may wait for the device."""

        def propose(context: DraftContext) -> Tensor:
            shown = dict(_tensors(context))
            before = {name: tensor.clone() for name, tensor in shown.items()}
            spy = NoSync(shown.values(), lambda what: self.note("S", f"propose waits for the device: {what}"))
            with nullcontext() if reads else spy:
                proposal = drafter.propose(context)
            for name, tensor in shown.items():
                if not torch.equal(_bits(tensor), _bits(before[name])):
                    self.note("W", f"propose writes to {name}")
                    tensor.copy_(before[name])
            return self.sound(proposal, (len(context.next_token), k), context.num_drafts, vocab_size)

        k = drafter.num_speculative_tokens
        return SimpleNamespace(num_speculative_tokens=k, needs=drafter.needs, propose=propose)

    def sound(self, proposal: Any, shape: tuple[int, int], num_drafts: int, vocab_size: int) -> Tensor:
        """Check shape, dtype and ids of a proposal; return it with -1 in place of entries that an engine can't use."""
        if not isinstance(proposal, Tensor) or proposal.shape != shape or proposal.dtype != torch.int64:
            found = f"{proposal.dtype} {tuple(proposal.shape)}" if isinstance(proposal, Tensor) else type(proposal)
            self.note("P", f"the proposal must be int64 (R, K), such as {shape}; it is {found}")
            return torch.full(shape, -1)
        strange = (proposal < -1) | (proposal >= vocab_size)
        if strange.any():
            first = int(proposal[strange][0])
            self.note("P", f"an id is {first}; ids are below {vocab_size}, -1 is no draft")
        if (proposal[:, num_drafts:] != -1).any():
            self.note("N", f"more than num_drafts drafts; later ones must be -1 (first: {num_drafts})")
        sound: Tensor = proposal.masked_fill(strange, -1)
        sound[:, num_drafts:] = -1
        return sound

    def compare(self, base: _Seen, other: _Seen, letter: str, when: str) -> None:
        """Check that two runs have equal tokens, and equal drafts after equal tokens wherever both requested drafts.

        letter: class of a difference of drafts, see `check_drafter`. when: how the runs differ, for the message.
        """
        for name, length in sorted(base.drafts.keys() & other.drafts.keys()):
            first, second = base.drafts[name, length], other.drafts[name, length]
            if any(one != two for one, two in zip(first, second, strict=False)):
                self.note(letter, f"drafts differ {when}: {name!r} at {length} tokens: {first} and {second}")
        for name, text in other.texts.items():
            if any(one != two for one, two in zip(text, base.texts[name], strict=False)):
                self.note("T", f"the text differs {when}: {name!r}")

    def run(
        self,
        jobs: Sequence[_Job],
        *,
        plain: bool = False,
        reverse: bool = False,
        padded: bool = False,
        asked: Sequence[int | None] = (None,),
    ) -> _Seen:
        """Run the requests `jobs` with a new drafter.

        plain: also decode without drafts, to compare. reverse: reverse the order of requests. padded: pad steps, with
        NaN in the padding. asked: numbers of drafts that steps request, in turn; None is K.
        """
        backend = get_backend("torch", device="cpu", dtype=DTYPE, head_dim=HEAD_DIM)
        engine = self.engine(self.target(), backend, _LIMITS, _MOST_DRAFTS)
        drafter = self.make(engine)
        k, self.name = drafter.num_speculative_tokens, type(drafter).__name__
        if not 1 <= k <= _MOST_DRAFTS:
            raise ValueError(f"num_speculative_tokens={k} must be in [1, {_MOST_DRAFTS}] for this check")
        engine.padded = padded
        engine.drafter = self.watched(drafter, engine.target.vocab_size, reads=self.reads_device or not plain)
        seen, named = _Seen({}, {}), dict[int, str]()
        for step in range(_NUM_STEPS):
            for job in (job for job in jobs if job.start == step):
                engine.add(job.row, job.prompt, job.seed, job.temperature)
                drafter.admit(job.row, list(job.prompt))
                named[job.row] = job.name
            self._step(engine, named, seen, asked[step % len(asked)], reverse)
        if plain:
            for request in engine.requests.values():
                if request.tokens != engine.plain(request, len(request.tokens) - request.prompt_len):
                    self.note("T", f"the text is not that of plain decoding: {named[request.row]!r}")
        return seen

    def _step(self, engine: ToyEngine, named: dict[int, str], seen: _Seen, asked: int | None, reverse: bool) -> None:
        k = engine.drafter.num_speculative_tokens if engine.drafter else 0
        live = [each for each in engine.requests.values() if len(each.tokens) + 2 * k < _LIMITS.max_model_len]
        live.sort(key=lambda each: (_in_prompt(each), -each.row if reverse else each.row))
        drafted = {each.row: len(each.drafts) for each in live}
        if not live:
            return
        work = {each.row: min(_CHUNK, each.prompt_len - each.computed) for each in live if _in_prompt(each)}
        work = {each.row: work.get(each.row, 1 + drafted[each.row]) for each in live}
        proposal = engine.step(work, asked)
        self.num_proposals += len(live)
        assert engine.context is not None
        valid = engine.context.num_valid.tolist()
        for request, drafts, kept in zip(live, proposal.tolist(), valid, strict=True):
            name = named[request.row]
            seen.drafts[name, request.computed] = drafts[: k if asked is None else asked]
            seen.texts[name] = list(request.tokens)
            if drafted[request.row]:
                self.num_steps, self.num_accepted = self.num_steps + 1, self.num_accepted + kept - 1


def _in_prompt(request: ToyRequest) -> bool:
    return request.computed < request.prompt_len - 1


def _tensors(context: DraftContext) -> Iterator[tuple[str, Tensor]]:
    yield from ((f"batch ({index})", tensor) for index, tensor in enumerate(device_tensors(context.batch)))
    yield from ((f"features[{index}]", tensor) for index, tensor in enumerate(context.features))
    for name in ("next_token", "num_valid", "emitted", "rows", "seeds", "temperature"):
        yield name, getattr(context, name)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num(123.0) if tensor.is_floating_point() else tensor
