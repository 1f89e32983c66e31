"""Reply bodies and stream chunks in OpenAI's format, from the outputs of the engine."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bateleur.runner.outputs import CompletionOutput, Logprob, RequestOutput
from bateleur.runner.serve.openai.requests import APIRequest, ChatRequest, CompletionRequest
from bateleur.runner.serve.parsers.events import Arguments, Content, End, Event, Reasoning, ToolCall
from bateleur.runner.text.token_bytes import TokenText, partial_character


def error_body(
    message: str, *, kind: str = "invalid_request_error", param: str | None = None, code: str | int | None = None
) -> dict[str, Any]:
    """Return an error body in OpenAI's format. kind: value of `type`."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def reply_head(reply_id: str, kind: str, model: str) -> dict[str, Any]:
    """Return the first fields of a reply, or of every chunk. kind: value of `object`."""
    return {"id": reply_id, "object": kind, "created": int(time.time()), "model": model}


class Usage:
    """Counts the tokens of one reply from its outputs. num_reasoning: reasoning tokens; None for `/v1/completions`."""

    def __init__(self, num_reasoning: int | None = None) -> None:
        self.num_reasoning = num_reasoning
        self._prompts: dict[str, tuple[int, int]] = {}
        self._written = 0

    def count(self, output: RequestOutput, *, only_prompt: bool = False) -> None:
        """Add an output. only_prompt: do not count its completion tokens."""
        self._prompts[output.request_id] = len(output.prompt_token_ids), output.num_cached_tokens
        if not only_prompt:
            self._written += sum(len(each.token_ids) for each in output.outputs)

    def as_dict(self) -> dict[str, Any]:
        """Return `usage` of a reply. `cached_tokens` are prompt tokens found in the prefix cache."""
        read = sum(length for length, _ in self._prompts.values())
        cached = sum(cached for _, cached in self._prompts.values())
        fields: dict[str, Any] = {
            "prompt_tokens": read,
            "completion_tokens": self._written,
            "total_tokens": read + self._written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if self.num_reasoning is not None:
            fields["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning}
        return fields


def completion_reply(
    parsed: CompletionRequest, outputs: Sequence[RequestOutput], head: Mapping[str, Any], decode: TokenText
) -> dict[str, Any]:
    """Return the reply to a body of `/v1/completions`. head: from `reply_head`. decode: decodes token ids.

    outputs: final outputs in the order of the prompts.
    """
    ended = [(output, each) for output in outputs for each in output.outputs]
    usage = Usage()
    for output in outputs:
        usage.count(output, only_prompt=parsed.only_prompt)
    return {
        **head,
        "choices": [completion_choice(parsed, *pair, i, decode) for i, pair in enumerate(ended)],
        "usage": usage.as_dict(),
        "metrics": request_metrics(outputs[0]) if len(outputs) == 1 else None,
    }


def completion_choice(
    parsed: CompletionRequest,
    output: RequestOutput,
    completion: CompletionOutput,
    index: int,
    decode: TokenText,
    *,
    first: bool = True,
    offset: int = 0,
) -> dict[str, Any]:
    """Return choice number `index` of a reply or chunk of `/v1/completions`. decode: decodes token ids.

    first: whether this is the choice's first or only chunk, which has the fields of the prompt.
    offset: characters in earlier chunks, for `text_offset`.
    """
    if parsed.only_prompt:
        completion = replace(completion, text="", token_ids=[], finish_reason="length", stop_reason=None)
    drawn, text, echoed = list(completion.token_ids), completion.text, first and parsed.echo
    if echoed:
        text = _prompt_text(parsed, output, decode) + text
    choice: dict[str, Any] = {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if (num_top := parsed.num_top_logprobs) is not None:
        ids, beginning = drawn, ""
        known: list[dict[int, Logprob] | None] = [*(completion.logprobs or ())[: len(drawn)]]
        if echoed and output.prompt_logprobs is not None:
            ids, known = [*output.prompt_token_ids, *drawn], [*output.prompt_logprobs, *known]
            beginning = "" if partial_character(decode.bytes_of(ids[0])) else decode(ids[:1])
        choice["logprobs"] = completion_logprobs(
            ids,
            known,
            num_top,
            offset=offset,
            beginning=beginning,
            hidden=not text.startswith(beginning),
            as_ids=parsed.return_tokens_as_token_ids,
        )
    if parsed.return_token_ids:
        choice |= _token_fields(completion, drawn, decode)
    if first:
        choice |= prompt_fields(parsed, output, decode, logprobs=parsed.report_prompt_logprobs)
    return choice


def _prompt_text(parsed: CompletionRequest, output: RequestOutput, decode: TokenText) -> str:
    """Return the text of the prompt, or of its kept tokens if `truncate_prompt_tokens` has shortened it."""
    text = output.prompt
    if text is not None and parsed.params.truncate_prompt_tokens is None:
        return text
    kept = decode(output.prompt_token_ids)
    return kept if text is None or text not in kept else text


def next_offset(choice: Mapping[str, Any], completion: CompletionOutput, offset: int) -> int:
    """Return the `text_offset` of the first token after a chunk.

    choice: choice of the chunk, from `completion`. offset: `text_offset` of the first token of the chunk.
    """
    if not choice["logprobs"] or not completion.logprobs:
        return offset
    last: int = choice["logprobs"]["text_offset"][-1]
    return last + len(_text(completion.logprobs[-1][completion.token_ids[-1]]))


def shown_events(parsed: ChatRequest, events: Sequence[Event], *, first: bool = True) -> list[Event]:
    """Return the events of one continuation that its reply shows, by `echo` and `include_reasoning` of the request.

    first: whether these are the first events of the continuation, which an echo precedes.
    """
    shown = [each for each in events if parsed.include_reasoning or not isinstance(each, Reasoning)]
    last = parsed.messages[-1]
    return [Content(last["content"]), *shown] if first and parsed.echo and last["role"] == "assistant" else shown


def chat_reply(
    parsed: ChatRequest,
    output: RequestOutput,
    events: Sequence[Sequence[Event]],
    head: Mapping[str, Any],
    usage: Usage,
    decode: TokenText,
) -> dict[str, Any]:
    """Return the reply to a body of `/v1/chat/completions`. head: from `reply_head`. decode: decodes token ids.

    events: all events of each continuation (one of `n`).
    """
    pairs = zip(output.outputs, events, strict=True)
    return {
        **head,
        "choices": [chat_choice(parsed, completion, each, decode) for completion, each in pairs],
        "usage": usage.as_dict(),
        "metrics": request_metrics(output),
    } | prompt_fields(parsed, output, decode)


def chat_choice(
    parsed: ChatRequest,
    completion: CompletionOutput,
    events: Sequence[Event],
    decode: TokenText,
    *,
    first: bool | None = None,
) -> dict[str, Any]:
    """Return one choice of a reply or chunk of `/v1/chat/completions`. decode: decodes token ids.

    first: whether this is the first chunk of the choice; None for a whole reply.
    """
    if first is None:
        kind, fields = "message", _NO_FIELDS | chat_message(events)
    else:
        kind, fields = "delta", ({"role": "assistant", "content": ""} if first else {}) | chat_delta(events)
    choice: dict[str, Any] = {
        "index": completion.index,
        kind: fields,
        "logprobs": None,
        "finish_reason": next((each.finish_reason for each in events if isinstance(each, End)), None),
        "stop_reason": completion.stop_reason,
    }
    if (num_top := parsed.num_top_logprobs) is not None:
        known, as_ids = completion.logprobs or (), parsed.return_tokens_as_token_ids
        choice["logprobs"] = chat_logprobs(completion.token_ids, known, num_top, as_ids=as_ids)
    if parsed.return_token_ids:
        choice |= _token_fields(completion, list(completion.token_ids), decode)
    return choice


def chat_delta(events: Sequence[Event]) -> dict[str, Any]:
    """Convert events to the `delta` of a chunk; empty if the events add nothing."""
    content = "".join(each.text for each in events if isinstance(each, Content))
    reasoning = "".join(each.text for each in events if isinstance(each, Reasoning))
    calls: list[dict[str, Any]] = []
    for each in events:
        if isinstance(each, ToolCall):
            function = {"name": each.name, "arguments": ""}
            calls.append({"index": each.index, "id": each.id, "type": "function", "function": function})
        elif isinstance(each, Arguments):
            if not calls or calls[-1]["index"] != each.index:
                calls.append({"index": each.index, "function": {"arguments": ""}})
            calls[-1]["function"]["arguments"] += each.text
    delta: dict[str, Any] = {}
    if reasoning:
        delta = {"reasoning": reasoning, "reasoning_content": reasoning}  # clients use both names
    if content:
        delta["content"] = content
    return delta | ({"tool_calls": calls} if calls else {})


def chat_message(events: Sequence[Event]) -> dict[str, Any]:
    """Convert all events of an answer to a message, without its role."""
    delta = chat_delta(events)
    for call in delta.get("tool_calls", ()):
        del call["index"]
    return {"content": None if "tool_calls" in delta else "", **delta}


def _token_fields(completion: CompletionOutput, token_ids: list[int], decode: TokenText) -> dict[str, Any]:
    texts = [decode.name_of(each) for each in token_ids]
    return {"token_ids": token_ids, "token_texts": texts, "drafted": completion.drafted[: len(token_ids)]}


_NO_FIELDS: dict[str, Any] = {"role": "assistant", "refusal": None, "reasoning": None, "reasoning_content": None}
"""Default fields of a message: clients expect them even without a value."""


def request_metrics(output: RequestOutput) -> dict[str, float | None] | None:
    """Return times of a finished request in milliseconds, with vLLM's names; None for more than one continuation."""
    times, count = output.metrics, sum(len(each.token_ids) for each in output.outputs)
    if len(output.outputs) > 1 or not times.first_token_time:
        return None
    decoding = times.last_token_time - times.first_token_time
    generation = times.last_token_time - times.first_scheduled_time
    return {
        "time_to_first_token_ms": 1e3 * (times.first_token_time - times.arrival_time),
        "generation_time_ms": 1e3 * generation,
        "queue_time_ms": 1e3 * (times.first_scheduled_time - times.arrival_time),
        "mean_itl_ms": 1e3 * decoding / (count - 1) if count > 1 else None,
        "tokens_per_second": count / generation if generation > 0 else None,
    }


def prompt_fields(
    parsed: APIRequest, output: RequestOutput, decode: TokenText, *, logprobs: bool = True
) -> dict[str, Any]:
    """Return the requested fields of the prompt: token ids and texts (by `decode`), log probabilities if `logprobs`."""
    fields: dict[str, Any] = {"prompt_token_ids": None, "prompt_logprobs": None}
    if parsed.return_token_ids:
        ids = output.prompt_token_ids
        fields |= {"prompt_token_ids": ids, "prompt_token_texts": [decode.name_of(each) for each in ids]}
    if logprobs and output.prompt_logprobs is not None:
        fields["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
    return fields


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[Mapping[int, Logprob] | None],
    num_top: int,
    *,
    offset: int = 0,
    beginning: str = "",
    hidden: bool = False,
    as_ids: bool = False,
) -> dict[str, Any]:
    """Return `logprobs` of `/v1/completions`, for each token of a reply or chunk.

    logprobs: for each token, log probabilities at its position by token id; None for a prompt's first token.
    num_top: number of most likely tokens to report; -1 for all in `logprobs`. as_ids: write tokens as token_id:ID.
    beginning: text of a prompt's first token. hidden: whether the text of the choice leaves that token out, such as a
    special token that the tokenizer adds. offset: characters before `token_ids`.
    """
    tokens: list[str] = []
    chosen: list[float | None] = []
    likely: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token, position in zip(token_ids, logprobs, strict=True):
        offsets.append(offset)
        text = beginning if position is None else _text(position[token])
        tokens.append(_id_name(token) if as_ids else text)
        chosen.append(None if position is None else _finite(position[token]))
        likely.append(None if position is None else _top_logprobs(position, token, num_top, as_ids))
        offset += 0 if position is None and hidden else len(text)
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": likely, "text_offset": offsets}


def _top_logprobs(position: Mapping[int, Logprob], token: int, num_top: int, as_ids: bool) -> dict[str, float]:
    """Return log probabilities by the text or bytes of tokens; of equal texts, the most likely one counts.

    position: log probabilities by token id. num_top: most likely tokens to return, -1 for all; `token` always is.
    as_ids: use token_id:ID instead of the text.
    """
    entry: dict[str, float] = {}
    for i, each in enumerate(sorted(position, key=lambda each: position[each].rank)):
        if i < num_top or num_top < 0 or each == token:
            name = _text(position[each]) if each == token else _name(position[each])
            entry.setdefault(_id_name(each) if as_ids else name, _finite(position[each]))
    return entry


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]], num_top: int, *, as_ids: bool = False
) -> dict[str, Any]:
    """Return `logprobs` of `/v1/chat/completions`. logprobs: for each token, those at its position by token id.
    num_top: number of most likely tokens to report; -1 for all in `logprobs`. as_ids: write tokens as token_id:ID.
    """

    def entry(token: int, position: Mapping[int, Logprob]) -> dict[str, Any]:
        known, text = position[token], _text(position[token])
        data = known.token_bytes or text.encode("utf-8", "replace")
        return {"token": _id_name(token) if as_ids else text, "logprob": _finite(known), "bytes": list(data)}

    content = []
    for token, position in zip(token_ids, logprobs, strict=True):
        ranked = sorted(position, key=lambda each: position[each].rank)[: None if num_top < 0 else num_top]
        content.append(entry(token, position) | {"top_logprobs": [entry(each, position) for each in ranked]})
    return {"content": content}


def prompt_logprobs(logprobs: Sequence[Mapping[int, Logprob] | None]) -> list[dict[str, Any] | None]:
    """Return `prompt_logprobs` in vLLM's format, by token id; None for the first token."""

    def entry(each: Logprob) -> dict[str, Any]:
        return {"logprob": _finite(each), "rank": each.rank, "decoded_token": each.decoded_token}

    return [
        None if position is None else {str(token): entry(each) for token, each in position.items()}
        for position in logprobs
    ]


def _id_name(token: int) -> str:
    """Return vLLM's unique name of a token: token_id:ID."""
    return f"token_id:{token}"


def _text(logprobs: Logprob) -> str:
    return logprobs.decoded_token or ""


def _name(logprobs: Logprob) -> str:
    """Return the text of a token, or its bytes in OpenAI's notation if it has no text."""
    return logprobs.decoded_token or "".join(["bytes:", *(f"\\x{byte:02x}" for byte in logprobs.token_bytes)])


def _finite(logprobs: Logprob) -> float:
    """Return the log probability, at least -9999.0 as in vLLM, because JSON has no infinity."""
    return max(logprobs.logprob, -9999.0)
