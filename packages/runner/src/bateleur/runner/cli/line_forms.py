"""The two forms of a file of requests, and what a result looks like in each: our own, and that of OpenAI's batches."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bateleur.runner.outputs import CompletionOutput, Logprob, RequestOutput
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.serve.openai.names import require_served
from bateleur.runner.serve.openai.replies import chat_reply, completion_reply, error_body
from bateleur.runner.serve.openai.requests import (
    ChatRequest,
    CompletionRequest,
    chat_request,
    completion_request,
)
from bateleur.runner.serve.parsers.chat_format import ChatFormat, ChatTurn, turn_of, with_options
from bateleur.runner.serve.parsers.message import chat_message
from bateleur.runner.serve.parsers.options import ParserOptions
from bateleur.runner.text.chat import ChatPrompt
from bateleur.runner.text.token_bytes import TokenText
from bateleur.runner.text.tokenizer import Tokenizer
from bateleur.runner.utils.arguments import listed, refuse

Asked = CompletionRequest | ChatRequest


@dataclass(frozen=True, slots=True)
class LineRequest:
    """One line of the file: what it asks for, or why that cannot be told."""

    line: int
    id: str | int | None
    """The line's own; else its number, or None in a batch."""
    digest: str
    """Of all that decides its tokens."""
    asked: Asked | None
    where: str
    error: str | None = None


class Form(Protocol):
    """How lines are read and results written."""

    name: str

    def ident(self, fields: dict[str, Any], line: int) -> str | int:
        """Take the id out of the fields of a line. Raises ValueError if it has none, and needs one, or a wrong one."""
        ...

    def asked(self, fields: dict[str, Any]) -> Asked:
        """What the other fields ask for. Raises ValueError if that can't be told."""
        ...

    def prepared(self, asked: Asked, tokenizer: Tokenizer) -> list[tuple[Any, SamplingParams]]:
        """The prompts of a request, each with its parameters. Raises ValueError for one that can't run."""
        ...

    def ended(
        self,
        request: LineRequest,
        outputs: Sequence[RequestOutput],
        error: str | None,
        tokenizer: Tokenizer,
    ) -> dict[str, Any]:
        """The result of a request that ran; error: what went wrong, if anything."""
        ...

    def failed(self, request: LineRequest, message: str) -> dict[str, Any]:
        """The result of one that can't run."""
        ...


class OwnForm:
    """A prompt and sampling parameters, under their own names."""

    name = "own"

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        self._defaults = defaults

    def ident(self, fields: dict[str, Any], line: int) -> str | int:
        """The line's number if it has no id."""
        value = fields.pop("id", line)
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise ValueError(f"id is {value!r}; it must be text or an integer")
        return value

    def asked(self, fields: dict[str, Any]) -> Asked:
        """One prompt."""
        prompt: dict[str, Any] = {
            key: fields.pop(key) for key in ("prompt", "prompt_token_ids") if key in fields
        }
        if len(prompt) != 1:
            raise ValueError("exactly one of prompt, prompt_token_ids is needed")
        params = SamplingParams.from_dict({**self._defaults, **fields})
        if params.n > 1:
            refuse(
                "n", params.n, "1 in a file of prompts: write a line for each continuation, with its own seed"
            )
        return CompletionRequest(prompts=(prompt,), params=params)

    def prepared(self, asked: Asked, tokenizer: Tokenizer) -> list[tuple[Any, SamplingParams]]:
        """The prompt as it is."""
        return [(prompt, asked.params) for prompt in asked.prompts_for(tokenizer)]

    def ended(
        self,
        request: LineRequest,
        outputs: Sequence[RequestOutput],
        error: str | None,
        tokenizer: Tokenizer,
    ) -> dict[str, Any]:
        """What `LLM` reports, under its names."""
        (output,) = outputs
        several = [_continuation(each) for each in output.outputs]
        fields: dict[str, Any] = {
            "prompt": output.prompt,
            **(several[0] if len(several) == 1 else {"outputs": several}),
            "num_prompt_tokens": len(output.prompt_token_ids),
            "num_cached_tokens": output.num_cached_tokens,
        }
        if output.prompt_logprobs is not None:
            fields["prompt_logprobs"] = [each and _told(each) for each in output.prompt_logprobs]
        if error is not None:
            fields["error"] = error
        return _own(request) | fields

    def failed(self, request: LineRequest, message: str) -> dict[str, Any]:
        """An `error` says why."""
        return _own(request) | {"error": message}


def _continuation(completion: CompletionOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        fields["cumulative_logprob"] = completion.cumulative_logprob
        fields["logprobs"] = [_told(each) for each in completion.logprobs]
    return fields


def _told(position: Mapping[int, Logprob]) -> dict[int, dict[str, Any]]:
    return {
        token: {"logprob": each.logprob, "rank": each.rank, "decoded_token": each.decoded_token}
        for token, each in position.items()
    }


def _own(request: LineRequest) -> dict[str, Any]:
    return {"line": request.line, "id": request.id, "request": request.digest}


class BatchForm:
    """OpenAI's batches: each line is a call of an endpoint, and each result what the server would have answered.

    defaults: sampling parameters where a body is silent. names: what the model is called. parsers: how answers of
    chats are read.
    """

    name = "batch"

    def __init__(
        self, defaults: Mapping[str, Any], names: Sequence[str], parsers: ParserOptions | None = None
    ) -> None:
        self._defaults, self._names, self._parsers = defaults, names, parsers or ParserOptions()
        self._chat_format: ChatFormat | None = None
        self._token_text: TokenText | None = None

    def ident(self, fields: dict[str, Any], line: int) -> str | int:
        """The `custom_id`."""
        value = fields.pop("custom_id", None)
        if not isinstance(value, str):
            refuse("custom_id", value, "text")
        return value

    def asked(self, fields: dict[str, Any]) -> Asked:
        """What the body asks for at its endpoint."""
        url, method, body = (fields.pop(key, None) for key in ("url", "method", "body"))
        if fields:
            raise ValueError(f"{listed(fields)}: no such field is known here")
        if method != "POST":
            refuse("method", method, "POST")
        if not isinstance(url, str) or url not in _ENDPOINTS:
            refuse("url", url, f"one of {', '.join(_ENDPOINTS)}")
        asked = _ENDPOINTS[url](body, self._defaults)
        require_served(asked.model, self._names)
        if isinstance(asked, ChatRequest):
            asked = with_options(asked, self._parsers)
        if asked.stream:
            refuse("stream", True, "false: the results of a batch are whole")
        return asked

    def prepared(self, asked: Asked, tokenizer: Tokenizer) -> list[tuple[Any, SamplingParams]]:
        """A chat as its template writes it, with what its answer needs."""
        if not isinstance(asked, ChatRequest):
            return [(prompt, asked.params) for prompt in asked.prompts_for(tokenizer)]
        (prompt,) = asked.prompts_for(tokenizer)
        return [(prompt, self._turn(asked, prompt, tokenizer).params)]

    def _decoded(self, tokenizer: Tokenizer) -> TokenText:
        if self._token_text is None:
            self._token_text = TokenText(tokenizer)
        return self._token_text

    def _turn(self, asked: ChatRequest, prompt: ChatPrompt, tokenizer: Tokenizer) -> ChatTurn:
        if self._chat_format is None:
            self._chat_format = ChatFormat(self._parsers, tokenizer)
        return turn_of(self._chat_format, asked, prompt)

    def ended(
        self,
        request: LineRequest,
        outputs: Sequence[RequestOutput],
        error: str | None,
        tokenizer: Tokenizer,
    ) -> dict[str, Any]:
        """The reply to the body."""
        if error is not None:
            return self._result(request, 500, error_body(error, kind="server_error", code=500))
        told: dict[str, Any] = {
            "model": self._names[0],
            "created": int(time.time()),
            "decode": self._decoded(tokenizer),
        }
        if isinstance(request.asked, ChatRequest):
            chat, (output,) = request.asked, outputs
            prompt = ChatPrompt(prompt=output.prompt or "", prompt_token_ids=output.prompt_token_ids)
            turn = self._turn(chat, prompt, tokenizer)
            told["message"] = lambda each: chat_message(turn.reader().read(each))
            reply = chat_reply(chat, output, reply_id=f"chatcmpl-{request.digest}", **told)
        else:
            assert request.asked is not None
            reply = completion_reply(request.asked, outputs, reply_id=f"cmpl-{request.digest}", **told)
        return self._result(request, 200, reply)

    def failed(self, request: LineRequest, message: str) -> dict[str, Any]:
        """An error as the server would answer it; one of the line itself if it can't be told who asked."""
        if request.id is None:
            return _batch(request) | {"response": None, "error": {"code": "invalid_line", "message": message}}
        return self._result(request, 400, error_body(message, code=400))

    def _result(self, request: LineRequest, status: int, body: dict[str, Any]) -> dict[str, Any]:
        response = {"status_code": status, "request_id": f"req_{request.line}", "body": body}
        return _batch(request) | {"response": response, "error": None}


_ENDPOINTS: dict[str, Callable[[Any, Mapping[str, Any]], Asked]] = {
    "/v1/completions": completion_request,
    "/v1/chat/completions": chat_request,
}
_BATCH_ID = re.compile(r"batch_req_(\d{1,18})_([0-9a-f]{16})")
_NO_DIGEST = "0" * 16


def _batch(request: LineRequest) -> dict[str, Any]:
    name = f"batch_req_{request.line}_{request.digest or _NO_DIGEST}"
    return {"id": name, "custom_id": request.id}


FIRST = (b'{"line": ', b'{"id": "batch_req_')
"""How results begin."""


def answered(raw: bytes) -> tuple[int, int | None]:
    """Of a result of either form the line that it answers, and the digest as a number; None if it is a failure.

    Raises ValueError, TypeError, KeyError or RecursionError if it is no result.
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
