"""Random heads in every supported checkpoint layout run with the shipped model and with targets of published heads,
and change no token.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bateleur.eagle.heads.fields import Fields
from bateleur.runner import LLM, SamplingParams

WRITER = Path(__file__).parents[1] / "packages/eagle/tests/heads/conftest.py"
PROMPTS = ["def fibonacci(n):", "import os\n"]
PARAMS = [SamplingParams(temperature=t, seed=4, max_tokens=14, ignore_eos=True) for t in (0.0, 0.8)]


def writer(folder: Path, **sizes: int) -> Any:
    """The checkpoint writer of the loaders' tests, for heads of these sizes."""
    spec = importlib.util.spec_from_file_location("head_checkpoints", WRITER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return type("Sized", (module.Checkpoints,), sizes)(folder)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Heads of the shipped model's size."""
    sizes = {"H": 256, "Ht": 256, "V": 4096, "Vd": 300, "HEADS": 4, "KV_HEADS": 2, "D": 64, "F": 96}
    return writer(tmp_path_factory.mktemp("heads"), **sizes)


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
        vocabulary = llm.engine.runner.proposer.drafter.head.vocabulary  # type: ignore[union-attr]
        assert vocabulary.output is llm.engine.model.output, "what is shared is packed once"


TARGETS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"layer_types": None},
    "qwen3_moe": {},
    "gpt_oss": {"layer_types": None},
}
"""Targets of published EAGLE-3 heads, of 7 layers, so that there are default taps: 2, 3 and 4."""
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}


def own_embedding(made: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    return {**tensors, "embed_tokens.weight": made.random(made.V, made.Ht)}


def speculators(made: Any) -> Path:
    """RedHatAI's heads: those of gpt-oss with one norm of all taps."""
    layer, tensors = made.eagle3((2, 3, 5))
    tensors["input_norm.weight"] = 1 + made.random(3 * made.Ht)
    inside = {name: layer.pop(name) for name in made.layer_config() if name != "rope_theta"}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": made.Vd,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 5],
        "embed_requires_grad": False,
        "norm_before_fc": True,
        "norm_before_residual": True,
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 3}]},
        "speculators_model_type": "eagle3",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {**inside, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
    }
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    return made.write(config, own_embedding(made, named))


def specforge(made: Any) -> Path:
    """SpecForge's configuration of EAGLE-3.1 for Qwen3-30B-A3B: a norm of each tap, and default taps."""
    config, tensors = made.eagle3()
    del config["eagle_config"], config["target_hidden_size"]
    more = {"fc_norm": True, "norm_output": True, "sliding_window": None, "use_sliding_window": False}
    tensors |= {f"fc_norm.{i}.weight": 1 + made.random(made.Ht) for i in range(3)}
    return made.write({**config, **more, "rope_scaling": None, "tie_word_embeddings": True}, tensors)


def angelslim(made: Any) -> Path:
    config, tensors = made.eagle3()
    del config["eagle_config"], config["target_hidden_size"]
    config |= {"architectures": ["Eagle3LlamaForCausalLM"], "aux_hidden_states_layer_ids": [1, 2, 5]}
    config |= {"decoder_sparse_step": 1, "output_router_logits": False, "router_aux_loss_coef": 0.001}
    return made.write(config, own_embedding(made, tensors))


def nebius(made: Any) -> Path:
    """nebius' heads of gpt-oss: called a Llama model, with YaRN."""
    config, tensors = made.eagle3((2, 3, 5))
    config |= {"architectures": ["LlamaForCausalLM"], "truncated_vocab_size": made.Vd, "rope_scaling": YARN}
    return made.write(config, tensors)


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> tuple[Path, list[list[int]]]:
    """A tiny target, and what it says without a head."""
    folder = tiny(request.param, num_hidden_layers=7, max_position_embeddings=64, **TARGETS[request.param])
    return folder, tokens(LLM(folder, device="cpu", max_num_seqs=2))


def tokens(llm: LLM) -> list[list[int]]:
    prompts = [{"prompt_token_ids": [3 + 7 * i % 90 for i in range(length)]} for length in (19, 5)]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS)]


@pytest.mark.parametrize(
    ("layout", "taps"),
    [(speculators, (2, 3, 5)), (specforge, (2, 3, 4)), (angelslim, (2, 3, 6)), (nebius, (2, 3, 5))],
    ids=["speculators", "specforge", "angelslim", "nebius"],
)
def test_published_layouts_run_beside_their_targets(
    tmp_path: Path, target: tuple[Path, list[list[int]]], layout: Callable[[Any], Path], taps: tuple[int, ...]
) -> None:
    folder, wanted = target
    made = writer(tmp_path, H=48, Ht=48, V=101, Vd=30, HEADS=4, KV_HEADS=2, D=12, F=40)
    draft = {"draft": layout(made), "num_speculative_tokens": 2}
    llm = LLM(folder, device="cpu", max_num_seqs=2, block_size=8, enable_prefix_caching=True, **draft)
    assert tokens(llm) == wanted
    head = llm.engine.runner.proposer.drafter.head  # type: ignore[union-attr]
    assert head.spec.needs.taps == taps
    acceptance = llm.get_metrics().acceptance
    assert acceptance is not None
    assert acceptance.num_steps > 10


def test_yarn_of_a_head_is_that_of_transformers() -> None:
    for more in ({}, {"truncate": True}, {"attention_factor": 1.5}, {"factor": 4.0, "beta_fast": 8.0}):
        rope = {**YARN, **more, "rope_theta": 150000.0}
        config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=rope)
        wanted, scaling = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
        found = Fields({"head_dim": 64, "rope_theta": 150000.0, "rope_scaling": {**YARN, **more}}).rope()
        assert found.attention_scaling == pytest.approx(scaling)
        assert found.inv_freq == pytest.approx(wanted.tolist(), rel=1e-5)
