"""Required form of a request's output: JSON, regex, choice, grammar or structural tag, with vLLM's names."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from bateleur.runner.utils.arguments import Check, Several, flag, listed, mapping, maybe, refuse, shown, text
from bateleur.runner.utils.options import Checked, option
from bateleur.runner.utils.vllm_names import STRUCTURED, drop_unsupported

MAX_BYTES = 1 << 17
"""Maximum UTF-8 size of a schema, a pattern, a grammar, or all choices together."""
MAX_CHOICES = 10_000
FORMS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
"""Exactly one of these is given."""


def _bounded(name: str, value: Any) -> str:
    if len(text(name, value).encode()) > MAX_BYTES:
        refuse(name, value, f"text of at most {MAX_BYTES} bytes")
    return str(value)


def _json_object(kind: str) -> Check:
    """Return a check that accepts a JSON object, as mapping or text, and returns its text. kind: name in errors."""
    rule = f"{kind}: an object, or JSON text of one"

    def check(name: str, value: Any) -> str:
        try:
            known = (
                json_text.loads(_bounded(name, value), parse_constant=_no_number) if isinstance(value, str) else value
            )
            if not isinstance(known, Mapping):
                refuse(name, value, rule)
            written = json_text.dumps(dict(known), allow_nan=False, ensure_ascii=False)
        except (TypeError, json_text.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{name} is {shown(value)}; it must be {rule}") from error
        except ValueError as error:
            if str(error).startswith(name):
                raise
            raise ValueError(f"{name} is {shown(value)}; it must be {rule}: {error}") from error
        return _bounded(name, written)

    return check


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


def _choice(name: str, value: Any) -> tuple[str, ...]:
    choices = Several(text, "a list of strings that are not empty")(name, value)
    if not 0 < len(choices) <= MAX_CHOICES:
        raise ValueError(f"{name} has {len(choices)} entries; it must have 1 to {MAX_CHOICES}")
    if (size := sum(len(each.encode()) for each in choices)) > MAX_BYTES:
        raise ValueError(f"{name} has {size} bytes; it must have at most {MAX_BYTES}")
    return choices


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams(Checked):
    """Required form of a request's output. Immutable. Raises ValueError unless exactly one form is given.
    The forms are all fields except `disable_any_whitespace`.
    """

    json: str | Mapping[str, Any] | None = option(None, maybe(_json_object("a JSON schema")))
    """A JSON schema, as text or as an object; stored as text."""
    json_object: bool = option(False, lambda name, value: flag(name, bool(value) if value is None else value))
    """Any JSON object."""
    regex: str | None = option(None, maybe(_bounded))
    """A regular expression that the whole text matches, without look-around and back references."""
    choice: Sequence[str] | None = option(None, maybe(_choice))
    """One of these texts."""
    grammar: str | None = option(None, maybe(_bounded))
    """A context-free grammar in Lark's notation (first rule `start`), or EBNF with `root ::=`."""
    structural_tag: str | Mapping[str, Any] | None = option(None, maybe(_json_object("a structural tag")))
    """Parts that follow grammars with free text between them, in xgrammar's notation, as text or as an object; stored
    as text."""
    disable_any_whitespace: bool = option(False, flag)
    """Generate JSON without whitespace between its parts."""

    def __post_init__(self) -> None:
        for each in fields(self):
            check: Check = each.metadata["check"]
            object.__setattr__(self, each.name, check(f"structured_outputs.{each.name}", getattr(self, each.name)))
        if len(given := [name for name in FORMS if getattr(self, name)]) != 1:
            refuse("structured_outputs", given, f"exactly one of {', '.join(FORMS)}")

    @property
    def form(self) -> str:
        """Name of the form that is given, one of `FORMS`."""
        return next(name for name in FORMS if getattr(self, name))


def structured_outputs(name: str, value: Any) -> StructuredOutputsParams:
    """Return `value` if it is `StructuredOutputsParams`, else create them from a mapping of their fields.

    name: name of the argument, for errors. Raises ValueError for another type, an unknown field or an invalid value.
    """
    if isinstance(value, StructuredOutputsParams):
        return value
    given = drop_unsupported(STRUCTURED, mapping(name, value, "StructuredOutputsParams, or a mapping of its fields"))
    known = [each.name for each in fields(StructuredOutputsParams)]
    if unknown := given.keys() - set(known):
        raise ValueError(f"{name} has unknown {listed(unknown)}; the known names are {', '.join(known)}")
    return StructuredOutputsParams(**given)
