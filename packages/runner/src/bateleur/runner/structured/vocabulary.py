"""The bytes that every token of a tokenizer adds to a text."""

from __future__ import annotations

import json

from bateleur.runner.text.token_bytes import decoder_steps, is_byte_piece, piece_bytes
from bateleur.runner.text.tokenizer import NoTokenizer, Tokenizer

SPECIAL = b"\xff"
"""Before the name of a token that is no text: no grammar of text allows it, for the byte is never part of UTF-8."""


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """What each of `vocab_size` tokens of a model adds to a text; b"" where the tokenizer has none of that id, or where
    another one says the same: a byte token beside the character it is.

    Raises ValueError for a tokenizer whose tokens can't be read one by one.
    """
    if isinstance(tokenizer, NoTokenizer):
        raise ValueError(
            "structured_outputs is given; with skip_tokenizer_init there is no text that it could be of"
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    about = "structured_outputs is given; the tokenizer of this checkpoint is"
    if backend is None:
        raise ValueError(f"{about} a {type(tokenizer).__name__}, and must be one of the tokenizers library")
    described = json.loads(backend.to_str())
    try:
        steps = decoder_steps(described["decoder"])
    except ValueError as error:
        raise ValueError(f"{about} {error}") from error
    special = {each["id"] for each in described["added_tokens"] if each["special"]}
    found, plain, pieces = [b""] * vocab_size, set(), []
    for piece, token in backend.get_vocab(with_added_tokens=True).items():
        if token < vocab_size:
            pieces.append((token in special or is_byte_piece(piece), token, piece))
    for _, token, piece in sorted(pieces):  # what says it in bytes comes last
        if token in special:
            found[token] = SPECIAL + piece.encode()
            continue
        said = piece_bytes(piece, steps)
        if said not in plain:
            found[token] = said
            plain.add(said)
    return found
