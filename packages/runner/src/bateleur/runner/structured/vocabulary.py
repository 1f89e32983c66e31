"""The bytes that every token of a tokenizer adds to a text."""

from __future__ import annotations

import json

from bateleur.runner.text.token_bytes import decoder_steps, is_byte_piece, piece_bytes
from bateleur.runner.text.tokenizer import NoTokenizer, Tokenizer

SPECIAL = b"\xff"
"""Prefix of tokens without text. No grammar allows it, because the byte is never part of UTF-8."""


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """Return the bytes that each of `vocab_size` tokens adds to a text.

    b"" for ids that the tokenizer lacks, and for a byte token if another token has the same bytes.
    Raises ValueError for a tokenizer whose tokens can't be read one by one.
    """
    if isinstance(tokenizer, NoTokenizer):
        raise ValueError("structured_outputs is given; it needs a tokenizer: leave skip_tokenizer_init False")
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
    for _, token, piece in sorted(pieces):  # byte tokens come last
        if token in special:
            found[token] = SPECIAL + piece.encode()
            continue
        data = piece_bytes(piece, steps)
        if data not in plain:
            found[token] = data
            plain.add(data)
    return found
