"""A custom model family whose Mamba layers have two shapes: one group of pages serves both."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, PretrainedConfig

import bateleur.runner
from bateleur.mamba import Mamba2
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.checkpoint.families import FAMILIES, Family
from bateleur.runner.checkpoint.names import StorageForm
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.spec import AttentionLayer, MambaLayer, MlpLayer, ModelSpec
from eagle_doubles.drafters import ScriptedDrafter

VOCAB = 4096
SMALL = MambaLayer(Mamba2(6, 12, 16, 3), 8, conv_bias=True, proj_bias=False, norm_eps=1e-5)
LARGE = MambaLayer(Mamba2(4, 20, 24, 1, conv_width=3), 12, conv_bias=False, proj_bias=True, norm_eps=1e-5)
LAYERS = (SMALL, LARGE, AttentionLayer(6, 2, 16, 0.25), MlpLayer(56, "relu2", gated=False), LARGE, SMALL)
SPEC = ModelSpec("TwoStatesForCausalLM", VOCAB, 40, LAYERS, 1e-5, max_position_embeddings=256)
FAMILY = Family("two_states", SPEC.architecture, lambda _: SPEC, FAMILIES["nemotron_h"].names, needs=())
PARAMS = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
SHARED = [(7 * i) % 4000 + 3 for i in range(40)]
PROMPTS = [{"prompt_token_ids": ids} for ids in (SHARED, [9, 8, 7], SHARED[20:37], [*SHARED, 5, 6, 7], [11])]


class TwoStates(PretrainedConfig):
    """The config class that transformers needs."""

    model_type = "two_states"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    AutoConfig.register(TwoStates.model_type, TwoStates, exist_ok=True)
    path = tmp_path_factory.mktemp("two_states")
    generator, tensors = torch.Generator().manual_seed(0), {}
    shapes = HybridDecoder(SPEC, dtype=torch.float32, device="meta").weights()
    for name, part in FAMILY.names(SPEC).items():
        shape = shapes[part.target].shape[1:]
        rows = shapes[part.target].shape[0] if part.rows is None else part.rows
        full = (rows, 1, *shape) if part.form is StorageForm.CONV else (rows, *shape)
        scale = 1.0 if len(full) == 1 else 1.3 / full[-1] ** 0.5
        tensors[name] = torch.randn(full, generator=generator) * scale + ("norm" in name)
    save_file(tensors, path / "model.safetensors")
    config = {"model_type": FAMILY.model_type, "architectures": [FAMILY.architecture]}
    (path / "config.json").write_text(json.dumps(config))
    for file in (Path(bateleur.runner.__file__).parent / "assets/model").glob("token*"):
        shutil.copy(file, path)
    return path


@pytest.fixture
def make(make_llm: Callable[..., LLM], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    monkeypatch.setitem(FAMILIES, FAMILY.model_type, FAMILY)
    return lambda **settings: make_llm(model=str(folder), max_model_len=128, **settings)


def texts(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("mode", ["none", "align", "all"])
@pytest.mark.parametrize("policy", ["slots", "fold"])
def test_mamba_layers_of_two_shapes(make: Callable[..., LLM], policy: str, mode: str, k: int) -> None:
    alone = make(max_num_seqs=1, mamba_state_policy="slots")
    wanted = texts(alone)
    assert len({tuple(text) for text in wanted}) == len(PROMPTS)
    assert len({spec.state_shape for spec in alone.engine.caches.pool.specs}) == 2
    known = [p["prompt_token_ids"] + text for p, text in zip(PROMPTS, wanted, strict=True)]

    def script(tokens: list[int]) -> list[int]:
        return next((text[len(tokens) :] for text in known if text[: len(tokens)] == tokens), [])

    settings: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 33, "mamba_state_policy": policy}
    if mode != "none":
        settings |= {"enable_prefix_caching": True, "mamba_cache_mode": mode, "mamba_block_size": 8}
    if k:
        settings |= {"num_speculative_tokens": k, "drafter": ScriptedDrafter(script, k, 2, VOCAB)}
    llm = make(**settings)
    assert [texts(llm), texts(llm)] == [wanted, wanted]
    assert (llm.get_metrics().num_cached_tokens > 0) == (mode != "none")
    assert (llm.get_metrics().tokens_per_step > 1.5) == (k > 0)
