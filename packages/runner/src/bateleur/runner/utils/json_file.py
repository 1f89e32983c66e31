"""Reads JSON files of a checkpoint folder, and names files in errors."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def errors_in(source: object) -> Iterator[None]:
    """Put the name of a file or an argument in front of the message of a ValueError that the `with` block raises."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ValueError, naming the file, if it has anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {_why(error)}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds {type(value).__name__}; it must hold a JSON object")
    return value


def _why(error: Exception) -> str:
    match error:
        case OSError():
            return str(error.strerror)
        case UnicodeDecodeError():
            return f"byte {error.start} is no UTF-8"
        case json.JSONDecodeError():
            return f"{error.msg}, line {error.lineno}, column {error.colno}"
        case RecursionError():
            return "it is nested too deeply"
    return "it holds a number of too many digits"
