"""NemotronH: one branch per layer (Mamba-2, attention without rotary embedding, an ungated MLP, or ungated experts)."""

from __future__ import annotations

import math
from functools import partial
from typing import cast

from bateleur.runner.checkpoint.experts import EXPERT_FIELDS, read_experts, sigmoid_router
from bateleur.runner.checkpoint.families.base import INERT, Family, MtpNames, read_layers
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import ExpertNames, weight_names
from bateleur.runner.models.spec import Activation, AttentionLayer, ExpertsLayer, Layer, MambaLayer, MlpLayer, ModelSpec
from bateleur.runner.utils.arguments import refuse
from bateleur.runner.utils.device import DTYPES

CALLED = ("mixer", "norm")
MAMBA_FIELDS = {
    "activation": "mamba_hidden_act",
    "num_heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "state_size": "ssm_state_size",
    "num_groups": "n_groups",
    "conv_width": "conv_kernel",
    "chunk_size": "chunk_size",
    "conv_bias": "use_conv_bias",
    "proj_bias": "use_bias",
    "norm_eps": "layer_norm_epsilon",
}
_EXPERT_FIELDS = {**EXPERT_FIELDS, "num_experts": "n_routed_experts"}
_EXPERTS = ExpertNames(
    norm="norm",
    router="mixer.gate.weight",
    correction="mixer.gate.e_score_correction_bias",
    up="mixer.experts.up_proj",
    other_up=("mixer.experts.{}.up_proj.weight",),
    down="mixer.experts.down_proj",
    other_down=("mixer.experts.{}.down_proj.weight",),
    latent=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
    shared="mixer.shared_experts",
)

_READ = (
    "vocab_size hidden_size layers_block_type layer_norm_epsilon max_position_embeddings residual_in_fp32 "
    "tie_word_embeddings eos_token_id intermediate_size mlp_bias mlp_hidden_act "
    "num_attention_heads num_key_value_heads head_dim time_step_min mamba_ssm_cache_dtype "
    "n_routed_experts num_experts_per_tok moe_intermediate_size moe_shared_expert_intermediate_size moe_latent_size "
    "n_group topk_group norm_topk_prob routed_scaling_factor num_nextn_predict_layers mtp_layers_block_type"
)
_UNREAD = (
    "expand mamba_proj_bias moe_shared_expert_overlap n_shared_experts num_logits_to_keep rescale_prenorm_residual "
    "sliding_window time_step_floor time_step_limit time_step_max use_mamba_kernels"
)
_PLAIN = INERT.union(_READ.split(), _UNREAD.split(), MAMBA_FIELDS.values())


def _read_spec(fields: ConfigFields, listed: str = "layers_block_type") -> ModelSpec:
    """Read the model. listed: name of the field with the list of layer types."""

    def mamba() -> Layer:
        dtype = fields.choice("mamba_ssm_cache_dtype", ("float32", "float16", "bfloat16"))
        # transformers clamps dt to (time_step_min, inf) and leaves `time_step_limit` unread; logits agree with it.
        limits = fields["time_step_min"], math.inf
        return fields.mamba(MAMBA_FIELDS, limits, DTYPES[dtype])

    def mlp(size: str = "intermediate_size") -> MlpLayer:
        activation = cast(Activation, fields.choice("mlp_hidden_act", ("relu2", "silu")))
        return MlpLayer(fields[size], activation, gated=False, bias=fields["mlp_bias"])

    def experts() -> Layer:
        shared = mlp("moe_shared_expert_intermediate_size")
        latent = None if fields.raw("moe_latent_size") is None else fields["moe_latent_size"]
        return read_experts(
            fields,
            sigmoid_router(fields, "n_routed_experts"),
            _EXPERT_FIELDS,
            activation=shared.activation,
            gated=False,
            shared=shared,
            latent_size=latent,
            latent_bias=shared.bias,
        )

    def attention() -> Layer:
        # `attention_bias` and `sliding_window` exist in the configuration, and no version of the model reads them.
        return fields.attention(rope=None, bias=False)

    kinds = fields.raw(listed)
    readers = {"linear_attention": mamba, "full_attention": attention, "mlp": mlp, "moe": experts}
    return fields.model(
        FAMILY.architecture,
        read_layers(f"{listed}[{{i}}] is {{kind!r}}", kinds, readers),
        norm_eps="layer_norm_epsilon",
        residual_in_fp32=fields["residual_in_fp32"],
    )


def _mtp_layers(fields: ConfigFields, spec: ModelSpec) -> tuple[tuple[Layer, ...], int]:
    modules = fields.raw("num_nextn_predict_layers")
    if modules != 1:
        refuse("num_nextn_predict_layers", modules, "1: a head of one module, which is fed its own output")
    return _read_spec(fields, "mtp_layers_block_type").layers, spec.branches_per_layer


FAMILY = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    _read_spec,
    partial(
        weight_names,
        mlp=CALLED,
        mixers={AttentionLayer: CALLED, MambaLayer: CALLED, ExpertsLayer: _EXPERTS},
        stem="backbone",
        embedding="embeddings",
        final_norm="norm_f",
    ),
    other_prefixes=(("model.", "backbone."),),
    mtp=MtpNames(
        layers=_mtp_layers,
        token_norm="layers.0.enorm",
        hidden_norm="layers.0.hnorm",
        fc="layers.0.eh_proj",
        final_norm="layers.{last}.final_layernorm",
    ),
    plain=_PLAIN,
    needs=("layers_block_type", "hybrid_override_pattern"),
)
