"""Translates structured outputs into one grammar in the notation of llguidance.

llguidance's forcing is off. With it, bytes without an alternative would be accepted in one tokenisation only, and
drafts with the same bytes in other tokens would be rejected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from bateleur.runner.structured.structural_tag import TagTokens, compile_structural_tag, escaped
from bateleur.runner.structured_outputs import StructuredOutputsParams

_HEAD = '%llguidance {"no_forcing": true}\n'
_SCHEMA = _HEAD + "start: @schema\n"
_COMPACT = {"whitespace_flexible": False}
_SPACE = {"whitespace_pattern": r"[ \t\n\r]{1,64}"}
"""Whitespace between the parts of JSON. Without a bound, a weak model may write nothing else."""


def grammar_source(params: StructuredOutputsParams, tokens: TagTokens) -> str:
    """Return the source text of a grammar. Equal sources mean equal grammars."""
    if params.structural_tag is not None:
        grammars = compile_structural_tag(
            json.loads(str(params.structural_tag)),
            tokens,
            head=_HEAD,
            json_grammar=partial(_json_grammar, compact=params.disable_any_whitespace),
            pattern=_pattern,
            lark=_rules,
        )
        return json.dumps({"grammars": grammars}, ensure_ascii=False)
    if params.json is not None or params.json_object:
        schema = '{"type": "object"}' if params.json is None else str(params.json)
        grammar = _json_grammar(json.loads(schema), compact=params.disable_any_whitespace)
        grammars = [{"lark_grammar": _SCHEMA}, {"name": "schema", **grammar}]
        return json.dumps({"grammars": grammars}, ensure_ascii=False)
    if params.regex is not None:
        return _lark(_HEAD + f"start: /{_pattern(params.regex)}/\n")
    if params.choice is not None:
        return _lark(_HEAD + f"start: /{'|'.join(map(escaped, params.choice))}/\n")
    assert params.grammar is not None
    return _lark(_HEAD + _rules(params.grammar))


def _lark(rules: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": rules}]}, ensure_ascii=False)


def _json_grammar(schema: Mapping[str, Any], *, compact: bool) -> dict[str, Any]:
    """Return the grammar of a JSON schema. compact: no whitespace between its parts."""
    own = schema.get("x-guidance")
    space = {**(_COMPACT if compact else _SPACE), **(own if isinstance(own, dict) else {})}
    return {"json_schema": {**schema, "x-guidance": space}}


def _pattern(regex: str) -> str:
    """Return a pattern without anchors. llguidance has none, because the whole text must match."""
    from llguidance import regex_to_lark

    body = regex.removeprefix("^")
    if body.endswith("$"):
        escapes = len(body) - 1 - len(body[:-1].rstrip("\\"))
        body = body[:-1] if escapes % 2 == 0 else body
    return regex_to_lark(body)


def _rules(grammar: str) -> str:
    """Return the rules of a grammar in Lark's notation; EBNF is translated."""
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(grammar))
    except Exception as error:  # the parser documents no exceptions
        raise ValueError(f"it can't be read as EBNF: {error}") from error
