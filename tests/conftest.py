"""Engines that several composition tests share."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bateleur.runner import LLM


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; this machine has none"))


@pytest.fixture(scope="session")
def make_llm() -> Callable[..., LLM]:
    """A small engine around the shipped model, on CPU in float32."""

    def make(**overrides: Any) -> LLM:
        settings: dict[str, Any] = {
            "device": "cpu",
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 8,
            "block_size": 8,
        }
        return LLM(**(settings | overrides))

    return make


@pytest.fixture(scope="session")
def llm(make_llm: Callable[..., LLM]) -> LLM:
    """The common engine; every test leaves it idle."""
    return make_llm()
