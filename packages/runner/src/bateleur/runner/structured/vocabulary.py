"""The bytes that every token of a tokenizer adds to a text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

from bateleur.runner.text.tokenizer import NoTokenizer, Tokenizer

SPECIAL = b"\xff"
"""Before the name of a token that is no text: no grammar of text allows it, for the byte is never part of UTF-8."""

_Step = Callable[[str | bytes], str | bytes]
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


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
    if backend is None:
        _refuse(f"a {type(tokenizer).__name__}", "one of the tokenizers library")
    described = json.loads(backend.to_str())
    steps = _steps(described["decoder"])
    special = {each["id"] for each in described["added_tokens"] if each["special"]}
    found, plain, pieces = [b""] * vocab_size, set(), []
    for piece, token in backend.get_vocab(with_added_tokens=True).items():
        if token < vocab_size:
            pieces.append((token in special or bool(_BYTE.fullmatch(piece)), token, piece))
    for _, token, piece in sorted(pieces):  # what says it in bytes comes last
        if token in special:
            found[token] = SPECIAL + piece.encode()
            continue
        said: str | bytes = piece
        for step in steps:
            said = step(said)
        said = said.encode() if isinstance(said, str) else said
        if said not in plain:
            found[token] = said
            plain.add(said)
    return found


def _steps(decoder: Any) -> list[_Step]:
    """What the decoder does to each token before they are joined."""
    if decoder is None:
        _refuse("one without a decoder, which puts spaces between tokens", "one that joins them")
    kind = decoder["type"]
    if kind == "Sequence":
        return [step for each in _before_joining(decoder["decoders"]) for step in _steps(each)]
    if kind == "Fuse":
        return []
    if kind == "ByteLevel":
        return [_byte_level]
    if kind == "ByteFallback":
        return [_byte_fallback]
    if kind == "Metaspace":
        return [_replacing(decoder["replacement"], " ")]
    if kind == "Replace" and "String" in decoder["pattern"]:
        return [_replacing(decoder["pattern"]["String"], decoder["content"])]
    _refuse(f"decoded by {kind}", "decoded by ByteLevel, ByteFallback, Metaspace, Replace or Fuse")


def _before_joining(decoders: list[Any]) -> list[Any]:
    """What stands behind Fuse is done to a whole text: it takes a space from its begin."""
    kinds = [each["type"] for each in decoders]
    return decoders[: kinds.index("Fuse")] if "Fuse" in kinds else decoders


def _refuse(found: str, rule: str) -> NoReturn:
    raise ValueError(
        f"structured_outputs is given; the tokenizer of this checkpoint is {found}, and must be {rule}"
    )


def _replacing(old: str, new: str) -> _Step:
    return lambda said: said.replace(old, new) if isinstance(said, str) else said


def _byte_fallback(said: str | bytes) -> str | bytes:
    if isinstance(said, str) and (match := _BYTE.fullmatch(said)):
        return bytes([int(match[1], 16)])
    return said


def _byte_table() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies: printable ones of Latin-1 for themselves, the
    others from U+0100 on (GPT-2).
    """
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_table()


def _byte_level(said: str | bytes) -> str | bytes:
    """A token with any other character is one that was added, and stands for itself."""
    if isinstance(said, bytes) or any(each not in _BYTES for each in said):
        return said
    return bytes(_BYTES[each] for each in said)
