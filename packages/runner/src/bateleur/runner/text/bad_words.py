"""Words that may not be written, as token ids."""

from __future__ import annotations

from collections.abc import Sequence

from bateleur.runner.text.tokenizer import NoTokenizer, Tokenizer


def bad_words_token_ids(
    words: Sequence[str], tokenizer: Tokenizer, vocab_size: int, most: int
) -> tuple[tuple[int, ...], ...]:
    """The token ids of each word as a tokenizer writes it at the beginning of a text, and behind a space.

    White space before a word doesn't count; a word of nothing else is taken as it is. Of more than `most` tokens, those
    that the request can generate, none can come.

    Raises ValueError, naming the word, if it has no tokens, or one that the model doesn't have.
    """
    if words and isinstance(tokenizer, NoTokenizer):
        raise ValueError(f"bad_words is {tuple(words)}; without a tokenizer no word has tokens")
    found: dict[tuple[int, ...], None] = {}  # a set that keeps its order
    for index, word in enumerate(words):
        bare = word.lstrip()
        for form in (bare, f" {bare}") if bare else (word,):
            ids = tuple(tokenizer.encode(form, add_special_tokens=False))
            if not ids:
                raise ValueError(f"bad_words[{index}] is {word!r}; the tokenizer makes no tokens of it")
            if unknown := [each for each in ids if not 0 <= each < vocab_size]:
                raise ValueError(
                    f"bad_words[{index}] is {word!r}, whose token is {unknown[0]}; the model has {vocab_size} tokens"
                )
            if len(ids) <= most:
                found[ids] = None
    return tuple(found)
