"""Converts grammars to llguidance's notation, limits the time and memory of its parsers, and shortens its errors."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer


HEAD = '%llguidance {"no_forcing": true}\n'
"""Start of a grammar. Forcing is off: for bytes with no alternative, llguidance would accept only one tokenisation, and
refuse drafts that write the same bytes in other tokens."""
_COMPACT = {"whitespace_flexible": False}
_SPACE = {"whitespace_pattern": r"[ \t\n\r]{1,64}"}
"""Whitespace between the parts of JSON. Without a bound, a weak model may write nothing else."""
SPECIAL = b"\xff"
"""Prefix of tokens without text. No grammar allows it, because the byte is never part of UTF-8."""


class _Tokens:
    """A vocabulary with the interface of the tokenizers that llguidance converts to `LLTokenizer`."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], eos_token_id: int) -> None:
        self.tokens, self.eos_token_id = tokens, eos_token_id
        self.special_token_ids: list[int] = []

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("it tokenises bytes that a grammar forces, but forcing is off")


def library_tokenizer(tokens: list[bytes], eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Return llguidance's form of a vocabulary. Building it takes a second for 250,000 tokens."""
    from llguidance import LLTokenizer

    source = _Tokens(tokens, eos_token_ids[0])
    library = LLTokenizer(source, eos_token=[*eos_token_ids])  # type: ignore[arg-type]
    source.tokens = []  # the library has its own copy, and keeps `source`
    return library


def parser_limits() -> LLParserLimits:
    """Return limits under which no mask takes longer than about 50 ms on one core."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=500,  # a step of an ambiguous grammar takes the square of them
        max_lexer_states=20_000,  # 2 kB each
        max_grammar_size=100_000,
        verbose_errors=False,  # verbose ones repeat the grammar and the text
    )


def error_line(error: str) -> str:
    """Return an error of llguidance in one line."""
    if "NoExtension" in error:
        return "no text that the model's tokens can write follows it"
    lines = [line.strip() for line in error.removesuffix("<non-verbose/>").splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "")
    return textwrap.shorten(reason.removeprefix("error: "), 200, placeholder=" ...")


def json_grammar(schema: Mapping[str, Any], *, compact: bool) -> dict[str, Any]:
    """Return the grammar of a JSON schema for llguidance. compact: allow no white space between the parts of JSON."""
    own = schema.get("x-guidance")
    space = {**(_COMPACT if compact else _SPACE), **(own if isinstance(own, dict) else {})}
    return {"json_schema": {**schema, "x-guidance": space}}


def pattern(regex: str) -> str:
    """Return a pattern for llguidance without ^ and $ around it: llguidance has no anchors, and matches whole texts."""
    from llguidance import regex_to_lark

    return regex_to_lark(without_anchors(regex)[0])


def without_anchors(regex: str) -> tuple[str, bool, bool]:
    """Return a pattern without ^ and $ around it, and whether it had each of them."""
    body = regex.removeprefix("^")
    num_backslashes = len(body) - 1 - len(body[:-1].rstrip("\\"))
    ends = body.endswith("$") and num_backslashes % 2 == 0
    return body.removesuffix("$") if ends else body, body != regex, ends


def lark_rules(grammar: str) -> str:
    """Return Lark rules; EBNF is translated. Raises ValueError if that is not possible."""
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(grammar))
    except Exception as error:  # the parser documents no exceptions
        raise ValueError(f"it can't be read as EBNF: {error}") from error
