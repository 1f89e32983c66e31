"""What benchmarks have measured: the JSON that lies in `benchmarks/results`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "results"


def result(name: str) -> dict[str, Any]:
    """The record that a benchmark has written under this name."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def source(name: str) -> str:
    """Where a figure comes from: file, day and command."""
    record = result(name)
    return f"[{name}.json](../benchmarks/results/{name}.json), {record['date']}, `{record['command']}`"
