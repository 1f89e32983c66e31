"""Bytes of single tokens, and the text that each adds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from bateleur.runner.text.token_bytes import TokenText, partial_character
from bateleur.runner.text.tokenizer import NoTokenizer

ITSELF = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in ITSELF]
LETTERS = {byte: chr(byte) for byte in ITSELF} | {byte: chr(256 + i) for i, byte in enumerate(OTHERS)}


def byte_level() -> Any:
    pieces = [LETTERS[byte] for byte in range(256)]
    pieces += ["".join(LETTERS[byte] for byte in word.encode()) for word in (" caf\u00e9", "\u65e5\u672c")]
    pieces += [LETTERS[0x80] + LETTERS[0x41], LETTERS[0xF0] + LETTERS[0x9F]]
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=made)


TOKENIZER = byte_level()
END = len(TOKENIZER) - 1


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, END) | st.sampled_from([0xF0, 0x9F, 0xA6, 0x85, 0xC3, 0xA9]), max_size=24))
def test_added_texts_join_to_the_text(ids: list[int]) -> None:
    found = TokenText(TOKENIZER)
    texts = [found.added_text(ids[:i][-3:], token) for i, token in enumerate(ids)]
    whole = b"".join(found.bytes_of(token) for token in ids)
    assert "".join(texts) == whole[: len(whole) - len(partial_character(whole))].decode(errors="replace")
    if not partial_character(whole):
        assert "".join(texts) == TOKENIZER.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("text", ["n\u00e9 \U0001f985!", "\u65e5\u672c caf\u00e9"])
def test_bytes_are_those_of_the_tokens(text: str) -> None:
    found = TokenText(TOKENIZER)
    assert [found.bytes_of(byte) for byte in text.encode()] == [bytes([byte]) for byte in text.encode()]
    assert found.bytes_of(256) == " caf\u00e9".encode()
    assert (found.bytes_of(END), found.added_text([0xF0], END)) == (b"<|end|>", "\ufffd<|end|>")


def test_a_part_of_a_character_is_named_by_its_bytes() -> None:
    found = TokenText(TOKENIZER)
    assert [found.name_of(token) for token in (0x41, 257, END)] == ["A", "\u65e5\u672c", "<|end|>"]
    assert found.name_of(259) == "bytes:\\xf0\\x9f"
    replacement = Tokenizer(models.WordLevel({"\ufffd": 0}, unk_token="\ufffd"))
    replacement.decoder = decoders.Fuse()
    assert TokenText(PreTrainedTokenizerFast(tokenizer_object=replacement)).name_of(0) == "\ufffd"


def test_pieces_of_sentencepiece_keep_their_space() -> None:
    made = Tokenizer(models.BPE({"\u2581the": 0, "<0xC3>": 1, "<0xA9>": 2}, [], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    found = TokenText(PreTrainedTokenizerFast(tokenizer_object=made))
    assert [found.bytes_of(token) for token in range(3)] == [b" the", b"\xc3", b"\xa9"]
    assert [found.added_text([0, 1][:i], i) for i in range(3)] == [" the", "", "\u00e9"]


def test_tokenizers_that_cannot_be_read_token_by_token() -> None:
    made = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    assert TokenText(PreTrainedTokenizerFast(tokenizer_object=made)).bytes_of(0) == b"a"
    assert TokenText(NoTokenizer()).added_text([], 5) == ""
    assert TokenText(NoTokenizer()).bytes_of(5) == b""
