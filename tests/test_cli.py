"""The command line as a user types it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bateleur.runner.cli import main

SMALL = ["--device", "cpu", "--max-model-len", "128", "--max-num-seqs", "4"]


def test_generate_streams_the_prompt_its_continuation_and_a_closing_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompt = "def fibonacci(n):"
    assert main(["generate", prompt, "--max-tokens", "12", "--ignore-eos", "--draft", "none", *SMALL]) == 0
    out = capsys.readouterr().out
    assert out.startswith(prompt)
    text, closing = out[len(prompt) :].rstrip("\n").rsplit("\n", 1)
    assert text
    words = closing.strip("[]").split(", ")
    assert words[0] == "12 tokens"
    assert float(words[1].removesuffix(" tokens/s")) > 0
    assert words[2:] == ["1.00 tokens per step"]


def test_the_shipped_draft_changes_the_closing_line_alone(capsys: pytest.CaptureFixture[str]) -> None:
    texts = {}
    drafts = ["--num-speculative-tokens", "3", "--draft-policy", "fixed"]
    for draft, more in (("auto", drafts), ("none", [])):
        call = ["generate", "def f(x):", "--max-tokens", "24", "--temperature", "0", "--ignore-eos"]
        assert main([*call, "--draft", draft, *more, *SMALL]) == 0
        texts[draft], closing = capsys.readouterr().out.rstrip("\n").rsplit("\n", 1)
        if draft == "auto":
            words = closing.strip("[]").split(", ")
            assert float(words[2].removesuffix(" tokens per step")) > 1.2
            assert words[3].startswith("drafts accepted 0.")
    assert texts["auto"] == texts["none"]
    assert main(["generate", "x", "--draft", "none", *drafts, *SMALL]) == 2
    assert "num_speculative_tokens is 3; there is no draft" in capsys.readouterr().err


def test_same_seed_same_text_other_seed_other_text(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        main(["generate", "x =", "--max-tokens", "16", "--seed", seed, "--temperature", "1", *SMALL])
        texts.append(capsys.readouterr().out.rsplit("\n", 2)[0])
    assert texts[0] == texts[1] != texts[2]


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
    error = capsys.readouterr().err
    assert error.startswith("bateleur: ")
    assert message in error
    assert error.count("\n") == 1


def test_help_is_complete() -> None:
    code = (
        "import sys\nfrom bateleur.runner.cli.main import build_parser\n"
        "text = build_parser().parse_args(['generate', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    for flag in ("--model", "--prompt-file", "--output", "--temperature", "--seed", "--stop", "examples:"):
        assert flag in done.stdout
