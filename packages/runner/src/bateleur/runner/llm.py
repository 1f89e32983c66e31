"""`LLM`: the synchronous engine, with vLLM's names."""

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, Self, Unpack, cast
from weakref import finalize

import numpy as np

from bateleur.runner.config.engine_config import EngineConfig, all_options
from bateleur.runner.distributed.ranks import ALONE, Ranks
from bateleur.runner.engine.engine import Engine
from bateleur.runner.engine.exclusive_access import ExclusiveAccess, exclusive
from bateleur.runner.engine.input_processor import InputProcessor, OneOrMoreAdapters, Prompt, checked_adapter
from bateleur.runner.engine.memory_profile import needed_bytes
from bateleur.runner.engine.request_registry import RequestRegistry
from bateleur.runner.engine.setup import EngineSetup, device_of
from bateleur.runner.errors import EngineDead
from bateleur.runner.lora.adapter_manager import LoRARequest
from bateleur.runner.outputs import RequestOutput, RequestOutputKind
from bateleur.runner.requests.request_group import RequestGroup
from bateleur.runner.sampling_params import SamplingParams, recommended_sampling
from bateleur.runner.stats import EngineStats, GraphCosts
from bateleur.runner.text.chat import ChatOptions, render
from bateleur.runner.text.messages import Message, is_conversation
from bateleur.runner.utils.arguments import Integer, Several, file, flag, text
from bateleur.runner.utils.device import explain_out_of_memory, use_device
from bateleur.runner.workers.data_parallel import DataParallelCoordinator
from bateleur.runner.workers.leader import Leader

_FINAL_ONLY = RequestOutputKind.FINAL_ONLY
_TOKEN_IDS = Several(Integer(0, 2**31 - 1), "a sequence of token ids")
_log = logging.getLogger(__name__)


class LLM:
    """Generates text with a model.

    Only one call runs at a time: a call from a second thread meanwhile, or from a forked process, raises RuntimeError.
    Different threads may call one after the other. If an error or Ctrl-C ends a call, other requests keep their tokens
    and the next call continues them. During a call, the calling thread's current CUDA device is the engine's.

    model: Hugging Face checkpoint folder; None is the model that is shipped with the package.
    options: fields of the configurations in `bateleur.runner.config.engine_config`, by name; `bateleur generate --help`
    lists them.

    With `tensor_parallel_size` or `data_parallel_size` above 1, it starts the other ranks as processes. They end on
    `close`, at the end of a `with` block, or when the `LLM` is garbage-collected. If a rank dies, hangs or raises, all
    of them end, and this call and later ones raise `RankFailed` (an `EngineDead`) with rank and cause.

    Raises ValueError if an option is unknown or out of range, or the folder is not a supported checkpoint.
    """

    def __init__(self, /, model: str | Path | None = None, **options: Any) -> None:
        self.config = EngineConfig.of(model=model, **options)
        self._leader = Leader.of(self.config)
        try:
            ranks = ALONE if self._leader is None else self._leader.ranks
            self.device = device_of(self.config, ranks)
            with use_device(self.device):
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
        with explain_out_of_memory(kv_cache_memory_bytes=self.cache_plan.total_bytes, **sizes):
            self.engine = Engine(setup)
        self.graph_costs = GraphCosts.of(self.engine.runner.graph_reports.values())
        if self.graph_costs.num_graphs:
            _log.info("%s", self.graph_costs)
        self._runner: Engine | DataParallelCoordinator = self.engine
        self._registry: RequestRegistry | DataParallelCoordinator = self.engine.registry
        self._input_processor = InputProcessor(self.tokenizer, self.spec, self.limits, self.config)
        model = self.config.model
        overrides = model.override_generation_config
        self.default_sampling = recommended_sampling(setup.folder, model.generation_config, overrides)
        """Sampling parameters that the checkpoint recommends, by name."""
        self._input_processor.default_params = SamplingParams.from_dict(self.default_sampling)
        self._access = ExclusiveAccess(self.device)
        if (leader := self._leader) is not None:
            leader.begin()
            if self.config.parallel.data_parallel_size > 1:
                self._runner = self._registry = DataParallelCoordinator(self.engine, leader)
            else:
                self.engine.registry.send = leader.send
            finalize(self, leader.close)

    def close(self) -> None:
        """Write pending prefixes to disk and end the processes of other ranks, also if an error ends the writing.
        Later calls raise; a second `close` does nothing.
        """
        access = self._access
        try:
            if access.holder is None and not access.closed and self.engine.offload.disk is not None:
                with suppress(EngineDead):  # no rank can write any more
                    self.engine.operate("flush_disk")
        finally:
            if self._leader is not None:
                self._leader.close()
            access.closed = True

    def on_fault(self, callback: Callable[[EngineDead], None]) -> None:
        """Set a callback that runs in its own thread, at most once, when another rank fails or this rank hangs."""
        if self._leader is not None:
            self._leader.on_fault(callback)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @exclusive
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        priority: Sequence[int] | int | None = None,
        lora_request: OneOrMoreAdapters = None,
    ) -> list[RequestOutput]:
        """Run all prompts to their end and return outputs in the order of the prompts.

        All prompts are validated before the first is queued, so a ValueError means that none was started. Requests
        queued by `add_request` run at the same time; the next `step` returns their outputs. An exception aborts the
        requests of this call.

        priority: priority of each prompt, or of all; lower values run first with scheduling_policy "priority".
        lora_request: LoRA adapter of each prompt, or of all; None for the base model.
        """
        flag("use_tqdm", use_tqdm)
        requests = self._input_processor.requests(
            prompts,
            sampling_params,
            taken=self._registry,
            kind=_FINAL_ONLY,
            priority=priority,
            lora_request=lora_request,
        )
        results: dict[str, RequestOutput] = {}
        from bateleur.runner.utils.progress import ProgressBar

        with ProgressBar(total=len(requests), unit="request") if use_tqdm else nullcontext() as bar:
            for output in self._run(requests):  # not `tqdm(...)`: a traceback would keep the generator open
                results[output.request_id] = output
                if bar is not None:
                    bar.update()
        return [results[request.request_id] for request in requests]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        lora_request: OneOrMoreAdapters = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Apply the checkpoint's chat template to one or several conversations, and `generate` answers.
        options: tools, chat_template, add_generation_prompt, continue_final_message, chat_template_kwargs; see
        `bateleur.runner.text.chat.render`, which raises ValueError for malformed messages.
        """
        several = [messages] if is_conversation(messages) else messages
        prompts = [render(self.tokenizer, cast(Sequence[Message], each), **options) for each in several]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    @exclusive
    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: OneOrMoreAdapters = None,
    ) -> Iterator[RequestOutput]:
        """Run all prompts and yield each request's output after each of its steps, with all text so far.
        With `output_kind` DELTA an output has only the new tokens; with FINAL_ONLY each request has one output. Text
        that may still change (an incomplete character, the start of a stop string) is held back. Closing the iterator
        aborts unfinished requests.
        """
        requests = self._input_processor.requests(
            prompts, sampling_params, taken=self._registry, lora_request=lora_request
        )
        return self._one_at_a_time(self._run(requests))

    def _one_at_a_time(self, outputs: Generator[RequestOutput]) -> Iterator[RequestOutput]:
        """Yield outputs. Other calls of the `LLM` are allowed between two outputs."""
        with closing(outputs):
            while (output := self._next(outputs)) is not None:
                yield output

    @exclusive
    def _next(self, outputs: Iterator[RequestOutput]) -> RequestOutput | None:
        return next(outputs, None)

    def _run(self, requests: list[RequestGroup]) -> Generator[RequestOutput]:
        """Run these requests to their end. A request that another caller aborts yields nothing more."""
        registry = self._registry
        ids = {request.request_id for request in requests}
        pending = set(ids)
        try:
            try:
                registry.add(*requests)
            except ValueError:
                pending = set()  # none was queued
                raise
            registry.fetched_by_caller |= ids
            while pending:
                output = registry.take(pending)
                if output is not None:
                    if output.finished:
                        pending.discard(output.request_id)
                    yield output
                elif pending := pending & registry.requests.keys():
                    self._runner.step()
        finally:
            registry.fetched_by_caller -= ids - pending
            registry.abandoned = registry.abandoned | pending
            if self._access.holder is None:  # else the current call or the next one drops them
                self._restore()

    @exclusive
    def _restore(self) -> None:
        self._registry.restore()

    @exclusive
    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        stream: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> str:
        """Queue a request and return its id; `step` returns its outputs.
        stream: return outputs after each step, as `output_kind` says, instead of one complete output at the end.
        priority: lower values run first with scheduling_policy "priority".
        """
        request = self._input_processor.request(
            prompt,
            sampling_params,
            request_id=request_id,
            kind=None if flag("stream", stream) else _FINAL_ONLY,
            priority=priority,
            taken=self._registry,
            lora_request=lora_request,
        )
        self._registry.add(request)
        return request.request_id

    @exclusive
    def add_prepared(self, *requests: RequestGroup) -> None:
        """Queue requests from `prepare`, all or none. Raises ValueError for an id in use or an invalid LoRA adapter."""
        self._registry.add(*requests)

    @exclusive
    def abort(self, request_id: str) -> RequestOutput:
        """End a request and return its output so far. Raises ValueError for an unknown id."""
        return self._registry.abort(text("request_id", request_id))

    @exclusive
    def step(self) -> list[RequestOutput]:
        """Run one engine step. Returns outputs of streaming requests, and of requests ended since the last call."""
        self._runner.step()
        return self._registry.take_all()

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether requests are waiting or running, or outputs were not returned yet."""
        return self._registry.has_unfinished

    def check_process(self) -> None:
        """Raise RuntimeError in a forked process."""
        self._access.check_process()

    def get_metrics(self) -> EngineStats:
        """Return counters since the start and the current load. Any thread may call this at any time."""
        return self._runner.metrics()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default parameters of requests: those that the checkpoint recommends."""
        return self._input_processor.default_params

    @exclusive
    def add_lora(self, lora_request: LoRARequest) -> None:
        """Load a LoRA adapter. Raises ValueError if it does not fit, its name is taken, or no adapter slot is free."""
        self.engine.operate("load_adapter", checked_adapter("lora_request", lora_request))

    @exclusive
    def remove_lora(self, lora_name: str) -> None:
        """Unload a LoRA adapter. Raises ValueError if it is not loaded, or unfinished requests use it."""
        self.engine.operate("unload_adapter", text("lora_name", lora_name))

    @exclusive
    def list_loras(self) -> dict[str, Path]:
        """Return the folders of the loaded LoRA adapters, by name."""
        adapters = self.engine.setup.adapters
        return {} if adapters is None else adapters.loaded

    @exclusive
    def export_prefix(self, token_ids: Sequence[int], path: str | Path) -> int:
        """Write the longest cached prefix of a prompt to a safetensors file and return its number of tokens.
        The file has keys, values, states, a hash of the tokens and a checksum. With several ranks, `path` is a folder
        (created if missing) to which each rank writes its part. The first export or import reads all weights for their
        digest. Raises ValueError if prefixes are not cached, or none of this prompt is, and OSError if writing fails.
        """
        ids = np.array(_TOKEN_IDS("token_ids", token_ids), np.int32)
        num_tokens: int = self.engine.operate("export_prefix", ids, file("path", path))
        return num_tokens

    @exclusive
    def import_prefix(self, path: str | Path) -> int:
        """Add a prefix written by `export_prefix` to the prefix cache and return its number of tokens.
        Raises PrefixRefused, a ValueError with the reason, unless the file is complete and of an engine with the same
        weights, dtype, kind of device, kernels, number of ranks, cache layout and versions; ValueError if the caches
        have too little room. With several ranks, a refusal by one rank applies to all.
        """
        num_tokens: int = self.engine.operate("import_prefix", file("path", path))
        return num_tokens

    def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> RequestGroup:
        """Return a request for `add_prepared`. Raises ValueError if it could never run.
        Any thread may call this at any time. The caller must keep request ids unique. Parameters: see `add_request`.
        """
        return self._input_processor.request(
            prompt, sampling_params, request_id=request_id, priority=priority, lora_request=lora_request
        )

    def prepare_structured_outputs(self) -> bool:
        """Load the vocabulary for `structured_outputs` early; False without llguidance or a usable tokenizer."""
        with suppress(ValueError):
            self._input_processor.grammars.prepare()
            return True
        return False


# The signature that `help(LLM)` shows: every option with its default.
LLM.__signature__ = Signature(  # type: ignore[attr-defined]
    [
        Parameter(
            each.name,
            Parameter.POSITIONAL_OR_KEYWORD if each.name == "model" else Parameter.KEYWORD_ONLY,
            default=each.default,
            annotation=each.type,
        )
        for each in all_options()
    ]
)
