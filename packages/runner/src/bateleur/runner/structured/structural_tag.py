"""Structural tags in xgrammar's notation: parts of a text follow grammars, with free text between them.

Tags that are one token of the model are recognised by token id, so that free text may quote their text. Other tags are
recognised in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bateleur.runner.structured.library import HEAD, json_grammar, lark_rules, pattern
from bateleur.runner.utils.arguments import mapping, refuse, shown

_TEXT = "/(?s:.+)/"
_MAX_DEPTH = 64
"""Maximum depth of nested formats."""
_MAX_BYTES = 1 << 22
"""Maximum size of all grammars as JSON. Definitions are repeated for each property that refers to one."""
_END_OF_PARAMETER = "\n</parameter>\n"
_REPEATS = {"optional": "?", "star": "*", "plus": "+"}
_TYPES = (
    *("const_string", "json_schema", "qwen_xml_parameter", "regex", "grammar", "any_text", "sequence", "or"),
    *("python_arguments", "optional", "star", "plus", "tag", "triggered_tags", "tags_with_separator"),
)


@dataclass(frozen=True, slots=True)
class TagTokens:
    """Tokens of a model that are markup, not text: tags, special tokens and end-of-sequence tokens."""

    tags: Mapping[str, int]
    """Ids of tags by their text: special tokens, and added tokens in the form of a tag."""
    special: frozenset[int]
    ends: frozenset[int]


def compile_structural_tag(tag: Mapping[str, Any], tokens: TagTokens, *, compact: bool) -> list[dict[str, Any]]:
    """Return grammars for llguidance; the first refers to the others. compact: allow no white space in JSON.

    Raises ValueError that names a wrong field.
    """
    compiler = _Compiler(tokens, compact)
    start = compiler.format("format", _format_of(tag), 0)
    rules = "\n".join([f"start: {start}", *compiler.rules])
    return [{"lark_grammar": f"{HEAD}{rules}\n"}, *compiler.grammars]


def _property_schema(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the schema of one property as a complete schema, with the definitions that it refers to."""
    value = mapping(f"properties.{key}", _schema(schema["properties"][key]), "a JSON schema")
    return {**_definitions(schema), **value} if "$ref" in json.dumps(value) else value


def _schema(given: object) -> object:
    """Return a schema that is true or false as an object."""
    return {} if given is True else {"not": {}} if given is False else given


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def at_pointer(schema: Any, pointer: str) -> Any:
    """Return the part of a schema at a JSON pointer such as #/$defs/City; None if there is none."""
    for step in pointer.removeprefix("#/").split("/"):
        schema = schema.get(step) if isinstance(schema, Mapping) else None
    return schema


class _Compiler:
    """Collects the grammar rules of one structural tag. Methods return expressions or names of rules.

    place: path of a format in the request, for messages. part: a format. depth: nesting depth.
    """

    def __init__(self, tokens: TagTokens, compact: bool) -> None:
        self._tokens, self._compact = tokens, compact
        self.rules: list[str] = []
        self.grammars: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}
        """Names of rules and grammars by their text."""
        self._num_bytes = 0
        known = sorted(tokens.tags, key=len, reverse=True)
        self._tag = re.compile("|".join(map(re.escape, known)) or "(?!)")

    def format(self, place: str, given: object, depth: int) -> str:
        part = mapping(place, given)
        if depth > _MAX_DEPTH:
            raise ValueError(f"format is nested too deeply: it has more than {_MAX_DEPTH} levels")
        match part.get("type"):
            case "sequence" | "or":
                return self._elements(place, part, depth)
            case "optional" | "star" | "plus" as kind:
                content = self.format(f"{place}.content", part.get("content"), depth + 1)
                return f"({content}){_REPEATS[kind]}"
            case "tag":
                begin = self._literal(_text(f"{place}.begin", part.get("begin")))
                return f"({begin} {self._after_begin(place, part, depth)})"
            case "structural_tag":
                return self.format(f"{place}.format", _format_of(part), depth + 1)
            case "triggered_tags":
                return self._triggered(place, part, (), depth)
            case "tags_with_separator":
                return self._separated(place, part, depth)
        return self._leaf(place, part)

    def _leaf(self, place: str, part: Mapping[str, Any]) -> str:
        """Return the grammar expression of a format without inner formats."""

        def text(name: str) -> str:
            return _text(f"{place}.{name}", part.get(name))

        match part.get("type"):
            case "const_string":
                return self._literal(text("value"))
            case "json_schema":
                return self._json(f"{place}.json_schema", part.get("json_schema"))
            case "qwen_xml_parameter":
                return self._parameters(mapping(f"{place}.json_schema", part.get("json_schema")))
            case "python_arguments":
                return self._keywords(mapping(f"{place}.json_schema", part.get("json_schema")))
            case "regex":
                return f"/{pattern(text('pattern'))}/"
            case "grammar":
                return self._grammar({"lark_grammar": lark_rules(text("grammar"))})
            case "any_text":
                return self._segments({}, (), _texts(f"{place}.excludes", part.get("excludes", ())))
        refuse(f"{place}.type", part.get("type"), f"one of {', '.join(_TYPES)}")

    # --- formats ---------------------------------------------------------------------------------------------

    def _elements(self, place: str, part: Mapping[str, Any], depth: int) -> str:
        given = _several(f"{place}.elements", part.get("elements"))
        between = " " if part["type"] == "sequence" else " | "
        if between == " | " and all(isinstance(each, Mapping) and each.get("type") == "const_string" for each in given):
            texts = [_text(f"{place}.elements[{i}].value", each.get("value")) for i, each in enumerate(given)]
            if not any(map(self._tag.search, texts)):
                return f"/{'|'.join(map(escaped, texts))}/"
        elements = [self.format(f"{place}.elements[{i}]", each, depth + 1) for i, each in enumerate(given)]
        return f"({between.join(elements)})"

    def _after_begin(self, place: str, part: Mapping[str, Any], depth: int) -> str:
        """Return the expression of what follows the begin text of a `tag` format: its content and its end."""
        given = part.get("end", "")
        ends = (given,) if isinstance(given, str) else _texts(f"{place}.end", given)
        stops = tuple(filter(None, ends))
        at, content = f"{place}.content", mapping(f"{place}.content", part.get("content"))
        if stops and content.get("type") == "any_text":
            return self._segments({}, stops, _texts(f"{at}.excludes", content.get("excludes", ())))
        if stops and content.get("type") == "triggered_tags":
            return self._triggered(at, content, stops, depth + 1)
        return f"{self.format(at, content, depth + 1)} ({' | '.join(map(self._literal, ends))})"

    def _triggered(self, place: str, part: Mapping[str, Any], ends: Sequence[str], depth: int) -> str:
        """Return the expression of a `triggered_tags` format, and of one of the texts `ends` after it, if any."""
        triggers = _texts(f"{place}.triggers", part.get("triggers"))
        bodies: dict[str, list[str]] = {}
        for i, each in enumerate(_several(f"{place}.tags", part.get("tags"))):
            at, tag = f"{place}.tags[{i}]", mapping(f"{place}.tags[{i}]", each)
            begin = _text(f"{at}.begin", tag.get("begin"))
            trigger = next((trigger for trigger in triggers if trigger and begin.startswith(trigger)), None)
            if trigger is None:
                refuse(f"{at}.begin", begin, f"text that begins with one of the triggers {shown(triggers)}")
            rest = f"{self._literal(begin.removeprefix(trigger))} {self._after_begin(at, tag, depth + 1)}"
            bodies.setdefault(trigger, []).append(rest)
        calls = {trigger: self._rule(" | ".join(each)) for trigger, each in bodies.items()}
        excludes = _texts(f"{place}.excludes", part.get("excludes", ()))
        if part.get("last"):
            return self._segments(calls, (), excludes, last=True)
        once, first = bool(part.get("stop_after_first")), bool(part.get("at_least_one"))
        end = f"({' | '.join(map(self._literal, ends))})" if ends else ""
        if not first:
            return self._segments(calls, ends, excludes, after=end if once else None)
        call = " | ".join(f"{self._literal(trigger)} {body}" for trigger, body in calls.items())
        return f"({call}) {end if once else self._segments(calls, ends, excludes)}"

    def _separated(self, place: str, part: Mapping[str, Any], depth: int) -> str:
        """Return the expression of a `tags_with_separator` format."""
        given = _several(f"{place}.tags", part.get("tags"))
        tags = [self.format(f"{place}.tags[{i}]", each, depth + 1) for i, each in enumerate(given)]
        one = self._rule(" | ".join(tags))
        separator = self._literal(_text(f"{place}.separator", part.get("separator")))
        several = one if part.get("stop_after_first") else f"{one} ({separator} {one})*"
        return f"({several})" if part.get("at_least_one") else f"({several})?"

    def _parameters(self, schema: Mapping[str, Any]) -> str:
        """Return the expression of a function's parameters in Qwen3-Coder's notation, in the order of the schema."""
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            if schema.get("additionalProperties") is False:
                return '""'
            value = self._lazy(f"(?s:.*){escaped(_END_OF_PARAMETER)}")
            return rf"({self._literal('<parameter=')} /[^<>\n=]{{1,64}}>\n/ {value})*"
        parts = []
        for key in properties:
            single = _property_schema(schema, key)
            begin, text = self._literal(f"<parameter={key}>\n"), _pattern_of_text(single)
            if text is None:
                rest = f"{self._json(key, single)} {self._literal(_END_OF_PARAMETER)}"
            else:
                rest = self._lazy(f"({pattern(text)}){escaped(_END_OF_PARAMETER)}")
            required = key in (schema.get("required") or ())
            parts.append(f"{begin} {rest}" if required else f"({begin} {rest})?")
        return " ".join(parts)

    def _keywords(self, schema: Mapping[str, Any]) -> str:
        """Return keyword arguments in Python's notation: required ones in the order of the schema, then optional ones.

        Each optional argument gets one rule that refers to the rules of later ones, so the grammar's size is linear.
        """
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            one = f"/[A-Za-z_][A-Za-z0-9_]{{0,63}}=/ {self._json('json_schema', {})}"
            return '""' if schema.get("additionalProperties") is False else f'({one} (", " {one})*)?'
        required = set(map(str, schema.get("required") or ()))
        needed: list[str] = []
        first, after = '""', '""'
        for key in reversed(properties):
            single = _property_schema(schema, key)
            value = "/True|False/" if single.get("type") == "boolean" else self._json(key, single)
            one = self._rule(f"{self._literal(f'{key}=')} {value}")
            if key in required:
                needed.insert(0, one)
            else:
                first, after = self._rule(f"{one} {after} | {first}"), self._rule(f'(", " {one})? {after}')
        return ' ", " '.join(needed) + f" {after}" if needed else first

    # --- parts of rules --------------------------------------------------------------------------------------

    def _segments(
        self,
        calls: Mapping[str, str],
        ends: Sequence[str],
        excludes: Sequence[str],
        *,
        after: str | None = None,
        last: bool = False,
    ) -> str:
        """Return the expression of free text in which each trigger starts a call.

        calls: rules for what follows a trigger, by trigger. ends: if given, one of these texts ends the text.
        excludes: tags that the text does not have.
        after: expression that follows a call, instead of more text. last: whether the text ends with a call.
        """
        tags, known = (*calls, *ends, *excludes), self._tokens
        ids = known.ends | {known.tags[tag] for tag in tags if tag in known.tags}
        if all(tag in known.tags for tag in tags):
            text = f"<[^{','.join(map(str, sorted(ids)))}]>*" if ids else "<[*]>*"
            head: Callable[[str], str] = self._literal
        else:
            text, head = self._text(excludes, known.special - ids), self._text_up_to
        name = f"r{len(self._names)}"
        self._names[name] = name
        after = f"{name}?" if last else name if after is None else after
        parts = [f"{head(trigger)} {body} {after}" for trigger, body in calls.items()]
        if parts := [*parts, *map(head, ends)]:
            self.rules.append(f"{name}: {text} ({' | '.join(parts)}){'' if ends or last else '?'}")
            return name
        return text

    def _text(self, excludes: Sequence[str], special: Collection[int]) -> str:
        """Return the expression of text without the tags `excludes`, in which the tokens `special` may occur."""
        tags, specials = self._tokens.tags, self._tokens.special
        texts = "|".join(escaped(tag) for tag in excludes if tags.get(tag) not in specials)
        text = self._rule(f"{_TEXT} & ~/(?s:.*)({texts})(?s:.*)/", terminal=True) if texts else _TEXT
        return f"({text} | <[{','.join(map(str, sorted(special)))}]>)*" if special else f"{text}?"

    def _text_up_to(self, tag: str) -> str:
        """Return the expression of text that ends with its first occurrence of a tag.

        If the tag is one token, free text can't contain it, so the expression is only the tag.
        """
        return self._literal(tag) if tag in self._tokens.tags else self._lazy(f"(?s:.*){escaped(tag)}")

    def _literal(self, text: str) -> str:
        """Return the expression of exactly this text, with token ids for tags that are tokens."""
        parts, at = [], 0
        for found in self._tag.finditer(text):
            parts += [_quoted(text[at : found.start()]), f"<[{self._tokens.tags[found[0]]}]>"]
            at = found.end()
        return " ".join(filter(None, [*parts, _quoted(text[at:])])) or '""'

    def _json(self, place: str, schema: object) -> str:
        return self._grammar(json_grammar(mapping(place, _schema(schema)), compact=self._compact))

    def _grammar(self, grammar: Mapping[str, Any]) -> str:
        """Add a grammar if it is new, and return a reference to it."""
        known = json.dumps(grammar)
        if known not in self._names:
            self._names[known] = name = f"g{len(self._names)}"
            self.grammars.append({"name": name, **grammar})
            self._num_bytes += len(known)
            if self._num_bytes > _MAX_BYTES:
                raise ValueError(f"its grammars have more than {_MAX_BYTES} bytes, with definitions for each property")
        return f"@{self._names[known]}"

    def _lazy(self, regex: str) -> str:
        """Return a rule for the shortest text that matches a regular expression."""
        return self._rule(f"/{regex}/", options="[lazy]")

    def _rule(self, body: str, *, options: str = "", terminal: bool = False) -> str:
        """Add a rule if it is new, and return its name. options: Lark attributes. terminal: it is a Lark terminal."""
        known = f"{options}: {body}"
        if known not in self._names:
            self._names[known] = name = f"{'T' if terminal else 'r'}{len(self._names)}"
            self.rules.append(name + known)
        return self._names[known]


def escaped(text: str) -> str:
    """Return a pattern that matches exactly this text."""
    return "".join(c if c.isalnum() or not c.isascii() else f"\\x{ord(c):02X}" for c in text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _pattern_of_text(schema: Mapping[str, Any]) -> str | None:
    """Return the pattern of a string that is written without quotes; None if the value is written as JSON."""
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found = at_pointer(schema, reference)
        if isinstance(found, Mapping) and found.get("$ref") != reference:
            return _pattern_of_text({**_definitions(schema), **found})
    single = [schema["const"]] if "const" in schema else []
    values = schema["enum"] if isinstance(schema.get("enum"), list) else single
    if any(isinstance(each, str) for each in values):
        return "|".join(escaped(each if isinstance(each, str) else json.dumps(each)) for each in values)
    kind = schema.get("type")
    if kind == "string":
        if isinstance(given := schema.get("pattern"), str):
            begin, end = "" if given.startswith("^") else "(?s:.*)", "" if given.endswith("$") else "(?s:.*)"
            return f"{begin}({given.removeprefix('^').removesuffix('$')}){end}"
        if "minLength" in schema or "maxLength" in schema:
            return f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})"
        return "(?s:.*)"
    parts = [each for name in ("anyOf", "oneOf") for each in schema.get(name) or () if isinstance(each, Mapping)]
    holds = "string" in kind if isinstance(kind, list) else any(_pattern_of_text(each) for each in parts)
    return "(?s:.*)" if holds or not (values or schema.keys() - _SILENT) else None


_SILENT = {"description", "title", "default", "examples", "deprecated", "$defs", "definitions"}
"""Fields of a schema that do not restrict values."""


def _format_of(tag: Mapping[str, Any]) -> object:
    """Return the format of a structural tag. An older notation with structures and triggers is converted."""
    if "structures" not in tag:
        return tag.get("format")
    tags = [
        {
            **{"type": "tag", "begin": each.get("begin"), "end": each.get("end", "")},
            "content": {"type": "json_schema", "json_schema": each.get("schema", {})},
        }
        for i, given in enumerate(_several("structures", tag["structures"]))
        for each in [mapping(f"structures[{i}]", given)]
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


def _text(place: str, value: object) -> str:
    if not isinstance(value, str):
        refuse(place, value, "text")
    return value


def _several(place: str, value: object) -> Sequence[Any]:
    if not isinstance(value, list | tuple) or not value:
        refuse(place, value, "a list that is not empty")
    return value


def _texts(place: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        refuse(place, value, "a list of texts")
    return tuple(value)
