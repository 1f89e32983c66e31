"""The bytes that single tokens add to a text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from bateleur.runner.text.tokenizer import Tokenizer

_Step = Callable[[str | bytes], str | bytes]
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MOST_PARTIAL = 3
"""Bytes of an incomplete character."""


class TokenText:
    """Decodes token ids, and says what single tokens are: many are only a part of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Nothing is read of the tokenizer before it is needed: that takes a second for 250,000 tokens."""
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}

    @cached_property
    def _described(self) -> tuple[list[_Step] | None, frozenset[int]]:
        """Steps of the decoder, None if tokens cannot be read one by one; and ids of the special tokens."""
        backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None, frozenset()
        described = json.loads(backend.to_str())
        special = frozenset(each["id"] for each in described["added_tokens"] if each["special"])
        try:
            return decoder_steps(described["decoder"]), special
        except ValueError:
            return None, special

    def __call__(self, token_ids: list[int]) -> str:
        """The text of some tokens, special ones included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def text_of(self, token: int) -> str:
        """The text of one token, special or not."""
        if token not in self._texts:
            self._texts[token] = self([token])
        return self._texts[token]

    def bytes_of(self, token: int) -> bytes:
        """The bytes of one token; those of its text if the tokenizer does not tell them."""
        if token not in self._bytes:
            steps, special = self._described
            backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
            piece = None if steps is None or token in special else backend.id_to_token(token)
            text = self.text_of(token).encode("utf-8", "replace")
            self._bytes[token] = text if piece is None else piece_bytes(piece, steps or ())
        return self._bytes[token]

    def name_of(self, token: int) -> str:
        """The text of one token, or its bytes as OpenAI writes them if it is a part of a character."""
        text, known = self.text_of(token), self.bytes_of(token)
        if "\ufffd" not in text or known == text.encode():
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in known)

    def added_text(self, previous: Sequence[int], token: int) -> str:
        """What a token adds to the text of the tokens before it, so that these texts join to the text of all.

        The last token of a character adds it. `previous`: the last tokens before it, 3 at least if there are so many.
        """
        begun = partial_character(b"".join(map(self.bytes_of, previous[-_MOST_PARTIAL:])))
        return _whole(begun + self.bytes_of(token))


def _whole(data: bytes) -> str:
    """The whole characters of UTF-8."""
    return data[: len(data) - len(partial_character(data))].decode("utf-8", "replace")


def partial_character(data: bytes) -> bytes:
    """The incomplete character at the end of UTF-8; empty if there is none."""
    for size in range(1, min(_MOST_PARTIAL, len(data)) + 1):
        first = data[-size]
        if first >= 0xC0:
            length = 2 if first < 0xE0 else 3 if first < 0xF0 else 4
            return data[-size:] if size < length else b""
        if first < 0x80:
            return b""
    return b""


def piece_bytes(piece: str, steps: Sequence[_Step]) -> bytes:
    """The bytes of a token, by the steps of its tokenizer's decoder."""
    said: str | bytes = piece
    for step in steps:
        said = step(said)
    return said.encode() if isinstance(said, str) else said


def is_byte_piece(piece: str) -> bool:
    """Whether a token stands for one byte by its name, such as <0x41>."""
    return _BYTE.fullmatch(piece) is not None


def decoder_steps(decoder: Any) -> list[_Step]:
    """What a decoder does to each token before they are joined.

    Raises ValueError for a decoder that is not known: what it is, and what it must be.
    """
    if decoder is None:
        raise ValueError(
            "one without a decoder, which puts spaces between tokens, and must be one that joins them"
        )
    kind = decoder["type"]
    if kind == "Sequence":
        return [step for each in _before_joining(decoder["decoders"]) for step in decoder_steps(each)]
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
    known = "ByteLevel, ByteFallback, Metaspace, Replace or Fuse"
    raise ValueError(f"decoded by {kind}, and must be decoded by {known}")


def _before_joining(decoders: list[Any]) -> list[Any]:
    """What stands behind Fuse is done to a whole text: it takes a space from its begin."""
    kinds = [each["type"] for each in decoders]
    return decoders[: kinds.index("Fuse")] if "Fuse" in kinds else decoders


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
