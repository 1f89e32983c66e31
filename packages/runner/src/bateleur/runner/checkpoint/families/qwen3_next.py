"""Qwen3-Next: gated delta nets or gated attention, then experts or a gated MLP."""

from __future__ import annotations

from functools import partial

from bateleur.runner.checkpoint.delta import packed_names
from bateleur.runner.checkpoint.experts import sparse_layers
from bateleur.runner.checkpoint.families.base import Family
from bateleur.runner.checkpoint.families.qwen3_5 import KINDS, MTP, NEEDS, qwen_names, read_blocks, read_qwen_experts
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.models.spec import MlpLayer, ModelSpec


def _read_spec(fields: ConfigFields) -> ModelSpec:
    experts = read_qwen_experts(fields, normalised=fields["norm_topk_prob"])
    layers = sparse_layers(fields, read_blocks(fields), MlpLayer(fields["intermediate_size"]), experts)
    return fields.model(FAMILY.architecture, layers, branches_per_layer=2, exact_norms=True)


FAMILY = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    _read_spec,
    partial(qwen_names, packed_names),
    kinds=KINDS,
    mtp=MTP,
    needs=NEEDS,
)
