"""Requests and results as Parquet files: a row is a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

_ROWS = 1024
"""Read or written at once."""


def is_parquet(path: str | Path) -> bool:
    """Whether a file is called so. ValueError if it is, and can't be read or written here."""
    if Path(path).suffix != ".parquet":
        return False
    if find_spec("pyarrow") is None:
        raise ValueError(f"{path} needs pyarrow, not installed here: pip install 'bateleur-runner[ray]'")
    return True


def lines_of(path: Path) -> Iterator[bytes]:
    """Each row as a line of JSON, without what it has no value for; a `body` may be JSON itself.

    Raises ValueError if it is no Parquet file.
    """
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS):
                for row in batch.to_pylist():
                    yield json.dumps(_request(row), default=str).encode() + b"\n"
    except ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file: {error}") from error


def _request(row: Mapping[str, Any]) -> Any:
    fields = _without_nulls(row)
    if isinstance(fields.get("body"), str):
        with suppress(ValueError):  # who reads the request says that it is no object
            fields["body"] = json.loads(fields["body"])
    return fields


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def write_results(lines: Path, target: Path) -> None:
    """Make of a file of results one with columns, in place of what was there, in one move.

    Columns: `line`, `id`, `text`, `finish_reason`, `error`, and `result`, which is the whole of it in JSON.
    """
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    names = ("id", "text", "finish_reason", "error", "result")
    schema = pyarrow.schema([("line", pyarrow.int64()), *((name, pyarrow.string()) for name in names)])
    made = target.with_name(f"{target.name}.part")
    try:
        with lines.open("rb") as file, ParquetWriter(made, schema) as writer:
            while rows := [_columns(raw) for raw in islice(file, _ROWS)]:
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
        made.replace(target)
    finally:
        made.unlink(missing_ok=True)


def _columns(raw: bytes) -> dict[str, Any]:
    """Of a result of either form."""
    record = json.loads(raw)
    told: dict[str, Any] = {"result": raw.decode().rstrip("\n")}
    if "line" in record:
        ident = record["id"]
        told |= {name: record.get(name) for name in ("line", "text", "finish_reason", "error")}
        return told | {"id": None if ident is None else str(ident)}
    body = (record["response"] or {}).get("body") or {}
    error = record["error"] or body.get("error")
    first = (body.get("choices") or [{}])[0]
    return told | {
        "line": int(record["id"].split("_")[2]),
        "id": record["custom_id"],
        "text": first.get("text", first.get("message", {}).get("content")),
        "finish_reason": first.get("finish_reason"),
        "error": error and error["message"],
    }
