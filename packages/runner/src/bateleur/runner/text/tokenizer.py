"""What the engine needs of a tokenizer."""

from __future__ import annotations

import re
from typing import Protocol

_TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
"""Form of a tag that a tokenizer may have as an ordinary added token, such as <think>."""


class Tokenizer(Protocol):
    """What is needed of a tokenizer; Hugging Face's satisfy it."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of the ids, invalid or incomplete UTF-8 as U+FFFD."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, with the special tokens that the tokenizer puts around a prompt, or without."""
        ...


class NoTokenizer:
    """For a model that is used with token ids alone: it refuses text, and every text that it gives is empty."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Always a ValueError."""
        raise ValueError(
            f"prompt is the text {text[:40]!r}; with skip_tokenizer_init only token ids are taken"
        )

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """The empty text."""
        return ""


def tag_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Ids and texts of the tokens that are markup and not text: special tokens, and added tokens in the form of a tag.

    Empty for a tokenizer without the tokenizers library.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {}
    added = backend.get_added_tokens_decoder()
    return {
        token: each.content
        for token, each in sorted(added.items())
        if each.special or _TAG.fullmatch(each.content)
    }


def special_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of the special tokens. Empty for a tokenizer without the tokenizers library."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return frozenset()
    return frozenset(token for token, each in backend.get_added_tokens_decoder().items() if each.special)
