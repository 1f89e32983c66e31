"""Structured outputs: grammars over token ids, and bit masks of the tokens that may come next."""
