"""Sizes of published models, as their `config.json` on the Hugging Face Hub have them, and of an H100."""

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
        "full_attention_interval": 4,
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
    "Qwen3.5-9B": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "full_attention_interval": 4,
        "max_position_embeddings": 262144,
    },
    "Granite-4.0-H-Small": {
        "model_type": "granitemoehybrid",
        "vocab_size": 100352,
        "hidden_size": 4096,
        "intermediate_size": 768,
        "shared_intermediate_size": 1536,
        "layer_types": ["full_attention" if i % 10 == 5 else "linear_attention" for i in range(40)],
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 72,
        "num_experts_per_tok": 10,
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_chunk_size": 256,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.0078125,
        "residual_multiplier": 0.22,
        "logits_scaling": 16.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
    },
    "Kimi-Linear-48B-A3B": {
        "model_type": "kimi_linear",
        "vocab_size": 163840,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 27,
        "layer_types": ["full_attention" if i in (3, 7, 11, 15, 19, 23, 26) else "linear_attention" for i in range(27)],
        "mlp_layer_types": ["dense"] + ["sparse"] * 26,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.446,
        "linear_num_heads": 32,
        "linear_head_dim": 128,
        "model_max_length": 1048576,
    },
}
MODELS["Qwen3.6-35B-A3B"] = MODELS["Qwen3.5-35B-A3B"]
"""Its layers are those of Qwen3.5."""
SHOWN = ("Nemotron-3-Nano-30B-A3B", "Qwen3.5-35B-A3B", "Llama-3.1-8B")
"""The models of the performance pages."""
_NARROW_DELTA = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_NARROW_HEADS = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
NARROW: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        **_NARROW_HEADS,
        "head_dim": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 16,
        "n_groups": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "qwen3_5_moe_text": {
        **_NARROW_HEADS,
        **_NARROW_DELTA,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "qwen3_5_text": {**_NARROW_HEADS, **_NARROW_DELTA, "head_dim": 16, "intermediate_size": 48},
    "llama": {**_NARROW_HEADS, "intermediate_size": 48},
}
"""By `model_type`, fields that make each layer small. The layers and their order stay those of the model."""


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
