"""`LLM`: the whole engine behind the names that vLLM's users type."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from inspect import Parameter, Signature
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, cast
from weakref import finalize

import numpy as np

from bateleur.runner.config.engine_config import EngineConfig, all_options
from bateleur.runner.distributed.ranks import ALONE, Ranks
from bateleur.runner.engine.engine import Engine
from bateleur.runner.engine.exclusive_access import ExclusiveAccess, exclusive
from bateleur.runner.engine.input_processor import InputProcessor, Prompt, as_prompts
from bateleur.runner.engine.memory_profile import needed_bytes
from bateleur.runner.engine.request_registry import RequestRegistry
from bateleur.runner.engine.setup import EngineSetup, device_of
from bateleur.runner.errors import EngineDead
from bateleur.runner.generation_config import recommended_sampling
from bateleur.runner.model_runner.graph_costs import GraphCosts
from bateleur.runner.outputs import RequestOutput, RequestOutputKind
from bateleur.runner.requests.request_group import RequestGroup
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.stats import EngineStats
from bateleur.runner.text.chat import ChatOptions, render
from bateleur.runner.text.messages import Message, is_conversation
from bateleur.runner.utils.arguments import Check, Integer, Several, file, flag, refuse, text
from bateleur.runner.utils.device import current, naming_memory
from bateleur.runner.workers.data_parallel import DataParallelCoordinator
from bateleur.runner.workers.leader import Leader

_log = logging.getLogger(__name__)


class LLM:
    """A model ready to generate.

    It serves one call at a time: a second thread that comes while one is inside, and a forked process, get a
    RuntimeError that says so. Between calls it may go from thread to thread. A call that breaks off, by an error or
    Ctrl-C, leaves the other requests with the tokens that they had, and the next call goes on from there. The calling
    thread's current CUDA device is the engine's during a call, and after it what it was before.

    model: Hugging Face checkpoint folder; None is the model that ships with the package.
    options: by name, the fields of the configurations in `bateleur.runner.config.engine_config`, where each is
        described; `bateleur generate --help` lists them as well.

    With `tensor_parallel_size` or `data_parallel_size` above 1 it starts the other ranks, processes that end with it:
    by `close`, at the end of a `with`, or when nobody has it any more. One that dies, hangs or raises ends them all,
    and this and every later call with a `RankFailed`, an `EngineDead` that names rank and cause.

    Raises ValueError if an option is unknown or out of range, or the folder is no supported checkpoint.
    """

    def __init__(self, /, model: str | Path | None = None, **options: Any) -> None:
        self.config = EngineConfig.of(model=model, **options)
        self._leader = Leader.of(self.config)
        try:
            ranks = ALONE if self._leader is None else self._leader.ranks
            self.device = device_of(self.config, ranks)
            with current(self.device):
                self._open(ranks)
        except BaseException as error:
            if self._leader is not None:
                self._leader.give_up(error)
            raise

    def _open(self, ranks: Ranks) -> None:
        setup = EngineSetup.of(self.config, needed_bytes, ranks)
        self.spec, self.dtype = setup.spec, setup.model.dtype
        self.limits, self.cache_plan, self.tokenizer = setup.limits, setup.cache_plan, setup.tokenizer
        sizes = {name: getattr(self.limits, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
        with naming_memory(kv_cache_memory_bytes=self.cache_plan.total_bytes, **sizes):
            self.engine = Engine(setup)
        self.graph_costs = GraphCosts.of(self.engine.all_graphs.reports.values())
        """Number, time and memory of the CUDA graphs that were captured at start."""
        if self.graph_costs.num_graphs:
            _log.info("%s", self.graph_costs)
        self._runner: Engine | DataParallelCoordinator = self.engine
        self._ledger: RequestRegistry | DataParallelCoordinator = self.engine.ledger
        self._admission = InputProcessor(self.tokenizer, self.spec, self.limits, self.config)
        model = self.config.model
        self.default_sampling = recommended_sampling(
            setup.folder, model.generation_config, model.override_generation_config
        )
        """Sampling parameters where a request is silent, by name."""
        self._default_params = SamplingParams.from_dict(self.default_sampling)
        self._turn = ExclusiveAccess(self.device)
        if (leader := self._leader) is not None:
            leader.begin()
            if self.config.parallel.data_parallel_size > 1:
                self._runner = self._ledger = DataParallelCoordinator(self.engine, leader)
            else:
                self.engine.ledger.tell = leader.tell
            finalize(self, leader.close)

    # --- from its beginning to its end --------------------------------------------------------------------

    def close(self) -> None:
        """Write what waits for the disk, and end the processes of other ranks, if there are any; no call is served any
        more. A second one is none."""
        if self._turn.holder is None:
            with suppress(EngineDead):  # then no rank writes any more
                self.engine.errands.drain()
        if self._leader is not None:
            self._leader.close()
        self._turn.close()

    def on_fault(self, told: Callable[[EngineDead], None]) -> None:
        """Call this in a thread of its own when another rank fails, or this one hangs; at most once."""
        if self._leader is not None:
            self._leader.on_fault(told)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- whole batches ------------------------------------------------------------------------------------

    @exclusive
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        priority: Sequence[int] | int | None = None,
    ) -> list[RequestOutput]:
        """Run all prompts to their end; results in the order of the prompts.

        All prompts are validated before the first is queued: a ValueError means that nothing was started. Requests
        queued by `add_request` run along; what they report meanwhile is kept for the next `step`. Whatever stops it
        early aborts these requests.

        priority: of each prompt, or of all; lower goes first, where scheduling_policy is "priority".
        """
        flag("use_tqdm", use_tqdm)
        kind = RequestOutputKind.FINAL_ONLY
        requests = self._requests(prompts, sampling_params, kind=kind, priority=priority)
        results: dict[str, RequestOutput] = {}
        from tqdm import tqdm

        with tqdm(total=len(requests), unit="request", disable=not use_tqdm) as bar:
            for output in self._run(requests):
                results[output.request_id] = output
                bar.update(1)
        return [results[request.request_id] for request in requests]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer a conversation, or several: `generate` behind the checkpoint's chat template.

        options: tools, chat_template, add_generation_prompt, continue_final_message, chat_template_kwargs, see
        `bateleur.runner.text.chat.render`, which also says what is refused by a ValueError.
        """
        several = [messages] if is_conversation(messages) else messages
        prompts = [render(self.tokenizer, cast(Sequence[Message], each), **options) for each in several]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    @exclusive
    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yields each request after each of its steps, with all of its text so far.

        With `output_kind` DELTA each output holds what is new, with FINAL_ONLY there is one of each request. Text that
        could still change (half a character, the start of a stop string) is held back. Closing the iterator aborts
        what has not finished.
        """
        return self._in_turns(self._run(self._requests(prompts, sampling_params)))

    def _in_turns(self, outputs: Generator[RequestOutput]) -> Iterator[RequestOutput]:
        """Between two of them others may call."""
        with closing(outputs):
            while (output := self._next(outputs)) is not None:
                yield output

    @exclusive
    def _next(self, outputs: Iterator[RequestOutput]) -> RequestOutput | None:
        return next(outputs, None)

    def _run(self, requests: list[RequestGroup]) -> Generator[RequestOutput]:
        """Run these requests to their end; one that somebody else aborts ends without a word."""
        ledger = self._ledger
        ids = {request.request_id for request in requests}
        pending = set(ids)
        ledger.add(*requests)
        ledger.claimed |= ids
        try:
            while pending:
                output = ledger.take(pending)
                if output is not None:
                    if output.finished:
                        pending.discard(output.request_id)
                    yield output
                elif pending := pending & ledger.requests.keys():
                    self._runner.step()
        finally:
            ledger.claimed -= ids - pending
            ledger.forsaken = ledger.forsaken | pending
            if self._turn.holder is None:  # else whoever is inside, or comes next, forgets them
                self._restore()

    @exclusive
    def _restore(self) -> None:
        self._ledger.restore()

    # --- one request at a time ----------------------------------------------------------------------------

    @exclusive
    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        stream: bool = False,
    ) -> str:
        """Queue a request beside those that run; returns its id. `step` reports it.

        With `stream` it reports each of its steps, as `output_kind` says; else its end alone, and all of it. A lower
        `priority` goes first, where scheduling_policy is "priority".
        """
        steps = flag("stream", stream)
        given = self._default_params if sampling_params is None else sampling_params
        request = self._admission.request(
            prompt,
            given,
            request_id=request_id,
            kind=None if steps else RequestOutputKind.FINAL_ONLY,
            priority=priority,
            taken=self._ledger,
        )
        self._ledger.add(request)
        return request.request_id

    @exclusive
    def enter(self, *requests: RequestGroup) -> None:
        """Queue what `prepare` made, all or none. ValueError for an id that is here already."""
        self._ledger.add(*requests)

    @exclusive
    def abort(self, request_id: str) -> RequestOutput:
        """End a request now and return what it has. Raises ValueError for an unknown id."""
        return self._ledger.abort(text("request_id", request_id))

    @exclusive
    def step(self) -> list[RequestOutput]:
        """One engine step; the requests that finished since the last one, and those added with `stream`."""
        self._runner.step()
        return self._ledger.take_unclaimed()

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return self._ledger.has_unfinished

    def check_process(self) -> None:
        """Raises RuntimeError in a process that was forked off."""
        self._turn.check_process()

    def get_metrics(self) -> EngineStats:
        """Counters since the start, and where the queues stand. It may be called from any thread at any time."""
        return self._runner.metrics()

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets: those that the model's `generation_config.json` recommends."""
        return self._default_params

    # --- prefixes -----------------------------------------------------------------------------------------

    @exclusive
    def export_prefix(self, token_ids: Sequence[int], path: str | Path) -> int:
        """Write what is cached of a prompt's longest prefix to a safetensors file: keys, values and states, with the
        prefix's name and a checksum. Its tokens are returned. Of several ranks `path` is a folder, made if it isn't
        there, to which each writes the file of its part.

        Raises ValueError where prefixes are not shared, or nothing is cached of this one, with the reason, and OSError
        where nothing can be written. The first export or import reads all weights, to say whose prefixes these are.
        """
        ids = np.array(_TOKEN_IDS("token_ids", token_ids), np.int32)
        return self.engine.errands.export(ids, file("path", path))

    @exclusive
    def import_prefix(self, path: str | Path) -> int:
        """Let requests find a prefix that `export_prefix` wrote, here or in another process. Its tokens are returned.

        Raises PrefixRefused, a ValueError with the reason, unless the file is whole and of an engine of the same
        weights, dtype, kind of device, kernels, number of ranks, layout of caches and versions; ValueError if the
        caches have too little room. Of several ranks what one refuses is refused.
        """
        return self.engine.errands.take_in(file("path", path))

    # --- admission ----------------------------------------------------------------------------------------

    def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str,
        priority: int = 0,
    ) -> RequestGroup:
        """A request for `enter`, which reports as its `output_kind` says; ValueError if it could never run.

        Any thread may call this at any time. Ids are for the caller to keep apart.
        """
        params = self._default_params if sampling_params is None else sampling_params
        return self._admission.request(prompt, params, request_id=request_id, priority=priority)

    def prepare_structured_outputs(self) -> bool:
        """Make ready what requests with `structured_outputs` need, which the first of them does otherwise: a second for
        a vocabulary of 250,000 tokens, in which no other thread runs. Whether there is anything to make ready: where
        the extra is missing, or the tokenizer is none that can be read, such requests are refused with the reason.
        """
        try:
            self._admission.grammars.prepare()
        except ValueError:
            return False
        return True

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        kind: RequestOutputKind | None = None,
        priority: Sequence[int] | int | None = None,
    ) -> list[RequestGroup]:
        listed = as_prompts(prompts)
        given = self._default_params if sampling_params is None else sampling_params
        params = _for_each(listed, "sampling_params", given, SamplingParams, _PARAMS)
        priorities = _for_each(listed, "priority", 0 if priority is None else priority, Integral, _PRIORITIES)
        requests, taken = [], self._ledger
        for index, (prompt, p, first) in enumerate(zip(listed, params, priorities, strict=True)):
            try:
                requests.append(self._admission.request(prompt, p, kind=kind, priority=first, taken=taken))
            except ValueError as error:
                raise ValueError(f"prompts[{index}]: {error}") from error
        return requests


def _sampling(name: str, value: object) -> SamplingParams:
    return value if isinstance(value, SamplingParams) else refuse(name, value, "SamplingParams")


_TOKEN_IDS = Several(Integer(0, 2**31 - 1), "a sequence of token ids")
_PARAMS = Several(_sampling, "SamplingParams, or a list of them")
_PRIORITIES = Several(Integer(), "an integer, or a list of them")


def _for_each(prompts: Sequence[Prompt], name: str, given: Any, kind: type, several: Check) -> Sequence[Any]:
    """One for all of them, or a list with one for each."""
    listed: Sequence[Any] = (given,) * len(prompts) if isinstance(given, kind) else several(name, given)
    if len(listed) != len(prompts):
        raise ValueError(f"{name} has {len(listed)} entries for {len(prompts)} prompts")
    return listed


# What `help(LLM)` shows: every option, with its default.
_KINDS = {"model": Parameter.POSITIONAL_OR_KEYWORD}
LLM.__signature__ = Signature(  # type: ignore[attr-defined]
    [
        Parameter(
            each.name,
            _KINDS.get(each.name, Parameter.KEYWORD_ONLY),
            default=each.default,
            annotation=each.type,
        )
        for each in all_options()
    ]
)
