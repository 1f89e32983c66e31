"""Reading the JSON files of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError naming the file when it holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path}: cannot be read as JSON: it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds {type(value).__name__}; it must hold a JSON object")
    return value
