"""Sampling parameters: defaults, normal forms, and error messages with argument, value and rule."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from bateleur.runner.outputs import RequestOutputKind
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.utils.vllm_names import SAMPLING


def test_defaults_and_names() -> None:
    params = SamplingParams()
    assert dataclasses.asdict(params) == {
        "n": 1,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": None,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop": (),
        "include_stop_str_in_output": False,
        "stop_token_ids": (),
        "ignore_eos": False,
        "logprobs": None,
        "logprob_token_ids": None,
        "prompt_logprobs": None,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": (),
        "skip_special_tokens": True,
        "detokenize": True,
        "return_tags": False,
        "truncate_prompt_tokens": None,
        "truncation_side": "left",
        "output_kind": RequestOutputKind.CUMULATIVE,
        "structured_outputs": None,
    }
    assert SamplingParams.names() == tuple(dataclasses.asdict(params))


def test_frozen_hashable_replaceable() -> None:
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[3], seed=np.int64(5), temperature=2)
    assert params.stop == ("a", "b")
    assert params.stop_token_ids == (3,)
    assert type(params.seed) is int
    assert type(params.temperature) is float
    assert hash(params) == hash(SamplingParams(stop=("a", "b"), stop_token_ids=(3,), seed=5, temperature=2.0))
    assert dataclasses.replace(params, top_k=4).top_k == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 1  # type: ignore[misc]
    assert SamplingParams(stop="end").stop == ("end",)


def test_edges_are_accepted() -> None:
    SamplingParams(top_k=-1, top_p=1, min_p=1, seed=-(2**63), max_tokens=None, min_tokens=10**6)
    SamplingParams(seed=2**63 - 1, max_tokens=3, min_tokens=3, logprobs=0, presence_penalty=-2)
    SamplingParams(top_p=1e-9, frequency_penalty=2, repetition_penalty=1e-3)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (9.9e-6, True), (1e-5, False), (1.0, False)])
def test_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_biases_come_with_ids_as_numbers_or_as_text() -> None:
    params = SamplingParams(logit_bias={"12": -3, np.int64(5): 100}, allowed_token_ids=np.array([3, 1]).tolist())
    assert params.logit_bias == {12: -3.0, 5: 100.0}
    assert params.allowed_token_ids == (3, 1)
    assert hash(params) == hash(dataclasses.replace(params, logit_bias=None)), "equal ones have one hash"
    assert params != dataclasses.replace(params, logit_bias=None)
    assert SamplingParams(logit_bias={}, bad_words=None) == SamplingParams()


def test_the_readme_lists_what_is_taken_and_what_is_refused() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    taken, refused = readme.split("## Parameters")[1].split("## ")[0].split("Refused by name")
    assert sorted(re.findall(r"`(\w+)`", taken)[1:]) == sorted(SamplingParams.names())
    assert sorted(re.findall(r"`(\w+)`", refused)) == sorted(SAMPLING)
