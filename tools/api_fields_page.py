"""The fields of requests as a page of documentation: ``python tools/api_fields_page.py > docs/api_fields.md``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pydantic import BaseModel

from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.serve.messages import MessagesBody
from bateleur.runner.serve.openai.fields import IGNORED, REFUSED, Field, sampling_names
from bateleur.runner.serve.openai.requests import CHAT_FIELDS, COMPLETION_FIELDS
from bateleur.runner.serve.responses.body import ResponsesBody
from bateleur.runner.utils.options import options_of
from bateleur.runner.utils.vllm_names import SAMPLING

_HEAD = """\
# Fields of requests

Written by `python tools/api_fields_page.py > docs/api_fields.md` from the tables that the server reads; do not edit.

Every field is in one of three groups. A supported field does what it says, and a value outside its rule gets status 400
with the field's name. An accepted field changes nothing, because it asks for what happens anyway. A refused field gets
status 400 with the reason, unless it has one of the values listed here. An unknown field is ignored, and logged once a
name; with `--strict-fields` it gets status 400. A field that holds null counts as absent.
"""


def api_fields_page() -> str:
    """The page, in Markdown."""
    own = {**CHAT_FIELDS, **COMPLETION_FIELDS}.keys()
    return "".join(
        (
            _HEAD,
            _section("/v1/chat/completions", _of_fields(CHAT_FIELDS)),
            _section("/v1/completions", _of_fields(COMPLETION_FIELDS)),
            _section("Sampling parameters of all requests", _sampling()),
            _section("/v1/responses, and the fields of chat completions", _of_model(ResponsesBody)),
            _section("/v1/messages, and the fields of chat completions", _of_model(MessagesBody)),
            _section("Accepted, without an effect", IGNORED.items(), "why"),
            _section(
                "Refused",
                ((name, _refusal(*rule)) for name, rule in {**REFUSED, **SAMPLING}.items() if name not in own),
                "accepted values, and why no others",
            ),
        )
    )


def _section(title: str, lines: Iterable[tuple[str, str]], what: str = "meaning") -> str:
    rows = "".join(f"| `{name}` | {' '.join(about.split())} |\n" for name, about in lines)
    return f"\n## {title}\n\n| field | {what} |\n|---|---|\n{rows}"


def _of_fields(fields: Mapping[str, Field]) -> Iterator[tuple[str, str]]:
    yield from ((name, field.about) for name, field in fields.items())


def _of_model(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    yield from ((name, field.description or "") for name, field in model.model_fields.items())


def _sampling() -> Iterator[tuple[str, str]]:
    names = sampling_names()
    yield from ((option.name, option.help) for option in options_of(SamplingParams) if option.name in names)


def _refusal(values: tuple[object, ...], why: str) -> str:
    return f"{' or '.join(f'`{value!r}`' for value in values) or 'none'}: {why}"


if __name__ == "__main__":
    print(api_fields_page(), end="")
