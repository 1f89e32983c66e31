"""Parquet files of requests and results. A row corresponds to a JSON line."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

_ROWS = 1024  # rows per batch when reading or writing


def is_parquet(path: str | Path) -> bool:
    """Return whether a file name ends with .parquet. Raises ValueError if it does and pyarrow is not installed."""
    if Path(path).suffix != ".parquet":
        return False
    if find_spec("pyarrow") is None:
        raise ValueError(f"{path} needs pyarrow, which is not installed: pip install 'bateleur-runner[ray]'")
    return True


def json_lines(path: Path) -> Iterator[bytes]:
    """Yield each row as a JSON line without null values. Raises ValueError if the file is not a Parquet file."""
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS):
                for row in batch.to_pylist():
                    yield json.dumps(_request(row), default=str).encode() + b"\n"
    except ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from error


def _request(row: Mapping[str, Any]) -> Any:
    fields = _without_nulls(row)
    if isinstance(fields.get("body"), str):
        with suppress(ValueError):  # the request parser reports a body that is not an object
            fields["body"] = json.loads(fields["body"])
    return fields


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def write_parquet(lines: Path, target: Path) -> None:
    """Convert a file of result lines to a Parquet file, which replaces `target` atomically. Its last column, `result`,
    is the whole record as JSON.
    """
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    names = ("id", "text", "finish_reason", "error", "result")
    schema = pyarrow.schema([("line", pyarrow.int64()), *((name, pyarrow.string()) for name in names)])
    part = target.with_name(f"{target.name}.part")
    try:
        with lines.open("rb") as file, ParquetWriter(part, schema) as writer:
            while rows := [_columns(raw) for raw in islice(file, _ROWS)]:
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _columns(raw: bytes) -> dict[str, Any]:
    """Return the Parquet columns of a result line in bateleur's or OpenAI's format (then of its first choice)."""
    record = json.loads(raw)
    row: dict[str, Any] = {"result": raw.decode().rstrip("\n")}
    if "line" in record:
        ident = record["id"]
        row |= {name: record.get(name) for name in ("line", "text", "finish_reason", "error")}
        return row | {"id": None if ident is None else str(ident)}
    body = (record["response"] or {}).get("body") or {}
    error = record["error"] or body.get("error")
    first = (body.get("choices") or [{}])[0]
    return row | {
        "line": int(record["id"].split("_")[2]),
        "id": record["custom_id"],
        "text": first.get("text", first.get("message", {}).get("content")),
        "finish_reason": first.get("finish_reason"),
        "error": error and error["message"],
    }
