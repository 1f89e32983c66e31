"""The interface of tokenizers, and token ids of tags and bad words."""

import re
from collections.abc import Sequence
from typing import Any, Protocol

_TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
"""Form of a tag that may be an ordinary added token, such as <think>."""


class Tokenizer(Protocol):
    """Interface of tokenizers for the engine. Hugging Face's tokenizers have it."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of the ids, with U+FFFD for invalid or incomplete UTF-8."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with or without the special tokens around a prompt."""


class NoTokenizer:
    """Tokenizer for a model that runs on token ids only. It refuses text, and decodes to empty text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raise ValueError, because text can't be tokenised."""
        raise ValueError(f"prompt is the text {text[:40]!r}; with skip_tokenizer_init it must be token ids")

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return "" for any ids."""
        return ""


def tag_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return tags by token id: special tokens, and added tokens such as <a> or [A].

    Empty for a tokenizer without the tokenizers library.
    """
    added = _added_tokens(tokenizer)
    return {token: each.content for token, each in added if each.special or _TAG.fullmatch(each.content)}


def special_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of special tokens. Empty for a tokenizer without the tokenizers library."""
    return frozenset(token for token, each in _added_tokens(tokenizer) if each.special)


def _added_tokens(tokenizer: Tokenizer) -> list[tuple[int, Any]]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return [] if backend is None else sorted(backend.get_added_tokens_decoder().items())


def bad_words_token_ids(
    words: Sequence[str], tokenizer: Tokenizer, vocab_size: int, max_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of bad words, all in one tuple: each word at the start of a text, and again after a space.

    Equal ids are listed once. Forms of more than `max_tokens` tokens are left out, because the output has no room for
    them. Raises ValueError, naming the word, for a word without tokens, or with a token that the model does not have.
    """
    if words and isinstance(tokenizer, NoTokenizer):
        raise ValueError(f"bad_words is {tuple(words)}; it must be empty without a tokenizer")
    found: dict[tuple[int, ...], None] = {}  # a set that keeps its order
    for index, word in enumerate(words):
        bare = word.lstrip()
        for form in (bare, f" {bare}") if bare else (word,):
            ids = tuple(tokenizer.encode(form, add_special_tokens=False))
            if not ids:
                raise ValueError(f"bad_words[{index}] is {word!r}; the tokenizer has no tokens for it")
            if unknown := [each for each in ids if not 0 <= each < vocab_size]:
                raise ValueError(
                    f"bad_words[{index}] is {word!r}, whose token is {unknown[0]}; the model has {vocab_size} tokens"
                )
            if len(ids) <= max_tokens:
                found[ids] = None
    return tuple(found)
