"""gpt-oss: attention with sinks and a sliding window in every other layer, then experts with biases."""

from __future__ import annotations

from dataclasses import replace

from bateleur.runner.checkpoint.experts import LOCAL_FIELDS, read_experts
from bateleur.runner.checkpoint.families.base import WINDOW_KINDS, Family, read_windows
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import ExpertNames, Names, WeightPart, weight_names
from bateleur.runner.models.spec import ExpertsLayer, ModelSpec, RouterSpec
from bateleur.runner.utils.arguments import refuse

_EXPERTS = ExpertNames(router="router.weight", other_up=(), other_down=())
_TRANSPOSED = ("up_proj", "down_proj")
"""Expert weights are stored transposed in bfloat16, but not in MXFP4. Gate and up rows alternate in both."""


def _read_spec(fields: ConfigFields) -> ModelSpec:
    for name, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if fields.raw(name) not in (None, value):
            refuse(name, fields.raw(name), f"{value}: another activation is not supported")
    attention = fields.attention(sinks=True)
    experts = read_experts(fields, RouterSpec(bias=True), LOCAL_FIELDS, bias=True, activation="clamped_swiglu")
    return fields.model(read_windows(fields, attention), experts)


def _names(spec: ModelSpec) -> Names:
    return {name: _stored(name, part) for name, part in weight_names(spec, mixers={ExpertsLayer: _EXPERTS}).items()}


def _stored(name: str, part: WeightPart) -> WeightPart:
    own = part.target.rpartition(".")[2]
    part = replace(part, axis=1, pieces=((0, 1), (1, 2))) if own in ("up_proj", "up_bias") else part
    return replace(part, transposed=True, instead={f"{name}_blocks": part}) if own in _TRANSPOSED else part


FAMILIES = (Family("gpt_oss", "GptOssForCausalLM", _read_spec, _names, kinds=WINDOW_KINDS),)
