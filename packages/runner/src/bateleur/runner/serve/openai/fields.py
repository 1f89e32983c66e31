"""The fields of a request body: which are known, which change nothing, which are refused, and the rules of values."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.utils.arguments import Check, Integer, flag, listed, refuse, shown, text
from bateleur.runner.utils.log_once import log_once
from bateleur.runner.utils.options import options_of
from bateleur.runner.utils.vllm_names import SAMPLING, drop_unsupported, table

_log = logging.getLogger(__name__)

IGNORED = {
    "user": "it names the caller",
    "metadata": "it is for the caller's own books",
    "client_metadata": "it is for the caller's own books",
    "store": "chat completions are not stored",
    "service_tier": "there is one",
    "safety_identifier": "it names the caller",
    "prompt_cache_key": "prompts are matched with the prefix cache by their tokens",
    "prompt_cache_retention": "the prefix cache keeps what it has room for",
    "prompt_cache_options": "prompts are matched with the prefix cache by their tokens",
    "context_management": "conversations are answered as they are sent",
    "background_options": "responses in the background run like others",
    "access_programs": "every client may use everything",
    "image": "answers are text",
    "moderation": "this server does not moderate",
    "prediction": "it makes answers faster at most, and changes none",
    "verbosity": "models that were not trained for it know nothing of it",
    "web_search_options": "this server does not search",
}
"""Fields that are accepted and change nothing, and why."""
REFUSED = table(
    ("modalities", (["text"],), "answers are text"),
    ("audio", (None,), "answers are text"),
    ("functions function_call", ([], "none"), "this form is out of use: say tools and tool_choice"),
    ("use_beam_search", (False,), "there is no beam search"),
    ("length_penalty", (1, 1.0), "it belongs to beam search"),
    ("early_stopping", (False,), "it belongs to beam search"),
    ("logprob_token_ids", ([],), "the most likely tokens are reported: say logprobs or top_logprobs"),
    ("chat_template", (), "a template is a program, and clients may not bring one: see --chat-template"),
    ("cache_salt", (), "the prefix cache is shared by all requests: see --no-enable-prefix-caching"),
    ("vllm_xargs kv_transfer_params", ({},), "this server has no plug-ins that read it"),
    ("mm_processor_kwargs", ({},), "prompts are text or token ids"),
    ("guided_json guided_regex guided_choice guided_grammar", (), "say structured_outputs"),
)
"""Fields that ask for something else than what is done, but for these values; and why."""
_ENGINE_ONLY = frozenset(("output_kind", "detokenize", "return_tags"))
"""Parameters that decide in which form the engine reports, which is up to whoever answers the body."""

_INTEGERS = frozenset(each.name for each in options_of(SamplingParams) if each.type.startswith("int"))

_PRIORITY = Integer(-(1 << 31), (1 << 31) - 1)


def mapping(name: str, value: Any) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        refuse(name, value, "an object")
    return dict(value)


def _name(name: str, value: Any) -> str:
    """Short, since it stands in every part of a reply."""
    if not isinstance(value, str) or not 0 < len(value) <= 200 or not value.isprintable():
        refuse(name, value, "1 to 200 printable characters")
    return value


def _stream_options(name: str, value: Any) -> dict[str, bool]:
    options = mapping(name, value)
    known = ("include_usage", "continuous_usage_stats", "include_obfuscation")  # nothing obfuscates here
    if unknown := options.keys() - {*known}:
        raise ValueError(f"{name} has {listed(unknown)}; the known ones are {', '.join(known)}")
    return {key: flag(f"{name}.{key}", each) for key, each in options.items()}


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a request body that is no sampling parameter."""

    check: Check
    about: str
    """What it does, for documents."""
    kind: str | None = None
    """Its type in JSON Schema; None for several."""


COMMON: dict[str, Field] = {
    "model": Field(
        text, "Name of the model; another one than those of /v1/models gets status 404.", "string"
    ),
    "request_id": Field(_name, "What the id of the reply ends with.", "string"),
    "priority": Field(_PRIORITY, "Lower runs first, under --scheduling-policy priority.", "integer"),
    "stream": Field(flag, "Send chunks as tokens are drawn.", "boolean"),
    "stream_options": Field(
        _stream_options,
        "include_usage: the last chunk has the usage; continuous_usage_stats: every chunk.",
        "object",
    ),
    "return_tokens_as_token_ids": Field(flag, "Write tokens of log probabilities as token_id:ID.", "boolean"),
    "return_token_ids": Field(
        flag, "Add token_ids, token_texts and drafted to choices, and the prompt's.", "boolean"
    ),
}
"""What bodies of every kind may hold in addition to sampling parameters."""


def split(
    body: Mapping[str, Any], known: Mapping[str, Field], *, strict: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields that `known` has, checked, and those for `SamplingParams`.

    A field that holds null counts as absent. An unknown field is logged once, and ignored unless `strict`. Raises
    ValueError that names the field for a wrong value.
    """
    given = {name: value for name, value in mapping("the body", body).items() if value is not None}
    given = drop_unsupported(REFUSED, given, keep=known)
    sampling = {*sampling_names(), *SAMPLING} - known.keys()
    if unknown := given.keys() - known.keys() - sampling - IGNORED.keys():
        report_unknown(unknown, strict=strict)
    own = {
        name: field.check(name, as_integer(given[name]) if field.kind == "integer" else given[name])
        for name, field in known.items()
        if name in given
    }
    if own.get("stream_options") and not own.get("stream"):
        refuse("stream_options", given["stream_options"], "absent unless stream is true")
    values = {name: _plain_value(name, value) for name, value in given.items() if name in sampling}
    return own, {name: value for name, value in values.items() if value is not None}


def sampling_names() -> frozenset[str]:
    """Sampling parameters that a body may hold."""
    return frozenset(SamplingParams.names()) - _ENGINE_ONLY


def report_unknown(names: Iterable[str], *, strict: bool) -> None:
    """Log each unknown field once. Raises ValueError instead if `strict`."""
    if strict:
        raise ValueError(f"{listed(names)}: no such field is known here (--strict-fields)")
    for name in sorted(names):
        log_once(
            _log, f"field {shown(name)} of a request is unknown and was ignored; --strict-fields refuses it"
        )


def as_integer(value: Any) -> Any:
    """1.0 as an integer, because JSON has one kind of numbers; everything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _plain_value(name: str, value: Any) -> Any:
    """A sampling parameter as other servers read it: 1.0 is an integer, and an empty stop string is none."""
    if name in _INTEGERS:
        return as_integer(value)
    if name == "stop" and not isinstance(value, str) and isinstance(value, Sequence):
        return [each for each in value if each != ""]
    return None if name == "stop" and value == "" else value


def response_format(name: str, value: Any) -> dict[str, Any] | None:
    """What a `response_format` asks of the text, in the words of `structured_outputs`; None for plain text."""
    fields = mapping(name, value)
    match fields.get("type"):
        case "text":
            return None
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            inner = mapping(f"{name}.json_schema", fields.get("json_schema"))
            if "schema" not in inner:
                raise ValueError(f"{name}.json_schema has no schema")
            return {"json": mapping(f"{name}.json_schema.schema", inner["schema"])}
        case "structural_tag":
            return {"structural_tag": fields}
    refuse(f"{name}.type", fields.get("type"), "one of text, json_object, json_schema, structural_tag")
