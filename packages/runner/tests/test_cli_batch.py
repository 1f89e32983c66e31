"""Files of OpenAI's batch form, and files that are larger than memory."""

from __future__ import annotations

import io
import json
import os
import re
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_files import Files

from bateleur.runner.cli import main
from bateleur.runner.cli.line_formats import NativeFormat, OpenAIBatchFormat
from bateleur.runner.cli.request_file import RequestFile


def call(custom_id: Any, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def test_a_batch_is_answered_as_the_server_would(files: Files) -> None:
    files.write(
        call("a", model="bateleur", prompt="long", max_tokens=3, user="me", best_of=None),
        call("b", prompt=[[65, 66], [67]], max_tokens=1, echo=True, return_token_ids=True),
    )
    assert files.run() == 0
    first, second = files.read()
    assert [*first] == ["id", "custom_id", "response", "error"]
    assert (first["custom_id"], first["error"]) == ("a", None)
    assert first["response"]["status_code"] == 200
    body = first["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["model"] == "bateleur"
    assert [(each["text"], each["finish_reason"]) for each in body["choices"]] == [("lll", "length")]
    assert body["usage"]["completion_tokens"] == 3
    assert body["usage"]["total_tokens"] == 7
    told = second["response"]["body"]["choices"]
    assert [each["index"] for each in told] == [0, 1]
    assert [each["text"] for each in told] == ["[65, 66][", "[67]["], "prompts are echoed, each in its place"
    assert told[0]["token_ids"] == [7]
    assert told[0]["prompt_token_texts"][0] == "\x01"


def test_chats_are_answered_as_well(files: Files) -> None:
    hello = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}]
    chat = {**call("c", messages=hello, max_completion_tokens=2), "url": "/v1/chat/completions"}
    files.write(chat, chat | {"custom_id": "d", "body": {"messages": [{"role": "user", "content": ""}]}})
    assert files.run() == 1
    body = files.read()[0]["response"]["body"]
    assert body["object"] == "chat.completion"
    message = body["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", "bb")
    assert files.asked == ["bex"]
    assert files.read()[1]["response"]["status_code"] == 400


def test_calls_of_a_chat_are_found_where_a_parser_is_named(
    files: Files, fake_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'Well. <tool_call>{"name": "f"}</tool_call>'
    answer = fake_llm._output

    def scripted(*given: Any) -> Any:
        output = answer(*given)
        output.outputs[0].text = text
        return output

    monkeypatch.setattr(fake_llm, "_output", scripted)
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f"}}]}
    files.write({**call("c", **body, max_tokens=1), "url": "/v1/chat/completions"})
    assert files.run() == 1
    assert "tool_choice is 'auto'" in files.read()[0]["response"]["body"]["error"]["message"]
    assert files.run("--tool-call-parser", "hermes", "--enable-auto-tool-choice") == 0
    message = files.read()[0]["response"]["body"]["choices"][0]["message"]
    assert message["content"] == "Well."
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


REFUSED = [
    ({"method": "GET"}, "method is 'GET'; it must be POST"),
    ({"url": "/v1/embeddings"}, "url is '/v1/embeddings'; it must be one of /v1/completions"),
    ({"url": ["/v1/completions"]}, "url is ['/v1/completions']; it must be one of"),
    ({"priority": 1}, "'priority': unknown; a line has custom_id, method, url and body"),
    ({"body": None}, "the body is None; it must be an object"),
    ({"body": {}}, "prompt is absent"),
    ({"body": {"prompt": "x", "stream": True}}, "stream is True; it must be false"),
    ({"body": {"prompt": "x", "model": "gpt"}}, "model is 'gpt'; it must be absent or one of 'bateleur'"),
    ({"body": {"prompt": "x", "best_of": 3}}, "best_of is 3"),
    ({"body": {"prompt": ""}}, "prompt is empty"),
    ({"body": {"prompt": ["ok", ""]}}, "prompt is empty"),
]


def test_what_is_wrong_with_a_call_is_its_answer(files: Files) -> None:
    files.write(*(call(str(i), prompt="x") | change for i, (change, _) in enumerate(REFUSED)))
    assert files.run() == 1
    records = files.read()
    assert [record["custom_id"] for record in records] == [str(i) for i in range(len(REFUSED))]
    for line, (record, (_, message)) in enumerate(zip(records, REFUSED, strict=True), 1):
        assert record["error"] is None
        assert record["response"]["status_code"] == 400
        said = record["response"]["body"]["error"]["message"]
        assert said.startswith(f"{files.requests}, line {line}: ")
        assert message in said
    assert files.llm._left == {}, "of a line that is refused nothing runs"


def test_a_call_that_nobody_asked_for_and_one_that_breaks(files: Files) -> None:
    files.write(
        *(call("x", prompt="a"), call("nan", prompt="nan"), call("x", prompt="b"), call(None, prompt="c")),
        *({"prompt": "own"}, b"not json"),
    )
    assert files.run() == 1
    _, broken, *strangers = files.read()
    assert broken["response"]["status_code"] == 500
    assert broken["response"]["body"]["error"]["type"] == "server_error"
    assert [(each["custom_id"], each["response"]) for each in strangers] == [(None, None)] * 4
    wrong = ['id is "x"; line 1 has it', "custom_id is None", "custom_id is None", "not JSON"]
    for each, message in zip(strangers, wrong, strict=True):
        assert each["error"]["code"] == "invalid_line"
        assert message in each["error"]["message"]


def test_a_batch_goes_on_where_it_stopped(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [call("a", prompt="long", max_tokens=9), *(call(str(i), prompt=f"{i}!") for i in range(4))]
    files.write(*lines[:3], call("2", prompt="nan"), *lines[4:])
    assert files.run() == 1
    whole = files.results.read_bytes()
    assert [record["custom_id"] for record in files.read()] == ["a", "0", "1", "2", "3"]
    files.results.write_bytes(whole[:-30])
    files.write(*lines)
    assert files.run() == 0
    assert files.asked == ["2!", "3!"], "the one that failed, and the one that is torn"
    assert "3 of 5 results are in" in capsys.readouterr().err
    assert [record["custom_id"] for record in files.read()] == ["a", "0", "1", "2", "3"]
    files.write(*lines[:4], call("3", prompt="3!", temperature=0))
    assert files.run() == 2
    assert "its result for line 5 has another prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [
        ("--kv-cache-dtype", "fp8"),
        ("--quantization", "dequantize"),
        ("--tokenizer", "."),
        ("--hf-overrides", '{"rope_theta": 5}'),
        ("--max-model-len", "99"),
    ],
)
def test_results_of_another_computation_are_refused(
    files: Files, capsys: pytest.CaptureFixture[str], option: tuple[str, str]
) -> None:
    files.write(call("a", prompt="x", max_tokens=1), call("b", prompt="nan", max_tokens=1))
    assert files.run() == 1
    assert files.run(*option) == 2
    assert "its result for line 1 has another prompt, model or parameters" in capsys.readouterr().err


def test_a_chat_has_what_the_server_would_return(files: Files, fake_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`echo` and `include_reasoning` apply. A batch does not limit reasoning, so it refuses a budget."""
    answer = fake_llm._output

    def scripted(*given: Any) -> Any:
        output = answer(*given)
        output.outputs[0].text = "<think>Hm.</think>it is."
        return output

    monkeypatch.setattr(fake_llm, "_output", scripted)
    begun = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Yes, "}]
    bodies: list[dict[str, Any]] = [
        {"messages": begun[:1]},
        {"messages": begun[:1], "include_reasoning": False},
        {"messages": begun, "echo": True},
        {"messages": begun[:1], "thinking_token_budget": 3},
    ]
    files.write(
        *(call(str(i), max_tokens=1, **body) | {"url": "/v1/chat/completions"} for i, body in enumerate(bodies))
    )
    assert files.run("--reasoning-parser", "think") == 1
    *told, refused = (each["response"]["body"] for each in files.read())
    messages = [each["choices"][0]["message"] for each in told]
    assert [each["reasoning"] for each in messages] == ["Hm.", None, "Hm."]
    assert [each["content"] for each in messages] == ["it is.", "it is.", "Yes, it is."]
    assert "thinking_token_budget is 3; it must be absent" in refused["error"]["message"]


def test_a_batch_has_the_limits_of_openai_and_ours_has_ours(files: Files) -> None:
    files.write(call("a", prompt="x"))
    assert files.run() == 0
    assert files.read()[0]["response"]["body"]["usage"]["completion_tokens"] == 16
    assert files.run("--overwrite", "--max-tokens", "5") == 0
    assert files.read()[0]["response"]["body"]["usage"]["completion_tokens"] == 5
    files.write({"prompt": "x"})
    assert files.run("--overwrite") == 0
    assert len(files.read()[0]["token_ids"]) == 128


def test_a_model_is_called_as_one_says(files: Files) -> None:
    files.write(call("a", prompt="x", model="gpt"))
    assert files.run("--served-model-name", "gpt", "other") == 0
    assert files.read()[0]["response"]["body"]["model"] == "gpt"


@pytest.mark.parametrize("source", ["file", "stdin"])
def test_neither_file_is_held_in_memory(files: Files, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of 100 kB, in and out, through an interrupt, a second run and the ordering: 12 MB."""
    weight = "w" * 100_000
    lines = [{"prompt": "long", "max_tokens": 90, "id": "0" + weight}]
    lines += [{"prompt": "x", "max_tokens": 1, "id": f"{i}{weight}"} for i in range(1, 120)]
    files.write(*lines)
    if source == "stdin":
        data = files.requests.read_bytes()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        named, files.requests = files.requests, Path("-")
    steps = iter(range(1000))

    def interrupt() -> None:
        if next(steps) == 60:
            raise KeyboardInterrupt

    del lines
    files.each_step = interrupt
    tracemalloc.start()
    try:
        assert files.run() == 130
        if source == "stdin":  # what was read there goes on from wherever it comes again
            files.requests = named
        assert files.run() == 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6_000_000
    assert files.results.stat().st_size > 12_000_000
    with files.results.open("rb") as results:
        assert [json.loads(line)["line"] for line in results] == [*range(1, 121)]


def test_the_file_is_read_as_the_engine_needs_it(files: Files) -> None:
    files.write(*({"prompt": f"{i}", "max_tokens": 2} for i in range(40)))
    ahead = []

    def look() -> None:
        ahead.append(len(files.asked) - len(files.read()))

    files.each_step = look
    assert files.run() == 0
    assert max(ahead) <= 2 * files.llm.limits.max_num_seqs


@pytest.mark.slow
def test_ids_cost_little_memory_while_a_file_is_scanned(tmp_path: Path) -> None:
    path, count = tmp_path / "in.jsonl", 5000  # more than the tuples that Python keeps for others
    path.write_text("".join(f'{{"prompt": "x", "id": "number {i}"}}\n' for i in range(count)))
    requests = RequestFile(str(path), NativeFormat({}), OpenAIBatchFormat({}, ["m"]), {})
    requests.scan()  # what is imported and made once
    assert sum(request.error is None for request in requests) == count
    tracemalloc.start()
    try:
        requests.scan()
        _, survey = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        assert sum(request.error is None for request in requests) == count
        _, one_pass = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    requests.close()
    assert survey < 100 * count + 100_000
    assert one_pass < 100_000


def test_ids_that_repeat_are_found_in_every_pass(tmp_path: Path) -> None:
    ids: list[str | int] = ["a", 1, "b", "1", "a", "c", 1, "b", "b", "\ud800", 2]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x", "id": each}) + "\n" for each in ids))
    requests = RequestFile(str(path), NativeFormat({}), OpenAIBatchFormat({}, ["m"]), {})
    requests.scan()
    for _ in range(2):
        firsts = [re.search(r"line (\d+) has it already", each.error or "") for each in requests]
        assert [found and int(found[1]) for found in firsts] == [None] * 4 + [1, None, 2, 3, 3, None, None]
    requests.close()


def test_an_id_that_repeats_one_of_a_result_is_refused(files: Files) -> None:
    files.write({"prompt": "a", "id": "x"}, {"prompt": "b", "id": "y"})
    assert files.run() == 0
    files.write({"prompt": "a", "id": "x"}, {"prompt": "b", "id": "y"}, {"prompt": "c", "id": "x"})
    assert files.run() == 1
    assert files.llm is None
    assert files.read()[2]["error"].endswith('line 3: id is "x"; line 1 has it already')


def test_a_line_that_is_too_long_is_refused_unread(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bateleur.runner.cli.request_file._MAX_LINE_BYTES", 100)
    files.write({"prompt": "a"}, {"prompt": "b" * 500}, {"prompt": "c" * 86}, {"prompt": "d" * 87})
    assert files.run() == 1
    assert ["error" in record for record in files.read()] == [False, True, False, True]
    assert "line 2: the line has more than 100 bytes" in files.read()[1]["error"]


def test_lines_that_come_meanwhile_are_left_to_the_next_run(files: Files) -> None:
    files.write({"prompt": "a", "max_tokens": 2})
    steps: Iterator[int] = iter(range(100))

    def add() -> None:
        if next(steps) == 0:
            with files.requests.open("ab") as more:
                more.write(b'\n{"prompt": "b", "max_tokens": 1}\n')

    files.each_step = add
    assert files.run() == 0
    assert files.asked == ["a"]
    assert files.run() == 0
    assert files.asked == ["b"]


def test_a_pipe_is_read_once(files: Files, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(b'{"prompt": "a"}\n{"prompt": "b"}\n'))
    writer.start()
    seen = set[str]()
    files.each_step = lambda: seen.update(path.name for path in tmp_path.iterdir())
    try:
        assert main(["generate", "--prompt-file", str(pipe), "--output", str(files.results)]) == 0
    finally:
        writer.join()
    assert [record["prompt"] for record in files.read()] == ["a", "b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "pipe"]
    assert not {name for name in seen if name.startswith("tmp")}, "the copy has no name that a killed process leaves"


@pytest.mark.parametrize("source", ["-", "pipe", "folder"])
def test_replicas_read_a_regular_file(
    files: Files, tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipe is refused before it is opened, which would wait for a writer."""
    monkeypatch.setattr("bateleur.runner.cli.options.check_ray", lambda: None)
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("folder").mkdir()
    assert main(["batch", source, str(files.results), "--replicas", "2"]) == 2
    rule = "a regular file if replicas is given, because each replica reads it; write the requests to a file first"
    assert f"bateleur: input is {source!r}; it must be {rule}\n" in capsys.readouterr().err
    assert not files.results.exists()


def test_replicas_and_no_file(
    files: Files, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bateleur.runner.cli.options.check_ray", lambda: None)
    assert main(["batch", str(files.requests), str(files.results), "--replicas", "2"]) == 2
    assert f"No such file or directory: '{files.requests}'" in capsys.readouterr().err
