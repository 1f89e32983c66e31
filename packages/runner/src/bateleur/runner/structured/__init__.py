"""Structured outputs: grammars over token ids, and masks of the tokens that may come next."""
