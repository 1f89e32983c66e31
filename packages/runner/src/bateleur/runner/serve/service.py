"""State and methods that all endpoints share: the engine, model names, and submission of requests."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from bateleur.runner.async_llm import AsyncLLM
from bateleur.runner.engine.output_processor import NO_NUMBERS
from bateleur.runner.engine_thread import OutputReader
from bateleur.runner.errors import ContextLengthExceeded
from bateleur.runner.lora.adapter_manager import LoRARequest
from bateleur.runner.outputs import RequestOutput, RequestOutputKind
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.serve import metrics
from bateleur.runner.serve.config import ServeConfig, require_served, served_names
from bateleur.runner.serve.errors import http_error, http_errors
from bateleur.runner.serve.openai.requests import APIRequest
from bateleur.runner.serve.parsers.chat_format import ChatFormat
from bateleur.runner.text.token_bytes import TokenText
from bateleur.runner.utils.arguments import refuse, shown

T = TypeVar("T")
A = TypeVar("A", bound=APIRequest)


class Service:
    """State of the HTTP server that all endpoints share: engine, options, model names and LoRA adapters."""

    def __init__(self, llm: AsyncLLM, config: ServeConfig) -> None:
        self.llm, self.config = llm, config
        model = llm.llm.config.model.model
        self.names = served_names(None if model is None else Path(model), config.served_model_name)
        """Names of the model; replies have the first."""
        self.adapters: dict[str, LoRARequest] = {}
        self._adapters_change = asyncio.Lock()
        """Held while an adapter is loaded or unloaded, so that a name is not taken twice."""
        for name, path in config.lora_modules:
            self._check_name(name)
            self.adapters[name] = LoRARequest(name, lora_path=path)
        self.defaults: dict[str, Any] = llm.llm.default_sampling
        self.created = int(time.time())
        self.stopping = False

    def with_server_options(self, parsed: A) -> A:
        """Return the request with the options `enable_force_include_usage` and `return_tokens_as_token_ids` applied."""
        config = self.config
        return replace(
            parsed,
            include_usage=parsed.include_usage or config.enable_force_include_usage,
            return_tokens_as_token_ids=parsed.return_tokens_as_token_ids or config.return_tokens_as_token_ids,
        )

    def adapter_of(self, name: str | None) -> LoRARequest | None:
        """Return the LoRA adapter `name`; None for the base model or no name. Raises HTTPException for other names."""
        if name is not None and name in self.adapters:
            return self.adapters[name]
        try:
            require_served(name, (*self.names, *self.adapters))
        except ValueError as error:
            message = f"the model {shown(name)} does not exist: {error}"
            raise http_error(404, message, param="model", code="model_not_found") from error
        return None

    def reply_model(self, name: str | None) -> str:
        """Return the model name for a reply: the name of an adapter, or the first name of the base model."""
        return self.names[0] if name is None or name in self.names else name

    def _check_name(self, name: str) -> None:
        if name in self.names or name in self.adapters:
            refuse("lora_name", name, "a name that no other model has; unload the other adapter first")

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter from a folder, and serve it. Raises ValueError as `LLM.add_lora`, or for a used name."""
        async with self._adapters_change:
            self._check_name(name)
            adapter = LoRARequest(name, lora_path=path)
            if name in await self.llm.list_loras():  # loaded again by a request that was queued before the unload
                await self.llm.remove_lora(name)
            await self.llm.add_lora(adapter)
            self.adapters[name] = adapter

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter. Raises HTTPException for an unknown name, and ValueError if it is in use."""
        async with self._adapters_change:
            if name not in self.adapters:
                message = f"the adapter {shown(name)} does not exist"
                raise http_error(404, message, param="lora_name", code="model_not_found")
            if name in await self.llm.list_loras():
                await self.llm.remove_lora(name)
            del self.adapters[name]

    @cached_property
    def decode(self) -> TokenText:
        """Decoder of token ids, including special tokens."""
        return TokenText(self.llm.llm.tokenizer)

    @cached_property
    def chat_format(self) -> ChatFormat:
        """Format of the model's reasoning and tool calls."""
        return ChatFormat(self.config, self.llm.llm.tokenizer)

    async def metrics(self) -> bytes:
        """Return the metrics as Prometheus text."""
        stats = await self.llm.get_metrics()
        queued = max(0, self.llm.num_unfinished - stats.num_running - stats.num_waiting)
        return metrics.render(stats, self.names[0], queued)

    async def submit(
        self, prompts: Sequence[Mapping[str, Any]], parsed: APIRequest, reply_id: str, *, continued: bool = False
    ) -> OutputReader:
        """Queue all prompts of a request. Raises HTTPException, and queues none, if any is invalid.

        reply_id: the id of prompt i in the engine is `reply_id`-i. continued: see `AsyncLLM.submit`.
        """
        kind = RequestOutputKind.DELTA if parsed.stream else RequestOutputKind.FINAL_ONLY
        params = replace(parsed.params, output_kind=kind)
        with http_errors(parsed.names):
            self.check_counts(len(prompts), params)
            # A prompt with one field is passed as its value, so that errors name it as the body does.
            given: list[Any] = [next(iter(each.values())) if len(each) == 1 else each for each in prompts]
            for each in given if params.truncate_prompt_tokens is None else ():
                self._check_length(each)
            ids = [f"{reply_id}-{i}" for i in range(len(prompts))]
            adapter = self.adapter_of(parsed.model)
            more: dict[str, Any] = {"priority": parsed.priority, "lora_request": adapter, "continued": continued}
            return await self.llm.submit(given, params, request_ids=ids, **more)

    def check_counts(self, num_prompts: int, params: SamplingParams) -> None:
        """Raise ValueError for too many prompts, continuations or log probabilities."""
        room = self.llm.llm.limits.max_num_seqs + self.config.max_queued_requests
        if num_prompts * params.n > room:
            given = f"prompt has {num_prompts} entries for n = {params.n} answers each"
            raise ValueError(f"{given}; max_num_seqs and max_queued_requests leave room for {room}")
        most, named = self.config.max_logprobs, params.logprob_token_ids or ()
        if most != -1 and len(named) > most:
            refuse("logprob_token_ids", named, f"at most max_logprobs = {most} token ids")
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(params, name) or 0
            if most != -1 and not 0 <= number <= most:
                refuse(name, number, f"at most max_logprobs = {most}")

    def _check_length(self, prompt: object) -> None:
        """Raise ContextLengthExceeded for a prompt that is certainly too long, before tokenizing it."""
        longest = self.llm.llm.limits.max_model_len
        if isinstance(prompt, list) and len(prompt) >= longest:
            raise ContextLengthExceeded(f"{len(prompt)} tokens", longest)
        if isinstance(prompt, str) and self.exceeds_context(len(prompt)):
            length = f"{len(prompt)} characters, in tokens of at most {self._longest_token} characters"
            raise ContextLengthExceeded(length, longest)

    def exceeds_context(self, characters: int) -> bool:
        """Return whether a text exceeds the model's context even if every token had the maximum length."""
        return 0 < self._longest_token * self.llm.llm.limits.max_model_len < characters

    @cached_property
    def _longest_token(self) -> int:
        """Maximum characters of a token; 0 if unknown."""
        vocabulary: dict[str, int] = getattr(self.llm.llm.tokenizer, "get_vocab", dict)()
        return max(map(len, vocabulary), default=0)

    async def outputs(self, reader: OutputReader) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs. Closing the generator aborts unfinished requests. Raises HTTPException for a failure."""
        try:
            while outputs := await reader.read():
                for output in outputs:
                    _raise_failure(output)
                    yield output
        finally:
            self.llm.abort_unfinished(reader)

    async def finish(self, reader: OutputReader, request: Request) -> list[RequestOutput]:
        """Return the final outputs in the order of the prompts. Raises ClientDisconnect if the client disconnects."""

        async def collect() -> list[RequestOutput]:
            return [output async for output in self.outputs(reader)]

        ended = await self.cancel_on_disconnect(collect(), request)
        return sorted(ended, key=lambda output: prompt_index(output.request_id))

    async def cancel_on_disconnect(self, work: Awaitable[T], request: Request) -> T:
        """Await `work`. Cancels it and raises ClientDisconnect if the client disconnects."""
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
        try:
            with http_errors():
                await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    raise ClientDisconnect
                return task.result()
        finally:
            task.cancel()
            gone.cancel()


async def merge_outputs(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    """Merge all outputs of a request into one."""
    merged: RequestOutput | None = None
    async with aclosing(outputs):
        async for output in outputs:
            if merged is None:
                merged = output
            else:
                merged.add(output)
    assert merged is not None, "every request has an output"
    return merged


def _raise_failure(output: RequestOutput) -> None:
    """Raise HTTPException for a request that the engine could not finish."""
    for each in output.outputs:
        if each.finish_reason == "error":  # 400 if no token is allowed, because many clients retry after a 500
            status = 500 if each.stop_reason == NO_NUMBERS else 400
            raise http_error(status, str(each.stop_reason), code="generation_failed")


def prompt_index(request_id: str) -> int:
    """Return the index of the prompt in its HTTP request: the number after the last "-" of the id."""
    return int(request_id.rpartition("-")[2])


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
