"""The two formats of request and result lines: bateleur's own, and that of OpenAI's Batch API."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bateleur.runner.outputs import Logprob, RequestOutput
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.serve.config import require_served
from bateleur.runner.serve.openai.replies import (
    Usage,
    chat_reply,
    completion_reply,
    error_body,
    reply_head,
    shown_events,
)
from bateleur.runner.serve.openai.requests import ChatRequest, CompletionRequest, chat_request, completion_request
from bateleur.runner.serve.parsers.chat_format import ChatFormat, PreparedChat, with_options
from bateleur.runner.serve.parsers.options import ParserOptions
from bateleur.runner.text.chat import ChatPrompt
from bateleur.runner.text.token_bytes import TokenText
from bateleur.runner.text.tokenizer import Tokenizer
from bateleur.runner.utils.arguments import listed, refuse

ApiRequest = CompletionRequest | ChatRequest


@dataclass(frozen=True, slots=True)
class LineRequest:
    """The request of one line, or the error that makes it invalid. line: line number. digest: hash of everything that
    decides the result. where: file name and line number, for error messages.
    """

    line: int
    id: str | int | None  # id of the line; without one its number, or None in the OpenAI batch format
    digest: str
    api_request: ApiRequest | None
    where: str
    error: str | None = None


class NativeFormat:
    """Bateleur's own format: a line is a JSON object with a prompt and fields of `SamplingParams`.

    defaults: values of parameters that a line leaves out. names: names of models that a line may give as `model`.
    """

    name = "own"

    def __init__(self, defaults: Mapping[str, Any], names: Sequence[str] = ()) -> None:
        self._defaults, self._names = defaults, names

    def pop_id(self, fields: dict[str, Any], line: int) -> str | int:
        """Pop the id of a line; without one, return the line number. Raises ValueError for a wrong type."""
        value = fields.pop("id", line)
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise ValueError(f"id is {value!r}; it must be text or an integer")
        return value

    def parse(self, fields: dict[str, Any]) -> ApiRequest:
        """Parse the fields of a line without its id. Raises ValueError if they are invalid."""
        prompt: dict[str, Any] = {key: fields.pop(key) for key in ("prompt", "prompt_token_ids") if key in fields}
        if len(prompt) != 1:
            raise ValueError("exactly one of prompt, prompt_token_ids is needed")
        require_served(model := fields.pop("model", None), self._names)
        params = SamplingParams.from_dict({**self._defaults, **fields})
        if params.n > 1:
            refuse("n", params.n, "1 in a file of prompts: write one line per continuation, with its own seed")
        return CompletionRequest(prompts=(prompt,), params=params, model=model)

    def engine_inputs(self, request: ApiRequest, tokenizer: Tokenizer) -> list[tuple[Any, SamplingParams]]:
        """Return the prompts, each with its sampling parameters. Raises ValueError if one is invalid."""
        assert isinstance(request, CompletionRequest), "`parse` returns it"
        return [(prompt, request.params) for prompt in request.prompts]

    def result(
        self, request: LineRequest, outputs: Sequence[RequestOutput], error: str | None, tokenizer: Tokenizer
    ) -> dict[str, Any]:
        """Return the record of a request that ran, with the fields of `RequestOutput`. error: message if it failed."""
        (output,) = outputs
        (completion,) = output.outputs  # `parse` refuses n > 1
        fields: dict[str, Any] = {"prompt": output.prompt}
        fields |= {name: getattr(completion, name) for name in ("text", "token_ids", "finish_reason", "stop_reason")}
        if completion.logprobs is not None:
            fields["cumulative_logprob"] = completion.cumulative_logprob
            fields["logprobs"] = [_logprob_fields(each) for each in completion.logprobs]
        fields["num_prompt_tokens"] = len(output.prompt_token_ids)
        fields["num_cached_tokens"] = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            fields["prompt_logprobs"] = [each and _logprob_fields(each) for each in output.prompt_logprobs]
        if error is not None:
            fields["error"] = error
        return _id_fields(request) | fields

    def error_result(self, request: LineRequest, message: str) -> dict[str, Any]:
        """Return the record of a request that cannot run."""
        return _id_fields(request) | {"error": message}


def _logprob_fields(position: Mapping[int, Logprob]) -> dict[int, dict[str, Any]]:
    return {
        token: {"logprob": each.logprob, "rank": each.rank, "decoded_token": each.decoded_token}
        for token, each in position.items()
    }


def _id_fields(request: LineRequest) -> dict[str, Any]:
    return {"line": request.line, "id": request.id, "request": request.digest}


class OpenAIBatchFormat:
    """OpenAI's batch format: a line is a request to an endpoint of OpenAI's API. Its result is the server's response.

    defaults: values of parameters that a body leaves out. names: served model names. parsers: tool call and reasoning
    parsers of chat completions. adapters: names of LoRA adapters.
    """

    name = "batch"

    def __init__(
        self,
        defaults: Mapping[str, Any],
        names: Sequence[str],
        parsers: ParserOptions | None = None,
        adapters: Collection[str] = (),
    ) -> None:
        self._defaults, self._names, self._parsers = defaults, names, parsers or ParserOptions()
        self._adapters = adapters
        self._chat_format: ChatFormat | None = None
        self._token_text: TokenText | None = None

    def pop_id(self, fields: dict[str, Any], line: int) -> str | int:
        """Remove the `custom_id` from the fields of a line and return it. Raises ValueError if it is no string."""
        value = fields.pop("custom_id", None)
        if not isinstance(value, str):
            refuse("custom_id", value, "text")
        return value

    def parse(self, fields: dict[str, Any]) -> ApiRequest:
        """Parse the body of a line for its endpoint. Raises ValueError if it is invalid."""
        url, method, body = (fields.pop(key, None) for key in ("url", "method", "body"))
        if fields:
            raise ValueError(f"{listed(fields)}: unknown; a line has custom_id, method, url and body")
        if method != "POST":
            refuse("method", method, "POST")
        if not isinstance(url, str) or url not in _ENDPOINTS:
            refuse("url", url, f"one of {', '.join(_ENDPOINTS)}")
        request = _ENDPOINTS[url](body, self._defaults)
        require_served(request.model, (*self._names, *self._adapters))
        if isinstance(request, ChatRequest):
            if (budget := request.thinking_token_budget) is not None:
                refuse("thinking_token_budget", budget, "absent: only the server limits reasoning")
            request = with_options(request, self._parsers)
        if request.stream:
            refuse("stream", True, "false: batch results are not streamed")
        return request

    def engine_inputs(self, request: ApiRequest, tokenizer: Tokenizer) -> list[tuple[Any, SamplingParams]]:
        """Return the prompts, each with its sampling parameters, which include the grammar that a chat's tools need."""
        if not isinstance(request, ChatRequest):
            return [(prompt, request.params) for prompt in request.prompts]
        prompt = request.prompt_for(tokenizer)
        return [(prompt, self._turn(request, prompt, tokenizer).params)]

    def _turn(self, request: ChatRequest, prompt: ChatPrompt, tokenizer: Tokenizer) -> PreparedChat:
        self._chat_format = self._chat_format or ChatFormat(self._parsers, tokenizer)
        return self._chat_format.prepare(request, prompt)

    def result(
        self, request: LineRequest, outputs: Sequence[RequestOutput], error: str | None, tokenizer: Tokenizer
    ) -> dict[str, Any]:
        """Return the server's response to the request of a line. error: message if it failed."""
        if error is not None:
            return _response(request, 500, error_body(error, kind="server_error", code=500))
        self._token_text = self._token_text or TokenText(tokenizer)
        assert request.api_request is not None
        asked = request.api_request.model
        name = asked if asked is not None and asked in self._adapters else self._names[0]
        if isinstance(request.api_request, ChatRequest):
            (output,) = outputs
            prompt = ChatPrompt(prompt=output.prompt or "", prompt_token_ids=output.prompt_token_ids)
            turn = self._turn(request.api_request, prompt, tokenizer)
            usage, chat = Usage(), request.api_request
            events = [shown_events(chat, turn.reader().read(each)) for each in output.outputs]
            usage.count(output)
            head = reply_head(f"chatcmpl-{request.digest}", "chat.completion", name)
            reply = chat_reply(chat, output, events, head, usage, self._token_text)
            return _response(request, 200, reply)
        head = reply_head(f"cmpl-{request.digest}", "text_completion", name)
        return _response(request, 200, completion_reply(request.api_request, outputs, head, self._token_text))

    def error_result(self, request: LineRequest, message: str) -> dict[str, Any]:
        """Return the server's error response, with code `invalid_line` if the line has no valid custom_id."""
        if request.id is None:
            return _batch_id_fields(request) | {"response": None, "error": {"code": "invalid_line", "message": message}}
        return _response(request, 400, error_body(message, code=400))


def _response(request: LineRequest, status: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req_{request.line}", "body": body}
    return _batch_id_fields(request) | {"response": response, "error": None}


LineFormat = NativeFormat | OpenAIBatchFormat
_ENDPOINTS: dict[str, Callable[[Any, Mapping[str, Any]], ApiRequest]] = {
    "/v1/completions": completion_request,
    "/v1/chat/completions": chat_request,
}
_BATCH_ID = re.compile(r"batch_req_(\d{1,18})_([0-9a-f]{16})")


def _batch_id_fields(request: LineRequest) -> dict[str, Any]:
    return {"id": f"batch_req_{request.line}_{request.digest or '0' * 16}", "custom_id": request.id}


RESULT_PREFIXES = (b'{"line": ', b'{"id": "batch_req_')  # the first bytes of a result line, in either format


def parse_result(raw: bytes) -> tuple[int, int | None]:
    """Return line number and digest of the request (None if it failed) from a result line in bateleur's or OpenAI's
    format. Raises ValueError, TypeError, KeyError or RecursionError for any other line.
    """
    record = json.loads(raw)
    if "line" in record:
        return int(record["line"]), None if "error" in record else int(record["request"], 16)
    found = _BATCH_ID.fullmatch(record["id"])
    if found is None:
        raise ValueError
    response = record["response"]
    failed = response is None or response["status_code"] != 200
    return int(found[1]), None if failed else int(found[2], 16)
