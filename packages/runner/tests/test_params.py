"""Sampling parameters: defaults, normal forms, and every refusal with argument, value and rule."""

import dataclasses
import math

import numpy as np
import pytest

from bateleur.runner.sampling_params import SamplingParams


def test_defaults_and_names() -> None:
    params = SamplingParams()
    assert dataclasses.asdict(params) == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": None,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "logprobs": None,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
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


@pytest.mark.parametrize("make", [lambda d: SamplingParams(**d), SamplingParams.from_dict])
def test_other_names_are_refused_by_name(make: object) -> None:
    assert callable(make)
    with pytest.raises(
        ValueError, match=r"unknown sampling parameter n; the known ones are temperature, top_k"
    ):
        make({"n": 2})
    with pytest.raises(ValueError, match="best_of, n;"):
        make({"n": 2, "best_of": 1, "temperature": 1.0})
    assert make({"top_k": 3}) == SamplingParams(top_k=3)


@pytest.mark.parametrize("values", [[("n", 1)], "temperature", None, {1: 2}])
def test_from_dict_wants_a_mapping(values: object) -> None:
    with pytest.raises(ValueError, match="mapping from names"):
        SamplingParams.from_dict(values)  # type: ignore[arg-type]


BAD = {
    "temperature": [math.nan, -0.1, math.inf, "1", None, True, 10**400],
    "top_k": [-2, 1.5, True, None, "3"],
    "top_p": [0, -0.5, 1.01, math.nan, None, True],
    "min_p": [-0.01, 1.01, math.nan, "0", None],
    "seed": [2**63, -(2**63) - 1, 1.0, True, "1"],
    "max_tokens": [0, -1, 1.5, True, "16"],
    "min_tokens": [-1, 0.5, True, None],
    "stop": ["", ["a", ""], [1], 3, b"x", [None], {"a"}],
    "stop_token_ids": [[-1], [1.0], [True], 3, "12", {1}],
    "ignore_eos": [1, 0, None, "yes"],
    "logprobs": [-1, 1.0, True, "5"],
    "repetition_penalty": [0, -1, math.nan, math.inf, None],
    "presence_penalty": [-2.1, 2.1, math.nan, None],
    "frequency_penalty": [-2.1, 2.1, math.nan, None, True],
}


def test_every_name_has_its_refusals() -> None:
    assert set(BAD) == set(SamplingParams.names())


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in BAD for value in BAD[name]])
def test_bad_values(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}=.* must ") as caught:
        SamplingParams.from_dict({name: value})
    assert repr(value) in str(caught.value) or isinstance(value, list)


def test_min_tokens_beyond_max_tokens() -> None:
    with pytest.raises(ValueError, match="min_tokens=17 must be <= max_tokens=16"):
        SamplingParams(min_tokens=17)
