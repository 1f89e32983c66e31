"""Kimi Linear: Kimi delta attention or latent attention without positions, then a gated MLP or experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bateleur.mamba import KimiDelta
from bateleur.runner.checkpoint.delta import CHUNK, factored_names
from bateleur.runner.checkpoint.experts import EXPERT_FIELDS, at_least_1, read_experts, sigmoid_router
from bateleur.runner.checkpoint.families.base import Family, read_layers
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import MIXERS, ExpertNames, Names, OwnNames, Part, weight_names
from bateleur.runner.models.spec import DeltaLayer, ExpertsLayer, LatentLayer, Layer, MlpLayer, ModelSpec

_LATENT_NORM_EPS = 1e-6  # not in the configuration
_EXPERT_FIELDS = {**EXPERT_FIELDS, "top_k": "num_experts_per_token"}
_MOE = "block_sparse_moe"
_EXPERTS = ExpertNames(
    router=f"{_MOE}.gate.weight",
    correction=f"{_MOE}.gate.e_score_correction_bias",
    up=f"{_MOE}.experts.gate_up_proj",
    other_up=(f"{_MOE}.experts.{{}}.w1.weight", f"{_MOE}.experts.{{}}.w3.weight"),
    down=f"{_MOE}.experts.down_proj",
    other_down=(f"{_MOE}.experts.{{}}.w2.weight",),
    shared=f"{_MOE}.shared_experts",
)


def _read_spec(fields: ConfigFields) -> ModelSpec:
    fields.choice("hidden_act", ("silu",))
    mixers = {"linear_attention": lambda: _delta(fields), "full_attention": lambda: _latent(fields)}
    blocks = read_layers("layer_types[{i}] is {kind!r}", fields.raw("layer_types") or (), mixers)
    networks: dict[str, Callable[[], Layer]] = {
        "dense": lambda: MlpLayer(fields["intermediate_size"]),
        "sparse": lambda: _experts(fields),
    }
    networks_after = read_layers("mlp_layer_types[{i}] is {kind!r}", fields.raw("mlp_layer_types") or (), networks)
    layers = tuple(each for pair in zip(blocks, networks_after, strict=True) for each in pair)
    return fields.model(FAMILY.architecture, layers, branches_per_layer=2)


def _experts(fields: ConfigFields) -> Layer:
    shared = MlpLayer(at_least_1(fields, "moe_intermediate_size") * fields["num_shared_experts"])
    return read_experts(fields, sigmoid_router(fields, "num_experts"), _EXPERT_FIELDS, shared=shared)


def _delta(fields: ConfigFields) -> Layer:
    size = fields["linear_head_dim"]
    state = KimiDelta(fields["linear_num_heads"], size, size, conv_width=fields["linear_conv_kernel_dim"])
    return DeltaLayer(state, CHUNK, fields["rms_norm_eps"], gate_activation="sigmoid", rank=size)


def _latent(fields: ConfigFields) -> Layer:
    heads, keys = fields["num_attention_heads"], fields["num_key_value_heads"]
    if keys != heads:
        raise ValueError(f"num_key_value_heads is {keys}; it must equal num_attention_heads = {heads}")
    for name, only in (("q_lora_rank", None), ("attention_bias", False), ("mla_use_nope", True)):
        if (value := fields.raw(name)) not in (None, only):
            raise ValueError(f"{name} is {value!r}; supported is {only}")
    own, shared, value = (fields[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return LatentLayer(
        heads,
        heads,
        max(own + shared, value),
        (own + shared) ** -0.5,
        rank=fields["kv_lora_rank"],
        key_dim=own,
        shared_dim=shared,
        value_dim=value,
        norm_eps=_LATENT_NORM_EPS,
    )


def _latent_names(layer: LatentLayer) -> Names:
    queries, latent = layer.num_heads * (layer.key_dim + layer.shared_dim), layer.rank + layer.shared_dim
    return {
        "q_proj.weight": Part("in_proj", 0, queries),
        "kv_a_proj_with_mqa.weight": Part("in_proj", queries, latent),
        "kv_a_layernorm.weight": Part("latent_norm"),
        "kv_b_proj.weight": Part("latent_proj"),
        "o_proj.weight": Part("o_proj"),
    }


def _names(spec: ModelSpec) -> Names:
    called = ("self_attn", "input_layernorm")
    mixers = {
        **MIXERS,
        DeltaLayer: OwnNames(called, factored_names),
        LatentLayer: OwnNames(called, _latent_names),
        ExpertsLayer: _EXPERTS,
    }
    names = weight_names(spec, ("mlp", "post_attention_layernorm"), mixers)
    # transformers writes the dense layers, too, under the name of the experts.
    return {
        name: replace(part, instead={name.replace(".mlp.", f".{_MOE}."): part}) if ".mlp." in name else part
        for name, part in names.items()
    }


FAMILY = Family(
    "kimi_linear",
    "KimiLinearForCausalLM",
    _read_spec,
    _names,
    kinds=("linear_attention", "full_attention"),
    needs=("layer_types", "linear_attn_config"),
)
