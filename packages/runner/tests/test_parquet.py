"""Requests and results as Parquet files, by an engine without a model."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bateleur.runner.cli import main
from bateleur.runner.cli.line_formats import NativeFormat
from bateleur.runner.cli.request_file import FileChunk, RequestFile

needs_pyarrow = pytest.mark.skipif(find_spec("pyarrow") is None, reason="pyarrow is not installed")


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.Table.from_pylist(rows), path)


def read(path: Path) -> list[dict[str, Any]]:
    from pyarrow.parquet import read_table

    rows: list[dict[str, Any]] = read_table(path).to_pylist()
    return rows


@needs_pyarrow
def test_rows_are_requests_and_results(files: Any, tmp_path: Path) -> None:
    """What a row has no value for it does not say; a wrong one has an error, and the next run asks it alone again."""
    source, target = tmp_path / "in.parquet", tmp_path / "out.parquet"
    rows = [{"id": "a", "prompt": "abc", "max_tokens": 2}, {"id": None, "prompt": "def", "max_tokens": None}]
    write(source, [*rows, {"id": "c", "prompt": "ghi", "max_tokens": 0}])
    assert main(["batch", str(source), str(target), "--max-tokens", "3"]) == 1
    first, second, third = read(target)
    assert (first["line"], first["id"], first["text"], first["finish_reason"]) == (1, "a", "aa", "length")
    assert (second["id"], second["text"], second["error"]) == ("2", "ddd", None)
    assert (third["id"], third["text"]) == ("c", None)
    assert "max_tokens is 0" in third["error"]
    assert json.loads(first["result"])["num_prompt_tokens"] == 3
    write(source, [*rows, {"id": "c", "prompt": "ghi", "max_tokens": 1}])
    assert main(["batch", str(source), str(target), "--max-tokens", "3"]) == 0
    assert files.asked == ["ghi"]
    assert [row["text"] for row in read(target)] == ["aa", "ddd", "g"]


@needs_pyarrow
def test_results_never_replace_the_requests(files: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.parquet"
    write(source, [{"prompt": "abc", "max_tokens": 2}])
    before = source.read_bytes()
    assert main(["batch", str(source), str(source)]) == 2
    assert f"--output is {source}; that is the prompt file" in capsys.readouterr().err
    assert source.read_bytes() == before


@needs_pyarrow
def test_rows_may_be_calls(files: Any, tmp_path: Path) -> None:
    """OpenAI's form, whose body is a struct, or JSON."""
    source, target = tmp_path / "in.parquet", tmp_path / "out.parquet"
    url = {"method": "POST", "url": "/v1/completions"}
    bodies = [json.dumps({"prompt": "abc", "max_tokens": 2}), json.dumps({"prompt": "x", "top_p": 7}), "{"]
    write(source, [{"custom_id": str(n), **url, "body": body} for n, body in enumerate(bodies)])
    assert main(["batch", str(source), str(target)]) == 1
    good, *wrong = read(target)
    assert (good["line"], good["id"], good["text"], good["error"]) == (1, "0", "aa", None)
    assert ["top_p" in wrong[0]["error"], "body" in wrong[1]["error"]] == [True, True]


@needs_pyarrow
def test_what_is_no_parquet_file_is_told(files: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.parquet"
    source.write_text('{"prompt": "x"}\n')
    assert main(["batch", str(source), str(tmp_path / "out.jsonl")]) == 2
    assert "is not a Parquet file" in capsys.readouterr().err


@needs_pyarrow
def test_a_pipe_with_a_name_of_a_parquet_file_is_refused(
    files: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("in.parquet")
    writer = os.open("in.parquet", os.O_RDWR)  # so that no open of the pipe waits
    try:
        assert main(["batch", "in.parquet", "out.jsonl"]) == 2
    finally:
        os.close(writer)
    rule = "a regular file, because reading Parquet needs seeking; write the data to a file first"
    assert capsys.readouterr().err == f"bateleur: input is 'in.parquet'; it must be {rule}\n"


def test_a_batch_is_a_file_of_prompts(files: Any) -> None:
    files.write({"prompt": "abc", "max_tokens": 2}, {"prompt": "def", "max_tokens": 1})
    assert main(["batch", str(files.requests), str(files.results)]) == 0
    assert [line["text"] for line in files.read()] == ["aa", "d"]


# --- parts ------------------------------------------------------------------------------------------------

LINES = [
    b'{"id": "a", "prompt": "one"}',
    b"",
    b'{"id": "b", "prompt": "two", "max_tokens": 0}',
    b"nonsense",
    b'{"id": "a", "prompt": "three"}',
    b"  ",
    b'{"prompt": "four"}',
    b'{"id": "b", "prompt": "five"}',
]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("done", [set(), {1}, {3, 4, 7}, {1, 3, 4, 5, 7, 8}])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_parts_hold_every_request_that_is_left(tmp_path: Path, size: int, done: set[int], mark: bytes) -> None:
    """Whoever reads them finds the same requests, and the same errors, as one pass over the file."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(mark + b"\n".join(LINES))
    requests = RequestFile(str(path), NativeFormat({"max_tokens": 4}), Any, {})  # type: ignore[arg-type]
    requests.scan()
    left = list(requests.remaining(done.__contains__))
    parts: list[FileChunk] = list(requests.chunks(done.__contains__, size))
    assert [request for part in parts for request in part.requests(requests.parser)] == left
    assert all(0 < len(list(part.requests(requests.parser))) <= size for part in parts)
    assert {request.line for request in left} == {1, 3, 4, 5, 7, 8} - done
    requests.close()
