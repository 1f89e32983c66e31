"""Grammars without an engine: bytes of tokens, allowed next tokens, and limits."""

from __future__ import annotations

import json
import os
import re
import resource
import sys
from collections.abc import Iterator, Sequence
from functools import reduce
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from bateleur.runner.assets import shipped_model
from bateleur.runner.structured import grammar as grammar_module
from bateleur.runner.structured import trial
from bateleur.runner.structured.grammar import Grammars, token_bytes
from bateleur.runner.structured.library import HEAD, SPECIAL, library_tokenizer
from bateleur.runner.structured.matcher import CompiledGrammar, Matcher, fill
from bateleur.runner.structured_outputs import MAX_BYTES, StructuredOutputsParams
from bateleur.runner.text.tokenizer import NoTokenizer

llguidance = pytest.importorskip("llguidance")

EOS = 0
VOCAB = 4096
TREE = {"$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}}, "$ref": "#/$defs/tree"}
TAG = {"type": "tag", "begin": "<", "content": {"type": "regex", "pattern": "[a-c]+"}, "end": ">"}
TAGGED = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": "[", "content": {"type": "any_text"}, "end": ["]", ")"]},
            {"type": "optional", "content": {"type": "const_string", "value": "--"}},
            {"type": "tags_with_separator", "tags": [TAG], "separator": ";", "stop_after_first": False},
        ],
    },
}
FORMS: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": False}},
    {"json": '{"enum": ["x", 7, null, "\\u00e9\\n"]}'},
    {"json": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 120}, "maxItems": 3}},
    {"json": {"type": "string", "format": "date"}, "disable_any_whitespace": True},
    {"json": TREE, "disable_any_whitespace": True},
    {
        "json": {
            "type": "object",
            "properties": {"k": {"$ref": "#/$defs/k"}},
            "required": ["k"],
            "additionalProperties": False,
            "$defs": {"k": {"type": "number"}},
        }
    },
    {"regex": "(a+)+$"},
    {"regex": r"^[0-9]{1,3}(\.[0-9]{1,3}){3}$"},
    {"regex": "(ab|a)(c|bcd)?"},
    {"regex": '日本[語人]+|été/"\\\\'},
    {"choice": ["a", "ab", "a b", '/\\"\n{}[]()|*+?.^$#', "日本", "é"]},
    {"choice": [f"number {i}" for i in range(3000)]},
    {"grammar": 'start: "(" start ")" | "x"'},
    {"grammar": 'root ::= "<" [a-c]+ ">" tail?\ntail ::= ";" root'},
    {"structural_tag": TAGGED},
    {
        "structural_tag": {
            "structures": [{"begin": "<f=", "schema": {"type": "integer"}, "end": ">"}],
            "triggers": ["<f"],
        }
    },
]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(AutoTokenizer.from_pretrained(str(shipped_model())), VOCAB, (EOS,))


@pytest.fixture(scope="module")
def said() -> list[bytes]:
    """By token, the bytes of the shipped model's vocabulary."""
    return token_bytes(AutoTokenizer.from_pretrained(str(shipped_model())), VOCAB)


def masks_of(matcher: Matcher, drafts: Sequence[int] = ()) -> Any:
    """(1 + drafts, V) bool."""
    masks = np.full((2 + len(drafts), matcher.num_words), -1, np.int32)
    fill(llguidance.LLExecutor(), [(matcher, 1, list(drafts))], masks)
    assert (masks[0] == -1).all(), "rows of others stay"
    return np.unpackbits(masks[1:].view(np.uint8), axis=1, bitorder="little").astype(bool)


def walk(matcher: Matcher, rng: Random, most: int) -> Iterator[int]:
    """Draw allowed tokens up to an end."""
    for _ in range(most):
        allowed = np.flatnonzero(masks_of(matcher)[0])
        token = EOS if EOS in allowed and rng.random() < 0.3 else int(rng.choice(allowed.tolist()))
        yield token
        matcher.accept(token)
        if token == EOS:
            return


def follows(params: dict[str, Any], text: str) -> bool:
    """Return whether a whole text has the required form, by other libraries."""
    if "choice" in params:
        return text in params["choice"]
    if "regex" in params:
        return re.fullmatch(params["regex"].removeprefix("^").removesuffix("$"), text) is not None
    if "json" in params:
        value = json.loads(text)
        kind = params["json"]
        if kind is TREE:
            return isinstance(value, list) and len(value) <= 2
        if isinstance(kind, str):
            return value in ("x", 7, None, "é\n")
        if kind["type"] == "array":
            return len(value) <= 3 and all(-5 <= each <= 120 for each in value)
        if kind["type"] == "string":
            return re.fullmatch(r"\d{4}-\d\d-\d\d", value) is not None
        return set(value) <= set(kind["properties"])
    if "structural_tag" in params:
        pattern = (
            r"[^<]*(<[^f][^<]*|<f=-?\d+>[^<]*)*<?"
            if "structures" in params["structural_tag"]
            else r"\[[^\])]*[\])](--)?(<[a-c]+>(;<[a-c]+>)*)?"
        )
        return re.fullmatch(pattern, text) is not None
    if params["grammar"].startswith("start"):
        return re.fullmatch(r"\(*x\)*", text) is not None and text.count("(") == text.count(")")
    return re.fullmatch("<[a-c]+>(;<[a-c]+>)*", text) is not None


@settings(max_examples=60, deadline=None, database=None)
@given(form=st.sampled_from(FORMS), seed=st.integers(0, 2**32), data=st.data())
def test_what_is_written_is_what_was_asked(
    grammars: Grammars, said: list[bytes], form: dict[str, Any], seed: int, data: st.DataObject
) -> None:
    """Token by token; masks after drafts equal those after the same tokens."""
    params = StructuredOutputsParams(**form)
    tokens = list(walk(grammars.matcher(params, {EOS}), Random(seed), 120))
    if tokens[-1] == EOS:
        text = b"".join(said[token] for token in tokens[:-1]).decode()
        assert follows(form, text), text
    at = data.draw(st.integers(0, len(tokens)))
    drafts = tokens[at : at + 4]
    drafted, plain = grammars.matcher(params, {EOS}), grammars.matcher(params, {EOS})
    drafted.restart(tokens[:at])
    plain.restart(tokens[:at])
    assert drafted.allowed_prefix(drafts) == len(drafts)
    places = masks_of(drafted, drafts)
    for place, token in enumerate(drafts):
        expected = masks_of(plain)[0]
        np.testing.assert_array_equal(places[place], expected)
        wrong = Random(seed).randrange(VOCAB)
        assert plain.allowed_prefix([wrong, token]) == (0 if not expected[wrong] else 1 if wrong == EOS else
                                                        plain.allowed_prefix([wrong, token]))  # fmt: skip
        plain.accept(token)
    np.testing.assert_array_equal(masks_of(drafted)[0], places[0])


def test_the_end_comes_where_the_grammar_has_one(grammars: Grammars, said: list[bytes]) -> None:
    matcher = grammars.matcher(StructuredOutputsParams(regex="ab?"), {EOS})
    a, b = said.index(b"a"), said.index(b"b")
    assert not masks_of(matcher)[0, EOS]
    assert matcher.allowed_prefix([EOS]) == 0
    matcher.accept(a)
    assert masks_of(matcher)[0].nonzero()[0].tolist() == [EOS, b]
    assert matcher.allowed_prefix([b, EOS, b]) == 2
    assert matcher.allowed_prefix([EOS, EOS]) == 1
    assert matcher.allowed_prefix([b, -1, EOS]) == 1
    assert not matcher.ended(without_end=True)
    matcher.accept(b)
    assert masks_of(matcher)[0].nonzero()[0].tolist() == [EOS]
    assert not matcher.ended()
    assert matcher.ended(without_end=True)


def test_an_end_that_ends_nothing_is_never_allowed(grammars: Grammars, said: list[bytes]) -> None:
    matcher = grammars.matcher(StructuredOutputsParams(regex="a{1,2}"), set())
    a = said.index(b"a")
    matcher.accept(a)
    assert EOS not in masks_of(matcher)[0].nonzero()[0]
    assert matcher.allowed_prefix([EOS]) == 0
    assert not matcher.ended()
    matcher.accept(a)
    assert matcher.ended()


# --- vocabularies -----------------------------------------------------------------------------------------------------


def fast(tokenizer: Tokenizer, **names: Any) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def pieces(words: Sequence[str], decoder: Any, kind: Any = models.WordLevel) -> Any:
    vocab = {word: i for i, word in enumerate(words)}
    made = Tokenizer(kind(vocab, unk_token="<unk>") if kind is models.WordLevel else kind(vocab, []))
    made.decoder = decoder
    return made


LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


def test_tokens_say_what_text_shows(said: list[bytes]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(shipped_model()))
    for token in range(1, VOCAB):
        assert said[token].decode(errors="replace") == tokenizer.decode([token])
    assert said[0].startswith(b"\xff")


def test_words_of_sentencepiece_and_their_bytes() -> None:
    words = ["<unk>", "<s>", "▁the", "cat", "▁", "<0x61>", "a", "<0xE2>", "<0x0A>", "▁▁x"]
    made = pieces(words, decoders.Sequence(LLAMA), models.BPE)
    made.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<unk>", special=True)])
    made.add_tokens([AddedToken("  plain", special=False)])
    found = token_bytes(fast(made), 16)
    assert found[2:] == [b" the", b"cat", b" ", b"", b"a", b"\xe2", b"\n", b"  x", b"  plain", *[b""] * 5]
    assert [each[:1] for each in found[:2]] == [b"\xff"] * 2
    assert token_bytes(fast(made), 4) == found[:4], "tokens that the model does not have"


def test_words_alone_and_metaspace() -> None:
    assert token_bytes(fast(pieces(["<unk>", "ab", "c"], decoders.Fuse())), 3)[1:] == [b"ab", b"c"]
    made = pieces(["<unk>", "▁ab", "c"], decoders.Metaspace())
    assert token_bytes(fast(made), 3)[1:] == [b" ab", b"c"]
    params = StructuredOutputsParams(regex="c( ab)*")
    matcher = Grammars(fast(made), 3, ()).matcher(params, ())
    assert masks_of(matcher)[0, :3].tolist() == [False, False, True]
    matcher.accept(2)
    assert masks_of(matcher)[0, :3].tolist() == [False, True, False]
    assert not matcher.ended()


@pytest.mark.parametrize("size", [31, 32, 33, 64])
def test_a_model_may_have_more_tokens_than_its_tokenizer_and_no_end(size: int) -> None:
    made = fast(pieces(["<unk>", "a", "b"], decoders.Fuse()))
    for ends in ((), (size - 1,)):
        matcher = Grammars(made, size, ends).matcher(StructuredOutputsParams(regex="a|b"), ends)
        assert masks_of(matcher)[0, :size].nonzero()[0].tolist() == [1, 2]
        matcher.accept(2)
        assert masks_of(matcher)[0, :size].nonzero()[0].tolist() == list(ends)
        assert matcher.ended() is not bool(ends)


def test_the_bytes_of_tokens_are_not_kept() -> None:
    tokens = [b"a", b"b", SPECIAL]
    count = sys.getrefcount(tokens)
    vocabulary = library_tokenizer(tokens, [2])
    assert (vocabulary.vocab_size, sys.getrefcount(tokens)) == (3, count)


@pytest.mark.parametrize(
    ("tokenizer", "why"),
    [
        (NoTokenizer(), "it needs a tokenizer: leave skip_tokenizer_init False"),
        (object(), "the tokenizer of this checkpoint is a object, and must be one of the tokenizers library"),
        (fast(pieces(["<unk>", "a"], decoders.WordPiece())), "decoded by WordPiece, and must be decoded by"),
        (fast(Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>"))), "without a decoder, which puts spaces between"),
    ],
)
def test_a_tokenizer_that_nobody_can_read_is_refused(tokenizer: Any, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        Grammars(tokenizer, 8, ()).matcher(StructuredOutputsParams(regex="a"), ())


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, grammars: Grammars) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    fresh = Grammars(fast(pieces(["<unk>", "a"], decoders.Fuse())), 2, ())
    with pytest.raises(ImportError, match=r"pip install 'bateleur-runner\[structured\]'"):
        fresh.matcher(StructuredOutputsParams(regex="a"), ())


# --- what costs too much ----------------------------------------------------------------------------------------------

CHAIN = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(8000)) + 'r8000: "a"'
DOUBLING = "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(40)) + 'T40: "a"'
HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": r"(a)\1"}, "backreferences are not supported"),
    ({"regex": "(" * 3000 + "a" + ")" * 3000}, "nested parentheses"),
    ({"json": {"$ref": "#"}}, "no text that the model's tokens can write follows it"),
    ({"json": {"$ref": "#/$defs/no"}}, "does not exist"),
    ({"json": {"$ref": "file:///etc/passwd"}}, "not present in a registry"),
    ({"json": {"$ref": "http://127.0.0.1:1/x"}}, "not present in a registry"),
    ({"json": {"type": "banana"}}, "Invalid type"),
    ({"json": {"allOf": [{"anyOf": [{"properties": {f"{c}{i}": {}}} for c in "ab"]} for i in range(30)]}}, "large"),
    ({"json": {"enum": []}}, "nsatisfiable"),
    ({"grammar": "x"}, "Expected token"),
    ({"grammar": "start: nope"}, "unknown name"),
    ({"grammar": "start: start"}, "no text"),
    ({"grammar": "start: " + "(" * 20000 + '"a"' + ")" * 20000}, "too deeply nested"),
    ({"grammar": DOUBLING}, "too big"),
    ({"grammar": CHAIN}, "it is too large or too deep"),
    ({"grammar": "root ::= ("}, "it can't be read as EBNF"),
    ({"grammar": "root ::= " + "(" * 20000}, "it can't be read as EBNF"),
    ({"structural_tag": {}}, "format is None; it must be an object"),
    ({"structural_tag": {"format": {"type": "x"}}}, r"format.type is 'x'; it must be one of const_string"),
    ({"structural_tag": {"format": {"type": "regex"}}}, r"format.pattern is None; it must be text"),
    ({"structural_tag": {"format": {"type": "or", "elements": []}}}, r"format.elements is \[\]; it must be a list"),
    (
        {"structural_tag": {"structures": [{"begin": "<a>"}], "triggers": ["<b"]}},
        r"format.tags\[0\].begin is '<a>'; it must be text that begins with one of the triggers",
    ),
    (
        {"structural_tag": {"format": {"type": "triggered_tags", "triggers": "<b", "tags": [{}]}}},
        r"format.triggers is '<b'; it must be a list of texts",
    ),
    ({"structural_tag": {"format": {"type": "json_schema", "json_schema": {"enum": []}}}}, "nsatisfiable"),
    (
        {
            "structural_tag": json.dumps(
                {"format": reduce(lambda inner, _: {"type": "star", "content": inner}, range(80), {"type": "any_text"})}
            )
        },
        "is nested too deeply",
    ),
]


@pytest.mark.parametrize(("form", "why"), HOSTILE)
def test_what_no_grammar_may_be(grammars: Grammars, form: dict[str, Any], why: str) -> None:
    params = StructuredOutputsParams(**form)
    with pytest.raises(ValueError, match=why) as refused:
        grammars.matcher(params, {EOS})
    assert str(refused.value).startswith(f"structured_outputs.{params.form} is ")
    assert len(str(refused.value)) < 600


def test_what_would_take_minutes_is_killed(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MAX_SECONDS", 0.5)
    schema = {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(15)]}
    with pytest.raises(ValueError, match=r"it takes more than 0\.5 s to compile"):
        grammars.matcher(StructuredOutputsParams(json=schema), {EOS})
    grammars.matcher(StructuredOutputsParams(regex="still[ ]here"), {EOS})


def test_a_grammar_compiles_after_an_idle_child_has_died(grammars: Grammars) -> None:
    grammars.matcher(StructuredOutputsParams(regex="before[ ]it"), {EOS})
    for child in grammar_module._COMPILERS._idle:
        child.kill()
        child.wait()
    grammars.matcher(StructuredOutputsParams(regex="after[ ]it"), {EOS})


def test_a_child_that_dies_before_it_reads_is_an_error_of_the_grammar(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may die between the check that it lives and the write."""
    grammars.matcher(StructuredOutputsParams(regex="before[ ]that"), {EOS})
    for child in grammar_module._COMPILERS._idle:
        child.kill()
        child.wait()
        monkeypatch.setattr(child, "poll", lambda: None)
    with pytest.raises(ValueError, match="too large or too deep"):
        grammars.matcher(StructuredOutputsParams(regex="after[ ]that"), {EOS})


def test_a_server_with_a_thousand_connections_compiles_grammars() -> None:
    """File descriptors from 1024 on, which `select` can't wait for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"this system allows only {hard} open files")
    compilers, opened = trial.GrammarCompilers(), list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        while not opened or opened[-1] < 1024:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        source = json.dumps({"grammars": [{"lark_grammar": HEAD + 'start: "a"'}]})
        assert compilers.error(source, VOCAB) == ""
    finally:
        compilers.close()
        for each in opened:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_ctrl_c_does_not_reach_the_children(grammars: Grammars) -> None:
    """A terminal sends SIGINT to the process group of the engine."""
    grammars.matcher(StructuredOutputsParams(regex="a[ ]group"), {EOS})
    for child in grammar_module._COMPILERS._idle:
        assert os.getpgid(child.pid) != os.getpgid(0)


@pytest.mark.parametrize(
    "form",
    [
        {"grammar": 'start: start start | start start start | "a" |'},
        {"grammar": 'start: ((("a"~1..1000)~1..1000)~1..1000)'},
        {"regex": "((a{1,100}){1,100}){1,100}"},
    ],
)
def test_what_grows_as_it_is_written_ends_in_an_error(
    grammars: Grammars, said: list[bytes], form: dict[str, Any]
) -> None:
    """Then no token is allowed, not even an end of sequence."""
    matcher = grammars.matcher(StructuredOutputsParams(**form), {EOS})
    other = grammars.matcher(StructuredOutputsParams(**form), {EOS})
    token = max(range(VOCAB), key=lambda i: len(said[i]) if set(said[i]) == {ord("a")} else 0)
    for _ in range(300):
        mask = masks_of(matcher)[0]
        if matcher.error:
            break
        matcher.accept(token if mask[token] else said.index(b"a"))
    assert matcher.error
    assert not masks_of(matcher)[0].any()
    assert matcher.allowed_prefix([token]) == 0
    assert masks_of(other)[0].any(), "others of the same grammar go on"


def test_what_another_broke_is_made_again(grammars: Grammars, said: list[bytes]) -> None:
    """A shared parser whose masks fail is replaced by one that shares nothing, with drafts and without."""
    params = StructuredOutputsParams(regex="abcdef")
    ids = [said.index(bytes([c])) for c in b"abc"]
    matcher, sound = grammars.matcher(params, {EOS}), grammars.matcher(params, {EOS})
    for each in (matcher, sound):
        each.accept(ids[0])
    matcher._parser.consume_token(said.index(b"z"))
    assert matcher.error
    np.testing.assert_array_equal(masks_of(matcher, ids[1:]), masks_of(sound, ids[1:]))
    assert not matcher.error


def test_what_was_compiled_is_kept_as_long_as_it_is_used(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    class Counted(CompiledGrammar):
        def __init__(self, *args: Any) -> None:
            compiled.append(args[-1])
            super().__init__(*args)

    monkeypatch.setattr(grammar_module, "CompiledGrammar", Counted)
    monkeypatch.setattr(grammar_module, "_CACHE_SIZE", 2)
    fresh = Grammars(grammars._tokenizer, VOCAB, (EOS,))
    for letter in "aababcabc":
        fresh.matcher(StructuredOutputsParams(choice=[letter * 3]), {EOS})
    assert len(compiled) == 2 + 1 + 3, "a, b; c for a; then each for the one that was not used for the longest"
    assert fresh._compiled.cache_info().currsize == 2


# --- parameters -------------------------------------------------------------------------------------------------------

DEEP: Any = {}
for _ in range(100_000):
    DEEP = {"items": DEEP}
NO_SCHEMA = "it must be a JSON schema: an object, or JSON text of one"
REFUSED: list[tuple[Any, str]] = [
    ({}, "structured_outputs is []; it must be exactly one of json, json_object, regex, choice, grammar"),
    ({"json_object": False}, "structured_outputs is []; it must be exactly one of"),
    ({"regex": "a", "choice": ["b"]}, "structured_outputs is ['regex', 'choice']; it must be exactly one of"),
    ({"json": "{"}, f"structured_outputs.json is '{{'; {NO_SCHEMA}"),
    ({"json": "[]"}, f"structured_outputs.json is '[]'; {NO_SCHEMA}"),
    ({"json": 5}, f"structured_outputs.json is 5; {NO_SCHEMA}"),
    ({"json": {"a": float("nan")}}, f"structured_outputs.json is {{'a': nan}}; {NO_SCHEMA}"),
    ({"json": '{"a": NaN}'}, NO_SCHEMA),
    ({"json": {"a": {1}}}, NO_SCHEMA),
    ({"json": DEEP}, NO_SCHEMA),
    ({"json": '{"a":' * 20000 + "1" + "}" * 20000}, NO_SCHEMA),
    ({"json": {"a": "x" * MAX_BYTES}}, f"it must be text of at most {MAX_BYTES} bytes"),
    ({"json": "\ud800"}, "half of a surrogate pair"),
    ({"json": {"a": "\ud800"}}, "half of a surrogate pair"),
    ({"json_object": 1}, "structured_outputs.json_object is 1; it must be True or False"),
    ({"regex": ""}, "structured_outputs.regex is ''; it must be text that is not empty"),
    ({"regex": "é" * MAX_BYTES}, f"it must be text of at most {MAX_BYTES} bytes"),
    ({"regex": 3}, "structured_outputs.regex is 3; it must be text that is not empty"),
    ({"choice": []}, "structured_outputs.choice has 0 entries; it must have 1 to 10000"),
    ({"choice": ["a"] * 10001}, "structured_outputs.choice has 10001 entries; it must have 1 to 10000"),
    ({"choice": ["a" * 200] * 1000}, f"structured_outputs.choice has 200000 bytes; it must have at most {MAX_BYTES}"),
    ({"choice": "ab"}, "structured_outputs.choice is 'ab'; it must be a list of strings that are not empty"),
    ({"choice": ["a", 3]}, "structured_outputs.choice[1] is 3; it must be text that is not empty"),
    ({"grammar": b"x"}, "structured_outputs.grammar is b'x'; it must be text that is not empty"),
    ({"regexp": "a"}, "structured_outputs has unknown 'regexp'; the known names are json, json_object, regex,"),
    ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern is ' '; it must be None: whitespace is"),
    ("a", "structured_outputs is 'a'; it must be StructuredOutputsParams, or a mapping of its fields"),
    ({1: "a"}, "structured_outputs is {1: 'a'}; it must be StructuredOutputsParams, or a mapping of its fields"),
]


@pytest.mark.parametrize(("given", "why"), REFUSED)
def test_parameters_are_refused_by_name(given: Any, why: str) -> None:
    from bateleur.runner import SamplingParams

    with pytest.raises(ValueError, match=re.escape(why)):
        SamplingParams(structured_outputs=given)


def test_parameters_are_values() -> None:
    from bateleur.runner import SamplingParams

    schema = {"type": "object", "title": "é"}
    params = SamplingParams(structured_outputs={"json": schema, "disable_fallback": True})
    assert params.structured_outputs == StructuredOutputsParams(json='{"type":"object","title":"\\u00e9"}')
    assert hash(params) == hash(SamplingParams(structured_outputs=StructuredOutputsParams(json=schema)))
    assert SamplingParams(structured_outputs=None) == SamplingParams()
    assert StructuredOutputsParams(json_object=True).form == "json_object"
