"""Renders a conversation as a prompt, by the chat template of the checkpoint."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypedDict, cast

from bateleur.runner.text.messages import Message, checked_messages, checked_tools
from bateleur.runner.text.tokenizer import Tokenizer
from bateleur.runner.utils.arguments import flag, mapping, refuse, shown, text
from bateleur.runner.utils.log_once import log_once


class ChatPrompt(TypedDict):
    """A prompt as text and as token ids. The engine uses the ids."""

    prompt: str
    prompt_token_ids: list[int]


class ChatOptions(TypedDict, total=False):
    """Arguments of `render` other than the messages, with vLLM's names."""

    tools: Sequence[Mapping[str, Any]] | None
    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any] | None


_log = logging.getLogger(__name__)
_SYSTEM = ("system", "developer")
_OWN = ("conversation", "messages", "tokenize", "return_dict", "return_tensors", *ChatOptions.__annotations__)
"""Names that `chat_template_kwargs` can't set, because they are arguments."""


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
    """Return the prompt of one conversation. Any thread may call this.

    chat_template: replaces the checkpoint's. It is a program (Jinja, in a sandbox) that may run forever, so do not
    accept it from untrusted users.
    add_generation_prompt: end with the start of an answer. continue_final_message: end in the last message, unfinished.
    chat_template_kwargs: further variables of the template, such as enable_thinking.

    System messages that the template refuses or omits are merged into one at the start, if it accepts that. The
    tokenizer adds no special tokens. Raises ValueError for malformed messages (naming the place), if there is no
    template, and if the template raises.
    """
    conversation, functions = checked_messages(messages), checked_tools(tools)
    more = _variables({} if chat_template_kwargs is None else chat_template_kwargs)
    if chat_template is not None:
        text("chat_template", chat_template)
    continues = flag("continue_final_message", continue_final_message)
    if flag("add_generation_prompt", add_generation_prompt) and continues:
        refuse("continue_final_message", True, "False with add_generation_prompt, which starts another message")
    program = getattr(tokenizer, "chat_template", None) if chat_template is None else chat_template
    if not program:
        raise ValueError("the checkpoint has no chat template: give chat_template, or a prompt instead of messages")
    template = partial(
        cast(Any, tokenizer).apply_chat_template,
        tools=functions,
        chat_template=chat_template,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tokenize=False,
        **more,
    )
    if "developer" not in str(program):  # OpenAI's role, which few templates know
        conversation = [each | {"role": "system"} if each["role"] == "developer" else each for each in conversation]
    written = _write(template, conversation)
    if not written.isascii():  # JSON can hold half of a surrogate pair, and tokenizers can't
        written = written.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return ChatPrompt(prompt=written, prompt_token_ids=tokenizer.encode(written, add_special_tokens=False))


def _write(template: Callable[[list[dict[str, Any]]], str], conversation: list[dict[str, Any]]) -> str:
    places = [i for i, each in enumerate(conversation) if each["role"] in _SYSTEM]
    system = [text for i in places if (text := conversation[i]["content"].strip())]
    written, refusal = "", None
    try:
        written = template(conversation)
    except Exception as error:  # the template is a program, which may raise anything
        refusal = error
    if places not in ([], [0]) and (refusal or not all(each in written for each in system)):
        first = [{"role": "system", "content": "\n\n".join(system)}] if system else []
        with suppress(Exception):
            merged = template([*first, *(each for each in conversation if each["role"] not in _SYSTEM)])
            if all(each in merged for each in system):
                log_once(_log, "system messages were merged into the first one, because the template wants one")
                return merged
    if refusal is not None:
        raise ValueError(f"the chat template refuses these messages: {_named(refusal)}") from refusal
    return written


def _variables(given: object) -> dict[str, Any]:
    variables = mapping("chat_template_kwargs", given, "a mapping from names to values, or None")
    if taken := sorted(variables.keys() & set(_OWN)):
        refuse(f"chat_template_kwargs[{taken[0]!r}]", variables[taken[0]], "absent: it is an argument or reserved")
    return variables


def _named(error: Exception) -> str:
    """Return the message of an error. The type is left out for a template's own `raise_exception`."""
    kind, message = type(error).__name__, " ".join(str(error).split())
    return message[:500] if kind == "TemplateError" and message else f"{kind}: {message[:500] or shown(error)}"
