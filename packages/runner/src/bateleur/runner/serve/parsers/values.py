"""Conversion of values in JSON, Python or bare text to JSON with the types of a schema."""

import json
import re
from collections.abc import Mapping
from itertools import islice
from math import isfinite
from typing import Any, NoReturn

from bateleur.runner.serve.openai.tools import standard_type
from bateleur.runner.structured.structural_tag import at_pointer

_DEEPEST = 16
"""Maximum depth of nested schemas that are searched for types."""
_KINDS: dict[type, str] = {
    **{str: "string", bool: "boolean", int: "integer", float: "number"},
    **{dict: "object", list: "array", type(None): "null"},
}
_INTEGER = re.compile(r"[+-]?\d{1,400}(\.0*)?")
_NUMBER = re.compile(r"[+-]?(\d{1,400}\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_PARTS = re.compile(
    r"""
      (?P<string> "(?:[^"\\]|\\.)*(?:"|\\?$) | '(?:[^'\\]|\\.)*(?:'|\\?$) )
    | (?P<open> [\[({] ) | (?P<close> [\])}] ) | (?P<comma> , ) | (?P<colon> : )
    | (?P<space> \s+ ) | (?P<word> [^\s"'\[\](){},:]+ )
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(
    r"\\(u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}


def types_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the JSON types of a key in an object schema; empty if the schema does not define the key."""
    properties = schema.get("properties")
    found: set[str] = set()
    if isinstance(properties, Mapping):
        _collect(properties.get(key), schema, found, 0)
    return frozenset(found)


def _collect(part: Any, root: Mapping[str, Any], found: set[str], depth: int) -> None:
    if not isinstance(part, Mapping) or depth > _DEEPEST:
        return
    given = part.get("type")
    for each in given if isinstance(given, list) else [given]:
        if (kind := standard_type(each)) is not None:
            found.add(kind)
    for name in ("anyOf", "oneOf", "allOf"):
        for each in part[name] if isinstance(part.get(name), list) else ():
            _collect(each, root, found, depth + 1)
    values = part["enum"] if isinstance(part.get("enum"), list) and given is None else []
    values = [*values, *([part["const"]] if "const" in part else ())]
    found.update(_KINDS[type(each)] for each in values if type(each) in _KINDS)
    if part.get("nullable") is True:
        found.add("null")
    if isinstance(part.get("$ref"), str):
        _collect(at_pointer(root, part["$ref"]), root, found, depth + 1)


def as_json(text: str, types: frozenset[str]) -> str:
    """Convert unquoted text to JSON of one of these types if possible, or else to a string."""
    bare = text.strip()
    small = bare.lower()
    if small in ("null", "none") and ("null" in types or "string" not in types):
        return "null"
    if small in ("true", "false") and "boolean" in types:
        return small
    if "integer" in types and _INTEGER.fullmatch(bare):
        return str(int(bare.partition(".")[0]))
    try:
        written = literal(bare)
    except ValueError:
        if "number" in types and _NUMBER.fullmatch(bare) and isfinite(float(bare)):
            return repr(float(bare))
        return as_string(text)
    kind = _KINDS[type(json.loads(written))]
    numeric = "number" in types and kind in ("integer", "number")
    return written if numeric or (kind in types and kind in ("object", "array")) else as_string(text)


def literal_as_json(text: str, types: frozenset[str]) -> str:
    """Convert a JSON or Python literal to JSON, of one of `types` if possible; any other text as `as_json` does."""
    try:
        written = literal(text)
    except ValueError:
        return as_json(text, types)
    value = json.loads(written)
    kind = _KINDS[type(value)]
    if not types or kind in types or kind == "null" or (kind == "integer" and "number" in types):
        return written
    if kind == "string":
        return as_json(value, types)
    converted = as_json(text, types)
    return written if converted.startswith('"') and "string" not in types else converted


def as_string(text: str) -> str:
    """Encode text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def literal(text: str, *, whole: bool = False) -> str:
    """Convert a JSON or Python literal to JSON. Unclosed strings and brackets are closed, or rejected if `whole`.

    Raises ValueError for invalid values and for values that JSON does not have, such as NaN.
    """
    try:
        try:
            _check(text)
        except ValueError:
            text = _repaired(text, whole=whole)
            _check(text)
    except RecursionError as error:
        raise ValueError("the value is nested too deeply") from error
    return text


def _check(text: str) -> None:
    json.loads(text, parse_constant=_no_value, parse_float=_finite)


def _no_value(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _finite(text: str) -> float:
    return float(text) if isfinite(float(text)) else _no_value(text)


def is_complete(text: str) -> bool:
    """Return whether the text is a complete JSON or Python literal."""
    try:
        literal(text.strip(), whole=True)
    except ValueError:
        return False
    return True


def _repaired(text: str, *, whole: bool) -> str:
    """Convert quotes, words (True, None), brackets and commas of a Python literal to JSON. whole: see `literal`."""
    parts: list[str] = []
    opened: list[str] = []
    for found in _PARTS.finditer(text):
        part = found[0]
        match found.lastgroup:
            case "string":
                ended = len(part) > 1 and part.endswith(part[0])
                if whole and not ended:
                    raise ValueError("a string is open at the end")
                parts.append(as_string(unescaped(part[1:-1] if ended else part[1:])))
            case "open":
                opened.append("}" if part == "{" else "]")
                parts.append("{" if part == "{" else "[")
            case "close":
                wanted, closed = "}" if part == "}" else "]", ""
                if wanted not in opened:
                    raise ValueError("a closing bracket has no opening bracket")
                while closed != wanted:
                    closed = opened.pop()
                    _close(parts, closed)
            case "word":
                parts.append(_WORDS.get(part, part))
            case _:
                parts.append(part)
    if whole and opened:
        raise ValueError("a bracket is open at the end")
    while opened:
        _close(parts, opened.pop())
    return "".join(parts)


def _close(parts: list[str], bracket: str) -> None:
    """Append a closing bracket to JSON tokens, without a comma before it. A missing last value becomes null."""
    while parts and (parts[-1].isspace() or parts[-1] == ","):
        parts.pop()
    if parts and parts[-1] == ":":
        parts.append("null")
    elif bracket == "}" and parts and parts[-1].startswith('"'):
        before = next((each for each in islice(reversed(parts), 1, None) if not each.isspace()), "")
        if before in ("{", ","):
            parts.append(": null")
    parts.append(bracket)


def unescaped(text: str) -> str:
    """Resolve the escapes of a JSON or Python string without quotes."""
    return _ESCAPE.sub(_character, text)


def _character(found: re.Match[str]) -> str:
    escape = found[1]
    if len(escape) > 6:  # a surrogate pair
        return str(json.loads(f'"\\{escape}"'))
    if len(escape) > 1:
        code = int(escape[1:], 16)
        return "\ufffd" if 0xD800 <= code < 0xE000 else chr(code)
    return _ESCAPES.get(escape, escape if escape in "\"'\\/" else found[0])
