"""Files of requests: what is written when, what a second run does, and what one bad line does to the others."""

from __future__ import annotations

import io
import json
import os
import stat
from contextlib import closing
from pathlib import Path

import pytest
from cli_files import Files

from bateleur.runner.cli import main
from bateleur.runner.cli.line_formats import NativeFormat, OpenAIBatchFormat
from bateleur.runner.cli.request_file import RequestFile
from bateleur.runner.cli.result_file import ResultFile

LONG_FIRST = [{"prompt": "long", "max_tokens": 9}, *({"prompt": text, "max_tokens": 2} for text in ("a", "b", "c"))]


def test_results_are_written_as_they_end_and_put_in_order_when_all_have(files: Files) -> None:
    files.write(*LONG_FIRST)
    seen: list[list[int]] = []
    files.each_step = lambda: seen.append([record["line"] for record in files.read()])
    assert files.run() == 0
    assert seen[-1] == [2, 3, 4]
    assert [record["line"] for record in files.read()] == [1, 2, 3, 4]
    assert [record["text"] for record in files.read()] == ["l" * 9, "aa", "bb", "cc"]


def test_an_interrupted_run_keeps_what_is_done_and_the_next_goes_on(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = [LONG_FIRST[1], {"prompt": "interrupt", "max_tokens": 2}, LONG_FIRST[0], LONG_FIRST[2]]
    files.write(*stopped)
    assert files.run() == 130
    error = capsys.readouterr().err
    assert f"0 of 4 requests have ended; the same command resumes from {files.results}" in error
    files.write(*LONG_FIRST[1:3], {"prompt": "interrupt", "max_tokens": 2})
    assert files.run("--seed", "4") == 130
    assert files.run() == 2  # the seed is another
    assert "its result for line 1 has another prompt, model or parameters" in capsys.readouterr().err
    files.write(*LONG_FIRST[1:3], {"prompt": "resumed", "max_tokens": 2})
    before = files.read()
    assert [record["line"] for record in before] == [1, 2]
    assert files.run("--seed", "4") == 0
    assert files.asked == ["resumed"]
    assert files.read()[:2] == before
    assert "2 of 3 results are in" in capsys.readouterr().err
    assert files.run("--seed", "4") == 0
    assert files.llm is None, "all was there: no model is opened"


def test_a_torn_last_line_is_run_again(files: Files) -> None:
    files.write(*LONG_FIRST)
    assert files.run() == 0
    whole = files.results.read_bytes()
    files.results.write_bytes(whole[:-5])
    assert files.run() == 0
    assert files.asked == ["c"]
    assert files.results.read_bytes() == whole


def test_failed_lines_are_tried_again_and_their_old_results_go(files: Files) -> None:
    files.write({"prompt": "nan"}, {"prompt": "a"}, b"not json")
    assert files.run() == 1
    first = files.read()
    assert ["error" in record for record in first] == [True, False, True]
    assert first[0]["error"] == f"{files.requests}, line 1: logits are not numbers"
    assert files.run() == 1
    assert files.asked == ["nan"]
    assert files.read() == first
    files.write({"prompt": "mended"}, {"prompt": "a"}, {"prompt": "too"})
    assert files.run() == 0
    assert [record["prompt"] for record in files.read()] == ["mended", "a", "too"]


@pytest.mark.parametrize("content", [b"notes of mine\n", b"[1]\n", b'{"line": 1}\n', b"notes"])
def test_a_file_that_holds_no_results_is_left_alone(
    files: Files, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    files.write({"prompt": "a"})
    files.results.write_bytes(content)
    assert files.run() == 2
    assert f"--output is {files.results}; its line 1 is not a result of this command" in capsys.readouterr().err
    assert files.results.read_bytes() == content
    assert files.run("--overwrite") == 0
    assert [record["prompt"] for record in files.read()] == ["a"]


def test_overwriting_waits_for_the_first_result(files: Files) -> None:
    files.write({"prompt": "a"})
    assert files.run() == 0
    before = files.results.read_bytes()
    files.write({"prompt": "interrupt"})
    assert files.run("--overwrite") == 130
    assert files.results.read_bytes() == before


def test_the_prompt_file_is_not_overwritten(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.write({"prompt": "a"})
    files.results.symlink_to(files.requests)
    before = files.requests.read_bytes()
    for more in ([], ["--overwrite"]):
        assert files.run(*more) == 2
        assert "that is the prompt file" in capsys.readouterr().err
    assert files.requests.read_bytes() == before


def test_two_runs_do_not_share_a_file(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    import fcntl

    files.write({"prompt": "a"})
    with files.results.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert files.run() == 2
    assert "another run is writing to it" in capsys.readouterr().err
    assert files.run() == 0


def test_ordering_keeps_links_and_rights(files: Files, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere.jsonl"
    target.touch(mode=0o640)
    files.results.symlink_to(target)
    files.write(*LONG_FIRST)
    assert files.run() == 0
    assert files.results.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere.jsonl", "in.jsonl", "out.jsonl"]


def test_ids_are_those_of_the_lines_or_their_numbers(files: Files) -> None:
    lines = [{"prompt": "a", "id": "x"}, {"prompt": "b"}, {"prompt": "c", "id": "x"}]
    files.write(*lines, {"prompt": "d", "id": [1]}, {"prompt": "e", "id": True}, {"id": "own"})
    assert files.run() == 1
    records = files.read()
    assert [record["id"] for record in records] == ["x", 2, 3, 4, 5, "own"]
    assert records[2]["error"].endswith('line 3: id is "x"; line 1 has it already')
    assert records[3]["error"].endswith("line 4: id is [1]; it must be text or an integer")
    assert records[4]["error"].endswith("line 5: id is True; it must be text or an integer")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"prompt": "caf\xe9"}', "byte 0xe9 at position 16 is not UTF-8"),
        (b"[" * 100_000, "brackets are nested too deeply"),
        (b'{"prompt": ' + b"[" * 100_000, "brackets are nested too deeply"),
        (b"not json", "not JSON: Expecting value at position 1"),
        (b"[1]", "a JSON list; an object is needed"),
        (b'{"max_tokens": 3}', "exactly one of prompt, prompt_token_ids is needed"),
        (b'{"prompt": "x", "best_of": 3}', "best_of is 3; it must be None or 1"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature is nan; it must be a finite number"),
        (b'{"prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}", "Exceeds the limit"),
        (b'{"prompt": ""}', "prompt is empty"),
    ],
)
def test_a_bad_line_spoils_itself_alone(
    files: Files, raw: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files.write({"prompt": "before"}, raw, {"prompt": "after"})
    assert files.run() == 1
    records = files.read()
    assert [record.get("prompt") for record in records] == ["before", None, "after"]
    assert records[1]["error"].startswith(f"{files.requests}, line 2: ")
    assert message in records[1]["error"]
    assert f"1 of 3 requests failed; the first: {files.requests}, line 2: " in capsys.readouterr().err


def test_lines_end_at_newlines_alone_and_a_byte_order_mark_is_none(files: Files) -> None:
    odd = "one\u2028two\x85\x0b\x0c\x1c\u2029three"
    files.requests.write_bytes(
        b"\xef\xbb\xbf" + json.dumps({"prompt": odd}, ensure_ascii=False).encode() + b'\r\n\n{"prompt": "b"}\r\n'
    )
    assert files.run() == 0
    assert [(record["id"], record["prompt"]) for record in files.read()] == [(1, odd), (3, "b")]


def test_half_a_surrogate_pair_is_written_as_it_was_read(files: Files) -> None:
    files.write(b'{"prompt": "a", "id": "\\ud800"}', {"prompt": "b"})
    assert files.run() == 0
    assert files.read()[0]["id"] == "\ud800"
    assert files.run() == 0
    assert files.llm is None


def test_stdin_in_and_stdout_out(
    files: Files, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    text = "\n".join(json.dumps(line) for line in LONG_FIRST)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode() + b"\n[]")))
    assert main(["generate", "--prompt-file", "-"]) == 1
    records = [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]
    assert [record["line"] for record in records] == [2, 5, 3, 4, 1], "as they end"
    assert records[1]["error"] == "stdin, line 5: a JSON list; an object is needed"


def test_no_requests_no_results(files: Files) -> None:
    files.requests.write_bytes(b"\n")
    assert files.run() == 0
    assert files.results.read_bytes() == b""
    assert files.llm is None


def test_an_output_that_cannot_be_written_is_noticed_before_the_model_is_opened(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files.write({"prompt": "a"})
    files.results = tmp_path / "nowhere" / "out.jsonl"
    assert files.run() == 2
    assert f"No such file or directory: '{files.results}'" in capsys.readouterr().err
    files.results = tmp_path
    assert files.run() == 2
    assert f"Is a directory: '{tmp_path}'" in capsys.readouterr().err
    assert files.llm is None


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_names_the_file(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.write({"prompt": "a"})
    files.results = Path("/dev/full")
    assert files.run() == 2
    assert "No space left on device: '/dev/full'" in capsys.readouterr().err


def test_brackets_just_short_of_too_deep_are_refused_as_well(files: Files) -> None:
    """What can be read, but no longer be digested or shown."""
    depths = range(800, 1010)
    files.write({"prompt": "a"}, *(b'{"prompt": "x", "stop": ' + b"[" * n + b"]" * n + b"}" for n in depths))
    assert files.run() == 1
    assert ["error" in record for record in files.read()] == [False, *(True for _ in depths)]
    files.write({"prompt": "a"}, *(b'{"prompt": ' + b"[" * n + b"]" * n + b"}" for n in depths))
    assert files.run("--overwrite") in (0, 1)
    assert len(files.read()) == 1 + len(depths)


def test_results_that_cannot_be_read_again_are_counted(files: Files) -> None:
    """Else a run on replicas would run every request again."""
    files.write({"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    requests = RequestFile(str(files.requests), NativeFormat({}), OpenAIBatchFormat({}, ["m"]), {})
    results = ResultFile(Path(os.devnull), str(files.requests), overwrite=False)
    with closing(requests), closing(results):
        requests.scan()
        assert results.resume(requests) == 0
        results.write(2, {"line": 2})
        assert [results.has_result(line) for line in (1, 2, 3)] == [False, True, False]
        results.finish()
