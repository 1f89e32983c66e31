"""Fields of request bodies: known, ignored and rejected ones, and the checks of their values."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.utils.arguments import Check, Integer, flag, listed, mapping, refuse, shown, text
from bateleur.runner.utils.log_once import log_once
from bateleur.runner.utils.options import options_of
from bateleur.runner.utils.vllm_names import SAMPLING, drop_unsupported, table

_log = logging.getLogger(__name__)

IGNORED = {
    "user": "it names the caller",
    "metadata": "it is for the caller's records",
    "client_metadata": "it is for the caller's records",
    "store": "chat completions are not stored",
    "service_tier": "there is only one",
    "safety_identifier": "it names the caller",
    "prompt_cache_key": "prompts are matched with the prefix cache by their tokens",
    "prompt_cache_retention": "the prefix cache decides what it evicts",
    "prompt_cache_options": "prompts are matched with the prefix cache by their tokens",
    "context_management": "conversations are not shortened",
    "background_options": "background responses have no options",
    "access_programs": "all clients have the same access",
    "image": "answers are text",
    "moderation": "this server does not moderate",
    "prediction": "it could only make answers faster",
    "verbosity": "most models are not trained for it",
    "web_search_options": "this server does not search",
}
"""Fields without effect, and the reason."""
REFUSED = table(
    ("modalities", (["text"],), "answers are text"),
    ("audio", (None,), "answers are text"),
    ("functions function_call", ([], "none"), "deprecated: use tools and tool_choice"),
    ("use_beam_search", (False,), "beam search is not supported"),
    ("length_penalty", (1, 1.0), "beam search is not supported"),
    ("early_stopping", (False,), "beam search is not supported"),
    ("chat_template", (), "clients may not send templates, which are programs: see --chat-template"),
    ("cache_salt", (), "the prefix cache is shared by all requests: see --no-enable-prefix-caching"),
    ("vllm_xargs kv_transfer_params", ({},), "there are no plug-ins that read it"),
    ("mm_processor_kwargs", ({},), "prompts are text or token ids"),
    ("guided_json guided_regex guided_choice guided_grammar", (), "use structured_outputs"),
)
"""Unsupported fields: name, values that are accepted because they change nothing, and the reason."""
_ENGINE_ONLY = frozenset(("output_kind", "detokenize", "return_tags"))
"""Sampling parameters that the server sets itself."""

_INTEGERS = frozenset(each.name for each in options_of(SamplingParams) if each.type.startswith("int"))


def _name(name: str, value: Any) -> str:
    """Check the `request_id` of a body, and return it. name: name of the field, for the error.

    Raises ValueError unless it has 1 to 200 printable characters. The length is limited because every chunk has the id.
    """
    if not isinstance(value, str) or not 0 < len(value) <= 200 or not value.isprintable():
        refuse(name, value, "1 to 200 printable characters")
    return value


def _stream_options(name: str, value: Any) -> dict[str, bool]:
    options = mapping(name, value)
    known = ("include_usage", "continuous_usage_stats", "include_obfuscation")  # the last one has no effect
    if unknown := options.keys() - {*known}:
        raise ValueError(f"{name} has {listed(unknown)}; the known ones are {', '.join(known)}")
    return {key: flag(f"{name}.{key}", each) for key, each in options.items()}


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a request body that is not a sampling parameter: its check, description and JSON Schema type."""

    check: Check
    about: str
    kind: str | None = None
    """JSON Schema type; None if several types are accepted."""


COMMON: dict[str, Field] = {
    "model": Field(text, "Name of the model, see /v1/models; unknown names get HTTP 404.", "string"),
    "request_id": Field(_name, "Suffix of the reply's id.", "string"),
    "priority": Field(
        Integer(-(1 << 31), (1 << 31) - 1), "Lower values run first with --scheduling-policy priority.", "integer"
    ),
    "stream": Field(flag, "Send chunks as tokens are sampled.", "boolean"),
    "stream_options": Field(
        _stream_options, "include_usage: usage in the last chunk; continuous_usage_stats: in every chunk.", "object"
    ),
    "return_tokens_as_token_ids": Field(flag, "Write tokens as token_id:ID in log probabilities.", "boolean"),
    "return_token_ids": Field(
        flag, "Add token_ids, token_texts and drafted to choices, and the tokens of the prompt.", "boolean"
    ),
}
"""Fields of all bodies, in addition to sampling parameters."""


def split(
    body: Mapping[str, Any], fields: Mapping[str, Field], *, strict: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a body into the fields of `fields`, which are checked here, and sampling parameters, which are not.

    A null counts as absent. Unknown fields are ignored and logged. Raises ValueError for an invalid value of a field in
    `fields`, for a value that needs an unsupported feature (`REFUSED`), and for unknown fields if `strict`.
    """
    given = {name: value for name, value in mapping("the body", body).items() if value is not None}
    given = drop_unsupported(REFUSED, given, keep=fields)
    sampling = {*sampling_names(), *SAMPLING} - fields.keys()
    unknown = sorted(given.keys() - fields.keys() - sampling - IGNORED.keys())
    if unknown and strict:
        raise ValueError(f"{listed(unknown)}: no such field is known here (--strict-fields)")
    for name in unknown:
        log_once(_log, f"field {shown(name)} of a request is unknown and was ignored; --strict-fields refuses it")
    own = {
        name: field.check(name, as_integer(given[name]) if field.kind == "integer" else given[name])
        for name, field in fields.items()
        if name in given
    }
    if own.get("stream_options") and not own.get("stream"):
        refuse("stream_options", given["stream_options"], "absent unless stream is true")
    values = {name: _plain_value(name, value) for name, value in given.items() if name in sampling}
    return own, {name: value for name, value in values.items() if value is not None}


def sampling_names() -> frozenset[str]:
    """Return the names of sampling parameters that a body may have."""
    return frozenset(SamplingParams.names()) - _ENGINE_ONLY


def as_integer(value: Any) -> Any:
    """Convert 1.0 to 1, because JSON has one number type. Other values are returned as they are."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _plain_value(name: str, value: Any) -> Any:
    """Normalize a sampling parameter as other servers do: an integer may be 1.0, and empty stop strings are dropped."""
    if name in _INTEGERS:
        return as_integer(value)
    if name == "stop" and not isinstance(value, str) and isinstance(value, Sequence):
        return [each for each in value if each != ""]
    return None if name == "stop" and value == "" else value


def response_format(name: str, value: Any) -> dict[str, Any] | None:
    """Convert the value of `response_format` to a value of `structured_outputs`; None for plain text.

    name: name of the field, for errors. Raises ValueError for an unknown type or a missing schema.
    """
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
