"""JSON as it is sent and as it is read."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from fastapi.responses import Response


def dumps(value: Any) -> bytes:
    """JSON on one line, in UTF-8; halves of surrogate pairs are escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def loads(data: bytes) -> Any:
    """Strict JSON. ValueError, on one line, for anything else, and for what no program could hold."""
    try:
        return json.loads(data.decode(), parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise ValueError(f"the body is no UTF-8: byte {error.start}") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"the body is no JSON: {error.msg}, {where}") from error
    except RecursionError as error:
        raise ValueError("the body is nested too deeply") from error
    except ValueError as error:
        said = (
            str(error) if str(error).startswith("the body") else "the body holds a number of too many digits"
        )
        raise ValueError(said) from error


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"the body holds {name}, which is no JSON")


class JSONText(Response):
    """A reply in JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """What is sent."""
        return dumps(content)
