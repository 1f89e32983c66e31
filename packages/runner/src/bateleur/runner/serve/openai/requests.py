"""Parsing of the bodies of `/v1/completions` and `/v1/chat/completions`: fields of OpenAI, vLLM and this project."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.serve.openai.fields import COMMON, Field, response_format, split
from bateleur.runner.serve.openai.tools import ToolChoice, allowed_tools, forced_schema, tool_choice, tools
from bateleur.runner.text.chat import ChatPrompt, render
from bateleur.runner.text.messages import checked_messages
from bateleur.runner.text.tokenizer import Tokenizer
from bateleur.runner.utils.arguments import TEXTS_AND_BYTES, Check, Integer, flag, mapping, refuse, shown, text

Body: TypeAlias = Mapping[str, Any]
Names: TypeAlias = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class APIRequest:
    """Base class of parsed request bodies: sampling parameters, and the fields of both APIs (`COMMON`).

    include_usage, continuous_usage: from `stream_options`: report the usage in the last chunk, or in every chunk.
    names: names of fields in the client's API, by their names in chat completions. Errors use the client's names.
    """

    params: SamplingParams
    model: str | None = None
    request_id: str | None = None
    priority: int = 0
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    names: Names = field(default_factory=dict)
    """For errors: names of fields in the client's API, by their names in chat completions."""

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of most likely tokens to report for each position; None for no log probabilities.

        -1 reports all tokens that the engine returned: those of the sampling parameter `logprob_token_ids` if it is
        given, else the whole vocabulary.
        """
        return -1 if self.params.logprob_token_ids else self.params.logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(APIRequest):
    """Parsed body of `/v1/completions`; see `COMPLETION_FIELDS`. only_prompt: whether replies have only the prompt.

    report_prompt_logprobs: whether choices have `prompt_logprobs`. An echo with logprobs computes them in any case.
    """

    prompts: tuple[dict[str, Any], ...]
    """Prompts as `LLM.add_request` takes them: {"prompt": text} or {"prompt_token_ids": ids}."""
    echo: bool = False
    only_prompt: bool = False
    """Whether `echo` is set and max_tokens is 0. The engine generates one token, which the reply leaves out."""
    report_prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(APIRequest):
    """Parsed body of `/v1/chat/completions`; see `CHAT_FIELDS`. template: variables of the chat template."""

    messages: tuple[dict[str, Any], ...]
    """Messages for the chat template: content is text, arguments of tool calls are objects."""
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice = "none"
    parallel_tool_calls: bool = True
    chat_template: str | None = None
    template: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    echo: bool = False
    thinking_token_budget: int | None = None
    include_reasoning: bool = True

    def prompt_for(self, tokenizer: Tokenizer) -> ChatPrompt:
        """Render the conversation by the chat template, without tools if tool_choice is none.

        Raises ValueError if there is no chat template, or if the template raises an error.
        """
        return render(
            tokenizer,
            self.messages,
            tools=self.tools if self.tool_choice != "none" else None,
            chat_template=self.chat_template,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.template,
        )


def completion_request(body: Body, defaults: Body, *, strict: bool = False) -> CompletionRequest:
    """Parse a body of `/v1/completions`. defaults: sampling parameters for absent fields.

    strict: reject unknown fields. Raises ValueError whose message begins with the name of the invalid field.
    """
    own, sampling = split(body, COMPLETION_FIELDS, strict=strict)
    if isinstance(sampling.get("logprobs"), bool):
        sampling["logprobs"] = 1 if sampling["logprobs"] else None
    if sampling.get("best_of") == sampling.get("n"):  # all are returned in any case
        sampling.pop("best_of", None)
    if "prompt" not in own:
        raise ValueError("prompt is absent; it must be text, token ids, or a list of these")
    echo, limit = own.get("echo", False), sampling.get("max_tokens")
    only_prompt = echo and limit == 0 and not isinstance(limit, bool)
    if only_prompt:
        sampling["max_tokens"] = 1
    sampling = {**defaults, **sampling}
    reported = sampling.get("prompt_logprobs") is not None
    if echo and not reported and (sampling.get("logprobs") is not None or sampling.get("logprob_token_ids")):
        sampling["prompt_logprobs"] = sampling.get("logprobs") or 0
    common = _common(CompletionRequest, own, sampling, "structured_outputs", {})
    chosen = {"prompts": own["prompt"], "only_prompt": only_prompt, "report_prompt_logprobs": reported}
    return CompletionRequest(**common | chosen)


def chat_request(body: Body, defaults: Body, *, strict: bool = False, names: Names | None = None) -> ChatRequest:
    """Parse a body of `/v1/chat/completions`. Without max_tokens the model's context is the limit.

    defaults: sampling parameters for absent fields. strict: reject unknown fields and tools that are not functions.
    names: names of fields in the client's API, by their names in chat completions; stored for later errors. Raises
    ValueError whose message begins with the invalid field's name in chat completions.
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
        refuse("add_generation_prompt", prompted, "false if continue_final_message is true")
    choice, parallel = tool_choice(chosen, known), own.get("parallel_tool_calls", True)
    schema = forced_schema(choice, known, parallel=parallel)
    grammar = "structured_outputs" if "structured_outputs" in sampling else "tools"
    if schema is not None:
        own.pop("response_format", None)  # the answer is a call without text
        if (given := sampling.get("structured_outputs")) is not None:
            refuse("structured_outputs", given, f"absent with tool_choice = {shown(choice)}")
        sampling["structured_outputs"] = {"json": schema, "disable_any_whitespace": True}
    names = {"logprobs": "top_logprobs", **(names or {})}
    common = _common(ChatRequest, own, {"max_tokens": None, **defaults, **sampling}, grammar, names)
    template = _template_variables(own) | own.get("chat_template_kwargs", {})
    chosen = {"tools": known, "tool_choice": choice, "template": template, "add_generation_prompt": prompted}
    return ChatRequest(**common | chosen)


def _template_variables(own: Body) -> dict[str, Any]:
    variables = {name: own[name] for name in ("documents", "reasoning_effort") if name in own}
    thinking = own.get("enable_thinking")
    if thinking is None and "reasoning_effort" in own:
        thinking = own["reasoning_effort"] != "none"
    # Templates use one of two names to enable thinking.
    return variables if thinking is None else variables | {"enable_thinking": thinking, "thinking": thinking}


def _common(kind: type[APIRequest], own: Body, sampling: Body, grammar: str, names: Names) -> dict[str, Any]:
    """Return constructor arguments of `kind`: body fields with the same names, and the fields of `APIRequest`.

    sampling: sampling parameters, defaults included. own: other fields of the body. names: as in `APIRequest`.
    grammar: field that errors of `structured_outputs` name; if the body has a `response_format`, they name that field.
    """
    if (form := own.get("response_format")) is not None:
        if sampling.get("structured_outputs") is not None:
            refuse("response_format", form, "absent if structured_outputs is given")
        sampling, grammar = {**sampling, "structured_outputs": form}, "response_format"
    stream_options = own.get("stream_options", {})
    return {name: own[name] for name in (each.name for each in fields(kind)) if name in own} | {
        "params": SamplingParams.from_dict(sampling),
        "names": {**names, "structured_outputs": names.get(grammar, grammar)},
        "include_usage": stream_options.get("include_usage", False),
        "continuous_usage": stream_options.get("continuous_usage_stats", False),
    }


def _prompts(name: str, value: Any) -> tuple[dict[str, Any], ...]:
    """Parse prompts: text, token ids, or a list of either. The engine checks the ids themselves."""
    if isinstance(value, str):
        return ({"prompt": value},)
    if not isinstance(value, Sequence) or isinstance(value, TEXTS_AND_BYTES) or not value:
        refuse(name, value, "text, token ids, or a list of these")
    if all(isinstance(each, str | list) for each in value):
        return tuple({"prompt" if isinstance(each, str) else "prompt_token_ids": each} for each in value)
    if all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        return ({"prompt_token_ids": list(value)},)
    refuse(name, value, "text, token ids, or a list of these")


def _as_it_is(name: str, value: Any) -> Any:
    """Return a value that is checked later, together with other fields."""
    return value


def _only(value: bool, why: str) -> Check:
    def check(name: str, given: Any) -> bool:
        if flag(name, given) is not value:
            refuse(name, given, f"{value}: {why}")
        return value

    return check


def _no_suffix(name: str, value: Any) -> None:
    if value != "":
        refuse(name, value, "absent: text is only generated at the end")


COMPLETION_FIELDS: dict[str, Field] = {
    **COMMON,
    "prompt": Field(_prompts, "Text, token ids, or a list of either."),
    "add_special_tokens": Field(
        _only(True, "send token ids for a prompt without them"),
        "Only true; send token ids instead of false.",
        "boolean",
    ),
    "echo": Field(flag, "Begin the text with the prompt; max_tokens 0 returns only the prompt.", "boolean"),
    "suffix": Field(_no_suffix, "Only empty: text is only generated at the end.", "string"),
    "response_format": Field(response_format, "text, json_object, json_schema or structural_tag.", "object"),
}
CHAT_FIELDS: dict[str, Field] = {
    **COMMON,
    "messages": Field(
        lambda _, value: tuple(checked_messages(value)),
        "The conversation; contents are text or lists of text parts.",
        "array",
    ),
    "tools": Field(_as_it_is, "Functions that the model may call; other tools are ignored.", "array"),
    "tool_choice": Field(_as_it_is, "none, auto, required, a function, or allowed_tools."),
    "add_special_tokens": Field(
        _only(False, "the chat template adds them"), "Only false: the template adds them.", "boolean"
    ),
    "parallel_tool_calls": Field(flag, "Allow several calls per answer. Default: true.", "boolean"),
    "logprobs": Field(flag, "Report the log probability of each token.", "boolean"),
    "top_logprobs": Field(Integer(-1), "Number of most likely tokens to report per position; -1 for all.", "integer"),
    "max_completion_tokens": Field(Integer(1), "Newer name of max_tokens.", "integer"),
    "reasoning_effort": Field(text, "Passed to the template; none turns thinking off, other values on.", "string"),
    "enable_thinking": Field(flag, "Turn thinking on or off, if the template supports it.", "boolean"),
    "thinking_token_budget": Field(Integer(0), "Maximum reasoning tokens; then the reasoning is ended.", "integer"),
    "include_reasoning": Field(flag, "Include the reasoning in the reply. Default: true.", "boolean"),
    "documents": Field(_as_it_is, "Passed to the template.", "array"),
    "chat_template_kwargs": Field(mapping, "Additional arguments of the template.", "object"),
    "add_generation_prompt": Field(flag, "End the prompt with the start of an answer. Default: true.", "boolean"),
    "echo": Field(flag, "Begin the reply with the last message if its role is assistant.", "boolean"),
    "continue_final_message": Field(flag, "Continue the last message.", "boolean"),
    "response_format": Field(response_format, "text, json_object, json_schema or structural_tag.", "object"),
}
