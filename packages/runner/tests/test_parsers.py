"""Parsers of reasoning and tool calls, with the text divided at every position."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bateleur.runner.outputs import CompletionOutput, TextTag
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.serve.openai.replies import chat_delta, chat_message
from bateleur.runner.serve.openai.requests import ChatRequest
from bateleur.runner.serve.openai.tools import NamedTool
from bateleur.runner.serve.parsers.answer import AnswerParser
from bateleur.runner.serve.parsers.chat_format import ChatFormat
from bateleur.runner.serve.parsers.events import Arguments, Content, Event, Reasoning, ToolCall, merged
from bateleur.runner.serve.parsers.hermes import Granite, Hermes, Qwen3Coder
from bateleur.runner.serve.parsers.json_calls import ListedCalls, Llama3Json, NamedCall
from bateleur.runner.serve.parsers.kimi_k2 import KimiK2
from bateleur.runner.serve.parsers.options import ParserOptions, reasoning_parser_of, tool_parser_of
from bateleur.runner.serve.parsers.pythonic import Lfm2, Olmo3
from bateleur.runner.serve.parsers.source import TagTable
from bateleur.runner.serve.parsers.tool_format import Function, ToolFormat
from bateleur.runner.serve.parsers.values import as_json, literal_as_json, types_of
from bateleur.runner.text.chat import ChatPrompt
from bateleur.runner.text.tokenizer import NoTokenizer

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "share": {"type": ["number", "null"]},
    "deep": {"type": "object"},
    "list": {"type": "array"},
    "on": {"type": "boolean"},
    "either": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "string"}]},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "$defs": {"n": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "we"}},
]
FORMATS: dict[str, type[ToolFormat]] = {
    "hermes": Hermes,
    "qwen3_coder": Qwen3Coder,
    "granite": Granite,
    "kimi_k2": KimiK2,
    "lfm2": Lfm2,
    "olmo3": Olmo3,
    "llama3_json": Llama3Json,
    "listed": ListedCalls,
}


def parser(
    kind: type[ToolFormat] | None = None, *, opened: bool | None = None, max_calls: int | None = None
) -> AnswerParser:
    calls = None if kind is None else kind(TOOLS, max_calls)
    return AnswerParser(opened=opened, calls=calls, make_id=lambda: "id")


def message_of(reader: AnswerParser, text: str) -> dict[str, Any]:
    return chat_message(reader.feed(text) + reader.finish())


def parse(reader: AnswerParser, *pieces: str, cut: bool = False) -> list[Any]:
    """Content as it is, reasoning in a set, calls as pairs."""
    events: list[Event] = []
    for piece in pieces:
        events += reader.feed(piece)
    found: list[Any] = []
    for each in merged(events + reader.finish(cut=cut)):
        match each:
            case Content(text):
                found.append(text)
            case Reasoning(text):
                found.append({text})
            case ToolCall(_, _, name):
                found.append([name, ""])
            case Arguments(index, text):
                [call for call in found if isinstance(call, list)][index][1] += text
    return found


def check(kind: type[ToolFormat] | None, text: str, found: list[Any], **more: Any) -> None:
    """Whole, and letter by letter."""
    assert parse(parser(kind, **more), text) == found
    assert parse(parser(kind, **more), *text) == found


CALL = '<tool_call>\n{"name": "we", "arguments": {"a": 1}}\n</tool_call>'
HERMES: list[tuple[str, list[Any]]] = [
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
    ('<tool_call>{"name":"we","parameters":{"a":1}}</tool_call>', [["we", '{"a":1}']]),
    ('<tool_call>[{"name":"we","arguments":{}}, {"name":"we"}]</tool_call>', [["we", "{}"]] * 2),
    ('<tool_call>{"name":"we","arguments":{"a":"</tool_call>\n"}}</tool_call>', [["we", '{"a":"</tool_call>\\n"}']]),
    (
        "<tool_call>{'name': 'we', 'arguments': {'a': True, 'b': [None]}}</tool_call>",
        [["we", '{"a": true, "b": [null]}']],
    ),
    (
        '<tool_call>{"name":"weather","arguments":{"days":"3","city":5}}</tool_call>',
        [["weather", '{"days":3,"city":"5"}']],
    ),
    (
        '<tool_call>{"name":"we","arguments":{"a":"say "hi" now","b":2}}</tool_call>',
        [["we", '{"a":"say \\"hi\\" now","b":2}']],
    ),
    ('<tool_call>{"name":"we","arguments":{"a":1}}</tool_call>\n</tool_call>', [["we", '{"a":1}']]),
    ('<tool_call>{"name":"we","arguments":{"a":1}}', [["we", '{"a":1}']]),
    ('<tool_call>{"name":"we","arguments":{"a":1}</tool_call>', [["we", '{"a":1}']]),
    ('<tool_call>{"name":"we","arguments":{"a":[1}} oh</tool_call>b', [["we", '{"a":[1]}'], " oh</tool_call>b"]),
    ('<tool_call>{"name":"we","arguments":{"a":"cut \\', [["we", '{"a":"cut "}']]),
    ('<tool_call>{"name":"we","arguments":{"a":{"b":[tru', [["we", '{"a":"{\\"b\\":[tru"}']]),
    ('<tool_call>{"name":"we","arguments":{"a":{"b":[1, 2', [["we", '{"a":{"b":[1, 2]}}']]),
    ('<tool_call>{"name":"we","arguments":{"a":1, "b', [["we", '{"a":1}']]),
    ('<tool_call>{"name":"we","arguments":{}} oh', [["we", "{}"], " oh"]),
    ("<tool_call>\n<function=we>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", [["we", '{"a": "1"}']]),
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
    check(Hermes, text, found)


def coder(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


ENDS = "\n</parameter>\n</function>\n</tool_call>"
CITY = "<tool_call>\n<function=weather>\n<parameter=city>\n"
DAYS = "<tool_call>\n<function=weather>\n<parameter=days>\n3"
QWEN: list[tuple[str, list[Any]]] = [
    (coder("we"), [["we", "{}"]]),
    (coder("weather", city='A\n\u00e9"B\n'), [["weather", '{"city": "A\\n\u00e9\\"B\\n"}']]),
    ("x\n" + coder("weather", days="3", city="3"), ["x", ["weather", '{"days": 3, "city": "3"}']]),
    (coder("weather", days="3.0", share="null"), [["weather", '{"days": 3, "share": null}']]),
    (coder("weather", days="many", on="True"), [["weather", '{"days": "many", "on": true}']]),
    (coder("weather", deep='{"a": [1,2.5]}', share="1e3"), [["weather", '{"deep": {"a": [1,2.5]}, "share": 1e3}']]),
    (coder("weather", list="[{'a': True}, (1, None)]"), [["weather", '{"list": [{"a": true}, [1, null]]}']]),
    (coder("weather", either="4"), [["weather", '{"either": 4}']]),
    (coder("weather", either="four", other="1"), [["weather", '{"either": "four", "other": "1"}']]),
    (coder("we") + "\n" + coder("we") + "\nEnd", [["we", "{}"], ["we", "{}"], "\nEnd"]),
    ("<function=we></function>", [["we", "{}"]]),
    ("<tool_call><function=we></tool_call>.", [["we", "{}"], "."]),
    ("<function=weather><parameter=city>a<parameter=days>1</function>", [["weather", '{"city": "a", "days": 1}']]),
    # tags in values
    (CITY + "a </parameter> b" + ENDS, [["weather", '{"city": "a </parameter> b"}']]),
    (CITY + "a </function> b" + ENDS, [["weather", '{"city": "a </function> b"}']]),
    (CITY + "a </tool_call> b" + ENDS, [["weather", '{"city": "a </tool_call> b"}']]),
    (CITY + "<parameter=days>9</parameter>" + ENDS, [["weather", '{"city": "<parameter=days>9</parameter>"}']]),
    (
        CITY + "a </parameter></function></tool_call> b" + ENDS,
        [["weather", '{"city": "a </parameter></function></tool_call> b"}']],
    ),
    (CITY + coder("we", a="1") + ENDS, [["weather", json.dumps({"city": coder("we", a="1")})]]),
    # tags that are left out, repeated, or have spaces in them
    (DAYS + "\n</tool_call>", [["weather", '{"days": 3}']]),
    (DAYS + "\n</parameter>\n</tool_call>", [["weather", '{"days": 3}']]),
    (DAYS + "\n</function>\n</tool_call>", [["weather", '{"days": 3}']]),
    (DAYS + "\n</parameter>\n</function>", [["weather", '{"days": 3}']]),
    (DAYS + "\n</parameter>\n</function>\nDone.", [["weather", '{"days": 3}'], "\nDone."]),
    (DAYS + "\n</parameter>\n" + coder("we"), [["weather", '{"days": 3}'], ["we", "{}"]]),
    (DAYS + "\n</parameter>", [["weather", '{"days": 3}']]),
    (DAYS, [["weather", '{"days": 3}']]),
    (CITY + "a\n<parameter=days>\n3" + ENDS, [["weather", '{"city": "a", "days": 3}']]),
    (CITY + "a\n</para", [["weather", '{"city": "a\\n</para"}']]),
    ("<function=weather><parameter=city>\n", [["weather", '{"city": ""}']]),
    (DAYS + "\n</parameter>" + ENDS + "\n</tool_call>", [["weather", '{"days": 3}']]),
    (CITY + "a\n</parameter>\n</function>\n</function>\n</tool_call>", [["weather", '{"city": "a"}']]),
    (
        "<tool_call>\n<function=weather >\n<parameter = days>\n3\n</parameter >\n</ function>\n</tool_call>",
        [["weather", '{"days": 3}']],
    ),
    ('<tool_call>\n<function="weather">\n<parameter="days">\n3' + ENDS, [["weather", '{"days": 3}']]),
    ('<tool_call>\n{"name": "we", "arguments": {}}\n</tool_call>', [["we", "{}"]]),
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
    check(Qwen3Coder, text, found)


def test_text_between_parameters_is_content() -> None:
    text = "<function=weather>\noh <parameter=a\n<parameter=city>a</parameter></function>"
    message = message_of(AnswerParser(calls=Qwen3Coder(TOOLS), make_id=lambda: "1"), text)
    assert message["content"] == "oh <parameter=a\n"
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "a"}'


KIMI = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
LFM = "<|tool_call_start|>[{}]<|tool_call_end|>"
OTHERS: list[tuple[str, str, list[Any]]] = [
    (
        "lfm2",
        LFM.format('weather(city="a, b)", days=3), we()') + "ok",
        [["weather", '{"city": "a, b)", "days": 3}'], ["we", "{}"], "ok"],
    ),
    (
        "lfm2",
        LFM.format("weather('it's', deep={\"a\": True})"),
        [["weather", '{"city": "it\'s", "deep": {"a": true}}']],
    ),
    ("lfm2", LFM.format('weather(days="3", list=("a", 1))'), [["weather", '{"days": 3, "list": ["a", 1]}']]),
    (
        "lfm2",
        LFM.format("weather(city='''a\n\"b\" isn't''', days=3)"),
        [["weather", '{"city": "a\\n\\"b\\" isn\'t", "days": 3}']],
    ),
    ("lfm2", LFM.format('weather(city="""""", days=3)'), [["weather", '{"city": "", "days": 3}']]),
    ("llama3_json", '{"type": "function", "function": "we", "parameters": {}}', [["we", "{}"]]),
    ("lfm2", LFM.format('weather("Oslo", 4)'), [["weather", '{"city": "Oslo", "days": 4}']]),
    (
        "lfm2",
        LFM.format("""weather(city="say "hi" now"\n  days="3" list=[1, {'a': 2}] on=True share=-1.5)"""),
        [["weather", '{"city": "say \\"hi\\" now", "days": 3, "list": [1, {"a": 2}], "on": true, "share": -1.5}']],
    ),
    ("lfm2", LFM.format("weather(city=Oslo days=3) we()"), [["weather", '{"city": "Oslo", "days": 3}'], ["we", "{}"]]),
    ("lfm2", LFM.format('weather(city="days=3" == days==4")'), [["weather", '{"city": "days=3\\" == days==4"}']]),
    ("lfm2", LFM.format('{"name": "we", "arguments": {}}'), [["we", "{}"]]),
    ("lfm2", '<|tool_call_start|>[weather(city="Os', [["weather", '{"city": "Os"}']]),
    ("lfm2", "<|tool_call_start|>[weather(days=3", [["weather", '{"days": 3}']]),
    ("lfm2", LFM.format("nobody()"), [LFM.format("nobody()")]),
    ("lfm2", "[we()]", ["[we()]"]),
    (
        "olmo3",
        '<function_calls>\nweather(city="x")\nwe()\n</function_calls>',
        [["weather", '{"city": "x"}'], ["we", "{}"]],
    ),
    (
        "kimi_k2",
        "Hm.<|tool_calls_section_begin|>"
        + KIMI.format("weather", 0, '{"city": "a"}')
        + KIMI.format("we", 1, "{}")
        + "<|tool_calls_section_end|>",
        ["Hm.", ["weather", '{"city": "a"}'], ["we", "{}"]],
    ),
    ("kimi_k2", KIMI.format("we", 0, '{"a": 1'), [["we", '{"a": 1}']]),
    ("kimi_k2", KIMI.format("nobody", 0, "{}"), [KIMI.format("nobody", 0, "{}")]),
    (
        "llama3_json",
        '{"name": "weather", "parameters": {"days": 3}}; {"name": "we", "parameters": {}}',
        [["weather", '{"days": 3}'], ["we", "{}"]],
    ),
    ("llama3_json", '<|python_tag|>{"name": "we", "parameters": {"a": "b"}}', [["we", '{"a": "b"}']]),
    ("llama3_json", '{"n": 3, "name": "we"}', ['{"n": 3, "name": "we"}']),
    ("llama3_json", 'It is {"name": "we", "parameters": {}}', ['It is {"name": "we", "parameters": {}}']),
    ("granite", '<|tool_call|>[{"name": "we", "arguments": {}}, {"name": "we"}]', [["we", "{}"], ["we", "{}"]]),
    ("granite", CALL, [["we", '{"a": 1}']]),
]


@pytest.mark.parametrize(("name", "text", "found"), OTHERS)
def test_other_notations(name: str, text: str, found: list[Any]) -> None:
    check(FORMATS[name], text, found)


def test_kimi_names_its_calls() -> None:
    text = KIMI.format("weather", 7, "{}")
    message = message_of(AnswerParser(calls=KimiK2(TOOLS)), text)
    assert message["tool_calls"][0]["id"] == "functions.weather:7"


@pytest.mark.parametrize(
    ("opened", "text", "found"),
    [
        (False, "hello <think>a</think>", ["hello <think>a"]),
        (False, "\n<think>\nwell\n</think>\n\nhi ", [{"well"}, "hi "]),
        (False, "<think>\n\n</think>\n\nhi", ["hi"]),
        (False, "<think>no end </th", [{"no end </th"}]),
        (False, " <thin", [" <thin"]),
        (True, "well\n</think>hi", [{"well"}, "hi"]),
        (True, "<think>well</think>", [{"well"}]),
        (True, "never ends\n", [{"never ends\n"}]),
        (True, "</think>\nhi</think>", ["hi"]),
        (True, "a</think>b</think>c", [{"a"}, "bc"]),
        (True, "a</think>\n</think>\n\nc", [{"a"}, "c"]),
    ],
)
def test_reasoning(opened: bool, text: str, found: list[Any]) -> None:
    check(None, text, found, opened=opened)


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("call", [CALL, coder("we", a="1")])
def test_a_call_ends_reasoning_that_is_still_open(opened: bool, call: str) -> None:
    begin = "" if opened else "<think>\n"
    arguments = '{"a": 1}' if call is CALL else '{"a": "1"}'
    check(Qwen3Coder, f"{begin}I write.\n\n{call}", [{"I write."}, ["we", arguments]], opened=opened)
    check(Qwen3Coder, f"{begin}{call}\n{call}", [["we", arguments]] * 2, opened=opened)
    drafted = f"I may write {call}, or not."
    check(Qwen3Coder, f"{begin}{drafted}</think>Hi", [{drafted}, "Hi"], opened=opened)
    check(Qwen3Coder, f"{begin}Hm. <tool_call> no", [{"Hm. <tool_call> no"}], opened=opened)


# --- tags that are tokens -----------------------------------------------------------------------------------------

TAG_IDS = {1: "<think>", 2: "</think>", 3: "<tool_call>", 4: "</tool_call>"}


def tokens(*parts: str | int, hidden: Sequence[int] = ()) -> tuple[str, list[TextTag]]:
    """A text, and the places of the tags in it that are given by their ids."""
    text, tags = "", []
    for part in parts:
        shown = part if isinstance(part, str) else "" if part in hidden else TAG_IDS[part]
        if isinstance(part, int):
            tags.append(TextTag(len(text), len(text) + len(shown), part))
        text += shown
    return text, tags


@pytest.mark.parametrize("hidden", [(), (1, 2, 3, 4)])
def test_only_the_token_of_a_tag_is_the_tag(hidden: tuple[int, ...]) -> None:
    def found(*parts: str | int, opened: bool = False) -> list[Any]:
        reader = AnswerParser(opened=opened, calls=Hermes(TOOLS, table=table), table=table)
        text, tags = tokens(*parts, hidden=hidden)
        events = reader.feed(text, tags)
        return [
            getattr(each, "text", each) for each in merged(events + reader.finish()) if not isinstance(each, ToolCall)
        ]

    table, call = TagTable(TAG_IDS), '\n{"name": "we", "arguments": {"a": "</tool_call>"}}\n'
    arguments = '{"a": "</tool_call>"}'
    assert found("The tag is '</think>'.", 2, "So.", opened=True) == ["The tag is '</think>'.", "So."]
    assert found(1, "a", 2, "b", 2, "c", 1, "d", 2, "e") == ["a", "bc", "d", "e"]
    assert found("Say <tool_call>", call, "now") == [f"Say <tool_call>{call}now"]
    assert found("Hm", 3, call, 4, 4, opened=True) == ["Hm", arguments]
    assert found("Hm", 3, call, 4, 3, call, 4) == ["Hm", arguments, arguments]
    assert found("x", 3, "no", 4) == ["x<tool_call>no</tool_call>"]


# --- whatever is written ------------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=", "we", "weather", ">", "</function>", "<parameter="),
        *("city", "days", "</parameter>", "<think>", "</think>", "\n", " ", "<", "</", '{"name": "we"'),
        *("}", "]", ', "arguments": ', "{", '{"a": "', '"', "\\", "[", ",", "1", "\u00e9", "text", "null"),
        *("}}", "\x01", "(", ")", "=", "'", "\\ud83d", "<|tool_call_start|>", "<|tool_call_end|>", "None"),
        *(text for text, _ in HERMES + QWEN),
        *(text for _, text, _ in OTHERS),
    ]
)
MAKE: dict[str, Callable[[], AnswerParser]] = {
    **{name: lambda kind=kind: parser(kind) for name, kind in FORMATS.items()},  # type: ignore[misc]
    "thinking": lambda: parser(Qwen3Coder, opened=False),
    "opened": lambda: parser(Hermes, opened=True, max_calls=1),
}


@pytest.mark.parametrize("escape", [r"\ud83d", r"\ud83d" "\\", r"\ud83d\u12", r"\ud83d\ude00", r"\u12", "\\"])
def test_an_escape_before_a_possible_tag_is_that_of_the_whole_text(escape: str) -> None:
    """<tool_call> begins as an end tag of LFM2 does, and is none."""
    text = f'<|tool_call_start|>[weather(city="Os{escape}<tool_call>")]'
    whole = parse(parser(Lfm2), text)
    assert parse(parser(Lfm2), *text) == whole
    ((_, arguments),) = whole
    assert json.loads(arguments)["city"].endswith("<tool_call>")
    assert ("\ufffd" in arguments) == (escape.startswith(r"\ud83d") and "ude00" not in escape)


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(PIECES, max_size=14), data=st.data())
def test_no_cut_changes_what_is_found(pieces: list[str], data: st.DataObject) -> None:
    """Arguments are always JSON, and the same in deltas as whole."""
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    for name, make in MAKE.items():
        whole = parse(make(), text)
        assert parse(make(), *pieces) == whole, name
        assert parse(make(), *text) == whole, name
        for each in whole:
            if isinstance(each, list):
                assert isinstance(json.loads(each[1]), dict), name


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(PIECES, max_size=14))
def test_a_text_without_a_call_is_content(pieces: list[str]) -> None:
    text = "".join(pieces)
    for name in ("hermes", "qwen3_coder", "lfm2", "kimi_k2"):
        found = parse(MAKE[name](), text)
        if not any(isinstance(each, list) for each in found):
            assert "".join(found) == text


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
    message = message_of(AnswerParser(calls=Hermes(TOOLS), make_id=lambda: "1"), text)
    assert message["content"] == (before or (None if calls else ""))
    told = [each["function"] for each in message.get("tool_calls", [])]
    assert [(each["name"], json.loads(each["arguments"])) for each in told] == calls
    listed = parse(parser(ListedCalls), f"[{', '.join(objects)}]")
    assert [(name, json.loads(values)) for name, values in listed] == calls


CLOSING = ("</parameter>", "</function>", "</tool_call>")
WORDS = st.sampled_from(["a", "b c", "\u00e9", "x\ny", '"', "\\", "{", "1 < 2"])
TAGGED = st.builds(
    lambda words, tags: "".join(f"{word} {tag} " for word, tag in zip(words, tags, strict=False)) + words[-1],
    st.lists(WORDS, min_size=3, max_size=5),
    st.lists(st.sampled_from([*CLOSING, "<tool_call>", "<function=we>", "<parameter=days>", "<think>"]), max_size=4),
)
"""Text that quotes tags."""
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "city": TAGGED | st.sampled_from([*CLOSING, coder("we", a="1"), "<parameter=days>9</parameter>", ""]),
        "days": st.integers(),
        "share": st.none() | st.integers() | st.just(2.5),
        "on": st.booleans(),
        "deep": st.fixed_dictionaries({"k": TAGGED | st.none() | st.booleans()}),
        "list": st.lists(st.integers() | TAGGED, max_size=3),
    },
)


@settings(max_examples=300, deadline=None)
@given(
    values=st.lists(VALUES, min_size=1, max_size=2),
    python=st.booleans(),
    data=st.data(),
    name=st.sampled_from(["hermes", "qwen3_coder", "lfm2", "kimi_k2"]),
)
def test_values_come_back_whatever_tags_they_hold(
    values: list[dict[str, Any]], python: bool, data: st.DataObject, name: str
) -> None:
    """With any one closing tag left out the arguments are JSON of the schema's types all the same."""
    text = "\n".join(written(name, each, python=python) for each in values)
    found = parse(parser(FORMATS[name]), text)
    assert [json.loads(arguments) for _, arguments in found] == values, text
    places = [at for tag in CLOSING for at in places_of(tag, text)]
    if name != "qwen3_coder" or not places:
        return
    at = data.draw(st.sampled_from(places))
    dropped = text[:at] + text[text.index(">", at) + 1 :]
    pieces = [dropped[i : i + 3] for i in range(0, len(dropped), 3)]
    found = parse(parser(FORMATS[name]), dropped)
    assert parse(parser(FORMATS[name]), *pieces) == found
    calls = [each for each in found if isinstance(each, list)]
    assert calls
    for _, arguments in calls:
        for key, value in json.loads(arguments).items():
            assert isinstance(value, (TYPES.get(key) or object)), (key, value)


TYPES: dict[str, Any] = {
    **{"city": str, "on": bool, "deep": dict, "list": list},
    **{"days": int, "share": (int, float, type(None))},
}


def places_of(tag: str, text: str) -> list[int]:
    """Where a tag stands on a line of its own."""
    found, at = [], text.find(f"\n{tag}")
    while at >= 0:
        found.append(at + 1)
        at = text.find(f"\n{tag}", at + 1)
    return found


def written(name: str, values: dict[str, Any], *, python: bool) -> str:
    """A call of `weather` as a model writes it."""
    note: Callable[[Any], str] = repr if python else lambda each: json.dumps(each, ensure_ascii=False)
    match name:
        case "hermes":
            body = note({"name": "weather", "arguments": values})
            return f"<tool_call>\n{body}\n</tool_call>"
        case "qwen3_coder":
            texts = {key: each if isinstance(each, str) else note(each) for key, each in values.items()}
            return coder("weather", **texts)
        case "lfm2":
            keywords = ", ".join(f"{key}={note(each)}" for key, each in values.items())
            return f"<|tool_call_start|>[weather({keywords})]<|tool_call_end|>"
    return KIMI.format("weather", 0, note(values))


# --- cost ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "hostile",
    [
        *("<", " ", "<tool_call>", "<tool_call>{", "<function=", "<function=we>", "[", "\n", "</tool_call> "),
        *('<tool_call>{"name":"we","arguments":{"a":"', "<function=weather><parameter=city>", "<parameter="),
        *('<tool_call>{"name":"we","arguments":{}}</tool_call>', "<think>", '"', "\\", "{", "</parameter>"),
    ],
)
def test_work_grows_as_the_text_does(hostile: str) -> None:
    """Counted in calls of functions, for the text as a whole and letter by letter."""
    for name in ("hermes", "qwen3_coder", "thinking", "lfm2", "llama3_json"):
        for cut in (False, True):
            work = []
            for size in (1500, 3000):
                text = hostile * (size // len(hostile))
                reader = MAKE[name]()
                with counted_calls() as calls:
                    for piece in text if cut else [text]:
                        reader.feed(piece)
                    reader.finish()
                work.append(calls())
            assert work[1] <= 2.2 * work[0] + 80, (name, cut)


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


def test_arguments_come_as_they_are_written() -> None:
    for kind, text in ((Hermes, CALL.replace("1", '"a long text"')), (Qwen3Coder, coder("we", a="a long text"))):
        parts = [event.text for letter in text for event in PARSERS[kind].feed(letter) if isinstance(event, Arguments)]
        assert len(parts) > 8


PARSERS: dict[type[ToolFormat], AnswerParser] = {kind: parser(kind) for kind in (Hermes, Qwen3Coder)}


# --- forced calls, and calls that were cut ------------------------------------------------------------------------


def test_only_as_many_calls_are_looked_for_as_are_wanted() -> None:
    call = '<tool_call>{"name":"we"}</tool_call>'
    assert parse(parser(Hermes, max_calls=1), call + call) == [["we", "{}"], call]
    assert parse(parser(Hermes, max_calls=0), call) == [call]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            '[{"name":"weather","arguments":{"days":3}},{"name":"we","arguments":{}}]',
            [["weather", '{"days":3}'], ["we", "{}"]],
        ),
        ('[{"name":"weather","arguments":{"city":"Os', [["weather", '{"city":"Os']]),
        ('[{"name":"weather","argu', [["weather", ""]]),
        ('[{"name":"weather"', [["weather", ""]]),
        ('[{"name":"wea', [["weather", ""]]),
        ('[{"name":"w', []),
        ('[{"na', []),
    ],
)  # fmt: skip
def test_a_forced_call_that_is_cut_is_a_call(text: str, found: list[Any]) -> None:
    assert parse(parser(ListedCalls), text, cut=True) == found
    assert parse(parser(ListedCalls), *text, cut=True) == found


def test_a_named_call_is_passed_on_as_it_is() -> None:
    for pieces in (['{"a":', "1}"], ['{"a":1}'], ['\n{"a":1}']):
        assert parse(AnswerParser(calls=NamedCall(TOOLS[1:]), make_id=lambda: "id"), *pieces) == [["we", '{"a":1}']]


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name":"weather","arguments":{"city":"Os', '{"city":"Os'),
        ("hermes", '<tool_call>{"name":"weather","arguments":{"days":3', '{"days":'),
        ("qwen3_coder", CITY + "Os", '{"city": "Os'),
        ("qwen3_coder", DAYS, '{"days": '),
        ("lfm2", '<|tool_call_start|>[weather(city="Os', '{"city": "Os'),
        ("kimi_k2", KIMI.format("weather", 0, '{"city": "Os').removesuffix("<|tool_call_end|>"), '{"city": "Os'),
    ],
)
def test_a_call_that_is_cut_has_the_arguments_so_far(name: str, text: str, arguments: str) -> None:
    """It is not closed, so that nobody takes half a file for a whole one."""
    assert parse(parser(FORMATS[name]), *text, cut=True) == [["weather", arguments]]


# --- messages and values ------------------------------------------------------------------------------------------


def test_message_deltas() -> None:
    ids = count()
    answer = AnswerParser(opened=False, calls=Hermes(TOOLS), make_id=lambda: f"call_{next(ids)}")
    text = '<think>a b</think>Hi <tool_call>{"name": "we", "arguments": {"a": 1}}</tool_call>'
    text += '<tool_call>{"name": "we"}</tool_call>'
    pieces = [*map(answer.feed, text), answer.finish()]
    told = [delta for events in pieces if (delta := chat_delta(events))]
    assert "".join(each.get("reasoning", "") for each in told) == "a b"
    assert all(each.get("reasoning") == each.get("reasoning_content") for each in told)
    assert "".join(each.get("content", "") for each in told) == "Hi"
    calls = [call for each in told for call in each.get("tool_calls", ())]
    assert [call["index"] for call in calls if "id" in call] == [0, 1]
    assert [call["id"] for call in calls if "id" in call] == ["call_0", "call_1"]
    arguments = ["".join(c["function"]["arguments"] for c in calls if c["index"] == i) for i in (0, 1)]
    assert arguments == ['{"a": 1}', "{}"]
    whole = message_of(AnswerParser(opened=False, calls=Hermes(TOOLS), make_id=lambda: "x"), text)
    assert whole["content"] == "Hi"
    assert whole["reasoning_content"] == "a b"
    assert [each["function"]["arguments"] for each in whole["tool_calls"]] == arguments
    assert "index" not in whole["tool_calls"][0]


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        *(("1" + "0" * 5000, {"integer"}, '"1' + "0" * 5000 + '"'), ("NaN", {"number"}, '"NaN"')),
        *(("[" * 100_000, {"array"}, '"' + "[" * 100_000 + '"'), ("[1]", {"object"}, '"[1]"')),
        *((" 7 ", {"integer"}, "7"), ("-2.5", {"number"}, "-2.5"), ("7", {"number"}, "7")),
        *((".5", {"number"}, "0.5"), ("1e999", {"number"}, '"1e999"'), ("True", {"boolean"}, "true")),
        *(("null", {"string", "null"}, "null"), ("null", {"string", "integer"}, '"null"')),
        *(("None", {"integer"}, "null"), ("{'a': 'it''s'}", {"object"}, "\"{'a': 'it''s'}\"")),
    ],
)
def test_a_value_is_json_whatever_it_is(text: str, types: set[str], value: str) -> None:
    assert as_json(text, frozenset(types)) == value
    json.loads(value)


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        *(('"4"', {"integer"}, "4"), ("4", {"string"}, '"4"'), ("4", set(), "4"), ("4.0", {"integer"}, "4")),
        *(("true", {"string"}, '"true"'), ("null", {"string"}, "null"), ("[1]", {"object"}, "[1]")),
        *(('"[1]"', {"array"}, "[1]"), ("{'a': None}", {"object"}, '{"a": null}'), ("4", {"number"}, "4")),
        *(('"a\\u00e9\\ud83d"', set(), '"a\\u00e9\\ud83d"'), ("'a\\ud83d'", set(), '"a\ufffd"')),
        # a last key without a value
        *(('{"x":1,"a', {"object"}, '{"x":1,"a": null}'), ('{"x": 1, "a', {"object"}, '{"x": 1, "a": null}')),
        *(('{ "a"', {"object"}, '{ "a": null}'), ("{'x': {\n\t'a", {"object"}, '{"x": {\n\t"a": null}}')),
        ('{"x": "a', {"object"}, '{"x": "a"}'),
    ],
)
def test_a_literal_becomes_a_value_of_the_schema(text: str, types: set[str], value: str) -> None:
    assert literal_as_json(text, frozenset(types)) == value


def test_types_come_from_all_over_a_schema() -> None:
    circle = {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}
    assert types_of(circle, "a") == frozenset()
    deep = {"properties": {"a": {"enum": ["x", 1]}, "b": {"const": True}, "c": {"nullable": True, "type": "int"}}}
    assert [types_of(deep, key) for key in "abcd"] == [{"string", "integer"}, {"boolean"}, {"integer", "null"}, set()]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("int", "integer"), ("float", "number"), ("bool", "boolean"), ("dict", "object"), ("list", "array")),
        *(("List[str]", "array"), ("dict[str, int]", "object"), ("str", "string"), ("string", "string")),
    ],
)
def test_types_have_other_names(name: str, kind: str) -> None:
    assert types_of({"properties": {"a": {"type": name}}}, "a") == {kind}


# --- which parser fits a model ------------------------------------------------------------------------------------

TEMPLATES = {
    "qwen3_coder": "{% if tools %}<tool_call>\n<function=name>\n<parameter=key>",
    "hermes": '{% if tools %}<tool_call>\n{"name": <function-name>}',
    "lfm2": "{% if tools %}List of tools: <|tool_list_start|>",
    "kimi_k2": "{% if tools %}<|tool_calls_section_begin|><|tool_call_begin|>",
    "olmo3": "{% if tools %}<function_calls></function_calls>",
    "granite": "{% if tools %}<|tool_call|>[",
    "llama3_json": '{% if tools %}{"name": name, "parameters": dictionary}',
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_chat_template_tells_the_notation(name: str) -> None:
    assert tool_parser_of(TEMPLATES[name], ()) == name
    assert tool_parser_of(TEMPLATES[name].replace("tools", "x"), ()) is None, "the model is told of no tools"
    found = ChatFormat(ParserOptions(chat_template=TEMPLATES[name]), NoTokenizer())
    assert (found.tool_call_parser, found.reasoning_parser) == (name, None)


def test_tags_of_the_tokenizer_tell_what_the_template_leaves_out() -> None:
    assert tool_parser_of("{{ tools }}", ("<|tool_call_start|>",)) == "lfm2"
    assert tool_parser_of("{{ tools }}", ()) is None
    assert reasoning_parser_of("", ("</think>",)) == reasoning_parser_of("a</think>", ()) == "think"
    assert reasoning_parser_of("{{ messages }}", ()) is None


@pytest.mark.parametrize("name", ["x{name}", 'x"{name}"'])
def test_a_tool_may_be_named_as_its_place_in_a_grammar(name: str) -> None:
    function = Function(name, {})
    begins = [each.call_tags([function], once=False)[-1]["begin"] for each in (Hermes, Llama3Json, Qwen3Coder)]
    quoted = json.dumps(name)
    assert begins == [
        f'<tool_call>\n{{"name": {quoted}, "arguments": ',
        f'{{"name": {quoted}, "parameters": ',
        f"<function={name}>\n",
    ]


@pytest.mark.parametrize("given", ["hermes", "qwen3_xml", "nemotron_v3", "none", "auto", None])
def test_names_of_vllm_are_ours(given: str | None) -> None:
    ours = {"qwen3_xml": "qwen3_coder", "nemotron_v3": "qwen3_coder", None: "none"}.get(given, given)
    assert ParserOptions(tool_call_parser=given).tool_call_parser == ours  # type: ignore[arg-type]


def test_an_option_can_be_said() -> None:
    assert ParserOptions(reasoning_parser="deepseek_r1").reasoning_parser == "think"
    found = ChatFormat(ParserOptions(tool_call_parser="lfm2", reasoning_parser="none"), NoTokenizer())
    assert (found.tool_call_parser, found.reasoning_parser) == ("lfm2", None)
    with pytest.raises(ValueError, match="tool_call_parser is 'x'; it must be one of auto, none, granite, hermes"):
        ParserOptions(tool_call_parser="x")
    with pytest.raises(ValueError, match=r"tool_choice is 'auto'; .* unless --tool-call-parser is given"):
        ChatFormat(ParserOptions(), NoTokenizer()).prepare(chat(tools=TOOLS, tool_choice="auto"), PROMPT)
    off = ParserOptions(tool_call_parser="hermes", enable_auto_tool_choice=False)
    with pytest.raises(ValueError, match=r"tool_choice is 'auto'; .* unless --enable-auto-tool-choice is given"):
        ChatFormat(off, NoTokenizer()).prepare(chat(tools=TOOLS, tool_choice="auto"), PROMPT)


PROMPT = ChatPrompt(prompt="Hi", prompt_token_ids=[1])


def chat(**more: Any) -> ChatRequest:
    return ChatRequest(params=SamplingParams(), messages=(), **more)


def test_a_turn_reads_what_its_request_may_contain() -> None:
    def read(text: str, prompt: str = "Hi", **more: Any) -> list[Any]:
        given = ChatPrompt(prompt=prompt, prompt_token_ids=[1])
        turn = chat_format.prepare(chat(**more), given)
        assert turn.params.return_tags
        done = CompletionOutput(0, text, [1], None, None, "stop", None)
        return [getattr(each, "text", getattr(each, "finish_reason", each)) for each in turn.reader().read(done)]

    chat_format = ChatFormat(ParserOptions(tool_call_parser="hermes", reasoning_parser="think"), NoTokenizer())
    call = '<tool_call>{"name":"we"}</tool_call>'
    assert read("a</think>b", "Hi <think>\n") == ["a", "b", "stop"]
    assert read(call) == [call, "stop"]
    assert read(call, tools=TOOLS, tool_choice="none") == [call, "stop"]
    assert read(call, tools=TOOLS, tool_choice="auto")[1:] == ["{}", "tool_calls"]
    assert read('{"a":1}', tools=TOOLS, tool_choice=NamedTool("we"))[1:] == ['{"a":1}', "tool_calls"]
    assert read('[{"name": "we", "arguments": {}}]', tools=TOOLS, tool_choice="required")[1:] == ["{}", "tool_calls"]
    once = read(call * 2, tools=TOOLS, tool_choice="auto", parallel_tool_calls=False)
    assert once[1:] == ["{}", call, "tool_calls"]
