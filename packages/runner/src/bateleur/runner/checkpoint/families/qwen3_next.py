"""Qwen3-Next: gated delta nets or gated attention, then experts or a gated MLP."""

from __future__ import annotations

from functools import partial

from bateleur.runner.checkpoint.delta import packed_names
from bateleur.runner.checkpoint.families.base import Family
from bateleur.runner.checkpoint.families.qwen3_5 import (
    KINDS,
    MTP,
    NEEDS,
    qwen_names,
    read_blocks,
    read_qwen_experts,
)
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.models.spec import Layer, MlpLayer, ModelSpec


def _read_spec(fields: ConfigFields) -> ModelSpec:
    blocks, step = read_blocks(fields), fields["decoder_sparse_step"]
    dense = fields["mlp_only_layers"]
    if bad := [i for i in dense if i >= len(blocks)]:
        raise ValueError(
            f"mlp_only_layers holds {bad[0]}; it must be in [0, num_hidden_layers = {len(blocks)})"
        )
    experts = read_qwen_experts(fields, normalised=fields["norm_topk_prob"])
    mlp = MlpLayer(fields["intermediate_size"])
    layers: list[Layer] = []
    for i, mixer in enumerate(blocks):
        layers += [mixer, mlp if i in dense or (i + 1) % step else experts]
    return fields.model(FAMILY.architecture, tuple(layers), branches_per_layer=2, exact_norms=True)


FAMILY = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    _read_spec,
    partial(qwen_names, packed_names),
    kinds=KINDS,
    mtp=MTP,
    needs=NEEDS,
)
