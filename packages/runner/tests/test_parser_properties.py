"""Random calls in every notation, token by token: with values that hold tags, and with tags left out or cut off."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tag_model import KINDS, TAGS, TagModel

from bateleur.runner.serve.parsers.options import TOOL_PARSERS

FIELDS = {
    "city": {"type": "string"},
    "days": {"type": "int"},
    "share": {"type": ["number", "null"]},
    "on": {"type": "bool"},
    "deep": {"type": "dict"},
    "list": {"type": "array"},
    "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
}
TYPES: dict[str, Any] = {
    **{"city": str, "days": int, "share": (int, float, type(None)), "on": bool, "deep": dict, "list": list},
    "either": (int, str),
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": FIELDS}}},
    {"type": "function", "function": {"name": "ping"}},
]
EVERY_TAG = " ".join([*TAGS, "<function=ping>", "</function>", "<parameter=days>", "</parameter>"])
INNER_TAGS = ("</parameter>", "</function>")


@cache
def model(kind: str) -> TagModel:
    return TagModel(kind)


WORDS = st.sampled_from(["a", "b c", "\u00e9\U0001f985", "x\ny", '"', "\\", "{", "1 < 2", "]", "it's"])
TEXT = st.lists(
    WORDS | st.sampled_from([*TAGS, *INNER_TAGS, "<function=ping>", "<parameter=days>", EVERY_TAG]),
    min_size=1,
    max_size=4,
).map(lambda parts: " ".join(["t", *parts, "t"]))
PLAIN = WORDS.map(lambda word: f"t {word} t")


def values(text: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {},
        optional={
            "city": text,
            "days": st.integers(-(10**20), 10**20),
            "share": st.none() | st.integers(-5, 5) | st.just(2.5),
            "on": st.booleans(),
            "deep": st.fixed_dictionaries({"k": text | st.none() | st.booleans()}),
            "list": st.lists(st.integers() | text, max_size=3),
            "either": text,
        },
    )


def written(name: str, given: dict[str, Any], *, python: bool, between: str = ", ") -> str:
    """A call of `weather` as a model writes it. between: text between keyword arguments."""

    def note(value: Any) -> str:
        return repr(value) if python else json.dumps(value, ensure_ascii=False)

    match name:
        case "hermes":
            return f"<tool_call>\n{note({'name': 'weather', 'arguments': given})}\n</tool_call>"
        case "granite":
            return f"<|tool_call|>[{note({'name': 'weather', 'arguments': given})}]"
        case "llama3_json":
            return note({"name": "weather", "parameters": given})
        case "qwen3_coder":
            texts = {key: each if isinstance(each, str) else note(each) for key, each in given.items()}
            body = "".join(f"<parameter={key}>\n{each}\n</parameter>\n" for key, each in texts.items())
            return f"<tool_call>\n<function=weather>\n{body}</function>\n</tool_call>"
        case "kimi_k2":
            section, call = "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.weather:0"
            arguments = f"<|tool_call_argument_begin|>{note(given)}<|tool_call_end|>"
            return f"{section}{call}{arguments}<|tool_calls_section_end|>"
    keywords = between.join(f"{key}={note(each)}" for key, each in given.items())
    if name == "olmo3":
        return f"<function_calls>\nweather({keywords})\n</function_calls>"
    return f"<|tool_call_start|>[weather({keywords})]<|tool_call_end|>"


def tokens_of(kind: str, text: str, given: dict[str, Any], *, quoted: bool) -> list[int]:
    """Tags of the notation are tokens. Tags in values are, too, or they are `quoted` letter by letter."""
    made = model(kind)
    if not quoted:
        return made.encode(text)
    tokens, rest = list[int](), text
    for value in sorted(set(_texts(given)), key=len, reverse=True):
        marks = [value, json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]]
        for mark in marks:
            rest = rest.replace(mark, "".join(chr(0xF0000 + byte) for byte in mark.encode()))
    for part in _split(rest):
        tokens += [ord(char) - 0xF0000 for char in part] if ord(part[0]) >= 0xF0000 else made.encode(part)
    return tokens


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in inner for text in _texts(each)]


def _split(text: str) -> list[str]:
    parts: list[str] = []
    for char in text:
        private = ord(char) >= 0xF0000
        if parts and (ord(parts[-1][0]) >= 0xF0000) == private:
            parts[-1] += char
        else:
            parts.append(char)
    return parts


NAMES, KIND = st.sampled_from(sorted(TOOL_PARSERS)), st.sampled_from(KINDS)


@settings(max_examples=300, deadline=None)
@given(given=values(TEXT), python=st.booleans(), quoted=st.booleans(), name=NAMES, kind=KIND, comma=st.booleans())
@example({"city": "t", "either": "t </tool_call> <function=ping> t"}, False, False, "qwen3_coder", "special", True)
@example({"city": "t </parameter> <parameter=days> t"}, False, False, "qwen3_coder", "text", True)
@example({"city": "t </parameter> </function> </tool_call> <tool_call> t"}, False, False, "qwen3_coder", "text", True)
def test_values_come_back(given: dict[str, Any], python: bool, quoted: bool, name: str, kind: str, comma: bool) -> None:
    text = written(name, given, python=python, between=", " if comma else "\n")
    tokens = tokens_of(kind, text, given, quoted=quoted)
    for each in (False, True):
        ((called, arguments),) = model(kind).reads(name, TOOLS, tokens, each=each)
        assert (called, json.loads(arguments)) == ("weather", given)


UNCLOSED = {
    "hermes": ("}}", "\n</tool_call>"),
    "granite": ("}}]", ""),
    "llama3_json": ("}}", ""),
    "kimi_k2": ("}", "<|tool_call_end|><|tool_calls_section_end|>"),
    "lfm2": (")]", "<|tool_call_end|>"),
    "olmo3": (")", "\n</function_calls>"),
}
"""What ends the values of a call, and the tags behind it."""


@settings(max_examples=300, deadline=None)
@given(given=values(PLAIN), python=st.booleans(), name=st.sampled_from(sorted(UNCLOSED)), kind=KIND, data=st.data())
def test_the_end_of_a_call_closes_what_is_open(
    given: dict[str, Any], python: bool, name: str, kind: str, data: st.DataObject
) -> None:
    brackets, tags = UNCLOSED[name]
    text = written(name, given, python=python).removesuffix(brackets + tags)
    open_ends = [brackets[:n] for n in range(len(brackets))] if given else [brackets[:-1]]
    tokens = model(kind).encode(text + data.draw(st.sampled_from(open_ends)) + tags)
    for each in (False, True):
        ((called, arguments),) = model(kind).reads(name, TOOLS, tokens, each=each)
        assert (called, json.loads(arguments)) == ("weather", given)


@settings(max_examples=300, deadline=None)
@given(given=values(TEXT), python=st.booleans(), name=NAMES, kind=KIND, data=st.data())
def test_a_text_may_end_anywhere(
    given: dict[str, Any], python: bool, name: str, kind: str, data: st.DataObject
) -> None:
    """The arguments so far are JSON if the model ended the text, and a part of the whole if a limit did."""
    tokens = tokens_of(kind, written(name, given, python=python), given, quoted=True)
    whole = model(kind).reads(name, TOOLS, tokens)
    at = data.draw(st.integers(0, len(tokens)))
    calls = [each for each in model(kind).reads(name, TOOLS, tokens[:at], each=True) if isinstance(each, list)]
    for _, arguments in calls:
        found = json.loads(arguments)
        assert given.keys() >= found.keys() or at < len(tokens)
        check_types(name, found, whole=False)
    for each in model(kind).reads(name, TOOLS, tokens[:at], cut=True):
        assert not isinstance(each, list) or whole[0][1].startswith(each[1])


@settings(max_examples=300, deadline=None)
@given(given=values(PLAIN), python=st.booleans(), name=NAMES, kind=KIND, data=st.data())
def test_a_closing_tag_may_be_left_out(
    given: dict[str, Any], python: bool, name: str, kind: str, data: st.DataObject
) -> None:
    text = written(name, given, python=python) * data.draw(st.integers(1, 2))
    end_tags = [*TOOL_PARSERS[name].END_TAGS, *(INNER_TAGS if name == "qwen3_coder" else ())]
    places = [(at, tag) for tag in end_tags for at in range(len(text)) if text.startswith(tag, at)]
    at, tag = data.draw(st.sampled_from([*places, (0, "")]))
    tokens = model(kind).encode(text[:at] + text[at + len(tag) :])
    found = model(kind).reads(name, TOOLS, tokens, each=True)
    assert found == model(kind).reads(name, TOOLS, tokens)
    assert [json.loads(arguments) for _, arguments in found] == [given] * text.count("weather")


@settings(max_examples=300, deadline=None)
@given(given=values(TEXT), python=st.booleans(), kind=KIND, data=st.data())
def test_arguments_have_their_types_whatever_is_left_out(
    given: dict[str, Any], python: bool, kind: str, data: st.DataObject
) -> None:
    """Values that quote tags may be read in several ways then."""
    text = written("qwen3_coder", given, python=python)
    places = [(at, tag) for tag in ("</tool_call>", *INNER_TAGS) for at in range(len(text)) if text.startswith(tag, at)]
    at, tag = data.draw(st.sampled_from(places))
    tokens = model(kind).encode(text[:at] + text[at + len(tag) :])
    found = model(kind).reads("qwen3_coder", TOOLS, tokens, each=True)
    assert found == model(kind).reads("qwen3_coder", TOOLS, tokens)
    calls = [each for each in found if isinstance(each, list)]
    assert calls
    for called, arguments in calls:
        if called == "weather":
            check_types("qwen3_coder", json.loads(arguments), whole=True)


def check_types(name: str, found: dict[str, Any], *, whole: bool) -> None:
    for key, value in found.items():
        wanted = TYPES.get(key, object)
        loose = not whole or name == "qwen3_coder"
        assert isinstance(value, wanted) or (loose and isinstance(value, str | type(None))), (key, value)


@settings(max_examples=100, deadline=None)
@given(given=values(TEXT), name=NAMES, kind=KIND, opened=st.booleans(), closed=st.booleans())
def test_a_call_behind_or_within_reasoning(
    given: dict[str, Any], name: str, kind: str, opened: bool, closed: bool
) -> None:
    call = tokens_of(kind, written(name, given, python=False), given, quoted=True)
    made = model(kind)
    begin = made.encode("" if opened else "<think>\n") + made.encode("I think.\n")
    tokens = begin + made.encode("</think>\n\n" if closed else "") + call
    found = made.reads(name, TOOLS, tokens, opened=opened, each=True)
    if kind == "text" or (name == "llama3_json" and not closed):
        return
    (reasoning, (called, arguments)) = found
    assert (reasoning, called, json.loads(arguments)) == ({"I think."}, "weather", given)
