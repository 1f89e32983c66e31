"""Structural tags in xgrammar's notation: parts of a text follow grammars, with free text between them.

Tags that are one token are recognised by token id, so that free text may quote their text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from bateleur.runner.structured.library import HEAD, json_grammar, lark_rules, pattern, without_anchors
from bateleur.runner.utils.arguments import mapping, refuse, shown

Texts: TypeAlias = tuple[str, ...]
_TEXT = "/(?s:.+)/"
_MAX_DEPTH = 64
"""Maximum depth of nested formats."""
_MAX_BYTES = 1 << 22
"""Maximum size of all grammars as JSON. Definitions are repeated for each property that refers to one."""
_END_OF_PARAMETER = "\n</parameter>\n"


@dataclass(frozen=True, slots=True)
class TagTokens:
    """Ids of tokens that are markup, not text: tags such as <think>, special tokens and end-of-sequence tokens."""

    tags: Mapping[str, int]
    """Ids of tags by their text: special tokens, and added tokens in the form of a tag."""
    special: frozenset[int]
    ends: frozenset[int]


def compile_structural_tag(tag: Mapping[str, Any], tokens: TagTokens, *, compact: bool) -> list[dict[str, Any]]:
    """Return grammars for llguidance; the first refers to the others. Raises ValueError that names a wrong field.

    compact: see `json_grammar`.
    """
    compiler = _Compiler(tokens, compact)
    start = compiler.format(_Part("format", mapping("format", _format_of(tag)), 0))
    return [{"lark_grammar": "\n".join([f"{HEAD}start: {start}", *compiler.rules, ""])}, *compiler.grammars]


def _property_schema(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the schema of one property as a complete schema, with the definitions that it refers to."""
    value = mapping(f"properties.{key}", _schema(schema["properties"][key]), "a JSON schema")
    return {**_definitions(schema), **value} if "$ref" in json.dumps(value) else value


def _schema(given: object) -> object:
    """Convert the JSON schemas true and false to equivalent objects. Other values are returned as they are."""
    return {} if given is True else {"not": {}} if given is False else given


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def at_pointer(schema: Any, pointer: str) -> Any:
    """Return the part of a schema at a JSON pointer such as #/$defs/City; None if there is none."""
    for step in pointer.removeprefix("#/").split("/"):
        schema = schema.get(step) if isinstance(schema, Mapping) else None
    return schema


@dataclass(frozen=True, slots=True)
class _Part:
    """A format of the request: its path for error messages, its fields, and how deep it is nested."""

    place: str
    fields: Mapping[str, Any]
    depth: int

    @property
    def kind(self) -> object:
        return self.fields.get("type")

    def inner(self, name: str, given: object = ...) -> _Part:
        place = f"{self.place}.{name}"
        return _Part(place, mapping(place, self.fields.get(name) if given is ... else given), self.depth + 1)

    def several(self, name: str) -> Iterator[_Part]:
        given = self.fields.get(name)
        if not isinstance(given, list | tuple) or not given:
            refuse(f"{self.place}.{name}", given, "a list that is not empty")
        return (self.inner(f"{name}[{i}]", each) for i, each in enumerate(given))

    def text(self, name: str) -> str:
        value = self.fields.get(name)
        return value if isinstance(value, str) else refuse(f"{self.place}.{name}", value, "text")

    def texts(self, name: str, default: object = None) -> Texts:
        value = self.fields.get(name, default)
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
            refuse(f"{self.place}.{name}", value, "a list of texts")
        return tuple(value)


class _Compiler:
    """Collects the grammar rules of one structural tag. Methods return expressions or names of rules."""

    def __init__(self, tokens: TagTokens, compact: bool) -> None:
        self._tokens, self._compact = tokens, compact
        self.rules: list[str] = []
        self.grammars: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}
        """Names of rules and grammars by their text."""
        self._num_bytes = 0
        known = sorted(tokens.tags, key=len, reverse=True)
        self._tag = re.compile("|".join(map(re.escape, known)) or "(?!)")

    def format(self, part: _Part) -> str:
        if part.depth > _MAX_DEPTH:
            raise ValueError(f"format is nested too deeply: it has more than {_MAX_DEPTH} levels")
        if part.kind == "structural_tag":
            return self.format(part.inner("format", _format_of(part.fields)))
        if not isinstance(part.kind, str) or part.kind not in _FORMATS:
            refuse(f"{part.place}.type", part.kind, f"one of {', '.join(_FORMATS)}")
        return _FORMATS[part.kind](self, part)

    def _either(self, part: _Part) -> str:
        given = part.fields.get("elements")
        if isinstance(given, list | tuple) and all(
            isinstance(each, Mapping) and each.get("type") == "const_string" for each in given
        ):
            texts = [each.text("value") for each in part.several("elements")]
            if not any(map(self._tag.search, texts)):
                return f"/{'|'.join(map(escaped, texts))}/"
        return f"({' | '.join(map(self.format, part.several('elements')))})"

    def _after_begin(self, part: _Part) -> str:
        """Return the expression of what follows the begin text of a `tag` format: its content and its end."""
        given = part.fields.get("end", "")
        ends = (given,) if isinstance(given, str) else part.texts("end")
        stops, content = tuple(filter(None, ends)), part.inner("content")
        if stops and content.kind == "any_text":
            return self._segments({}, stops, content.texts("excludes", ()))
        if stops and content.kind == "triggered_tags":
            return self._triggered(content, stops)
        return f"{self.format(content)} ({' | '.join(map(self._literal, ends))})"

    def _triggered(self, part: _Part, ends: Texts) -> str:
        triggers = part.texts("triggers")
        bodies: dict[str, list[str]] = {}
        for tag in part.several("tags"):
            begin = tag.text("begin")
            # A longer one comes too late: free text ends at the first trigger.
            trigger = min((each for each in triggers if each and begin.startswith(each)), key=len, default=None)
            if trigger is None:
                rule = f"text that begins with one of the triggers {shown(triggers)}"
                refuse(f"{tag.place}.begin", begin, rule)
            rest = f"{self._literal(begin.removeprefix(trigger))} {self._after_begin(tag)}"
            bodies.setdefault(trigger, []).append(rest)
        calls = {trigger: self._rule(" | ".join(each)) for trigger, each in bodies.items()}
        excludes = part.texts("excludes", ())
        if part.fields.get("last"):
            return self._segments(calls, (), excludes, last=True)
        once = bool(part.fields.get("stop_after_first"))
        end = f"({' | '.join(map(self._literal, ends))})" if ends else ""
        if not part.fields.get("at_least_one"):
            return self._segments(calls, ends, excludes, after=end if once else None)
        call = " | ".join(f"{self._literal(trigger)} {body}" for trigger, body in calls.items())
        return f"({call}) {end if once else self._segments(calls, ends, excludes)}"

    def _separated(self, part: _Part) -> str:
        one = self._rule(" | ".join(map(self.format, part.several("tags"))))
        separator = self._literal(part.text("separator"))
        several = one if part.fields.get("stop_after_first") else f"{one} ({separator} {one})*"
        return f"({several})" if part.fields.get("at_least_one") else f"({several})?"

    def _parameters(self, schema: Mapping[str, Any]) -> str:
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
        """Return the expression of Python keyword arguments: required ones in the schema's order, then optional ones.

        The rule of an optional argument refers to the rules of later ones, so the grammar's size is linear.
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

    def _segments(
        self, calls: Mapping[str, str], ends: Texts, excludes: Texts, *, after: str | None = None, last: bool = False
    ) -> str:
        """Return the expression of free text in which each trigger starts a call.

        calls: rules for what follows a trigger, by trigger. ends: if given, one of these texts ends the text.
        excludes: tags that the text does not have. after: expression after a call; None for more text and calls.
        last: whether the text must end with a call; xgrammar has no such option.
        """
        tags, known = (*calls, *ends, *excludes), self._tokens
        ids = known.ends | {known.tags[tag] for tag in tags if tag in known.tags}
        lead, text = f"<[^{','.join(map(str, sorted(ids)))}]>*" if ids else "<[*]>*", '""'
        if not all(tag in known.tags for tag in tags):
            lead, text = self._text(excludes, known.special - ids)
        name = f"r{len(self._names)}"
        self._names[name] = name
        after = f"{name}?" if last else name if after is None else after

        def head(tag: str) -> str:
            # Text can't contain a tag that is one token.
            return f"{text} {self._literal(tag)}" if tag in known.tags else self._text_up_to(tag, excludes)

        parts = [f"{head(trigger)} {body} {after}" for trigger, body in calls.items()]
        if parts := [*parts, *map(head, ends)]:
            parts += [] if ends or last else [text]
            self.rules.append(f"{name}: {lead} ({' | '.join(parts)})")
            return name
        return f"{lead} {text}"

    def _text(self, excludes: Texts, special: Collection[int]) -> tuple[str, str]:
        """Return the expressions of text up to the last of the tokens `special` in it, and of the text after them. It
        has none of the tags `excludes`.
        """
        barred = self._barred(excludes)
        text = self._rule(f"{_TEXT} & ~/(?s:.*)({barred})(?s:.*)/", terminal=True) if barred else _TEXT
        return f"({text}? <[{','.join(map(str, sorted(special)))}]>)*" if special else "", f"{text}?"

    def _text_up_to(self, tag: str, excludes: Texts) -> str:
        """Return the expression of free text, without the tags `excludes`, up to and including the first `tag`."""
        end, barred = escaped(tag), self._barred(excludes)
        if not barred:
            return self._lazy(f"(?s:.*){end}")
        text = self._rule(f"/(?s:.*){end}/ & ~/(?s:.*)({barred})(?s:.*){end}/", terminal=True)
        return self._rule(text, options="[lazy]")

    def _barred(self, tags: Texts) -> str:
        """Return the pattern of those tags that are not special tokens; empty if there are none."""
        known, special = self._tokens.tags, self._tokens.special
        return "|".join(escaped(tag) for tag in tags if known.get(tag) not in special)

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
        """Add a grammar rule, and return its name, for the shortest text that matches a regular expression."""
        return self._rule(f"/{regex}/", options="[lazy]")

    def _rule(self, body: str, *, options: str = "", terminal: bool = False) -> str:
        """Add a rule if it is new, and return its name. options: Lark attributes. terminal: add a Lark terminal."""
        known = f"{options}: {body}"
        if known not in self._names:
            self._names[known] = name = f"{'T' if terminal else 'r'}{len(self._names)}"
            self.rules.append(name + known)
        return self._names[known]


_FORMATS: dict[str, Callable[[_Compiler, _Part], str]] = {
    "const_string": lambda compiler, part: compiler._literal(part.text("value")),
    "json_schema": lambda compiler, part: compiler._json(f"{part.place}.json_schema", part.fields.get("json_schema")),
    "qwen_xml_parameter": lambda compiler, part: compiler._parameters(part.inner("json_schema").fields),
    "regex": lambda compiler, part: f"/{pattern(part.text('pattern'))}/",
    "grammar": lambda compiler, part: compiler._grammar({"lark_grammar": lark_rules(part.text("grammar"))}),
    "any_text": lambda compiler, part: compiler._segments({}, (), part.texts("excludes", ())),
    "sequence": lambda compiler, part: f"({' '.join(map(compiler.format, part.several('elements')))})",
    "or": _Compiler._either,
    "python_arguments": lambda compiler, part: compiler._keywords(part.inner("json_schema").fields),
    "optional": lambda compiler, part: f"({compiler.format(part.inner('content'))})?",
    "star": lambda compiler, part: f"({compiler.format(part.inner('content'))})*",
    "plus": lambda compiler, part: f"({compiler.format(part.inner('content'))})+",
    "tag": lambda compiler, part: f"({compiler._literal(part.text('begin'))} {compiler._after_begin(part)})",
    "triggered_tags": lambda compiler, part: compiler._triggered(part, ()),
    "tags_with_separator": _Compiler._separated,
}
"""Functions that return the expression of a format, by its type. An error lists the types in this order."""


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
            body, begins, ends = without_anchors(given)
            return f"{'' if begins else '(?s:.*)'}({body}){'' if ends else '(?s:.*)'}"
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
    given, tags = tag["structures"], []
    if not isinstance(given, list | tuple) or not given:
        refuse("structures", given, "a list that is not empty")
    for i, structure in enumerate(given):
        each = mapping(f"structures[{i}]", structure)
        content = {"type": "json_schema", "json_schema": each.get("schema", {})}
        tags.append({"type": "tag", "begin": each.get("begin"), "content": content, "end": each.get("end", "")})
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
