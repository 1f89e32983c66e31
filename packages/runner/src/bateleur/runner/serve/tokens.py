"""`/tokenize`, `/detokenize` and `/tokenizer_info`: conversion between text and token ids."""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from bateleur.runner.serve.body import openapi_body, read_json_object
from bateleur.runner.serve.errors import http_errors
from bateleur.runner.serve.json_text import JSONText
from bateleur.runner.serve.openai.fields import COMMON, Field
from bateleur.runner.serve.openai.requests import CHAT_FIELDS, chat_request
from bateleur.runner.serve.parsers.chat_format import with_options
from bateleur.runner.serve.service import Service
from bateleur.runner.utils.arguments import Integer, Several, flag, listed, refuse, require_unicode


def router(service: Service) -> APIRouter:
    """Create the routes for tokenization."""
    routes = APIRouter()

    @routes.post("/tokenize", openapi_extra=openapi_body(_TOKENIZE, sampled=False))
    async def tokenize(request: Request) -> Response:
        """Tokenize a text or a conversation."""
        body = await read_json_object(request, service.config)
        with http_errors():
            parsed = _checked(body, _TOKENIZE)
            service.adapter_of(parsed.get("model"))
            return JSONText(await service.llm.run_in_thread(lambda: _tokens(service, parsed), long=True))

    @routes.post("/detokenize", openapi_extra=openapi_body(_DETOKENIZE, "tokens", sampled=False))
    async def detokenize(request: Request) -> Response:
        """Convert token ids to text."""
        body = await read_json_object(request, service.config)
        with http_errors():
            return JSONText(await service.llm.run_in_thread(lambda: _text(service, body), long=True))

    @routes.get("/tokenizer_info")
    async def info(request: Request) -> Response:
        llm = service.llm.llm
        facts = {"tokenizer_class": type(llm.tokenizer).__name__, "vocab_size": llm.spec.vocab_size}
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        facts |= {name: getattr(llm.tokenizer, name, None) for name in names}
        if service.config.chat_template is not None:
            facts["chat_template"] = service.config.chat_template
        return JSONText({**facts, "model_max_length": llm.limits.max_model_len})

    return routes


def _tokens(service: Service, parsed: dict[str, Any]) -> dict[str, Any]:
    tokenizer = service.llm.llm.tokenizer
    if ("prompt" in parsed) == ("messages" in parsed):
        raise ValueError("prompt is given with messages, or both are absent; send exactly one of them")
    if "prompt" in parsed:
        ids = tokenizer.encode(parsed["prompt"], add_special_tokens=parsed.get("add_special_tokens", True))
    else:
        chat = chat_request({name: parsed[name] for name in _CHAT_FIELDS if name in parsed}, {})
        chat = with_options(chat, service.config)
        ids = chat.prompt_for(tokenizer)["prompt_token_ids"]
    texts = [service.decode([each]) for each in ids] if parsed.get("return_token_strs", False) else None
    limit = service.llm.llm.limits.max_model_len
    return {"count": len(ids), "max_model_len": limit, "tokens": list(ids), "token_strs": texts}


def _text(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    parsed = _checked(body, _DETOKENIZE)
    service.adapter_of(parsed.get("model"))
    if "tokens" not in parsed:
        raise ValueError("tokens is absent; it must be a list of token ids")
    size = service.llm.llm.spec.vocab_size
    if foreign := [each for each in parsed["tokens"] if each >= size]:
        refuse("tokens", foreign, f"a list of token ids below {size}")
    return {"prompt": service.decode(list(parsed["tokens"]))}


def _checked(body: dict[str, Any], fields: Mapping[str, Field]) -> dict[str, Any]:
    given = {name: value for name, value in body.items() if value is not None}
    if unknown := given.keys() - fields.keys():
        raise ValueError(f"{listed(unknown)}: no such field is known here")
    return {name: fields[name].check(name, value) for name, value in given.items()}


def _any_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        refuse(name, value, "text")
    require_unicode(name, value)
    return value


_CHAT_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
_TOKENIZE = {
    "model": COMMON["model"],
    "prompt": Field(_any_text, "The text.", "string"),
    "add_special_tokens": Field(flag, "Add the tokenizer's special tokens. Default: true.", "boolean"),
    "return_token_strs": Field(flag, "Add the text of each token.", "boolean"),
    **{name: CHAT_FIELDS[name] for name in _CHAT_FIELDS},
}
_DETOKENIZE = {
    "model": COMMON["model"],
    "tokens": Field(Several(Integer(0), "a list of token ids"), "Token ids.", "array"),
}
