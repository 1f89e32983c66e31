"""OLMo 3: attention with a sliding window in most layers, then a gated MLP. Norms come after the branches."""

from __future__ import annotations

from functools import partial

from bateleur.runner.checkpoint.families.base import WINDOW_KINDS, Family, read_windows
from bateleur.runner.checkpoint.families.llama import gated_mlp
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import MIXERS, weight_names
from bateleur.runner.models.spec import AttentionLayer, ModelSpec, ParallelLayer


def _read_spec(fields: ConfigFields) -> ModelSpec:
    attention = fields.attention(
        rope=fields.rope(partial=False, layer_type="full_attention"),
        bias=fields["attention_bias"],
        qk_norm_eps=fields["rms_norm_eps"],
        qk_norm_whole=True,
    )
    blocks = read_windows(fields, attention, rope=fields.rope(partial=False, layer_type="sliding_attention"))
    mlp = gated_mlp(fields)
    layers = tuple(ParallelLayer((part,), (1.0,), norm_last=True) for block in blocks for part in (block, mlp))
    return fields.model(FAMILY.architecture, layers, branches_per_layer=2)


FAMILY = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    _read_spec,
    partial(
        weight_names,
        mlp=("mlp", "post_feedforward_layernorm"),
        mixers={**MIXERS, AttentionLayer: ("self_attn", "post_attention_layernorm")},
    ),
    kinds=WINDOW_KINDS,
    needs=("num_hidden_layers",),
)
