"""The command line as a user types it."""

import ast
import json
import logging
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bateleur.runner import LLM, EngineStats, SamplingParams
from bateleur.runner.assets import default_drafts
from bateleur.runner.cli import main
from bateleur.runner.cli.console import DecodeRate, progress_messages
from bateleur.runner.cli.options import _NOT_SAMPLING_FLAGS, ENGINE_OPTIONS
from bateleur.runner.serve.config import served_engine

SMALL = ["--device", "cpu", "--max-model-len", "128", "--max-num-seqs", "4"]


def test_generate_streams_the_prompt_and_its_continuation(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "def fibonacci(n):"
    assert main(["generate", prompt, "--max-tokens", "12", "--ignore-eos", "--draft", "none", *SMALL]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(prompt)
    assert out[len(prompt) :].strip()
    progress = ["loading torch", "loading the shipped model"]
    assert err.splitlines()[:2] == [f"bateleur: {text}" for text in progress]
    words = err.splitlines()[-1].removeprefix("bateleur: ").split(", ")
    assert words[0] == "12 tokens"
    assert float(words[1].removesuffix(" tokens/s")) > 0
    assert words[2:] == ["1.00 tokens per step"]


def test_the_shipped_draft_changes_the_closing_line_alone(capsys: pytest.CaptureFixture[str]) -> None:
    texts = {}
    drafts = ["--num-speculative-tokens", "3", "--draft-policy", "fixed"]
    for draft, more in (("auto", drafts), ("none", [])):
        call = ["generate", "def f(x):", "--max-tokens", "24", "--temperature", "0", "--ignore-eos"]
        assert main([*call, "--draft", draft, *more, *SMALL]) == 0
        texts[draft], err = capsys.readouterr()
        if draft == "auto":
            words = err.splitlines()[-1].split(", ")
            assert float(words[2].removesuffix(" tokens per step")) > 1.2
            assert words[3].startswith("drafts accepted 0.")
    assert texts["auto"] == texts["none"]
    assert main(["generate", "x", "--draft", "none", *drafts, *SMALL]) == 2
    assert "num_speculative_tokens is 3; it must be 0 without a draft" in capsys.readouterr().err


def test_same_seed_same_text_other_seed_other_text(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        main(["generate", "x =", "--max-tokens", "16", "--seed", seed, "--temperature", "1", *SMALL])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_every_argument_of_the_engine_is_an_option() -> None:
    """But for objects, which a shell can't name, and the seed of requests that have none: here each has one."""
    arguments = set(signature(LLM).parameters) - {"model", "drafter", "seed"}
    assert set(ENGINE_OPTIONS) == arguments


def test_every_sampling_parameter_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    told = capsys.readouterr().out
    sampling = told[told.index("\nsampling ") : told.index("\nexamples:")]
    flags = [line.split()[0] for line in sampling.splitlines() if line.startswith("  --")]
    assert [flag.removeprefix("--").replace("-", "_") for flag in flags] == [
        name for name in SamplingParams.names() if name not in _NOT_SAMPLING_FLAGS
    ]


def test_options_reach_the_engine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(model: object, **arguments: object) -> None:
        raise ValueError(f"{model} {arguments}")

    monkeypatch.setattr("bateleur.runner.llm.LLM", refuse)
    options = ["--gpu-memory-utilization", "0.5", "--attention-backend", "torch", "--cudagraph-checks", "OFF"]
    assert main(["generate", "x", "--model", "m", *options, "--skip-tokenizer-init"]) == 2
    arguments = {
        "gpu_memory_utilization": 0.5,
        "attention_backend": "torch",
        "cudagraph_checks": "OFF",
        "skip_tokenizer_init": True,
    }
    told = capsys.readouterr().err.splitlines()[-1].removeprefix("bateleur: m ")
    assert ast.literal_eval(told) == arguments


def test_one_stream_of_the_shipped_model_has_one_thread_unless_told_otherwise() -> None:
    for more, threads in (([], 1), (["--num-threads", "2"], 2)):
        torch.set_num_threads(3)
        assert main(["generate", "x", "--max-tokens", "1", *more, *SMALL]) == 0
        assert torch.get_num_threads() == threads
    torch.set_num_threads(1)


def test_the_rate_counts_from_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = EngineStats()
    times = iter([100.0, 104.0])  # the first token, and the end
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    pace = DecodeRate(SimpleNamespace(get_metrics=lambda: stats))  # type: ignore[arg-type]
    for count in (0, 2, 2, 10):
        stats.num_emitted_tokens = count
        pace.end_step()
    assert pace.summary() == "10 tokens, 2.0 tokens/s, 1.00 tokens per step"
    stats.num_emitted_tokens = 1
    assert DecodeRate(SimpleNamespace(get_metrics=EngineStats)).summary() == "0 tokens, 1.00 tokens per step"  # type: ignore[arg-type]


def test_what_only_the_engine_can_refuse_spoils_its_line_alone(tmp_path: Path) -> None:
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        '{"prompt": "def a(", "max_tokens": 2}',
        '{"prompt": "x\\ud800"}',
        '{"prompt": "' + "x " * 2000 + '"}',
        '{"prompt_token_ids": [4096]}',
        '{"prompt_token_ids": [[1]]}',
        '{"prompt": "b", "max_tokens": 2}',
    ]
    requests.write_text("\n".join(lines))
    assert main(["generate", "--prompt-file", str(requests), "--output", str(results), *SMALL]) == 1
    records = [json.loads(line) for line in results.read_text().splitlines()]
    wrong = [
        "holds '\\ud800' at position 1, half of a surrogate pair",
        "prompt has 2002 tokens; this model's maximum context length is 128 tokens (max_model_len)",
        "prompt_token_ids[0] is 4096; it must be a token id, an integer in [0, 4095]",
        "prompt_token_ids[0] is [1]; it must be a token id, an integer in [0, 4095]",
    ]
    for record, number, message in zip(records[1:5], range(2, 6), wrong, strict=True):
        assert record["error"].startswith(f"{requests}, line {number}: ")
        assert message in record["error"]
    assert [len(record.get("token_ids", [])) for record in records] == [2, 0, 0, 0, 0, 2]


def test_a_long_wait_is_told_again_and_again(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    with progress_messages("counting", interval=0.001):
        while len(told) < 3:
            told += capsys.readouterr().err.splitlines()
    assert told[0] == "bateleur: counting"
    assert all(line.startswith("bateleur: counting, ") for line in told[1:])


def test_a_prompt_that_is_too_long_is_told_by_us_alone(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    assert main(["generate", "x " * 2000, *SMALL]) == 2
    logging.getLogger("transformers").removeHandler(handler)
    assert said == []
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith(
        "bateleur: prompts[0]: prompt has 2002 tokens; this model's maximum context length is 128 tokens"
    )


def test_prompt_file_gives_one_result_a_line_in_order(tmp_path: Path) -> None:
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"prompt": "def f(", "max_tokens": 9, "temperature": 0},
        {"prompt_token_ids": [5, 6, 7], "max_tokens": 2, "logprobs": 2},
        {"prompt": "", "max_tokens": 3},
        {"prompt": "x", "best_of": 3},
        {"prompt": "import", "max_tokens": 1, "temperature": 0},
    ]
    text = "\n".join(json.dumps(line) for line in lines) + "\n\nnot json\n[1]\n"
    requests.write_text(text)
    arguments = ["generate", "--prompt-file", str(requests), "--output", str(results), "--ignore-eos", *SMALL]
    assert main(arguments) == 1  # some lines failed
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert [record["line"] for record in records] == [1, 2, 3, 4, 5, 7, 8]
    assert [len(record.get("token_ids", [])) for record in records] == [9, 2, 0, 0, 1, 0, 0]
    assert records[0]["finish_reason"] == "length"
    assert len(records[1]["logprobs"]) == 2
    assert "prompt is empty" in records[2]["error"]
    assert "best_of" in records[3]["error"]
    assert "not JSON" in records[5]["error"]
    assert "object is needed" in records[6]["error"]


def test_info_prints_layers_and_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for word in ("NemotronHForCausalLM", "mamba", "attention", "mlp", "parameters", "KV", "state"):
        assert word.lower() in text.lower()
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "give either a prompt or --prompt-file"),
        (["generate", "x", "--output", "y"], "--output needs --prompt-file"),
        (["generate", "x", "--logprobs", "2"], "--logprobs needs --prompt-file"),
        (["generate", "--prompt-file", "y", "--overwrite"], "--overwrite needs --output"),
        (["generate", "x", "--num-threads", "0"], "--num-threads is 0; it must be at least 1"),
        (["generate", "x", "--temperature", "-1"], "temperature"),
        (["generate", "x", "--model", "/nowhere"], "/nowhere"),
        (["generate", "--prompt-file", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["info", "/nowhere"], "/nowhere"),
        (["generate", "x", "--dtype", "int8", *SMALL], "int8"),
    ],
)
def test_wrong_calls_are_told_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    out, error = capsys.readouterr()
    assert out == ""
    *progress, told = error.splitlines()
    assert told.startswith("bateleur: ")
    assert message in told
    assert all(line.startswith(("bateleur: loading ", "bateleur: opening ")) for line in progress)


def test_help_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    told = capsys.readouterr().out
    for flag in ("--model", "--prompt-file", "--output", "--temperature", "--seed", "--stop", "examples:"):
        assert flag in told


def test_drafts_of_the_shipped_head_are_as_many_as_pay_unless_somebody_says_otherwise() -> None:
    both = {"draft": "auto", "draft_policy": "auto"}
    for options, more in (
        ({}, both),
        ({"model": None, "dtype": "float32"}, both),
        ({"draft_policy": "fixed"}, {"draft": "auto"}),
        ({"speculative_rule": "block"}, {"draft": "auto"}),
        ({"draft": "ngram"}, {}),
        ({"num_speculative_tokens": 0}, {}),
        ({"num_speculative_tokens": 2}, both),
        ({"draft": None}, {}),
        ({"model": "somewhere"}, {}),
    ):
        assert default_drafts(options) == more, options
        assert default_drafts(options, alone=True) == {key: more[key] for key in more if key == "draft"}
        shared = {"draft": None, "enable_prefix_caching": True}
        assert served_engine(options) == shared | options | more
    assert served_engine({"draft": "none"})["draft"] is None
