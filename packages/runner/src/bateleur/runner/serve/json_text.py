"""Reading and writing of JSON."""

import json
from math import isinf
from typing import Any, NoReturn

from fastapi.responses import Response


def dumps(value: Any) -> bytes:
    """Encode a value as one line of JSON in UTF-8. Lone surrogates are escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def loads(data: bytes) -> Any:
    """Parse strict JSON in UTF-8. Raises ValueError with one line for invalid, too deep or too large values."""
    try:
        return json.loads(data.decode("utf-8-sig"), parse_constant=_refuse, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise ValueError(f"the body is not UTF-8: byte {error.start}") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"the body is not JSON: {error.msg}, {where}") from error
    except RecursionError as error:
        raise ValueError("the body is nested too deeply") from error
    except ValueError as error:
        message = str(error) if str(error).startswith("the body") else "the body holds a number with too many digits"
        raise ValueError(message) from error


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"the body holds {name}, which is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if isinf(number):
        raise ValueError(f"the body holds {text[:40]}, which is too large a number")
    return number


class JSONText(Response):
    """JSON response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode the content as one line of JSON."""
        return dumps(content)
