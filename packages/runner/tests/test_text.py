"""Text through an engine: streaming, stop conditions, log probabilities."""

import math

import pytest

from bateleur.runner import LLM, RequestOutput, SamplingParams

PROMPT = "import os\nimport sys\n\n\ndef main("


@pytest.fixture(scope="module")
def plain(llm: LLM) -> RequestOutput:
    return llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0]


def test_stream_grows_to_what_generate_returns(llm: LLM, plain: RequestOutput) -> None:
    texts, last = [""], None
    for last in llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)):
        text = last.outputs[0].text
        assert text.startswith(texts[-1])
        texts.append(text)
    assert last is not None
    assert last.finished
    assert texts[-1] == plain.outputs[0].text
    assert last.outputs[0].token_ids == plain.outputs[0].token_ids
    assert len(texts) - 1 == 40


def test_closing_a_stream_aborts_its_requests(llm: LLM) -> None:
    stream = llm.stream(["x", "y"], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    assert llm.has_unfinished_requests
    stream.close()  # type: ignore[attr-defined]
    assert not llm.has_unfinished_requests


def test_every_substring_as_stop_cuts_exactly(llm: LLM, plain: RequestOutput) -> None:
    text = plain.outputs[0].text
    for start in range(3, len(text) - 6, 7):
        stop = text[start : start + 5]
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=[stop])
        streamed = [output.outputs[0].text for output in llm.stream(PROMPT, params)]
        output = llm.generate(PROMPT, params)[0].outputs[0]
        assert output.text == text[: text.index(stop)]
        assert output.finish_reason == "stop"
        assert output.stop_reason == stop
        assert streamed[-1] == output.text
        assert all(output.text.startswith(part) for part in streamed), "what was streamed is never taken back"


def test_min_tokens_outlasts_a_stop_string(llm: LLM, plain: RequestOutput) -> None:
    text = plain.outputs[0].text
    params = SamplingParams(temperature=0, max_tokens=40, min_tokens=40, ignore_eos=True, stop=text[4:8])
    output = llm.generate(PROMPT, params)[0].outputs[0]
    assert output.text == text
    assert output.finish_reason == "length"


def test_stop_token_ends_without_its_text(llm: LLM, plain: RequestOutput) -> None:
    tokens = plain.outputs[0].token_ids
    stop = tokens[6]
    cut = tokens.index(stop)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=[stop])
    output = llm.generate(PROMPT, params)[0].outputs[0]
    assert output.token_ids == tokens[: cut + 1]
    assert output.stop_reason == stop
    assert plain.outputs[0].text.startswith(output.text)
    assert output.text == llm.tokenizer.decode(tokens[:cut])
    streamed = list(llm.stream(PROMPT, params))[-1].outputs[0]
    assert (streamed.text, streamed.token_ids) == (output.text, output.token_ids)


def test_eos_ends_and_ignore_eos_does_not(llm: LLM) -> None:
    eos = llm.spec.eos_token_ids[0]
    greedy = {"temperature": 0, "max_tokens": 400}
    prompt = "\n\nif __name__ == '__main__':\n    unittest.main()\n"
    stopped = llm.generate(prompt, SamplingParams.from_dict(greedy | {"max_tokens": 100}))[0].outputs[0]
    assert eos not in stopped.token_ids[:-1]
    if stopped.finish_reason == "stop":
        assert stopped.token_ids[-1] == eos
        assert stopped.stop_reason is None
    longer = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))[0].outputs[0]
    assert len(longer.token_ids) == 100
    kept = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=60, min_tokens=50))[0].outputs[0]
    assert len(kept.token_ids) >= 50
    assert eos not in kept.token_ids[:49]


def test_logprobs_are_of_the_raw_model_and_ranked(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
    outputs = llm.generate([PROMPT, "x = ["], [params, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)])
    completion = outputs[0].outputs[0]
    assert outputs[1].outputs[0].logprobs is None
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 6
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert len(entry) == 3
        assert entry[token].rank == 1
        assert sorted(lp.rank for lp in entry.values()) == [1, 2, 3]
        assert sum(math.exp(lp.logprob) for lp in entry.values()) <= 1.0
        assert entry[token].decoded_token == llm.tokenizer.decode([token])
    total = sum(e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)


def test_logprobs_zero_gives_the_sampled_token_only(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=5, ignore_eos=True, logprobs=0)
    completion = llm.generate("x", params)[0].outputs[0]
    assert completion.logprobs is not None
    assert [list(entry) for entry in completion.logprobs] == [[token] for token in completion.token_ids]


def test_penalties_change_repetition(llm: LLM) -> None:
    def repeats(params: SamplingParams) -> int:
        tokens = llm.generate("x = [0, 0, 0, 0,", params)[0].outputs[0].token_ids
        return len(tokens) - len(set(tokens))

    base = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    plain = repeats(SamplingParams.from_dict(base))
    assert repeats(SamplingParams.from_dict(base | {"frequency_penalty": 2.0, "presence_penalty": 2.0})) < plain
    assert repeats(SamplingParams.from_dict(base | {"repetition_penalty": 5.0})) < plain


def test_token_ids_in_give_the_same_as_text_in(llm: LLM, plain: RequestOutput) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    tokens = llm.tokenizer.encode(PROMPT)
    for prompt in (tokens, {"prompt_token_ids": tokens}, {"prompt": PROMPT}):
        assert llm.generate(prompt, params)[0].outputs[0] == plain.outputs[0]
    assert [o.outputs[0] for o in llm.generate([tokens, tokens], params)] == [plain.outputs[0]] * 2
