"""Stop tokens from configuration files and tokenizer, and stop strings that are special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bateleur.runner import LLM, SamplingParams
from bateleur.runner.outputs import CompletionOutput
from scripted_model import EOS, marker, write_scripted_model

END = "<|end|>"
TEXTS: dict[str, Any] = {
    "eos": ("abc", EOS, "def", END, "g"),
    "eot": ("abc", END, "def", EOS, "g"),
    "start": ("abc", "<|im_start|>", "def", EOS),
}


def write(folder: Path, tokenizer: dict[str, Any], **config: Any) -> Path:
    """Write a model whose config names token 5 as its end-of-text token."""
    write_scripted_model(folder, TEXTS, tags={END: True}, eos_token_id=5, **config)
    file = folder / "tokenizer_config.json"
    given = json.loads(file.read_text())
    file.write_text(json.dumps({**{key: each for key, each in given.items() if key != "eos_token"}, **tokenizer}))
    return folder


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(write(tmp_path_factory.mktemp("eos"), {"eos_token": EOS}), device="cpu", max_model_len=128)


def generate(llm: LLM, name: str, **params: Any) -> CompletionOutput:
    (output,) = llm.generate(marker(name), SamplingParams(temperature=0, max_tokens=5, **params))
    return output.outputs[0]


def test_the_end_of_the_tokenizer_ends_a_text(llm: LLM) -> None:
    done = generate(llm, "eos")
    assert (done.text, done.finish_reason, done.stop_reason, len(done.token_ids)) == ("abc", "stop", None, 2)
    assert generate(llm, "eot").text == "abcdef"


@pytest.mark.parametrize(
    "tokenizer", [{"eos_token": "<|im_start|>", "eot_token": END}, {"eot_token": {"content": END, "special": True}}]
)
def test_a_second_end_of_the_tokenizer_ends_a_text(tmp_path: Path, tokenizer: dict[str, Any]) -> None:
    llm = LLM(write(tmp_path, tokenizer), device="cpu", max_model_len=128)
    assert generate(llm, "eot").text == "abc"
    assert generate(llm, "eot").finish_reason == "stop"


def test_an_end_that_is_ignored_or_too_early_is_none(llm: LLM) -> None:
    assert generate(llm, "eos", ignore_eos=True).text == "abcdefg"
    late = generate(llm, "eos", min_tokens=4)
    assert EOS not in llm.tokenizer.decode(late.token_ids[:4])


def test_a_grammar_ends_by_the_end_of_the_tokenizer(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    done = generate(llm, "eos", structured_outputs={"regex": "[a-z]+"})
    assert (done.text, done.finish_reason) == ("abc", "stop")
    assert llm.tokenizer.decode(done.token_ids[-1:]) == EOS


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_string_that_is_a_special_token_ends_a_text(llm: LLM, include: bool, skip: bool) -> None:
    asked = {"include_stop_str_in_output": include, "skip_special_tokens": skip}
    done = generate(llm, "start", stop=["<|im_start|>", "zz"], **asked)
    shown = "<|im_start|>" if include and not skip else ""
    assert (done.text, done.finish_reason, done.stop_reason) == (f"abc{shown}", "stop", "<|im_start|>")
    assert generate(llm, "start", stop=["im_start"]).text == "abcdef", "a part of its text is no stop"
    assert generate(llm, "eos", stop=[EOS], ignore_eos=True).stop_reason == EOS


def test_a_bad_word_may_be_an_end(llm: LLM) -> None:
    assert generate(llm, "eos", bad_words=[EOS]).token_ids[1] != generate(llm, "eos").token_ids[1]
