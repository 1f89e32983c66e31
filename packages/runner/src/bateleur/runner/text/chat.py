"""A conversation as a prompt, by the template of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast

from bateleur.runner.arguments import flag, refuse, shown, text
from bateleur.runner.text.messages import Message, checked_messages, checked_tools
from bateleur.runner.text.tokenizer import Tokenizer


class ChatPrompt(TypedDict):
    """A prompt of both kinds: the ids are what runs, the text what they stand for."""

    prompt: str
    prompt_token_ids: list[int]


class ChatOptions(TypedDict, total=False):
    """What `render` takes beside the messages; the names are vLLM's."""

    tools: Sequence[Mapping[str, Any]] | None
    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any] | None


_OWN = ("conversation", "messages", "tokenize", "return_dict", "return_tensors", *ChatOptions.__annotations__)
"""Names that `chat_template_kwargs` cannot give, since the call itself says them."""


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> ChatPrompt:
    """The prompt of one conversation. Any thread may call this.

    chat_template: in place of the checkpoint's. It is a program (Jinja, in its sandbox), which may run for
        as long as it likes: take none from people who are not trusted with the machine.
    add_generation_prompt: end with what an answer begins with. continue_final_message: the last message goes on.
    chat_template_kwargs: further names for the template, such as enable_thinking.

    The ids are those of the text, without a token before it that the tokenizer puts before other texts: the template
    writes it. Raises ValueError for what is malformed, naming its place, without a template, or where it raises.
    """
    conversation, functions = checked_messages(messages), checked_tools(tools)
    more = _names(chat_template_kwargs)
    if chat_template is not None:
        text("chat_template", chat_template)
    goes_on = flag("continue_final_message", continue_final_message)
    if flag("add_generation_prompt", add_generation_prompt) and goes_on:
        refuse(
            "continue_final_message", True, "False beside add_generation_prompt, which begins another message"
        )
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the checkpoint has no chat template, which says how messages become a prompt; give chat_template, or a "
            "prompt in place of messages"
        )
    template = cast(Any, tokenizer).apply_chat_template
    try:
        written = template(
            conversation,
            tools=functions,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **more,
        )
    except Exception as error:  # the template is a program: it may raise whatever it likes
        raise ValueError(f"the chat template refuses these messages: {_named(error)}") from error
    return ChatPrompt(prompt=written, prompt_token_ids=tokenizer.encode(written, add_special_tokens=False))


def _names(given: object) -> dict[str, Any]:
    name = "chat_template_kwargs"
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        refuse(name, given, "a mapping from names to values, or None")
    if taken := sorted(given.keys() & set(_OWN)):
        refuse(
            f"{name}[{taken[0]!r}]", given[taken[0]], "absent: it is an argument, or none of the template's"
        )
    return dict(given)


def _named(error: Exception) -> str:
    """What it says; a template's own `raise_exception` says it without more."""
    kind, said = type(error).__name__, " ".join(str(error).split())
    return said[:500] if kind == "TemplateError" and said else f"{kind}: {said[:500] or shown(error)}"
