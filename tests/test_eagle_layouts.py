"""Random heads in every supported checkpoint layout run with the shipped model, and change no token."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bateleur.runner import LLM, SamplingParams

WRITER = Path(__file__).parents[1] / "packages/eagle/tests/heads/conftest.py"
PROMPTS = ["def fibonacci(n):", "import os\n"]
PARAMS = [SamplingParams(temperature=t, seed=4, max_tokens=14, ignore_eos=True) for t in (0.0, 0.8)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The checkpoint writer of the loaders' tests, for heads of the shipped model's size."""
    spec = importlib.util.spec_from_file_location("head_checkpoints", WRITER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = {"H": 256, "Ht": 256, "V": 4096, "Vd": 300, "HEADS": 4, "KV_HEADS": 2, "D": 64, "F": 96}
    return type("Sized", (module.Checkpoints,), sizes)(tmp_path_factory.mktemp("heads"))


def eagle1(made: Any) -> Path:
    return made.write(*made.eagle1())


def wrapped(made: Any) -> Path:
    config, tensors = made.eagle1()
    return made.write({"model_type": "eagle", "model": config, "architectures": ["EAGLEModel"]}, tensors)


def eagle3(made: Any) -> Path:
    config, tensors = made.eagle3()
    config["max_position_embeddings"] = 2048
    return made.write(config, tensors, "bin")


@pytest.mark.parametrize("layout", [eagle1, wrapped, eagle3], ids=lambda layout: layout.__name__)
def test_a_head_in_this_layout_runs(
    make_llm: Callable[..., LLM], checkpoints: Any, layout: Callable[[Any], Path]
) -> None:
    folder = layout(checkpoints)
    settings: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2}
    plain = make_llm(**settings).generate(PROMPTS, PARAMS)
    llm = LLM(device="cpu", dtype="float32", block_size=8, draft=folder, num_speculative_tokens=2, **settings)
    got = llm.generate(PROMPTS, PARAMS)
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in plain]
    acceptance = llm.get_metrics().acceptance
    assert acceptance is not None
    assert acceptance.num_steps > 10
    if layout is not eagle3:
        vocabulary = llm.engine._proposer.drafter.head.vocabulary  # type: ignore[union-attr]
        assert vocabulary.output is llm.engine.model.output, "what is shared is packed once"
