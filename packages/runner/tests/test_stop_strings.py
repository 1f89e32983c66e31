"""The search for stop strings compared with the obvious one, and parameters of stops and text."""

import random
from typing import Any

import pytest

from bateleur.runner import LLM, SamplingParams
from bateleur.runner.text.detokenizer import IncrementalDetokenizer
from bateleur.runner.text.stop_strings import StopStrings

PROMPT = "import os\nimport sys\n\n\ndef main("
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


def first(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Return where the first complete string ends; of several, the longest."""
    ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    return None if not ends else (min(ends)[0], min(ends)[2])


def could_begin(text: str, stops: list[str]) -> int:
    return max(size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size]))


class Parts:
    """Tokens are positions in a list of texts."""

    def __init__(self, parts: list[str]) -> None:
        self.parts = parts

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(self.parts[i] for i in token_ids)


@pytest.mark.parametrize("letters", ["ab", "a\U0001f600\u00e9"])
def test_it_finds_what_a_naive_search_finds(letters: str) -> None:
    rng = random.Random(5)
    hits = 0
    for _ in range(1500):
        stops = ["".join(rng.choices(letters, k=rng.randint(1, 6))) for _ in range(rng.randint(1, 5))]
        parts = ["".join(rng.choices(letters, k=rng.randint(1, 4))) for _ in range(rng.randint(0, 7))]
        tokenizer: Any = Parts(parts)
        found = IncrementalDetokenizer(tokenizer, stop=stops)
        early = IncrementalDetokenizer(tokenizer, stop=stops, min_tokens=8)
        for i in range(len(parts)):
            text = "".join(parts[: i + 1])
            early.push(i)
            assert early.text == text[: len(text) - could_begin(text, stops)]
            if found.stopped is None:
                found.push(i)
                end, stop = first(text, stops) or (0, None)
                assert found.stopped == stop
                assert found.text == (early.text if stop is None else text[: end - len(stop)])
        hits += found.stopped is not None
    assert 200 < hits < 1490


def test_time_is_that_of_the_text_however_many_and_long_they_are() -> None:
    """Counts lookups per character instead of time."""
    for stops in (["a" * 4095 + "b"], [f"{i:04}" for i in range(1000)], ["ab" * 2000]):
        search, lookups = StopStrings(stops), 0

        class Counting(dict[int, int]):
            def get(self, key: int, default: Any = None) -> Any:
                nonlocal lookups
                lookups += 1
                return super().get(key, default)

        search._next = Counting(search._next)
        search.pass_by(0, "a" * 6000 + "0123" * 500 + "ab" * 3000)
        assert lookups <= 2 * 14_000 + len(stops[0])


def test_stops_beyond_the_bound_are_refused() -> None:
    SamplingParams(stop=["x"] * 4096)
    for wrong in (["ab"] * 10_000, "x" * 4097, ["y" * 4096, "z"]):
        with pytest.raises(ValueError, match=r"stop is .*; it must be of at most 4096 characters in all"):
            SamplingParams(stop=wrong)


def test_the_stop_is_part_of_the_text_if_asked_for(llm: LLM) -> None:
    plain = llm.generate(PROMPT, SamplingParams(**GREEDY))[0].outputs[0]
    stop = plain.text[9:13]
    end = plain.text.index(stop) + len(stop)
    params = SamplingParams(**GREEDY, stop=[stop, "never"], include_stop_str_in_output=True)
    output = llm.generate(PROMPT, params)[0].outputs[0]
    assert (output.text, output.stop_reason) == (plain.text[:end], stop)
    texts = [each.outputs[0].text for each in llm.stream(PROMPT, params)]
    assert texts[-1] == output.text
    assert all(output.text.startswith(each) for each in texts)
    token = plain.token_ids[5]
    params = SamplingParams(**GREEDY, stop_token_ids=[token], include_stop_str_in_output=True)
    ids = plain.token_ids[: plain.token_ids.index(token) + 1]
    for output in (llm.generate(PROMPT, params)[0].outputs[0], list(llm.stream(PROMPT, params))[-1].outputs[0]):
        assert output.token_ids == ids
        assert output.text == llm.tokenizer.decode(ids)
        assert (output.finish_reason, output.stop_reason) == ("stop", token)


def test_special_tokens_have_text_if_asked_for(llm: LLM) -> None:
    """With the end-of-sequence token as the only allowed one."""
    eos = llm.spec.eos_token_ids[0]
    shown = llm.tokenizer.decode([eos])
    assert shown
    how: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True, "allowed_token_ids": [eos]}
    for skip, text in ((True, ""), (False, shown * 3)):
        params = SamplingParams(**how, skip_special_tokens=skip)
        assert llm.generate(PROMPT, params)[0].outputs[0].text == text
        assert list(llm.stream(PROMPT, params))[-1].outputs[0].text == text
    params = SamplingParams(**how, skip_special_tokens=False, stop=shown + shown[:1])
    assert llm.generate(PROMPT, params)[0].outputs[0].text == "", "a stop string is found in it"


def test_text_is_left_out_if_asked_for(llm: LLM) -> None:
    expected = llm.generate(PROMPT, SamplingParams(**GREEDY))[0].outputs[0]
    params = SamplingParams(**GREEDY, detokenize=False)
    for output in (llm.generate(PROMPT, params)[0].outputs[0], list(llm.stream(PROMPT, params))[-1].outputs[0]):
        assert (output.token_ids, output.text) == (expected.token_ids, "")
    with pytest.raises(ValueError, match="detokenize is False; it must be True with stop"):
        SamplingParams(detokenize=False, stop="x")


def test_the_end_of_a_long_prompt_runs(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT * 3)
    for most, kept in ((5, ids[-5:]), (10**9, ids), (None, ids)):
        (output,) = llm.generate(PROMPT * 3, SamplingParams(**GREEDY, truncate_prompt_tokens=most))
        assert output.prompt_token_ids == kept
        assert output.prompt == PROMPT * 3
    long = [1 + i % 50 for i in range(3 * llm.limits.max_model_len)]
    for max_tokens, kept in ((24, long[-(llm.limits.max_model_len - 24) :]), (10**6, long[-1:]), (None, long[1:])):
        group = llm._input_processor.request(long, SamplingParams(max_tokens=max_tokens, truncate_prompt_tokens=-1))
        assert group.prompt_token_ids == kept[-(llm.limits.max_model_len - 1) :]


def test_what_is_left_is_refused_by_name() -> None:
    SamplingParams(spaces_between_special_tokens=True)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="spaces_between_special_tokens is False; it must be True"):
        SamplingParams(spaces_between_special_tokens=False)  # type: ignore[call-arg]
