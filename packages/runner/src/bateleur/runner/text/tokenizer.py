"""The little that the engine needs of a tokenizer."""

from __future__ import annotations

from typing import Protocol


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
