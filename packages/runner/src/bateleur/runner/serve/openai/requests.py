"""What a body of `/v1/completions` or `/v1/chat/completions` asks for, in the words of the engine.

Names are OpenAI's, those of `SamplingParams`, and vLLM's `priority`, `request_id` and `return_token_ids`. A value that
breaks a rule is a ValueError that begins with the name of the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.serve.openai.fields import COMMON, Field, mapping, response_format, split
from bateleur.runner.serve.openai.tools import (
    ToolChoice,
    allowed_tools,
    forced_schema,
    is_strict,
    tool_choice,
    tools,
)
from bateleur.runner.text.chat import ChatPrompt, render
from bateleur.runner.text.messages import checked_messages
from bateleur.runner.text.tokenizer import Tokenizer
from bateleur.runner.utils.arguments import TEXTS_AND_BYTES, Check, Integer, flag, refuse, shown, text


@dataclass(frozen=True, slots=True, kw_only=True)
class APIRequest:
    """What bodies of every kind ask for."""

    params: SamplingParams
    model: str | None = None
    request_id: str | None = None
    """What the id of the reply ends with."""
    priority: int = 0
    """Lower runs first."""
    stream: bool = False
    include_usage: bool = False
    """Of a stream: its last chunk tells the usage."""
    continuous_usage: bool = False
    """Of a stream: every chunk tells the usage so far."""
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    """Of log probabilities: tokens are token_id:ID."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What the client calls fields, for errors: those of chat completions, and `structured_outputs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(APIRequest):
    """What a body of `/v1/completions` asks for."""

    prompts: tuple[dict[str, Any], ...]
    """Each {"prompt": text} or {"prompt_token_ids": ids}."""
    echo: bool = False
    """The text begins with the prompt."""
    only_prompt: bool = False
    """No token is wanted: one is drawn, since a request has one at least, and left out of the reply."""

    def prompts_for(self, tokenizer: Tokenizer) -> tuple[dict[str, Any], ...]:
        """Each as `LLM.add_request` takes it."""
        return self.prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(APIRequest):
    """What a body of `/v1/chat/completions` asks for."""

    messages: tuple[dict[str, Any], ...]
    """As chat templates want them: content is text, arguments of tool calls are objects."""
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice = "none"
    parallel_tool_calls: bool = True
    chat_template: str | None = None
    """In place of the checkpoint's."""
    template: dict[str, Any] = field(default_factory=dict)
    """More arguments of the template."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    echo: bool = False
    """The answer begins with the last message, if that is the assistant's."""
    thinking_token_budget: int | None = None
    """Most tokens of reasoning; None for no limit."""
    include_reasoning: bool = True
    """Whether the reply has the reasoning."""

    def prompts_for(self, tokenizer: Tokenizer) -> tuple[ChatPrompt]:
        """As of a completion; ValueError as `render`. The model isn't told of tools where none may be called."""
        prompt = render(
            tokenizer,
            self.messages,
            tools=self.tools if self.tool_choice != "none" else None,
            chat_template=self.chat_template,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.template,
        )
        return (prompt,)


def completion_request(
    body: Mapping[str, Any], defaults: Mapping[str, Any], *, strict: bool = False
) -> CompletionRequest:
    """Read a body of `/v1/completions`.

    defaults: sampling parameters where the body is silent. strict: refuse unknown fields. Raises ValueError as the
    module says.
    """
    own, sampling = split(body, COMPLETION_FIELDS, strict=strict)
    if isinstance(sampling.get("logprobs"), bool):
        sampling["logprobs"] = 1 if sampling["logprobs"] else None
    if "prompt" not in own:
        raise ValueError("prompt is absent; it must be text, token ids, or a list of these")
    echo, limit = own.get("echo", False), sampling.get("max_tokens")
    only_prompt = echo and limit == 0 and not isinstance(limit, bool)
    if only_prompt:
        sampling["max_tokens"] = 1
    if echo and sampling.get("logprobs") is not None:
        sampling.setdefault("prompt_logprobs", sampling["logprobs"])
    return CompletionRequest(
        prompts=own["prompt"], echo=echo, only_prompt=only_prompt, **_common(own, {**defaults, **sampling})
    )


def chat_request(
    body: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *,
    strict: bool = False,
    names: Mapping[str, str] | None = None,
) -> ChatRequest:
    """Read a body of `/v1/chat/completions`; without a limit a reply may be as long as the model's context.

    defaults: sampling parameters where the body is silent. strict: refuse unknown fields and tools that are not
    functions. names: see `APIRequest`. Raises ValueError as the module says.
    """
    own, sampling = split(body, CHAT_FIELDS, strict=strict)
    if "messages" not in own:
        raise ValueError("messages is absent; it must be a list of at least one message")
    if "max_completion_tokens" in own:
        sampling["max_tokens"] = own["max_completion_tokens"]
    top = own.get("top_logprobs", 0)
    if own.get("logprobs"):
        sampling["logprobs"] = top
    elif top:
        refuse("top_logprobs", top, "absent unless logprobs is true")
    chosen, known = allowed_tools(own.get("tool_choice"), tools(own.get("tools"), strict=strict))
    continued = own.get("continue_final_message", False)
    prompted = own.get("add_generation_prompt", not continued)
    if continued and prompted:
        refuse("add_generation_prompt", prompted, "false where continue_final_message is true")
    choice, parallel = tool_choice(chosen, known), own.get("parallel_tool_calls", True)
    schema = forced_schema(choice, known, parallel=parallel)
    if schema is not None:
        own.pop("response_format", None)  # the answer is a call, and has no text
        if (given := sampling.get("structured_outputs")) is not None:
            refuse("structured_outputs", given, f"absent where tool_choice is {shown(choice)}")
        sampling["structured_outputs"] = {"json": schema, "disable_any_whitespace": True}
    strict_calls = schema is not None or (choice == "auto" and any(map(is_strict, known)))
    common = _common(own, {"max_tokens": None, **defaults, **sampling}, "tools" if strict_calls else "")
    source = common["names"]["structured_outputs"]
    return ChatRequest(
        messages=own["messages"],
        tools=known,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        template=_names_for_template(own) | own.get("chat_template_kwargs", {}),
        echo=own.get("echo", False),
        thinking_token_budget=own.get("thinking_token_budget"),
        include_reasoning=own.get("include_reasoning", True),
        add_generation_prompt=prompted,
        continue_final_message=continued,
        **common
        | {
            "names": {
                "logprobs": "top_logprobs",
                **(names or {}),
                "structured_outputs": (names or {}).get(source, source),
            }
        },
    )


def _names_for_template(own: Mapping[str, Any]) -> dict[str, Any]:
    """Names for the template, of which two switch the thinking: templates call that differently."""
    names = {"documents": own["documents"]} if "documents" in own else {}
    effort, reasons = own.get("reasoning_effort"), own.get("enable_thinking")
    if effort is not None:
        names["reasoning_effort"], reasons = effort, effort != "none" if reasons is None else reasons
    return names if reasons is None else names | {"enable_thinking": reasons, "thinking": reasons}


def _common(own: Mapping[str, Any], sampling: dict[str, Any], grammar: str = "") -> dict[str, Any]:
    """Fields of `APIRequest`. grammar: the field that asks for a grammar, if `response_format` does not."""
    if (form := own.get("response_format")) is not None:
        if sampling.get("structured_outputs") is not None:
            refuse("response_format", form, "absent beside structured_outputs")
        sampling["structured_outputs"], grammar = form, "response_format"
    told = own.get("stream_options", {})
    return {
        "params": SamplingParams.from_dict(sampling),
        "names": {"structured_outputs": grammar or "structured_outputs"},
        "model": own.get("model"),
        "request_id": own.get("request_id"),
        "priority": own.get("priority", 0),
        "stream": own.get("stream", False),
        "include_usage": told.get("include_usage", False),
        "continuous_usage": told.get("continuous_usage_stats", False),
        "return_token_ids": own.get("return_token_ids", False),
        "return_tokens_as_token_ids": own.get("return_tokens_as_token_ids", False),
    }


def _prompts(name: str, value: Any) -> tuple[dict[str, Any], ...]:
    """Text, ids, or a list of either. What is wrong within the ids is said by who admits them."""
    if isinstance(value, str):
        return ({"prompt": value},)
    if not isinstance(value, Sequence) or isinstance(value, TEXTS_AND_BYTES) or not value:
        refuse(name, value, "text, token ids, or a list of these")
    if all(isinstance(each, str | list) for each in value):
        return tuple({"prompt" if isinstance(each, str) else "prompt_token_ids": each} for each in value)
    if all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        return ({"prompt_token_ids": list(value)},)
    refuse(name, value, "text, token ids, or a list of these")


def _messages(name: str, value: Any) -> tuple[dict[str, Any], ...]:
    return tuple(checked_messages(value))


def _as_it_is(name: str, value: Any) -> Any:
    """What is read together with other fields."""
    return value


def _only(value: bool, why: str) -> Check:
    def check(name: str, given: Any) -> bool:
        if flag(name, given) is not value:
            refuse(name, given, f"{value}: {why}")
        return value

    return check


def _no_suffix(name: str, value: Any) -> None:
    if value != "":
        refuse(name, value, "absent: text is written at the end alone")


COMPLETION_FIELDS: dict[str, Field] = {
    **COMMON,
    "prompt": Field(_prompts, "Text, token ids, or a list of either."),
    "add_special_tokens": Field(
        _only(True, "send token ids for a prompt without them"),
        "Only true: send token ids otherwise.",
        "boolean",
    ),
    "echo": Field(
        flag, "The text begins with the prompt; with max_tokens 0 it is the prompt alone.", "boolean"
    ),
    "suffix": Field(_no_suffix, "Only the empty text: texts are written at the end alone.", "string"),
    "response_format": Field(
        response_format, "text, json_object or json_schema: what the text must be.", "object"
    ),
}
"""Of `/v1/completions`."""
CHAT_FIELDS: dict[str, Field] = {
    **COMMON,
    "messages": Field(_messages, "The conversation; contents are texts, or lists of parts of text.", "array"),
    "tools": Field(
        _as_it_is, "Functions that the model may call; tools of other types are left out.", "array"
    ),
    "tool_choice": Field(_as_it_is, "none, auto, required, a function, or allowed_tools."),
    "add_special_tokens": Field(
        _only(False, "the chat template writes them"), "Only false: the template writes them.", "boolean"
    ),
    "parallel_tool_calls": Field(flag, "Whether an answer may have several calls. Default: true.", "boolean"),
    "logprobs": Field(flag, "Report the log probability of each token.", "boolean"),
    "top_logprobs": Field(
        Integer(-1), "Most likely tokens that are reported at each place; -1 for all.", "integer"
    ),
    "max_completion_tokens": Field(Integer(1), "max_tokens by its newer name.", "integer"),
    "reasoning_effort": Field(
        text, "Passed to the template; none switches thinking off, others on.", "string"
    ),
    "enable_thinking": Field(flag, "Switch thinking, if the template can.", "boolean"),
    "thinking_token_budget": Field(
        Integer(0), "Most tokens of reasoning; then the tag that ends it is written for the model.", "integer"
    ),
    "include_reasoning": Field(flag, "Whether the reply has the reasoning. Default: true.", "boolean"),
    "documents": Field(_as_it_is, "Passed to the template.", "array"),
    "chat_template_kwargs": Field(mapping, "Names for the template, and their values.", "object"),
    "add_generation_prompt": Field(
        flag, "End the prompt with the beginning of an answer. Default: true.", "boolean"
    ),
    "echo": Field(flag, "The reply begins with the last message, if that is the assistant's.", "boolean"),
    "continue_final_message": Field(flag, "The answer goes on with the last message.", "boolean"),
    "response_format": Field(
        response_format, "text, json_object or json_schema: what the answer must be.", "object"
    ),
}
"""Of `/v1/chat/completions`."""
