"""Limits on time and memory that llguidance may use for a grammar, and its errors as one line."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits


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
    """Return an error of llguidance as one line."""
    if "NoExtension" in error:
        return "no text that the model's tokens can write follows it"
    lines = [line.strip() for line in error.removesuffix("<non-verbose/>").splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "")
    return textwrap.shorten(reason.removeprefix("error: "), 200, placeholder=" ...")
