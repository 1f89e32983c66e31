"""Fields of a checkpoint's config.json, of every family: what can't be is refused by name before anything is loaded."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bateleur.runner.checkpoint.families import FAMILIES as KNOWN
from bateleur.runner.checkpoint.open import open_checkpoint

FAMILIES = ("nemotron_h", "bamba", "granitemoehybrid", "llama", "falcon_h1")
LLAMAS = ("bamba", "granitemoehybrid", "llama", "falcon_h1")


def brief(value: object) -> str:
    return ascii(value)[1:41] if isinstance(value, str) else ""


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`folder(family, **fields)` is a checkpoint with these fields; None removes one. Its config.json is not kept."""
    made: dict[str, tuple[Path, dict[str, Any]]] = {}

    def edit(family: str, **fields: Any) -> Path:
        if family not in made:
            copy = tmp_path_factory.mktemp("copy") / family
            shutil.copytree(tiny(family), copy)
            made[family] = copy, json.loads((copy / "config.json").read_text())
        path, config = made[family]
        kept = {name: value for name, value in {**config, **fields}.items() if value is not None}
        (path / "config.json").write_text(json.dumps(kept))
        return path

    return edit


MOST = 1 << 24
COUNT = "an integer in [0, 4096]"
EXPERTS = ("nemotron_h-experts",)
SIZE = f"an integer in [1, {MOST}]"
POSITIVE, FLAG, NAME = "a finite number > 0", "True or False", "text that is not empty"
KINDS = "one of attention, conv, full_attention, linear_attention, mamba, mlp, moe, sliding_attention"
WRONG = ["many", 1.5, True, [], {}, 0, -1, math.nan, math.inf]
UNREAL = ["many", True, [], {}, math.nan, math.inf]

# (families, fields, rule, values)
RULES: list[tuple[tuple[str, ...], str, str, list[Any]]] = [
    (FAMILIES, "vocab_size hidden_size num_attention_heads num_key_value_heads", SIZE, [*WRONG, 10**15, 10**30]),
    (("nemotron_h", "bamba", "llama"), "intermediate_size", SIZE, [0, "a", 10**30]),
    (("nemotron_h", "llama"), "head_dim", SIZE, [0, "a", 10**30]),
    (("nemotron_h",), "mamba_num_heads mamba_head_dim ssm_state_size n_groups", SIZE, [0, -5, "a", 2.0, 10**30]),
    (("bamba", "granitemoehybrid"), "mamba_n_heads mamba_d_head mamba_d_state mamba_n_groups", SIZE, [0, "a", 10**30]),
    (("granitemoehybrid",), "shared_intermediate_size", SIZE, [-1, "a", 10**30]),
    (LLAMAS, "num_hidden_layers", "an integer in [1, 1024]", [*WRONG, 100_000, 10**9]),
    (("nemotron_h",), "chunk_size", "an integer in [1, 1024]", [*WRONG, 10**9]),
    (("bamba", "granitemoehybrid"), "mamba_chunk_size", "an integer in [1, 1024]", [0, 10**9]),
    (FAMILIES, "max_position_embeddings", f"an integer in [1, {2**31 - 1}]", [0, "a", 2**31, 10**30]),
    (("granitemoehybrid",), "num_local_experts", "an integer in [0, 4096]", [-1, "a", 1.5, 10**9]),
    ((*EXPERTS, "granitemoehybrid-experts"), "num_experts_per_tok", COUNT, [-1, "a", True, 10**9]),
    (EXPERTS, "n_routed_experts n_group topk_group", COUNT, [-1, "a", 1.5, 10**9]),
    (EXPERTS, "moe_shared_expert_intermediate_size moe_latent_size", SIZE, [0, "a", 10**30]),
    (EXPERTS, "routed_scaling_factor", POSITIVE, [*UNREAL, 0, -1]),
    (EXPERTS, "norm_topk_prob", FLAG, [0, "false"]),
    (("nemotron_h",), "layer_norm_epsilon", POSITIVE, [*UNREAL, 0, -1e-5]),
    (LLAMAS, "rms_norm_eps", POSITIVE, [0.0, "a", math.nan]),
    (("granitemoehybrid",), "logits_scaling", POSITIVE, [0, -1, "a", math.inf]),
    (("bamba", "granitemoehybrid"), "mamba_expand", "a finite number in (0, 1024]", ["a", 0, -1, 10**30, math.nan]),
    (("granitemoehybrid",), "embedding_multiplier residual_multiplier attention_multiplier", "a finite number", UNREAL),
    (
        ("falcon_h1",),
        "embedding_multiplier key_multiplier attention_out_multiplier ssm_in_multiplier ssm_out_multiplier",
        "a finite number",
        ["many", [], math.nan],
    ),
    (("falcon_h1",), "attention_in_multiplier lm_head_multiplier", POSITIVE, ["many", True, math.inf, 0, -1]),
    (("falcon_h1",), "mlp_multipliers", "a list of 2 numbers", [1.0, [1.0], [1, 2, 3], {}, "ab"]),
    (("falcon_h1",), "ssm_multipliers", "a list of 5 numbers", [1.0, [1.0] * 4, {}, "abcde"]),
    (("falcon_h1",), "mamba_d_ssm mamba_n_heads mamba_d_state", SIZE, [0, "a", 1.5, 10**30]),
    (
        ("falcon_h1",),
        "attention_bias projectors_bias mamba_rms_norm mamba_norm_before_gate mamba_proj_bias",
        FLAG,
        ["false", 1],
    ),
    (("nemotron_h",), "time_step_min", "a finite number >= 0", [*UNREAL, -1]),
    (
        ("bamba", "granitemoehybrid", "nemotron_h"),
        "time_step_limit",
        "two numbers with 0 <= low <= high",
        [[2.0, 1.0], [-1, 1], [1], [1, 2, 3], ["a", "b"], [0, None], "many", 5, math.nan],
    ),
    (("nemotron_h",), "mlp_bias use_bias use_conv_bias residual_in_fp32", FLAG, [0, 1, "false", []]),
    (("bamba", "granitemoehybrid"), "mamba_conv_bias mamba_proj_bias", FLAG, ["false"]),
    (("llama",), "attention_bias mlp_bias", FLAG, ["false", 1]),
    (FAMILIES, "tie_word_embeddings", FLAG, [0, "false"]),
    (("nemotron_h",), "mamba_hidden_act mlp_hidden_act mamba_ssm_cache_dtype", NAME, [5, [], True, ""]),
    (LLAMAS, "hidden_act", NAME, [5, []]),
    (FAMILIES, "model_type", NAME, [5, [], {}, True, ""]),
    (FAMILIES, "architectures", "a list of names", [5, "LlamaForCausalLM", {}, True, 10**30]),
    (("nemotron_h",), "layers_block_type", "a list of names", [5, "mlp", {}, True]),
    (("nemotron_h",), "hybrid_override_pattern", "letters of M*-E", ["MX", 5, []]),
    (
        ("qwen3_5_text",),
        "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim",
        SIZE,
        [0, -5, "a", 2.0, 10**30],
    ),
    (("qwen3_next",), "decoder_sparse_step", "an integer in [1, 1024]", [0, "a"]),
    (("qwen3_next",), "mlp_only_layers", "a list of layers", [5, "1", {}]),
    *(
        ((family,), field, "an integer in [2, 65536]", [1, 0, "a", 2.0, 10**30])
        for family, field in (
            ("lfm2", "conv_L_cache"),
            ("nemotron_h", "conv_kernel"),
            ("bamba", "mamba_d_conv"),
            ("falcon_h1", "mamba_d_conv"),
            ("qwen3_5_text", "linear_conv_kernel_dim"),
        )
    ),
    (("lfm2",), "block_multiple_of", SIZE, [0, "a", 1.5, 10**30]),
    (("lfm2",), "block_ffn_dim_multiplier", "a finite number in (0, 1024]", [0, -1, "a", math.nan]),
    (("lfm2", "lfm2_moe"), "conv_bias", FLAG, [0, "false"]),
    (("lfm2", "lfm2_moe"), "norm_eps", POSITIVE, [0.0, "a", math.nan]),
    (("lfm2_moe",), "num_dense_layers", "an integer in [0, 1024]", [-1, "a", 1.5, 10**9]),
    (("qwen3_5_text",), "full_attention_interval", "an integer in [1, 1024]", [0, "a", 10**9]),
    (("qwen3_5_text",), "attn_output_gate attention_bias", FLAG, [0, "false"]),
    (
        ("kimi_linear",),
        "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim linear_num_heads linear_head_dim",
        SIZE,
        [0, "a", 2.0, 10**30],
    ),
    (("kimi_linear",), "num_experts_per_token num_shared_experts", "an integer in [1, 4096]", [0, "a", 10**6]),
    (("olmo_hybrid",), "linear_allow_neg_eigval attention_bias", FLAG, [0, "false"]),
    (("granitemoehybrid", "qwen3_5_text"), "layer_types", "a list of names", [5, "mamba", {}, True]),
    (("bamba",), "attn_layer_indices", "a list of layers", [5, "1", {}, True]),
    (FAMILIES, "eos_token_id", "a token id or a list of them", ["a", -1, 1.5, True, {}, math.nan]),
    (FAMILIES, "dtype torch_dtype", "one of auto, float64, float32, bfloat16, float16", ["int8", 5, []]),
    (("llama", "bamba"), "rope_parameters rope_scaling", "an object", [5, "linear", [], True]),
    (("llama",), "rope_theta partial_rotary_factor", POSITIVE, [0, -1, "a", math.nan, math.inf, True]),
    (FAMILIES, "auto_map", "an object", [5, "evil.C", True, 1.5]),
]

ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
LLAMA3 = ROPE | {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = ROPE | {"rope_type": "yarn"}


def rope(message: str, base: dict[str, Any] = ROPE, **fields: Any) -> tuple[str, dict[str, Any], str]:
    kept = {name: value for name, value in (base | fields).items() if value is not None}
    return "llama", {"rope_parameters": kept}, message


SUPPORTED = f"supported are {', '.join(sorted(KNOWN))}"
MORE: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": None}, f"model_type is None; {SUPPORTED}"),
    ("nemotron_h", {"model_type": None}, f"model_type is None; {SUPPORTED}"),
    ("llama", {"model_type": "gpt2"}, f"model_type is 'gpt2'; {SUPPORTED}"),
    (
        "llama",
        {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
        f"model_type is 'mixtral'; {SUPPORTED}",
    ),
    (
        "llama",
        {"architectures": ["LlamaForSequenceClassification"]},
        "architectures is ['LlamaForSequenceClassification']; supported is 'LlamaForCausalLM'",
    ),
    ("llama", {"architectures": ["LlamaForCausalLM", 5]}, "architectures[1] is 5; it must be text that is not empty"),
    (
        "llama",
        {"quantization_config": {"bits": 4}},
        "quantization_config: quant_method is None; nothing here reads it. Supported are fp8, compressed-tensors, "
        "modelopt, gptq, awq, auto-round, mxfp4",
    ),
    ("llama", {"quantization_config": 5}, "quantization_config is 5; it must be an object"),
    ("llama", {"quantization_config": []}, "quantization_config is []; it must be an object"),
    ("llama", {"num_hidden_layers": None}, "num_hidden_layers is missing; it says what the layers are"),
    ("bamba", {"num_hidden_layers": None}, "num_hidden_layers is missing; it says what the layers are"),
    (
        "nemotron_h",
        {"layers_block_type": None},
        "layers_block_type or hybrid_override_pattern is missing; it says what the layers are",
    ),
    (
        "granitemoehybrid",
        {"layer_types": None},
        "layer_types or layers_block_type is missing; it says what the layers are",
    ),
    ("nemotron_h", {"layers_block_type": []}, "layers is empty; a model needs at least one"),
    ("nemotron_h", {"layers_block_type": ["fir"]}, f"layers_block_type[0] is 'fir'; it must be {KINDS}"),
    ("nemotron_h", {"layers_block_type": ["mlp", 5]}, f"layers_block_type[1] is 5; it must be {KINDS}"),
    (
        "nemotron_h-experts",
        {"num_experts_per_tok": 9},
        "num_experts_per_tok is 9; it must be at most 8: topk_group = 2 of n_group = 3 groups of n_routed_experts = 12",
    ),
    *(
        ("nemotron_h-experts", {name: 0}, f"{name} is 0; it must be an integer >= 1")
        for name in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group")
    ),
    ("nemotron_h-experts", {"n_group": 5}, "n_group is 5; it must divide n_routed_experts = 12"),
    ("nemotron_h-experts", {"n_group": 12}, "n_group is 12; a group needs two of n_routed_experts = 12"),
    ("nemotron_h-experts", {"topk_group": 4}, "topk_group is 4; it must be at most n_group = 3"),
    ("nemotron_h-experts", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; supported is 'sigmoid'"),
    (
        "nemotron_h-experts",
        {"moe_router_activation_func": "tanh"},
        "moe_router_activation_func is 'tanh'; supported is 'sigmoid'",
    ),
    (
        "granitemoehybrid-experts",
        {"num_experts_per_tok": 8},
        "num_experts_per_tok is 8; it must be at most 7: num_local_experts = 7",
    ),
    (
        "nemotron_h",
        {"layers_block_type": ["mlp"] * 100_000},
        "layers_block_type has 100000 entries; it must have at most 1024",
    ),
    (
        "nemotron_h",
        {"layers_block_type": None, "hybrid_override_pattern": "M" * 2000},
        "hybrid_override_pattern has 2000 entries; it must have at most 1024",
    ),
    ("granitemoehybrid", {"layer_types": ["mamba"]}, "layer_types has 1 entries; it must have num_hidden_layers = 5"),
    ("granitemoehybrid", {"num_hidden_layers": 4}, "layer_types has 5 entries; it must have num_hidden_layers = 4"),
    ("granitemoehybrid", {"layer_types": ["fir"]}, f"layer_types[0] is 'fir'; it must be {KINDS}"),
    ("llama", {"num_labels": 1 << 17}, "num_labels is 131072; it must be an integer in [0, 65536]"),
    ("bamba", {"attn_layer_indices": [1, "2"]}, "attn_layer_indices[1] is '2'; it must be an integer >= 0"),
    ("bamba", {"attn_layer_indices": [1, 9]}, "attn_layer_indices holds 9; it must be in [0, num_hidden_layers = 5)"),
    (
        "bamba",
        {"mamba_d_head": 15},
        "mamba_n_heads * mamba_d_head is 90; it must equal mamba_expand * hidden_size = 96",
    ),
    ("falcon_h1", {"mamba_d_head": 15}, "mamba_n_heads * mamba_d_head is 90; it must equal mamba_d_ssm = 72"),
    ("falcon_h1", {"mamba_n_groups": 4}, "mamba_n_groups is 4; it must divide mamba_n_heads = 6"),
    ("falcon_h1", {"mamba_proj_bias": True}, "projectors_bias is False; it must equal mamba_proj_bias = True"),
    ("falcon_h1", {"mlp_multipliers": [1.0, "a"]}, "mlp_multipliers[1] is 'a'; it must be a finite number"),
    ("falcon_h1", {"ssm_multipliers": [1, 1, 1, math.nan, 1]}, "ssm_multipliers[3] is nan; it must be a finite number"),
    ("falcon_h1", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is 'silu'"),
    ("falcon_h1", {"num_hidden_layers": None}, "num_hidden_layers is missing; it says what the layers are"),
    ("qwen3_next", {"mlp_only_layers": [1, 9]}, "mlp_only_layers holds 9; it must be in [0, num_hidden_layers = 4)"),
    ("qwen3_next", {"layer_types": ["fir"] * 4}, f"layer_types[0] is 'fir'; it must be {KINDS}"),
    ("qwen3_next", {"num_experts_per_tok": 8}, "num_experts_per_tok is 8; it must be at most 7: num_experts = 7"),
    ("qwen3_5_moe_text", {"scoring_func": "tanh"}, "scoring_func is 'tanh'; supported is 'softmax'"),
    ("kimi_linear", {"layer_types": None}, "layer_types or linear_attn_config is missing; it says what the layers are"),
    ("kimi_linear", {"q_lora_rank": 8}, "q_lora_rank is 8; supported is None"),
    ("kimi_linear", {"attention_bias": True}, "attention_bias is True; supported is False"),
    ("kimi_linear", {"num_key_value_heads": 1}, "num_key_value_heads is 1; it must equal num_attention_heads = 3"),
    (
        "kimi_linear",
        {"mlp_layer_types": ["dense", "moe", "dense", "dense"]},
        "mlp_layer_types[1] is 'moe'; it must be one of dense, sparse",
    ),
    (
        "kimi_linear",
        {"mlp_layer_types": ["dense"]},
        "mlp_layer_types has 1 entries; it must have num_hidden_layers = 4",
    ),
    ("kimi_linear", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; supported is 'sigmoid'"),
    ("kimi_linear", {"linear_attn_config": 5}, "linear_attn_config is 5; it must be an object"),
    (
        "kimi_linear",
        {"linear_attn_config": {"kda_layers": [1, 9], "full_attn_layers": [2]}},
        "full_attn_layers and kda_layers of linear_attn_config hold [1, 2, 9]; they must hold each layer from 1 to "
        "num_hidden_layers = 4 once",
    ),
    (
        "kimi_linear",
        {"layer_types": None, "linear_attn_config": {"kda_layers": [1, 3], "full_attn_layers": [2]}},
        "full_attn_layers and kda_layers of linear_attn_config hold [1, 2, 3]; they must hold each layer from 1 to "
        "num_hidden_layers = 4 once",
    ),
    ("olmo_hybrid", {"layer_types": None}, "layer_types is missing; it says what the layers are"),
    (
        "olmo_hybrid",
        {"layer_types": ["linear_attention", "sliding_attention", "mamba", "mlp"]},
        "layer_types[1] is 'sliding_attention'; supported are linear_attention, full_attention",
    ),
    (
        "olmo_hybrid",
        {"linear_num_value_heads": 7},
        "linear_num_key_heads is 3; it must divide linear_num_value_heads = 7",
    ),
    ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate is False; supported is True"),
    (
        "qwen3_5_text",
        {"linear_num_key_heads": 4},
        "linear_num_key_heads is 4; it must divide linear_num_value_heads = 6",
    ),
    ("qwen3_5_text", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is 'silu'"),
    (
        "qwen3_5_text",
        {"layer_types": ["linear_attention", "full_attention", "mamba", "mlp"]},
        "layer_types[2] is 'mamba'; supported are linear_attention, full_attention",
    ),
    (
        "qwen3_5_text",
        {"layer_types": None},
        "layer_types or full_attention_interval is missing; it says what the layers are",
    ),
    (
        "lfm2",
        {"layer_types": ["conv", "mamba", "conv", "conv", "conv"]},
        "layer_types[1] is 'mamba'; supported are conv, full_attention",
    ),
    ("lfm2", {"layer_types": None}, "layer_types or full_attn_idxs is missing; it says what the layers are"),
    ("lfm2", {"num_attention_heads": 5}, "num_attention_heads is 5; it must divide hidden_size = 48"),
    ("lfm2", {"block_ffn_dim_multiplier": 1e-9}, "intermediate_size is 0; it must be at least 1"),
    ("lfm2", {"intermediate_size": 1}, "intermediate_size is 0; it must be at least 1"),
    ("lfm2_moe", {"num_experts_per_tok": 8}, "num_experts_per_tok is 8; it must be at most 7: num_experts = 7"),
    ("lfm2_moe", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; supported is 'sigmoid'"),
    ("bamba", {"mamba_n_groups": 4}, "mamba_n_groups is 4; it must divide mamba_n_heads = 6"),
    ("bamba", {"num_attention_heads": 5}, "num_attention_heads is 5; it must divide hidden_size = 48"),
    ("bamba", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is 'silu'"),
    ("nemotron_h", {"num_key_value_heads": 4}, "num_key_value_heads is 4; it must divide num_attention_heads = 6"),
    ("nemotron_h", {"n_groups": 4}, "n_groups is 4; it must divide mamba_num_heads = 6"),
    (
        "kimi_linear",
        {"linear_attn_config": {"short_conv_kernel_size": 1}},
        "short_conv_kernel_size is 1; it must be an integer in [2, 65536]",
    ),
    ("kimi_linear", {"num_expert_group": 3}, "num_expert_group is 3; it must divide num_experts = 7"),
    ("kimi_linear", {"num_expert_group": 7}, "num_expert_group is 7; a group needs two of num_experts = 7"),
    (
        "kimi_linear",
        {"num_expert_group": None, "n_group": 3, "num_experts": None, "num_local_experts": 7},
        "n_group is 3; it must divide num_local_experts = 7",
    ),
    ("kimi_linear", {"topk_group": 2}, "topk_group is 2; it must be at most num_expert_group = 1"),
    ("kimi_linear", {"moe_intermediate_size": 0}, "moe_intermediate_size is 0; it must be an integer >= 1"),
    (
        "kimi_linear",
        {"num_shared_experts": None, "n_shared_experts": 0},
        "n_shared_experts is 0; it must be an integer in [1, 4096]",
    ),
    ("kimi_linear", {"num_experts_per_token": 8}, "num_experts_per_token is 8; it must be at most 7: num_experts = 7"),
    ("nemotron_h", {"mlp_hidden_act": "tanh"}, "mlp_hidden_act is 'tanh'; supported is 'relu2', 'silu'"),
    (
        "nemotron_h",
        {"mamba_ssm_cache_dtype": "int4"},
        "mamba_ssm_cache_dtype is 'int4'; supported is 'float32', 'float16', 'bfloat16'",
    ),
    ("llama", {"eos_token_id": 101}, "eos_token_id holds 101; the vocabulary has 101 tokens"),
    ("llama", {"eos_token_id": [1, 10**30]}, f"eos_token_id holds {10**30}; the vocabulary has 101 tokens"),
    ("llama", {"eos_token_id": [1, "a"]}, "eos_token_id[1] is 'a'; it must be a token id or a list of them"),
    ("llama", {"eos_token_id": [[1]]}, "eos_token_id[0] is [1]; it must be a token id or a list of them"),
    ("llama", {"bos_token_id": "a"}, "bos_token_id is 'a'; it must be a token id or a list of them"),
    ("llama", {"use_cache": 5}, "use_cache is 5; it must be True or False"),
    ("llama", {"initializer_range": "x"}, "initializer_range is 'x'; it must be a finite number >= 0"),
    (
        "granitemoehybrid",
        {"router_aux_loss_coef": "x"},
        "router_aux_loss_coef is 'x'; transformers refuses it, with a StrictDataclassFieldValidationError",
    ),
    (
        "qwen3_5_text",
        {"num_hidden_layers": None},
        "transformers refuses it, with a StrictDataclassClassValidationError: ValueError: `num_hidden_layers` (32) "
        "must be equal to the number of `layer_types` (4)",
    ),
    rope("rope_theta is nan; it must be a finite number > 0", rope_theta=math.nan),
    rope("rope_theta is inf; it must be a finite number > 0", rope_theta={"__float__": "Infinity"}),
    rope("rope_theta is -1; it must be a finite number > 0", rope_theta=-1),
    rope("rope_theta is '1'; it must be a finite number > 0", rope_theta="1"),
    rope("factor is 0; it must be a finite number >= 1", factor=0),
    rope("factor is -1; it must be a finite number >= 1", factor=-1),
    rope("factor is nan; it must be a finite number >= 1", factor=math.nan),
    rope("factor is 'x'; it must be a finite number >= 1", factor="x"),
    rope("factor is None; it must be a finite number >= 1", factor=None),
    rope("factor is None; it must be a finite number >= 1", YARN, factor=None),
    rope("low_freq_factor is None; it must be a finite number > 0", LLAMA3, low_freq_factor=None),
    rope("high_freq_factor is 0; it must be a finite number > 0", LLAMA3, high_freq_factor=0),
    rope("beta_fast is 'x'; it must be a finite number > 0", YARN, beta_fast="x"),
    rope("rope_type is 5; it must be text that is not empty", rope_type=5),
    *(
        rope(f"rope_parameters is {wrong}; it must be numbers that make frequencies", {}, **wrong)
        for wrong in (
            {"factor": 2.0, "rope_theta": 10**30, "rope_type": "linear"},
            {"factor": 10**30, "rope_theta": 1e4, "rope_type": "linear"},
            {"factor": 2.0, "partial_rotary_factor": 1e308, "rope_theta": 1e4, "rope_type": "linear"},
            {"factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 1, "rope_type": "yarn"},
            {"rope_theta": 10**30, "rope_type": "default"},
        )
    ),
    rope("rope_type is 'ntk'; supported are default, linear, llama3, yarn, longrope, dynamic", rope_type="ntk"),
    (
        "bamba",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.2}},
        "3 of head_dim = 16 lanes rotate; it must be an even number of lanes",
    ),
]

# What JSON itself can be: (contents of config.json, message).
TEXTS: list[tuple[bytes, str]] = [
    (b"", "cannot be read as JSON: Expecting value, line 1, column 1"),
    (b"{", "cannot be read as JSON: Expecting property name enclosed in double quotes, line 1, column 2"),
    (b'{\n "a": }', "cannot be read as JSON: Expecting value, line 2, column 7"),
    (b"\x00", "cannot be read as JSON: Expecting value, line 1, column 1"),
    (b'{"a": "\xe9"}', "cannot be read as JSON: byte 7 is no UTF-8"),
    (b"[" * 100_000, "cannot be read as JSON: it is nested too deeply"),
    (b'{"a":' * 100_000, "cannot be read as JSON: it is nested too deeply"),
    (b'{"a": 1' + b"0" * 5000 + b"}", "cannot be read as JSON: it holds a number of too many digits"),
    (b"[]", "holds list; it must hold a JSON object"),
    (b"null", "holds NoneType; it must hold a JSON object"),
    (b'"text"', "holds str; it must hold a JSON object"),
    (b"5", "holds int; it must hold a JSON object"),
    (b"{}", f"model_type is None; {SUPPORTED}"),
]


@pytest.mark.parametrize(
    ("family", "name", "value", "message"),
    [
        (family, name, value, f"{name} is {value!r}; it must be {rule}")
        for families, names, rule, values in RULES
        for family in families
        for name in names.split()
        for value in values
    ],
    ids=brief,
)
def test_fields(folder: Any, refused: Any, family: str, name: str, value: Any, message: str) -> None:
    path = folder(family, **{name: value})
    with refused(f"{path / 'config.json'}: {message}"):
        open_checkpoint(path)


@pytest.mark.parametrize(("family", "fields", "message"), MORE, ids=brief)
def test_what_does_not_go_together(
    folder: Any, refused: Any, family: str, fields: dict[str, Any], message: str
) -> None:
    path = folder(family, **fields)
    with refused(f"{path / 'config.json'}: {message}"):
        open_checkpoint(path)


@pytest.mark.parametrize(("text", "message"), TEXTS, ids=brief)
def test_texts(tmp_path: Path, refused: Any, text: bytes, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text)
    with refused(f"{file}: {message}"):
        open_checkpoint(tmp_path)


def test_an_error_of_weights_lists_as_many_as_one_can_read(folder: Any) -> None:
    with pytest.raises(ValueError, match="weights do not fit LlamaForCausalLM") as caught:
        open_checkpoint(folder("llama", num_hidden_layers=1000))
    lines = str(caught.value).splitlines()
    assert len(lines) == 42
    assert lines[-1] == "  and 8915 more"


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"architectures": None}),
        ("llama", {"architectures": []}),
        ("llama", {"eos_token_id": []}),
        ("llama", {"eos_token_id": None}),
        ("llama", {"quantization_config": {}}),
        ("llama", {"rope_parameters": ROPE}),
        ("bamba", {"mamba_d_head": "auto"}),
        ("nemotron_h", {"time_step_limit": [0.0, math.inf]}),
        ("nemotron_h", {"unknown_field": {"a": [1]}}),
        ("nemotron_h", {"n_routed_experts": 0, "moe_intermediate_size": 0, "num_experts_per_tok": 0}),
        ("granitemoehybrid", {"num_experts_per_tok": 0}),
    ],
)
def test_what_is_accepted(folder: Any, family: str, fields: dict[str, Any]) -> None:
    assert open_checkpoint(folder(family, **fields)).spec.num_layers >= 5


def test_a_null_that_undoes_the_layers_is_refused(folder: Any, refused: Any) -> None:
    """transformers takes `layers_block_type` for another name of `layer_types`, null or not."""
    path = folder("granitemoehybrid")
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"layers_block_type": None}))
    with refused(f"{path}/config.json: layers is empty; a model needs at least one"):
        open_checkpoint(path)
