"""Sizes of three published models, as their `config.json` on the Hugging Face Hub have them, and of an H100."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from bateleur.runner.checkpoint.families import FAMILIES
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.models.spec import ModelSpec

_KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
_NEMOTRON = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
MODELS: dict[str, dict[str, Any]] = {
    "Nemotron-3-Nano-30B-A3B": {
        "model_type": "nemotron_h",
        "vocab_size": 131072,
        "hidden_size": 2688,
        "layers_block_type": [_KINDS[kind] for kind in _NEMOTRON],
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 1856,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "chunk_size": 128,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 262144,
    },
    "Qwen3.5-35B-A3B": {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "max_position_embeddings": 262144,
    },
    "Llama-3.1-8B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
}


@dataclass(frozen=True, slots=True)
class Device:
    """What bounds a step, from a data sheet."""

    name: str
    bytes_per_s: float
    flops_per_s: float
    """Of dense products in bfloat16."""
    memory_bytes: float


H100 = Device("H100 SXM", 3.35e12, 989e12, 80e9)


@cache
def spec_of(name: str) -> ModelSpec:
    """The layers of one of `MODELS`; what its fields leave out is as transformers has it."""
    from transformers import AutoConfig

    fields = dict(MODELS[name])
    kind = fields.pop("model_type")
    return FAMILIES[kind].read_spec(ConfigFields(AutoConfig.for_model(kind, **fields)))
