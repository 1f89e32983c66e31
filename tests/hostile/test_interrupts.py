"""Ctrl-C wherever it may come, then going on: nothing is lost, nothing is left behind, no token is another."""

import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from inspect import CO_GENERATOR
from io import StringIO
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import bateleur.runner
from bateleur.runner import LLM, CompletionOutput, RequestOutput, RequestOutputKind, SamplingParams
from bateleur.runner.engine.messages import AddRequests, Message
from bateleur.runner.engine_thread import AdmissionLimit
from bateleur.runner.utils import progress

SOURCES = str(Path(bateleur.runner.__file__).parents[2])
"""The folder of `bateleur`: where an interrupt may come."""

PROMPTS = ["Some words,", "x", "to be cut in pieces by a budget of so few tokens", "again, again"]
PARAMS = [
    SamplingParams(max_tokens=9, seed=1, temperature=0.8, top_p=0.9, repetition_penalty=1.2, logprobs=2),
    SamplingParams(max_tokens=12, temperature=0, stop=["zz", "qx"], logprobs=0),
    SamplingParams(
        n=2,
        max_tokens=6,
        seed=3,
        presence_penalty=0.5,
        min_tokens=3,
        stop_token_ids=[7, 8, 9],
        structured_outputs={"regex": "[a-f]{2}[(-?]*"},
    ),
    SamplingParams(
        max_tokens=14,
        seed=4,
        top_k=20,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs={"regex": "([!-O]|[P-~]){20,30}"},
    ),
]

ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("nemotron_h", {"mamba_state_policy": "slots"}),
    "fold": ("nemotron_h", {"mamba_state_policy": "fold"}),
    "preempting": ("llama", {"kv_cache_memory_bytes": 190_000}),
    "prefixes": ("nemotron_h", {"enable_prefix_caching": True, "mamba_block_size": 8}),
    "drafts": ("nemotron_h", {"draft": "head", "num_speculative_tokens": 3}),
    "all": (
        "nemotron_h",
        {
            "draft": "head",
            "num_speculative_tokens": 2,
            "draft_policy": {1: 2, 3: 1},
            "enable_prefix_caching": True,
            "mamba_block_size": 8,
            "mamba_retention": "last+every=16",
        },
    ),
    "lookup": (
        "nemotron_h-experts",
        {
            "draft": "ngram",
            "prompt_lookup_min": 1,
            "num_speculative_tokens": 3,
            "enable_prefix_caching": True,
            "mamba_block_size": 8,
        },
    ),
    "mtp": ("mtp", {"draft": "mtp", "num_speculative_tokens": 2, "enable_prefix_caching": True, "mamba_block_size": 8}),
    "latent": ("kimi_linear", {"enable_prefix_caching": True, "mamba_cache_mode": "align"}),
    "ratio": ("llama", {"draft": "head", "num_speculative_tokens": 3, "speculative_rule": "ratio"}),
    "block": ("llama", {"draft": "head", "num_speculative_tokens": 3, "speculative_rule": "block"}),
    "ahead": (
        "nemotron_h",
        {
            "async_scheduling": True,
            "draft": "head",
            "num_speculative_tokens": 3,
            "enable_prefix_caching": True,
            "mamba_block_size": 8,
        },
    ),
    "ahead-ratio": (
        "llama",
        {
            "async_scheduling": True,
            "draft": "head",
            "num_speculative_tokens": 3,
            "speculative_rule": "ratio",
            "kv_cache_memory_bytes": 190_000,
        },
    ),
    "graphs": (
        "llama",
        {
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "cudagraph_backend": "recorded",
            "cudagraph_capture_sizes": [1, 2, 4, 8],
            "cudagraph_checks": "ADDRESSES",
        },
    ),
}


class Interrupter:
    """A profiler that interrupts where CPython looks for signals: where a function begins, and behind calls of C.

    At every place at which it comes by for the first time; and when told so, behind so many more of them.
    """

    def __init__(self, files: tuple[str, ...] = ("",)) -> None:
        """`files`: how the names of files end where it may interrupt."""
        self.files = files
        self.seen: set[tuple[int, int, str]] = set()
        self._codes: dict[int, tuple[CodeType, bool]] = {}
        self.every_place = True
        self.countdown = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "c_return"):
            return
        name = id(code := frame.f_code)  # its own hash looks at every instruction
        if name not in self._codes:
            self._codes[name] = code, self._counts(code)
        if not self._codes[name][1]:
            return
        self.countdown -= 1
        if self.every_place:
            place = (name, frame.f_lasti, event)
            if place not in self.seen:
                self.seen.add(place)
                raise KeyboardInterrupt
        if self.countdown == 0:
            raise KeyboardInterrupt

    def _counts(self, code: CodeType) -> bool:
        """Whether it may interrupt there. Python swallows what is raised while it closes a generator."""
        ours = code.co_filename.startswith(SOURCES) and code.co_filename.endswith(self.files)
        return ours and not code.co_flags & CO_GENERATOR

    @contextmanager
    def watching(self) -> Iterator[None]:
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)


@pytest.fixture(scope="module")
def make(tiny: Callable[[str], Path], tiny_mtp: Path, make_head: Callable[..., Path]) -> Callable[[str], LLM]:
    def build(name: str) -> LLM:
        family, settings = ENGINES[name]
        if settings.get("draft") == "head":
            hidden, vocab, dim = (48, 101, 24) if family == "llama" else (40, 131, 16)
            settings = settings | {"draft": make_head(hidden, vocab, dim, (1, 2, 4))}
        sizes = {"max_model_len": 76, "max_num_seqs": 3, "max_num_batched_tokens": 16, "block_size": 4}
        folder = tiny_mtp if family == "mtp" else tiny(family)
        return LLM(folder, device="cpu", **(sizes | settings))

    return build


def start(llm: LLM) -> list[str]:
    pairs = zip(PROMPTS, PARAMS, strict=True)
    return [llm.add_request(p, s, stream=i >= 2) for i, (p, s) in enumerate(pairs)]


class Near(float):
    """A number that equals others up to the rounding of another batch."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 1e-3


def told(output: RequestOutput) -> Any:
    """All that must be the same; of log probabilities up to the rounding of another batch."""
    return output.prompt, [_told(each) for each in output.outputs]


def _told(done: CompletionOutput) -> Any:
    assert len(done.drafted) == len(done.token_ids)
    ranked = None
    if done.logprobs is not None:
        assert done.cumulative_logprob is not None
        ranked = [
            {token: (each.rank, Near(each.logprob), each.decoded_token) for token, each in place.items()}
            for place in done.logprobs
        ]
    return done.token_ids, done.text, done.finish_reason, done.stop_reason, ranked


def finish(llm: LLM, interrupter: Interrupter | None = None, gaps: Iterator[int] | None = None) -> Any:
    """Step until all is done, through every interrupt; by request all that was said, and how often it was final."""
    last: dict[str, RequestOutput] = {}
    finals: dict[str, int] = {}
    interrupts = 0
    while llm.has_unfinished_requests:
        outputs: list[RequestOutput] = []
        if interrupter is None:
            outputs = llm.step()
        else:
            if gaps is not None and interrupter.countdown <= 0:
                interrupter.countdown = next(gaps)
            try:
                with interrupter.watching():
                    outputs = llm.step()
            except KeyboardInterrupt:
                interrupts += 1
        for output in outputs:
            assert not finals.get(output.request_id), "nothing is said behind the end"
            if output.request_id in last:
                last[output.request_id].add(output)
            else:
                last[output.request_id] = output
            finals[output.request_id] = finals.get(output.request_id, 0) + output.finished
    assert set(finals.values()) == {1}
    return last, interrupts


def assert_idle(llm: LLM) -> None:
    """Every row, block and page is back, and nobody is remembered."""
    engine, scheduler = llm.engine, llm.engine.scheduler
    engine.registry.restore()
    assert not llm.has_unfinished_requests
    assert not engine.requests
    assert not scheduler.waiting
    assert not scheduler.running
    assert not engine.registry.fetched_by_caller
    assert len(scheduler.table.free_rows) == llm.limits.max_num_seqs
    assert not scheduler.table.block_table.any()
    for pool in (scheduler.pool, scheduler.states and scheduler.states.pool):
        if pool is not None:
            assert pool.num_free == pool.capacity
            assert not any(pool._holders)
            assert sorted(pool._free + list(pool._idle)) == list(range(1, pool.num_blocks))
            assert pool._keys.keys() == pool._idle.keys()
    if scheduler.states is not None:
        assert not scheduler.states.table.any()


@pytest.fixture(scope="module")
def everywhere() -> Interrupter:
    """Shared, so that a place that several engines come by is interrupted in one of them."""
    return Interrupter()


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_a_step_interrupted_at_every_place(make: Callable[[str], LLM], everywhere: Interrupter, name: str) -> None:
    """Then at random ones; both in the middle of putting right what broke off as well."""
    llm = make(name)
    names = start(llm)
    undisturbed, _ = finish(llm)
    expected = [told(undisturbed[each]) for each in names]
    assert_idle(llm)
    emitted, rng = llm.get_metrics().num_emitted_tokens, random.Random(7)
    for every_place in (True, False):
        everywhere.every_place, everywhere.countdown = every_place, 0
        names = start(llm)
        outputs, interrupts = finish(llm, everywhere, iter(lambda: int(rng.expovariate(1 / 2400)) + 1, None))
        assert [told(outputs[each]) for each in names] == expected
        assert interrupts > 5 or every_place
        assert_idle(llm)
    assert llm.get_metrics().num_emitted_tokens == 3 * emitted


# --- other calls --------------------------------------------------------------------------------------------------

OUTER = (
    "llm.py",
    "request_registry.py",
    "exclusive_access.py",
    "input_processor.py",
    "request.py",
    "request_group.py",
    "scheduler.py",
    "block_pool.py",
)


def interrupted(call: Callable[[], Any], check: Callable[[], None]) -> Any:
    """What a call returns in the end, after it was interrupted at every place of `OUTER`; `check` runs after each."""
    interrupter = Interrupter(OUTER)
    for _ in range(1000):
        try:
            with interrupter.watching():
                return call()
        except KeyboardInterrupt:
            check()
    pytest.fail("interrupted for ever")


@pytest.fixture(scope="module")
def llm(make: Callable[[str], LLM]) -> LLM:
    return make("prefixes")


def test_an_interrupted_generate_leaves_the_others_as_they_were(llm: LLM) -> None:
    expected = told(llm.generate(PROMPTS[0], PARAMS[0])[0])
    other = llm.add_request(PROMPTS[0], PARAMS[0])
    wanted = [told(each) for each in llm.generate(PROMPTS[1:3], PARAMS[1:3])]
    llm.step()
    other = llm.add_request(PROMPTS[0], PARAMS[0])

    def check() -> None:
        llm.engine.registry.restore()
        assert set(llm.engine.requests) <= {other}

    outputs = interrupted(lambda: llm.generate(PROMPTS[1:3], PARAMS[1:3]), check)
    assert [told(each) for each in outputs] == wanted
    assert told(finish(llm)[0][other]) == expected
    assert_idle(llm)


def test_an_interrupt_in_the_bar_ends_the_requests_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(StringIO):
        def write(self, text: str) -> int:
            if "2/4" in text:
                raise KeyboardInterrupt
            return super().write(text)

    lock = progress.ProgressBar.get_lock().th_lock
    bar = partial(progress.ProgressBar, mininterval=0, miniters=1, file=Terminal())
    monkeypatch.setattr(progress, "ProgressBar", bar)
    with pytest.raises(KeyboardInterrupt) as caught:
        llm.generate(PROMPTS, PARAMS, use_tqdm=True)
    assert_idle(llm)
    assert caught.tb is not None  # keeps all frames of the call
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lock.acquire, blocking=False).result()
        other.submit(lock.release).result()


def test_an_interrupt_that_is_delayed_until_the_requests_are_queued_ends_them(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several ranks, Ctrl-C is raised when a message was applied."""

    @contextmanager
    def send(message: Message) -> Iterator[None]:
        yield
        if isinstance(message, AddRequests):
            raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.registry, "send", send)
    for call in (lambda: llm.generate(PROMPTS, PARAMS), lambda: list(llm.stream(PROMPTS, PARAMS))):
        with pytest.raises(KeyboardInterrupt):
            call()
        assert_idle(llm)


def test_an_interrupted_stream_leaves_nothing(llm: LLM) -> None:
    (expected,) = llm.generate(PROMPTS[3], PARAMS[3])
    outputs = interrupted(lambda: list(llm.stream(PROMPTS[3], PARAMS[3])), lambda: assert_idle(llm))
    assert [len(each.outputs[0].token_ids) for each in outputs] == [1] * 14
    for output in outputs[1:]:
        outputs[0].add(output)
    assert told(outputs[0]) == told(expected)


class GeneratorInterrupter(Interrupter):
    """Interrupts only where a generator begins or goes on."""

    def _counts(self, code: CodeType) -> bool:
        return code.co_filename.endswith(self.files) and bool(code.co_flags & CO_GENERATOR)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # those that are closed
def test_interrupted_generators_leave_names_for_later_requests(llm: LLM) -> None:
    limit = AdmissionLimit(1, 100)
    for make in (lambda: llm._input_processor.request("x").request_id, lambda: limit.take([None], 1)[0]):
        interrupter, names = GeneratorInterrupter(("input_processor.py", "engine_thread.py")), set[str]()
        for _ in range(20):
            with suppress(KeyboardInterrupt), interrupter.watching():
                names.add(make())
        assert interrupter.seen
        assert len(names) > 9


def test_text_that_is_held_back_survives_an_interrupted_end(llm: LLM) -> None:
    params: dict[str, Any] = {"max_tokens": 9, "temperature": 0, "ignore_eos": True}
    text = llm.generate(PROMPTS[1], SamplingParams(**params))[0].outputs[0].text
    held = SamplingParams(**params, stop=[text[-2:] + "and more"])
    interrupter, times = Interrupter(("detokenizer.py", "output_processor.py", "request_registry.py")), 0
    for kind in RequestOutputKind:
        name = llm.add_request(PROMPTS[1], replace(held, output_kind=kind), stream=True)
        outputs, interrupts = finish(llm, interrupter)
        assert outputs[name].outputs[0].text == text
        times += interrupts
    assert times > 9
    assert_idle(llm)


def test_an_interrupted_add_adds_nothing(llm: LLM) -> None:
    expected = told(llm.generate(PROMPTS[0], PARAMS[0])[0])
    name = interrupted(lambda: llm.add_request(PROMPTS[0], PARAMS[0]), lambda: assert_idle(llm))
    assert told(finish(llm)[0][name]) == expected
    assert_idle(llm)


def test_an_interrupted_abort_still_reports_once(llm: LLM) -> None:
    reports = []

    def abort() -> None:
        if not llm.engine.requests:
            llm.add_request(PROMPTS[3], PARAMS[3])
        (name,) = llm.engine.requests
        reports.append(llm.abort(name))

    def check() -> None:
        llm.engine.registry.restore()
        if not llm.engine.requests and llm.has_unfinished_requests:
            reports.extend(llm.step())

    interrupted(abort, check)
    assert_idle(llm)
    assert len(reports) > 5
    assert len({each.request_id for each in reports}) == len(reports)
    assert {each.outputs[0].finish_reason for each in reports} == {"abort"}
