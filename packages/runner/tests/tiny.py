"""Tiny checkpoints of every family, written by transformers, with weights large enough to tell answers apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# Sizes are odd on purpose: nothing is a power of two, groups are more than one, heads are shared unevenly.
NEMOTRON_H: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 40,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp", "full_attention"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 56,
    "mamba_num_heads": 6,
    "mamba_head_dim": 12,
    "ssm_state_size": 16,
    "n_groups": 3,
    "conv_kernel": 4,
    "chunk_size": 8,
    "max_position_embeddings": 256,
}
BAMBA: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 5,
    "attn_layer_indices": [1, 3],
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 40,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
    "max_position_embeddings": 256,
}
GRANITE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "num_hidden_layers": 5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "shared_intermediate_size": 40,
    "num_local_experts": 0,
    "mamba_n_heads": 12,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
    "max_position_embeddings": 256,
    "embedding_multiplier": 3.5,
    "attention_multiplier": 0.125,
    "residual_multiplier": 0.37,
    "logits_scaling": 2.5,
}
FALCON_H1: dict[str, Any] = {
    "vocab_size": 89,
    "hidden_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 56,
    "mamba_d_ssm": 72,
    "mamba_n_heads": 6,
    "mamba_d_head": 12,
    "mamba_n_groups": 3,
    "mamba_d_state": 16,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 8,
    "max_position_embeddings": 256,
    "lm_head_multiplier": 0.35,
    "embedding_multiplier": 2.7,
    "mlp_multipliers": [0.8, 1.3],
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.6,
    "ssm_multipliers": [0.9, 1.4, 0.6, 1.1, 0.7],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.45,
}
NEMOTRON_H_EXPERTS = NEMOTRON_H | {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 36,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
GRANITE_EXPERTS = GRANITE | {"num_local_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 24}
LFM2: dict[str, Any] = {
    "vocab_size": 107,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 5,
    "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "conv_L_cache": 3,
    "block_multiple_of": 12,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
}
LFM2_EXPERTS = LFM2 | {
    "num_dense_layers": 2,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
}
LLAMA: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 256,
}
WINDOWS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
QWEN = LLAMA | {"use_sliding_window": True, "sliding_window": 7, "layer_types": WINDOWS}
QWEN3_5: dict[str, Any] = {
    "vocab_size": 103,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 256,
}
OLMO_HYBRID: dict[str, Any] = {
    "vocab_size": 109,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 3,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
KIMI_LINEAR: dict[str, Any] = {
    "vocab_size": 113,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "linear_num_heads": 3,
    "linear_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
QWEN_EXPERTS: dict[str, Any] = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
QWEN3_MOE = LLAMA | {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
}
MAMBA2: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_heads": 6,
    "head_dim": 16,
    "state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 8,
}
GPT_OSS = LLAMA | {
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "intermediate_size": 40,
    "sliding_window": 7,
    "layer_types": WINDOWS,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
OLMO3 = LLAMA | {
    "sliding_window": 7,
    "layer_types": WINDOWS,
    "eos_token_id": 2,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    },
}
PHI3 = {name: value for name, value in LLAMA.items() if name != "head_dim"} | {
    "num_attention_heads": 4,
    "sliding_window": 9,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}
GEMMA3 = LLAMA | {
    "sliding_window": 7,
    "layer_types": WINDOWS,
    "query_pre_attn_scalar": 20,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
QWEN3_NEXT = {**QWEN3_5, **QWEN_EXPERTS, "decoder_sparse_step": 2, "vocab_size": 107, "num_hidden_layers": 4}
QWEN3_5_MOE = {name: value for name, value in QWEN3_5.items() if name != "intermediate_size"} | QWEN_EXPERTS
FAMILIES: dict[str, dict[str, Any]] = {
    "nemotron_h": NEMOTRON_H,
    "bamba": BAMBA,
    "granitemoehybrid": GRANITE,
    "llama": LLAMA,
    "falcon_h1": FALCON_H1,
    "kimi_linear": KIMI_LINEAR,
    "olmo_hybrid": OLMO_HYBRID,
    "lfm2": LFM2,
    "lfm2_moe": {name: value for name, value in LFM2_EXPERTS.items() if name != "block_multiple_of"},
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3": QWEN,
    "qwen2": {name: value for name, value in QWEN.items() if name != "head_dim"},
    "mistral": LLAMA | {"sliding_window": 9},
    "qwen3_moe": QWEN3_MOE,
    "smollm3": QWEN
    | {"no_rope_layers": [1, 0, 1, 0, 1], "pad_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False},
    "granite": {name: value for name, value in LLAMA.items() if name != "head_dim"}
    | {"embedding_multiplier": 3.5, "attention_multiplier": 0.25, "residual_multiplier": 0.37, "logits_scaling": 2.5},
    "olmo3": OLMO3,
    "phi3": PHI3,
    "gemma3_text": GEMMA3,
    "mamba2": MAMBA2,
    "gpt_oss": GPT_OSS,
    "nemotron_h-experts": NEMOTRON_H_EXPERTS,
    "granitemoehybrid-experts": GRANITE_EXPERTS,
}
"""Sizes by model type, behind which may stand what differs."""
EVEN: dict[str, dict[str, Any]] = {
    "nemotron_h": {"n_groups": 2, "mamba_num_heads": 8, "num_attention_heads": 8},
    "bamba": {"num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_d_head": 12},
    "granitemoehybrid": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "llama": {"num_attention_heads": 8, "head_dim": 8},
    "falcon_h1": {"num_attention_heads": 8, "mamba_n_groups": 2, "mamba_n_heads": 8, "mamba_d_ssm": 96},
    "kimi_linear": {"num_attention_heads": 4, "num_key_value_heads": 4, "linear_num_heads": 4},
    "olmo_hybrid": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    },
    "lfm2": {"num_attention_heads": 4},
    "lfm2_moe": {"num_attention_heads": 4},
    "qwen3_5_text": {"num_attention_heads": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 8},
    "qwen3_5_moe_text": {"num_attention_heads": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "qwen3_next": {"num_attention_heads": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "qwen3": {"num_attention_heads": 8, "head_dim": 8},
    "qwen2": {"num_attention_heads": 8},
    "mistral": {"num_attention_heads": 8, "head_dim": 8},
    "qwen3_moe": {"num_attention_heads": 8, "head_dim": 8},
    "smollm3": {"num_attention_heads": 8, "head_dim": 8},
    "granite": {"num_attention_heads": 8},
    "olmo3": {"num_attention_heads": 8, "head_dim": 8},
    "phi3": {},
    "gemma3_text": {"num_attention_heads": 8, "head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 12, "vocab_size": 104},
    "gpt_oss": {"num_attention_heads": 8, "head_dim": 8},
    "nemotron_h-experts": {"n_groups": 2, "mamba_num_heads": 8, "num_attention_heads": 8},
    "granitemoehybrid-experts": {"num_attention_heads": 8, "num_key_value_heads": 2},
}
"""Sizes of tiny models that four ranks can share."""
ALIKE = frozenset(("granite", "mistral", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"))
"""Families whose layers other families have; tests that start processes per family skip these."""


def transformers_before(*version: int) -> bool:
    """Whether the transformers that is installed is older: some do less than those that we are like."""
    import transformers

    return tuple(map(int, transformers.__version__.split(".")[: len(version)])) < version


def make_model(family: str, **overrides: Any) -> Any:
    """A transformers model with random float32 weights; overrides replace fields of the family's tiny config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if family.startswith(("bamba", "granitemoehybrid")) and transformers_before(5, 23):
        overrides["mamba_n_groups"] = 1  # in 5.17 gated norms of these are over all groups at once
    if family == "mamba2" and transformers_before(5, 23):
        overrides["n_groups"] = 1
    config = AutoConfig.for_model(family.partition("-")[0], **{**FAMILIES[family], **overrides})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomise(model)
    return model


def randomise(model: Any) -> None:
    """Random numbers in all weights of a transformers model, such as tell answers apart."""
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            _randomise(name, weight)


def _randomise(name: str, weight: torch.Tensor) -> None:
    if name.endswith("A_log"):
        weight.uniform_(-2.0, 2.0)
    elif name.endswith(("dt_bias", ".D")):
        weight.normal_(0.0, 1.5)
    elif "norm" in name:
        weight.uniform_(0.5, 1.5)
    elif name.endswith("conv1d.weight"):
        weight.normal_(0.0, 0.5)
    elif name.endswith("bias"):
        weight.normal_(0.0, 0.3)
    else:
        weight.normal_(0.0, 1.3 / weight.shape[-1] ** 0.5)


_QWEN_MTP = {
    "fc": "fc",
    "token_norm": "pre_fc_norm_embedding",
    "hidden_norm": "pre_fc_norm_hidden",
    "final_norm": "norm",
}
MTP: dict[str, dict[str, str]] = {
    "nemotron_h": {
        "fc": "layers.0.eh_proj",
        "token_norm": "layers.0.enorm",
        "hidden_norm": "layers.0.hnorm",
        "final_norm": "layers.{last}.final_layernorm",
    },
    "qwen3_5_text": _QWEN_MTP,
    "qwen3_5_moe_text": _QWEN_MTP,
    "qwen3_next": _QWEN_MTP,
}
"""What files of a family call the parts of an MTP head, behind `mtp.`"""


def add_mtp(folder: Path, family: str, scratch: Path, **layers: Any) -> Any:
    """Write a random MTP head into the checkpoint folder of a tiny model, under its names in published files.

    layers: what differs from the family's tiny configuration in a model of nothing but the layers of the head, which is
    returned: transformers' own, for it reads no head. scratch: a folder that does not exist yet.
    """
    body = make_model(family, **layers)
    torch.manual_seed(1)
    randomise(body)
    names, size = MTP[family.partition("-")[0]], body.config.hidden_size
    tensors: dict[str, torch.Tensor] = {f"mtp.{names['fc']}.weight": torch.randn(size, 2 * size) / size**0.5}
    norms = torch.rand(2, size) + 0.5
    tensors |= {f"mtp.{names[name]}.weight": norms[i] for i, name in enumerate(("token_norm", "hidden_norm"))}
    final = names["final_norm"].format(last=body.config.num_hidden_layers - 1)
    for name, tensor in load_file(save(body, scratch) / "model.safetensors").items():
        layer = name.partition("layers.")
        if layer[1]:
            tensors[f"mtp.layers.{layer[2]}"] = tensor
        elif name.endswith(("norm_f.weight", "model.norm.weight")):
            tensors[f"mtp.{final}.weight"] = tensor
    file = folder / "model.safetensors"
    save_file({name: t.contiguous() for name, t in (load_file(file) | tensors).items()}, file)
    return body


def num_weights(model: Any) -> int:
    """Numbers in a model's files: its parameters, and what it calls buffers; what is tied counts once."""
    return sum({each.data_ptr(): each.numel() for each in model.state_dict().values()}.values())


def save(model: Any, folder: Path, **kwargs: Any) -> Path:
    """Write a model as a checkpoint folder."""
    model.save_pretrained(folder, **kwargs)
    _cut_convolutions({file: load_file(file) for file in folder.glob("*.safetensors")})
    return folder


def _cut_convolutions(files: dict[Path, dict[str, torch.Tensor]]) -> None:
    """Convolutions of queries, keys and values in their sizes: transformers cuts what it joined into equal parts."""
    tensors = {name: tensor for file in files.values() for name, tensor in file.items()}
    for first in [name for name in tensors if name.endswith(".q_conv1d.weight")]:
        branch = first.removesuffix("q_conv1d.weight")
        own = [f"{branch}{name}_conv1d.weight" for name in "qkv"]
        rows = [len(tensors[f"{branch}{name}_proj.weight"]) for name in "qkv"]
        parts = torch.cat([tensors[name] for name in own]).split(rows)
        tensors |= {name: part.clone() for name, part in zip(own, parts, strict=True)}
    for file, held in files.items():
        if any("_conv1d" in name for name in held):
            save_file({name: tensors[name] for name in held}, file, {"format": "pt"})


def edit_config(folder: Path, **fields: Any) -> None:
    """Set fields of config.json; None removes one."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
