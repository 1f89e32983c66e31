"""Structural tags without an engine, with tags that are special tokens, added tokens or text."""

from __future__ import annotations

import json
from itertools import permutations
from random import Random
from typing import Any

import numpy as np
import pytest
from tag_model import KINDS, TagModel

from bateleur.runner.serve.parsers.chat_format import ReasoningPhase, answer_grammar
from bateleur.runner.serve.parsers.options import TOOL_PARSERS
from bateleur.runner.serve.parsers.tool_format import Function
from bateleur.runner.structured.grammar import Grammars
from bateleur.runner.structured.matcher import Matcher, fill
from bateleur.runner.structured_outputs import StructuredOutputsParams

llguidance = pytest.importorskip("llguidance")


class Model(TagModel):
    """The tokens that grammars allow."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.grammars = Grammars(self.tokenizer, self.size, (self.end,))

    def matcher(self, params: StructuredOutputsParams) -> Matcher:
        return self.grammars.matcher(params, {self.end}, already_compiled=True)

    def allows(self, params: StructuredOutputsParams, text: str) -> bool:
        """Return whether the whole text may be written and ended."""
        tokens = [*self.encode(text), self.end]
        return self.matcher(params).allowed_prefix(tokens) == len(tokens)


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 9},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "hot": {"type": "boolean"},
        "unit": {"enum": ["c", "f"]},
        "at": {"$ref": "#/$defs/at"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"at": {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "maxItems": 2}},
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "ping", "parameters": NOTHING}},
]
FUNCTIONS = [Function("weather", PARAMETERS), Function("ping", NOTHING)]
CALLS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "granite": '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}]',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Oslo", "days": 3}<|tool_call_end|><|tool_calls_section_end|>',
    "lfm2": '<|tool_call_start|>[weather(city="Oslo", days=3)]<|tool_call_end|>',
    "olmo3": '<function_calls>\nweather(city="Oslo", days=3)\n</function_calls>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}',
}
FOUND = ["weather", '{"city": "Oslo", "days": 3}']
NUMBER = StructuredOutputsParams(regex="[0-9]{1,3}")


def grammar(
    name: str | None, phase: ReasoningPhase, answer: StructuredOutputsParams | None, *, once: bool = False
) -> StructuredOutputsParams:
    kind = None if name is None else TOOL_PARSERS[name]
    found = answer_grammar(answer, phase, kind, FUNCTIONS, once=once)
    assert found is not None
    return found


def test_every_notation_is_tried() -> None:
    assert CALLS.keys() == TOOL_PARSERS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_calls_stand_in_free_text(model: Model, name: str) -> None:
    call, params = CALLS[name], grammar(name, "none", None)
    before = "" if name == "llama3_json" else "I look \u00e9\n"
    assert model.allows(params, "It is five. {} < <too \u00e9")
    assert model.allows(params, "")
    assert model.allows(params, before + call)
    assert not model.allows(params, before + call.replace("3", '"x"'))
    assert not model.allows(params, before + call.replace("weather", "nobody"))
    assert not model.allows(params, before + call.replace("city", "town"))
    separator = TOOL_PARSERS[name].SEPARATOR
    assert model.allows(params, call + separator + call)
    assert model.reads(name, TOOLS, model.encode(before + call)) == [*filter(None, [before.strip()]), FOUND]


@pytest.mark.parametrize("required", [[], ["b"], ["c", "a"]])
def test_keyword_arguments_come_in_order(model: Model, required: list[str]) -> None:
    properties = {"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"type": "integer"}, "d": {"type": "null"}}
    written = {"a": "a=1", "b": "b=True", "c": "c=2", "d": "d=null"}
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    found = answer_grammar(None, "none", TOOL_PARSERS["lfm2"], [Function("f", schema)], once=True)
    assert found is not None
    for keys in (each for n in range(5) for each in permutations("abcd", n)):
        order = [key for key in "abcd" if key in required] + [key for key in "abcd" if key not in required]
        right = list(keys) == [key for key in order if key in keys] and {*required} <= {*keys}
        call = f"<|tool_call_start|>[f({', '.join(written[key] for key in keys)})]<|tool_call_end|>"
        assert model.allows(found, call) == right, keys


def calling(triggers: list[str], begins: list[str], **fields: Any) -> StructuredOutputsParams:
    """Free text with calls, each a begin text, a digit and ">"."""
    tags = [
        {"type": "tag", "begin": each, "content": {"type": "regex", "pattern": "[0-9]"}, "end": ">"} for each in begins
    ]
    tag = {"type": "triggered_tags", "triggers": triggers, "tags": tags, **fields}
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": tag})


def test_text_before_a_call_has_no_excluded_text(model: Model) -> None:
    params = calling(["<f"], ["<f="], excludes=["no", "</think>"])
    for text in ("", "n", "yes", "yes<f=1>", "n<f=1>o", "<f=1> n <f=2>o", "y</thin<f=1>"):
        assert model.allows(params, text), text
    for text in ("no", "not<f=1>", "no<f=1>", "<f=1>no<f=2>", "y</think><f=1>", "<f=1></think>"):
        assert not model.allows(params, text), text
    inner = {"type": "any_text", "excludes": ["no"]}
    tag = {"type": "tag", "begin": "[", "content": inner, "end": "]"}
    params = StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": tag})
    assert [model.allows(params, text) for text in ("[n]", "[no]", "[not]")] == [True, False, False]


@pytest.mark.parametrize("triggers", [["<f", "<fo"], ["<fo", "<f"]])
def test_the_order_of_triggers_does_not_matter(model: Model, triggers: list[str]) -> None:
    params = calling(triggers, ["<fo=", "<fx="])
    for text in ("<fo=1>", "x<fx=1>y<fo=2>"):
        assert model.allows(params, text), text
    assert not model.allows(params, "x<f")


@pytest.mark.parametrize(("before", "given", "after"), [("", r"^[0-9]+\$", "x"), ("x", r"[0-9]+\$$", "")])
def test_a_dollar_sign_in_a_pattern_is_no_anchor(model: Model, before: str, given: str, after: str) -> None:
    schema = {"type": "object", "properties": {"price": {"type": "string", "pattern": given}}, "required": ["price"]}
    found = answer_grammar(None, "none", TOOL_PARSERS["qwen3_coder"], [Function("f", schema)], once=True)
    assert found is not None
    for price, right in (("10$", True), (f"{before}10${after}", True), ("10", False), (f"{after}10${before}", False)):
        call = f"<tool_call>\n<function=f>\n<parameter=price>\n{price}\n</parameter>\n</function>\n</tool_call>"
        assert model.allows(found, call) == right, price


@pytest.mark.parametrize("name", ["lfm2", "qwen3_coder"])
@pytest.mark.parametrize(("count", "length"), [(1000, 1), (600, 20_000)])
def test_large_schemas_are_compiled_or_refused(model: Model, name: str, count: int, length: int) -> None:
    """A grammar that grew with the square of the properties would take minutes."""
    definitions = {"a": {"type": "boolean", "description": "x" * length}}
    properties = {
        f"p{i}": {"type": "boolean"} if length == 1 else {"$ref": "#/$defs/a", "title": f"{i}"} for i in range(count)
    }
    schema = {"type": "object", "properties": properties, "$defs": definitions, "additionalProperties": False}
    params = answer_grammar(None, "none", TOOL_PARSERS[name], [Function("f", schema)], once=True)
    assert params is not None
    assert len(str(params.structural_tag)) < 100_000
    if length > 1:
        with pytest.raises(ValueError, match="its grammars have more than 4194304 bytes"):
            model.matcher(params)
    elif name == "lfm2":
        assert model.allows(params, "<|tool_call_start|>[f(p7=True, p999=False)]<|tool_call_end|>")


@pytest.mark.parametrize(("answer", "end"), [(None, ""), (NUMBER, "</think>5")])
def test_a_call_without_tags_around_it_follows_its_schema(
    model: Model, answer: StructuredOutputsParams | None, end: str
) -> None:
    call = CALLS["qwen3_coder"]
    bare = call.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    params = grammar("qwen3_coder", "none" if answer is None else "opened", answer)
    for before in ("", "I look \u00e9\n", call + "\n", bare, "<function=other> or <function"):
        for each in (call, bare):
            assert model.allows(params, before + each + end)
            assert not model.allows(params, before + each.replace("3", "x") + end)
            assert not model.allows(params, before + each.replace("city", "town") + end)
    assert model.reads("qwen3_coder", TOOLS, model.encode(f"Now {bare}")) == ["Now", FOUND]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", ["special", "added"])
def test_free_text_quotes_tags_in_other_tokens(name: str, kind: str) -> None:
    model = Model(kind)
    quoted = f"The tags {' '.join(TOOL_PARSERS[name].tags())} </think>".replace("<function=", "").encode()
    free = [*quoted, model.end]
    assert model.matcher(grammar(name, "none", None)).allowed_prefix(free) == len(free)
    thought = [*quoted, *model.encode("</think>5"), model.end]
    assert model.matcher(grammar(name, "opened", NUMBER)).allowed_prefix(thought) == len(thought)


@pytest.mark.parametrize("name", [*CALLS, None])
def test_an_answer_follows_the_reasoning(model: Model, name: str | None) -> None:
    opened, possible = (grammar(name, phase, NUMBER) for phase in ("opened", "possible"))
    for params, begin in ((opened, ""), (possible, "<think>\n")):
        assert model.allows(params, f"{begin}Is it 5 or {{?</think>\n\n5")
        assert not model.allows(params, f"{begin}Hm.</think>\n\nfive")
        assert not model.allows(params, f"{begin}Hm. 5")
        if name is not None:
            assert model.allows(params, f"{begin}Hm.</think>\n\n{CALLS[name]}")
            assert not model.allows(params, f"{begin}Hm.</think>\n\n{CALLS[name]}5")
    assert model.allows(possible, "5")
    assert not model.allows(possible, "five")
    assert not model.allows(opened, "5")
    if name is not None:
        assert model.allows(possible, CALLS[name])
        assert model.allows(opened, f"Hm.\n{CALLS[name]}") == (name != "llama3_json")
        assert not model.allows(grammar(name, "none", NUMBER), f"Hm. {CALLS[name]}")


@pytest.mark.parametrize("name", CALLS)
def test_one_call_is_enough(model: Model, name: str) -> None:
    call = CALLS[name]
    params = grammar(name, "none", NUMBER, once=True)
    assert model.allows(params, call)
    assert not model.allows(params, call + TOOL_PARSERS[name].SEPARATOR + call)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("seed", range(4))
def test_calls_that_are_drawn_are_read(model: Model, name: str, seed: int) -> None:
    """Whatever tokens a model draws, the parser finds calls of the schema in them."""
    rng = Random(seed)
    matcher = model.matcher(grammar(name, "none", StructuredOutputsParams(regex="never"), once=seed % 2 == 1))
    tokens = list[int]()
    while len(tokens) < 3000:
        masks = np.full((1, matcher.num_words), -1, np.int32)
        fill(llguidance.LLExecutor(), [(matcher, 0, [])], masks)
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
        wanted = [t for t in allowed if t == model.end or t in (10, 34, 93, 125) or rng.random() < 0.2]
        token = int(rng.choice(wanted or allowed.tolist()))
        if token == model.end:
            break
        if tokens[-4:] == [token] * 4:
            continue
        tokens.append(token)
        matcher.accept(token)
    else:
        pytest.fail("it never ends")
    found = model.reads(name, TOOLS, tokens)
    if found == ["never"]:
        return
    assert found
    for called, arguments in found:
        given = json.loads(arguments)
        if called == "ping":
            assert given == {}
            continue
        assert {"city", "days"} <= given.keys() <= PARAMETERS["properties"].keys()
        assert isinstance(given["city"], str)
        assert len(given["city"]) <= 9
        assert type(given["days"]) is int
        assert 0 <= given["days"] <= 99
        assert given.get("hot") in (True, False, None)
        assert given.get("unit", "c") in ("c", "f")
        assert len(given.get("at", [])) <= 2
        assert all(0 <= each <= 9 for each in given.get("at", []))
