"""Incremental detokenization: no broken characters, exact stops, and the same text as decoding at once."""

from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from bateleur.runner.text.detokenizer import IncrementalDetokenizer, decode_all

SAMPLE = "def f(x):\n    return '😀👩‍👩‍👧 漢字かな交じり文 été' + x  # the cat, the hat\n" * 3
SPECIAL = "<|end|>"


class Bytes:
    """One token per byte, and a special token, 256."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        special = b"" if skip_special_tokens else SPECIAL.encode()
        return b"".join(special if i == 256 else bytes([i]) for i in token_ids).decode(errors="replace")


class Counting(Bytes):
    """Counts decoded tokens."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        self.num_decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator([SAMPLE], trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    vocab = {"<unk>": 0, "▁": 1, "▁the": 2, "a": 3, "b": 4, "▁a": 5}
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


BPE, FALLBACK = byte_level(), byte_fallback()


def run(detokenizer: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    pieces = [detokenizer.push(i) for i in ids] + [detokenizer.finish()]
    assert "".join(pieces) == detokenizer.text
    return pieces


def without_partial_end(text: str) -> str:
    tail = text[-3:]
    return text[: len(text) - len(tail)] + tail.rstrip("\ufffd")


# Bytes that make and break characters, with special tokens between; then arbitrary ids.
tricky = st.sampled_from([*b"a b", 0xE4, 0xB8, 0xAD, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0xEF, 0xBF, 0xBD, 256])
byte_ids = st.lists(tricky | st.integers(0, 256), max_size=120)
bpe_ids = st.lists(st.integers(0, BPE.get_vocab_size() - 1), max_size=120)


@settings(max_examples=300, deadline=None)
@given(byte_ids, st.lists(tricky, max_size=12))
def test_bytes_equal_the_whole(ids: list[int], prompt: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(Bytes(), prompt_token_ids=prompt)
    pieces = run(detokenizer, ids)
    assert detokenizer.text == decode_all(Bytes(), ids, prompt_token_ids=prompt)
    if not prompt:
        assert detokenizer.text == without_partial_end(Bytes().decode(ids, skip_special_tokens=True))
    assert not any(piece.endswith("\ufffd") for piece in pieces[: min(20, len(pieces) - 1)])


@settings(max_examples=200, deadline=None)
@given(bpe_ids)
def test_byte_level_bpe_equals_the_whole(ids: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(BPE)
    run(detokenizer, ids)
    assert detokenizer.text == without_partial_end(BPE.decode(ids, skip_special_tokens=True))
    assert detokenizer.text == decode_all(BPE, ids)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_text_goes_round(text: str) -> None:
    for tokenizer in (BPE, Bytes()):
        ids = BPE.encode(text).ids if tokenizer is BPE else list(text.encode())
        detokenizer = IncrementalDetokenizer(tokenizer)
        run(detokenizer, ids)
        assert detokenizer.text == without_partial_end(text)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["▁", "▁the", "a", "b", "▁a", "</s>", "中", "😀", "é"]), max_size=60))
def test_byte_fallback_equals_the_whole(words: list[str]) -> None:
    ids = []
    for word in words:
        known = FALLBACK.token_to_id(word)
        bytes_ = [FALLBACK.token_to_id(f"<0x{byte:02X}>") for byte in word.encode()]
        ids += bytes_ if known is None else [known]
    detokenizer = IncrementalDetokenizer(FALLBACK)
    run(detokenizer, ids)
    assert detokenizer.text == FALLBACK.decode(ids) == decode_all(FALLBACK, ids)


def test_prompt_gives_the_leading_space() -> None:
    the = FALLBACK.token_to_id("▁the")
    assert run(IncrementalDetokenizer(FALLBACK), [the]) == ["the", ""]
    assert run(IncrementalDetokenizer(FALLBACK, prompt_token_ids=[the]), [the]) == [" the", ""]


def test_a_character_comes_whole_and_at_once() -> None:
    detokenizer = IncrementalDetokenizer(Bytes())
    assert run(detokenizer, list("a😀b".encode())) == ["a", "", "", "", "😀", "b", ""]


def test_an_incomplete_end_is_dropped_and_garbage_in_the_middle_is_shown() -> None:
    assert run(IncrementalDetokenizer(Bytes()), [97, 0xF0, 0x9F]) == ["a", "", "", ""]
    assert run(IncrementalDetokenizer(Bytes()), [97, 0xFF, 98]) == ["a", "", "\ufffdb", ""]


@pytest.mark.parametrize("num_bad", range(8, 30))
def test_a_window_of_garbage_is_never_cut_inside_a_character(num_bad: int) -> None:
    ids = [0xFF] * num_bad + list("中😀漢".encode())
    detokenizer = IncrementalDetokenizer(Bytes())
    run(detokenizer, ids)
    assert detokenizer.text == "\ufffd" * num_bad + "中😀漢"


@settings(max_examples=300, deadline=None)
@given(
    st.text(alphabet="ab😀", max_size=40),
    st.lists(st.text(alphabet="ab😀", min_size=1, max_size=5), min_size=1, max_size=3),
    st.booleans(),
)
def test_stops_cut_exactly(text: str, stops: list[str], bpe: bool) -> None:
    tokenizer = BPE if bpe else Bytes()
    ids = BPE.encode(text).ids if bpe else list(text.encode())
    detokenizer = IncrementalDetokenizer(tokenizer, stop=tuple(stops))
    run(detokenizer, ids)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert (detokenizer.text, detokenizer.stopped) == (text, None)
        return
    hit = max((stop for stop in stops if text.find(stop) + len(stop) == min(ends) and stop in text), key=len)
    assert (detokenizer.text, detokenizer.stopped) == (text[: min(ends) - len(hit)], hit)


def test_text_that_may_become_a_stop_is_withheld() -> None:
    detokenizer = IncrementalDetokenizer(Bytes(), stop=("abcd",))
    assert [detokenizer.push(i) for i in b"xababc"] == ["x", "", "", "ab", "", ""]
    assert detokenizer.push(ord("x")) == "abcx"
    assert [detokenizer.push(i) for i in b"abcd"] == ["", "", "", ""]
    assert detokenizer.stopped == "abcd"
    assert detokenizer.push(ord("z")) == detokenizer.finish() == ""
    assert detokenizer.text == "xababcx"


def test_finish_shows_what_was_withheld() -> None:
    detokenizer = IncrementalDetokenizer(Bytes(), stop=("abcd",))
    assert run(detokenizer, list(b"xabc")) == ["x", "", "", "", "abc"]
    assert detokenizer.finish() == detokenizer.push(97) == ""


def test_an_interrupt_while_text_is_read_moves_no_later_text() -> None:
    class Interrupted(StringIO):
        def read(self, size: int | None = -1) -> str:
            raise KeyboardInterrupt

    detokenizer = IncrementalDetokenizer(Bytes(), tags={ord("b"): "b"})
    detokenizer._text = Interrupted()
    detokenizer.push(ord("a"))
    with pytest.raises(KeyboardInterrupt):
        detokenizer.text_from(0)
    detokenizer.push(ord("b"))
    assert detokenizer.text == "ab"
    with pytest.raises(KeyboardInterrupt):
        detokenizer.text_from(0)
    assert detokenizer.tags_from(0) == [(1, 2, ord("b"))]


def test_early_stop_strings_are_text_until_min_tokens() -> None:
    detokenizer = IncrementalDetokenizer(Bytes(), stop=("ab",), min_tokens=4)
    assert run(detokenizer, list(b"abxabab"))[:5] == ["", "ab", "x", "", ""]
    assert (detokenizer.text, detokenizer.stopped) == ("abx", "ab")
    judged = IncrementalDetokenizer(Bytes(), stop=("ab", "abX"), min_tokens=3)
    assert run(judged, list(b"abY")) == ["", "", "abY", ""]
    exact = IncrementalDetokenizer(Bytes(), stop=("ab",), min_tokens=2)
    run(exact, list(b"abab"))
    assert (exact.text, exact.stopped) == ("", "ab")


@pytest.mark.parametrize("ids", [list(b"hello ") * 500, [0xFF] * 3000, [0xE4] * 3000, [256] * 3000])
def test_cost_per_token_is_bounded(ids: list[int]) -> None:
    tokenizer = Counting()
    detokenizer = IncrementalDetokenizer(tokenizer)
    run(detokenizer, ids)
    assert tokenizer.num_decoded < 60 * len(ids)
    assert detokenizer.text == without_partial_end(Bytes().decode(ids, skip_special_tokens=True))


TAG, SHOWN = "<think>", {300: "<think>"}


class Tagged(Bytes):
    """One token per byte, a special token, 256, and a tag with text, 300."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        special = b"" if skip_special_tokens else SPECIAL.encode()
        known = {256: special, 300: TAG.encode()}
        return b"".join(known.get(i) or (b"" if i in known else bytes([i])) for i in token_ids).decode(errors="replace")


@settings(max_examples=300, deadline=None)
@given(st.lists(tricky | st.just(300), max_size=60), st.booleans(), st.booleans())
def test_tags_are_where_their_tokens_are(ids: list[int], skip: bool, stops: bool) -> None:
    """Whatever pieces were returned, each tag with text is at its position."""
    tags = {256: SPECIAL, 300: TAG}
    detokenizer = IncrementalDetokenizer(
        Tagged(), skip_special_tokens=skip, tags=tags, stop=("b" * 9,) if stops else ()
    )
    known, told = [], ""
    for i in ids:
        told += detokenizer.push(i)
        fresh = detokenizer.tags_from(len(known))
        assert all(tag.end <= len(told) for tag in fresh)
        known += fresh
    detokenizer.finish()
    known += detokenizer.tags_from(len(known))
    assert [tag.token_id for tag in known] == [i for i in ids if i in tags]
    for tag in known:
        shown = TAG if tag.token_id == 300 else "" if skip else SPECIAL
        assert detokenizer.text[tag.start : tag.end] == shown
    places = [tag.start for tag in known]
    assert places == sorted(places)


def test_a_tag_is_held_back_and_cut_with_its_text() -> None:
    detokenizer = IncrementalDetokenizer(Tagged(), stop=(f"{TAG}a", "bc"), tags={256: SPECIAL, 300: TAG})
    assert detokenizer.push(300) == ""
    assert detokenizer.tags_from(0) == [], "it may become a stop string"
    assert detokenizer.push(ord("b")) == TAG
    assert detokenizer.tags_from(0) == [(0, len(TAG), 300)]
    detokenizer.push(300)
    detokenizer.push(ord("a"))
    assert (detokenizer.stopped, detokenizer.text) == (f"{TAG}a", f"{TAG}b")
    assert len(detokenizer.tags_from(0)) == 1
    hidden = IncrementalDetokenizer(Tagged(), stop=("bc",), tags={256: SPECIAL})
    for i in (ord("a"), 256, ord("b")):
        hidden.push(i)
    assert hidden.tags_from(0) == [(1, 1, 256)]
    assert hidden.push(ord("c")) == ""
    assert hidden.text == "a"
