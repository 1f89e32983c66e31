"""Calls and reasoning in text: what is found, wherever the text is cut."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bateleur.runner.openai.requests import chat_request
from bateleur.runner.serve.parsers.events import Argued, Called, Event, Parser, Said, Thought, merged
from bateleur.runner.serve.parsers.forced import ListedCalls, NamedCall
from bateleur.runner.serve.parsers.hermes import Hermes
from bateleur.runner.serve.parsers.message import Message
from bateleur.runner.serve.parsers.options import ParserOptions
from bateleur.runner.serve.parsers.qwen3_coder import Qwen3Coder
from bateleur.runner.serve.parsers.think import Think
from bateleur.runner.serve.parsers.values import as_json, types_of

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "share": {"type": ["number", "null"]},
    "deep": {"type": "object"},
    "on": {"type": "boolean"},
    "either": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "string"}]},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "$defs": {"n": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "we"}},
]
MAKE: dict[str, Callable[[], Parser]] = {
    "hermes": lambda: Hermes(TOOLS),
    "qwen3_coder": lambda: Qwen3Coder(TOOLS),
    "one": lambda: Hermes(TOOLS, most=1),
    "think": Think,
    "opened": lambda: Think(opened=True),
    "listed": lambda: ListedCalls(TOOLS),
    "named": lambda: NamedCall("we"),
}


def parse(parser: Parser, *pieces: str) -> list[Event]:
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    return merged(events + parser.finish())


def texts(events: list[Event]) -> list[Any]:
    """Said as it is, thoughts in a set, calls as pairs."""
    found: list[Any] = []
    for each in events:
        match each:
            case Said(text):
                found.append(text)
            case Thought(text):
                found.append({text})
            case Called(name):
                found.append([name, ""])
            case Argued(text):
                found[-1][1] += text
    return found


HERMES = [
    ("plain text\n", ["plain text\n"]),
    ('<tool_call>\n{"name": "we", "arguments": {"a": 1}}\n</tool_call>', [["we", '{"a": 1}']]),
    ('Let me see.\n\n<tool_call>{"name":"we","arguments":{}}</tool_call>\n', ["Let me see.", ["we", "{}"]]),
    (
        '<tool_call>{"name": "we"}</tool_call>\n<tool_call>{"arguments": {"x": "}"}, "name": "weather"}</tool_call>',
        [["we", "{}"], ["weather", '{"x": "}"}']],
    ),
    ('a<tool_call>{"name":"we","arguments":{}}</tool_call>\nb', ["a", ["we", "{}"], "\nb"]),
    ('<tool_call>{"name":"we","arguments":"{\\"a\\": 1}"}</tool_call>', [["we", '{"a": 1}']]),
    ('<tool_call>{"name":"we","arguments":null, "id": [1]}</tool_call>', [["we", "{}"]]),
    (
        '<tool_call>{"name":"we","arguments":{"a":"</tool_call>\n"}}</tool_call>',
        [["we", '{"a":"</tool_call>\\n"}']],
    ),
    ('<tool_call>{"name":"we","arguments":{"a":1}}', [["we", '{"a":1}']]),
    ('<tool_call>{"name":"we","arguments":{"a":1}</tool_call>', [["we", '{"a":1}']]),
    ('<tool_call>{"name":"we","arguments":{"a":[1}} oh</tool_call>b', [["we", '{"a":[1'], "}} ohb"]),
    ('<tool_call>{"name":"we","arguments":{"a":"cut \\', [["we", '{"a":"cut \\']]),
    ('<tool_call>{"name":"we","arguments":{}} oh', [["we", "{}"], " oh"]),
    *(
        (text, [text])
        for text in (
            '<tool_call>{"name":"nobody","arguments":{}}</tool_call>',
            '<tool_call>{"name":"we","arguments":[1]}</tool_call>',
            '<tool_call>{"name":["we"],"arguments":{}}</tool_call> ',
            '<tool_call>{"arguments":{"a":1}}</tool_call>',
            '<tool_call>{"arguments":{"a":1}, "na',
            "<tool_call>{}</tool_call>",
            "<tool_call>\n[1]</tool_call>",
            '<tool_call>{"name" "we"}</tool_call>',
            "  <tool_call>  ",
            "a < b </tool_call> <tool",
            '<tool_call>{"name": we, "arguments": {}}',
        )
    ),
    ('<tool_call> no <tool_call>{"name":"we"}</tool_call>', ["<tool_call> no", ["we", "{}"]]),
]


@pytest.mark.parametrize(("text", "found"), HERMES)
def test_hermes(text: str, found: list[Any]) -> None:
    assert texts(parse(Hermes(TOOLS), text)) == found
    assert texts(parse(Hermes(TOOLS), *text)) == found


def coder(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


QWEN = [
    (coder("we"), [["we", "{}"]]),
    (coder("weather", city='A\n\u00e9"B\n'), [["weather", '{"city": "A\\n\u00e9\\"B\\n"}']]),
    ("x\n" + coder("weather", days="3", city="3"), ["x", ["weather", '{"days": 3, "city": "3"}']]),
    (coder("weather", days="3.0", share="null"), [["weather", '{"days": 3, "share": null}']]),
    (coder("weather", days="many", on="True"), [["weather", '{"days": "many", "on": true}']]),
    (
        coder("weather", deep='{"a": [1,2.5]}', share="1e3"),
        [["weather", '{"deep": {"a": [1, 2.5]}, "share": 1000.0}']],
    ),
    (coder("weather", either="4"), [["weather", '{"either": 4}']]),
    (coder("weather", either="four", other="1"), [["weather", '{"either": "four", "other": "1"}']]),
    (coder("we") + "\n" + coder("we") + "\nEnd", [["we", "{}"], ["we", "{}"], "\nEnd"]),
    ("<function=we></function>", [["we", "{}"]]),
    ("<tool_call><function=we></tool_call>.", [["we", "{}"], "."]),
    (
        "<function=weather><parameter=city>a<parameter=days>1</function>",
        [["weather", '{"city": "a", "days": 1}']],
    ),
    ("<function=weather><parameter=city>\n", [["weather", '{"city": "']]),
    ("<function=weather><parameter=city>\na\n</para", [["weather", '{"city": "a\\n</para']]),
    ("<function=weather><parameter=days>12", [["weather", '{"days": 12']]),
    *(
        (text, [text])
        for text in (
            "<tool_call>\n<function=nobody>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>hello",
            "<tool_call>\n<func",
            "<function=weat",
            "<function=weather ",
            "<function=weat\n<tool_call>",
            "<function=wet></function>",
            "</function></tool_call>",
        )
    ),
]


@pytest.mark.parametrize(("text", "found"), QWEN)
def test_qwen3_coder(text: str, found: list[Any]) -> None:
    assert texts(parse(Qwen3Coder(TOOLS), text)) == found
    assert texts(parse(Qwen3Coder(TOOLS), *text)) == found


def test_what_stands_between_parameters_is_content() -> None:
    text = "<function=weather>\noh <parameter=a\n<parameter=city>a</parameter>no</function>"
    delta = Message(calls=Qwen3Coder(TOOLS), make_id=lambda: "1").whole(text)
    assert delta["content"] == "\noh <parameter=ano"
    assert delta["tool_calls"][0]["function"]["arguments"] == '{"city": "a"}'


@pytest.mark.parametrize(
    ("opened", "text", "found"),
    [
        (False, "hello <think>a</think>", ["hello <think>a</think>"]),
        (False, "\n<think>\nwell\n</think>\n\nhi ", [{"well"}, "hi "]),
        (False, "<think>\n\n</think>\n\nhi", ["hi"]),
        (False, "<think>no end </th", [{"no end </th"}]),
        (False, " <thin", [" <thin"]),
        (True, "well\n</think>hi", [{"well"}, "hi"]),
        (True, "<think>well</think>", [{"well"}]),
        (True, "never ends\n", [{"never ends\n"}]),
        (True, "</think>\nhi</think>", ["hi</think>"]),
    ],
)
def test_reasoning(opened: bool, text: str, found: list[Any]) -> None:
    assert texts(parse(Think(opened=opened), text)) == found
    assert texts(parse(Think(opened=opened), *text)) == found


JSON = st.recursive(st.text(max_size=9) | st.integers() | st.none(), st.lists, max_leaves=4)
PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=", "we", "weather", ">", "</function>", "<parameter="),
        *(
            "city",
            "days",
            "</parameter>",
            "<think>",
            "</think>",
            "\n",
            " ",
            "<",
            "</",
            '{"name": "we"',
            "}",
            "]",
        ),
        *(
            ', "arguments": ',
            "{",
            '{"a": "',
            '"',
            "\\",
            "[",
            ",",
            "1",
            "\u00e9",
            "text",
            "null",
            "}}",
            "\x01",
        ),
        *(text for text, _ in HERMES + QWEN),
    ]
)


@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(PIECES, max_size=14), data=st.data())
def test_no_cut_changes_what_is_found(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    bounds = [0, *cuts, len(text)]
    cut = [text[a:b] for a, b in pairwise(bounds)]
    for name, make in MAKE.items():
        whole = parse(make(), text)
        assert parse(make(), *cut) == whole, name
        assert parse(make(), *text) == whole, name


@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(PIECES, max_size=14))
def test_nothing_is_lost_or_doubled(pieces: list[str]) -> None:
    text = "".join(pieces)
    for name in ("hermes", "qwen3_coder", "one", "think", "opened"):
        events = parse(MAKE[name](), text)
        if any(isinstance(each, Called) for each in events):
            at = 0
            for each in events:
                if isinstance(each, Said):  # in its order, but for tags between
                    for word in each.text.split():
                        at = _after(word, text, at)
        elif name not in ("think", "opened"):
            assert "".join(each.text for each in events if isinstance(each, Said)) == text
        else:
            told = "".join(each.text for each in events if isinstance(each, Said | Thought))
            rest = text
            for tag in ("<think>", "</think>"):
                rest = rest.replace(tag, "")
            assert "".join(told.replace("<think>", "").replace("</think>", "").split()) == "".join(
                rest.split()
            )


def _after(word: str, text: str, at: int) -> int:
    """Where a word ends that stands in the text from `at` on; tags may have stood within."""
    for char in word:
        at = text.index(char, at) + 1
    return at


@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["we", "weather"]),
            st.dictionaries(
                st.text(max_size=5), st.recursive(st.text(max_size=9) | st.integers(), st.lists), max_size=3
            ),
        ),
        max_size=3,
    ),
    before=st.sampled_from(["", "Well.", "a < b"]),
)
def test_calls_come_back_as_they_were_written(calls: list[tuple[str, dict[str, Any]]], before: str) -> None:
    objects = [json.dumps({"name": name, "arguments": values}) for name, values in calls]
    text = before + "".join(f"\n<tool_call>\n{each}\n</tool_call>" for each in objects)
    message = Message(calls=Hermes(TOOLS), make_id=lambda: "1").whole(text)
    assert message["content"] == (before or (None if calls else ""))
    told = [each["function"] for each in message.get("tool_calls", [])]
    assert [(each["name"], json.loads(each["arguments"])) for each in told] == calls
    listed = texts(parse(ListedCalls(TOOLS), f"[{', '.join(objects)}]"))
    assert [(name, json.loads(values)) for name, values in listed] == calls


@settings(max_examples=60, deadline=None)
@given(value=st.text(st.characters(exclude_categories=["Cs"]), max_size=20), days=st.integers())
def test_values_come_back_as_they_were_written(value: str, days: int) -> None:
    if any(tag in value for tag in ("</parameter>", "<parameter=", "</function>")):
        return
    ((_, values),) = texts(parse(Qwen3Coder(TOOLS), coder("weather", city=value, days=str(days))))
    assert json.loads(values) == {"city": value, "days": days}


@pytest.mark.parametrize(
    "hostile",
    [
        *("<", " ", "<tool_call>", "<tool_call>{", "<function=", "<function=we>", "[", "\n", "</tool_call> "),
        *('<tool_call>{"name":"we","arguments":{"a":"', "<function=weather><parameter=city>", "<parameter="),
        *('<tool_call>{"name":"we","arguments":{}}</tool_call>', "<think>"),
    ],
)
def test_work_grows_as_the_text_does(hostile: str) -> None:
    """Counted in calls of functions, for the text as a whole and letter by letter; and little is held back."""
    for name in ("hermes", "qwen3_coder", "think"):
        for cut in (False, True):
            work = []
            for size in (1500, 3000):
                text = hostile * (size // len(hostile))
                parser = MAKE[name]()
                with counted_calls() as calls:
                    for piece in text if cut else [text]:
                        parser.feed(piece)
                        assert len(parser._held) < 16
                    parser.finish()
                work.append(calls())
            assert work[1] <= 2.1 * work[0] + 50


@contextmanager
def counted_calls() -> Iterator[Callable[[], int]]:
    calls = 0

    def count_one(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count_one)
    try:
        yield lambda: calls
    finally:
        sys.setprofile(None)


def test_only_as_many_calls_are_looked_for_as_are_wanted() -> None:
    call = '<tool_call>{"name":"we"}</tool_call>'
    assert texts(parse(Hermes(TOOLS, most=1), call + call)) == [["we", "{}"], call]
    assert texts(parse(Hermes(TOOLS, most=0), call)) == [call]


def test_a_message_is_told_in_deltas() -> None:
    ids = count()
    message = Message(reasoning=Think(), calls=Hermes(TOOLS), make_id=lambda: f"call_{next(ids)}")
    text = '<think>a b</think>Hi <tool_call>{"name": "we", "arguments": {"a": 1}}</tool_call>'
    text += '<tool_call>{"name": "we"}</tool_call>'
    deltas = [message.feed(letter) for letter in text] + [message.end()]
    told = [each for each in deltas if each]
    assert "".join(each.get("reasoning", "") for each in told) == "a b"
    assert all(each.get("reasoning") == each.get("reasoning_content") for each in told)
    assert "".join(each.get("content", "") for each in told) == "Hi"
    calls = [call for each in told for call in each.get("tool_calls", ())]
    assert [call["index"] for call in calls if "id" in call] == [0, 1]
    assert [call["id"] for call in calls if "id" in call] == ["call_0", "call_1"]
    arguments = ["".join(c["function"]["arguments"] for c in calls if c["index"] == i) for i in (0, 1)]
    assert arguments == ['{"a": 1}', "{}"]
    assert len([call for call in calls if call["index"] == 0]) > 5, "as they come"
    whole = Message(reasoning=Think(), calls=Hermes(TOOLS), make_id=lambda: "x").whole(text)
    assert whole["content"] == "Hi"
    assert whole["reasoning_content"] == "a b"
    assert [each["function"]["arguments"] for each in whole["tool_calls"]] == arguments
    assert "index" not in whole["tool_calls"][0]


def test_options_choose_parsers() -> None:
    def read(text: str, prompt: str = "", **more: Any) -> dict[str, Any]:
        asked = chat_request({"messages": [{"role": "user", "content": "x"}], **more}, {})
        asked = options.readable(asked)
        assert asked.params.skip_special_tokens == (asked.tool_choice != "auto")
        return options.message(asked, prompt).whole(text)

    options = ParserOptions(tool_call_parser="hermes", reasoning_parser="think", enable_auto_tool_choice=True)
    call = '<tool_call>{"name":"we"}</tool_call>'
    assert read("a</think>b", "<think>\n") == {"reasoning": "a", "reasoning_content": "a", "content": "b"}
    assert read(call)["content"] == call, "without tools"
    assert read(call, tools=TOOLS, tool_choice="none")["content"] == call
    assert read(call, tools=TOOLS)["tool_calls"][0]["function"] == {"name": "we", "arguments": "{}"}
    forced = {"type": "function", "function": {"name": "we"}}
    named = read('{"a":1}', "<think>", tools=TOOLS, tool_choice=forced)
    assert named["tool_calls"][0]["function"] == {"name": "we", "arguments": '{"a":1}'}
    listed = read('[{"name": "we", "arguments": {}}]', tools=TOOLS, tool_choice="required")
    assert listed["tool_calls"][0]["function"] == {"name": "we", "arguments": "{}"}
    assert read(call * 2, tools=TOOLS, parallel_tool_calls=False)["content"] == call
    options = ParserOptions(tool_call_parser="hermes")
    with pytest.raises(
        ValueError, match="tool_choice is 'auto'; it must be none, required or a tool, unless"
    ):
        read(call, tools=TOOLS)
    with pytest.raises(ValueError, match="enable_auto_tool_choice is True; it must be False without"):
        ParserOptions(enable_auto_tool_choice=True)
    with pytest.raises(ValueError, match="tool_call_parser is 'x'; it must be one of hermes, qwen3_coder"):
        ParserOptions(tool_call_parser="x")
    assert texts(parse(NamedCall("we"), '{"a":', "1}")) == [["we", '{"a":1}']]


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        *(("1" + "0" * 5000, {"integer"}, '"1' + "0" * 5000 + '"'), ("NaN", {"number"}, '"NaN"')),
        *(("[" * 100_000, {"array"}, '"' + "[" * 100_000 + '"'), ("[1]", {"object"}, '"[1]"')),
        *(
            (" 7 ", {"integer"}, "7"),
            ("-2.5", {"number"}, "-2.5"),
            ("7", {"number"}, "7"),
            ("1e999", {"number"}, '"1e999"'),
        ),
        *(("null", {"string", "null"}, "null"), ("null", {"string", "integer"}, '"null"')),
    ],
)
def test_a_value_is_json_whatever_it_is(text: str, types: set[str], value: str) -> None:
    assert as_json(text, frozenset(types)) == value
    json.loads(value)


def test_types_come_from_all_over_a_schema() -> None:
    circle = {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}
    assert types_of(circle, "a") == {"string"}
    told = {"a": {"enum": [1, None]}, "b": {"const": 2.5}, "c": {"type": "integer", "nullable": True}, "d": 3}
    kinds = [types_of({"properties": told}, key) for key in "abcd"]
    assert kinds == [{"integer", "null"}, {"number"}, {"integer", "null"}, {"string"}]
    assert types_of({}, "a") == types_of({"properties": []}, "a") == {"string"}
