"""The test model that generates given texts: every token is certain, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bateleur.runner import LLM, SamplingParams
from scripted_model import EOS, marker, write_scripted_model

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}"
ANSWER = "It is 5 \u00b0C in Oslo. \U0001f985!"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cut = (b"\xf0\x9f", b"\xa6\x85", "!", EOS)
    texts: dict[str, Any] = {"weather": [THOUGHT, ANSWER], "default": "Hello hello.", "cut": cut}
    return write_scripted_model(tmp_path_factory.mktemp("scripted"), texts)


@pytest.mark.parametrize("options", [{}, {"draft": "ngram", "num_speculative_tokens": 3}])
def test_texts_are_written_token_by_token(folder: Path, options: dict[str, Any]) -> None:
    llm = LLM(folder, device="cpu", max_model_len=512, **options)
    asked = SamplingParams(max_tokens=None, temperature=1.0, logprobs=0)
    prompts = [marker("weather"), "a b c " * 30 + marker("weather", 1), marker("default"), marker("cut")]
    found = [output.outputs[0] for output in llm.generate(prompts, asked)]
    assert [each.text for each in found] == [THOUGHT, ANSWER, "Hello hello.", "\U0001f985!"]
    assert [each.finish_reason for each in found] == ["stop"] * 4
    assert len(found[3].token_ids) == 4
    assert min(place[token].logprob for each in found for token, place in
               zip(each.token_ids, each.logprobs or (), strict=True)) > -1e-6  # fmt: skip


def test_a_conversation_chooses_the_text(folder: Path) -> None:
    llm = LLM(folder, device="cpu", max_model_len=512)
    asked = SamplingParams(max_tokens=None, temperature=0)

    def answer(*messages: dict[str, Any], **names: Any) -> tuple[str | None, str]:
        (output,) = llm.chat(messages, asked, chat_template_kwargs=names)
        return output.prompt, output.outputs[0].text

    first, call = {"role": "user", "content": "weather"}, {"role": "assistant", "content": THOUGHT}
    assert answer(first)[1] == THOUGHT
    prompt, text = answer(first, call, {"role": "tool", "content": "5"}, enable_thinking=True)
    assert text == ANSWER
    assert prompt is not None
    assert prompt.endswith("<|im_start|>assistant\n<think>\n<|weather:1|>")
    assert answer({"role": "user", "content": "other"})[1] == "Hello hello."


def test_tags_are_tokens(folder: Path, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(model=folder, dtype="auto")
    vocabulary: dict[str, int] = llm.tokenizer.get_vocab()  # type: ignore[attr-defined]
    (output,) = llm.generate(marker("weather"), SamplingParams(max_tokens=None))
    written = output.outputs[0].token_ids
    assert [written.count(vocabulary[tag]) for tag in ("<think>", "</think>", "<tool_call>")] == [1, 1, 2]


@pytest.mark.parametrize("options", [{}, {"draft": "ngram", "num_speculative_tokens": 3}])
def test_log_probabilities_have_the_bytes_of_tokens(folder: Path, options: dict[str, Any]) -> None:
    llm = LLM(folder, device="cpu", max_model_len=512, **options)
    asked = SamplingParams(max_tokens=None, temperature=1.0, logprobs=1, prompt_logprobs=0)
    prompt = "n\u00e9 \U0001f985!" + marker("cut")
    (output,) = llm.generate(prompt, asked)
    done, known = output.outputs[0], output.prompt_logprobs
    entries = [place[token] for token, place in zip(done.token_ids, done.logprobs or (), strict=True)]
    assert [each.token_bytes for each in entries[:3]] == [b"\xf0\x9f", b"\xa6\x85", b"!"]
    assert [each.decoded_token for each in entries] == ["", "\U0001f985", "!", EOS]
    assert known is not None
    ids = output.prompt_token_ids[1:]
    texts = [place[token].decoded_token for token, place in zip(ids, known[1:], strict=True) if place]
    assert "".join(map(str, texts)) == prompt[1:]
    (bare,) = llm.generate(prompt, SamplingParams(max_tokens=2, logprobs=0, detokenize=False))
    assert [each.decoded_token for place in bare.outputs[0].logprobs or () for each in place.values()] == [None, None]
