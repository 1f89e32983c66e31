"""Text and bytes of single tokens."""

import json
import re
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any

from bateleur.runner.text.tokenizer import Tokenizer, special_token_ids

_Step = Callable[[str | bytes], str | bytes]
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Name of a token that is one byte, such as <0x41>."""
_MAX_PARTIAL = 3
"""Maximum bytes of an incomplete character."""


class TokenText:
    """Decodes token ids, and returns text and bytes of single tokens. A token may be a part of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._special = special_token_ids(tokenizer)
        self.text_of: Callable[[int], str] = cache(lambda token: self([token]))
        """Returns the text of one token, special or not."""
        self.bytes_of: Callable[[int], bytes] = cache(self._find_bytes)
        """Returns the bytes of one token."""

    @cached_property
    def _bytes_of_piece(self) -> Callable[[str], bytes] | None:
        """Function from a vocabulary token to its bytes (`piece_decoder`); None if tokens can't be decoded one by one.

        Takes a second for 250,000 tokens.
        """
        try:
            return None if self._backend is None else piece_decoder(self._backend)
        except ValueError:
            return None

    def __call__(self, token_ids: list[int]) -> str:
        """Return the text of some tokens, special ones included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _find_bytes(self, token: int) -> bytes:
        """Return the bytes of one token. If they can't be read from the vocabulary, encode its text."""
        decode = None if token in self._special else self._bytes_of_piece
        piece = None if decode is None else self._backend.id_to_token(token)
        return self.text_of(token).encode("utf-8", "replace") if decode is None or piece is None else decode(piece)

    def name_of(self, token: int) -> str:
        """Return the text of one token, or its bytes in OpenAI's notation if it is a part of a character."""
        text, known = self.text_of(token), self.bytes_of(token)
        if "\ufffd" not in text or known == text.encode():
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in known)

    def added_text(self, previous: Sequence[int], token: int) -> str:
        """Return the text that a token adds. A character of several tokens is added by the last of them.

        previous: at least the last 3 tokens before this one, or all if there are fewer.
        """
        data = partial_character(b"".join(map(self.bytes_of, previous[-_MAX_PARTIAL:]))) + self.bytes_of(token)
        return data[: len(data) - len(partial_character(data))].decode("utf-8", "replace")


def partial_character(data: bytes) -> bytes:
    """Return the incomplete character at the end of UTF-8 bytes; empty if there is none."""
    for size in range(1, min(_MAX_PARTIAL, len(data)) + 1):
        first = data[-size]
        if first >= 0xC0:
            length = 2 if first < 0xE0 else 3 if first < 0xF0 else 4
            return data[-size:] if size < length else b""
        if first < 0x80:
            return b""
    return b""


def piece_decoder(backend: Any) -> Callable[[str], bytes]:
    """Return a function from a token of the vocabulary to its bytes. Raises ValueError for unsupported decoders."""
    steps = _steps(json.loads(backend.to_str())["decoder"])

    def decode(piece: str) -> bytes:
        data: str | bytes = piece
        for step in steps:
            data = step(data)
        return data.encode() if isinstance(data, str) else data

    return decode


def _steps(decoder: Any) -> list[_Step]:
    """Return the functions that a decoder of `tokenizer.json` applies to each token before it joins the tokens.

    Raises ValueError for an unsupported decoder.
    """
    if decoder is None:
        raise ValueError("one without a decoder, which puts spaces between tokens, and must be one that joins them")
    kind = decoder["type"]
    if kind == "Sequence":
        kinds = [each["type"] for each in decoder["decoders"]]
        # Decoders after Fuse, which joins tokens, change a whole text: they strip its first space.
        end = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
        return [step for each in decoder["decoders"][:end] for step in _steps(each)]
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


def _replacing(old: str, new: str) -> _Step:
    return lambda data: data.replace(old, new) if isinstance(data, str) else data


def _byte_fallback(data: str | bytes) -> str | bytes:
    if isinstance(data, str) and (match := BYTE_PIECE.fullmatch(data)):
        return bytes([int(match[1], 16)])
    return data


_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
"""Bytes of the characters in byte-level vocabularies (GPT-2): printable Latin-1, others from U+0100."""


def _byte_level(data: str | bytes) -> str | bytes:
    """Convert a token of a byte-level vocabulary (GPT-2) to bytes, one for each character, by `BYTES`.

    Bytes are returned as they are, and so is an added token in plain text, which has a character outside of `BYTES`.
    """
    if isinstance(data, bytes) or any(each not in BYTES for each in data):
        return data
    return bytes(BYTES[each] for each in data)
