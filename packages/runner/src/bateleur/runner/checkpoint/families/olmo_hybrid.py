"""OLMo-hybrid: a gated delta net with a norm before it, or attention with norms after it, then a gated MLP."""

from __future__ import annotations

from collections.abc import Iterator

from bateleur.runner.checkpoint.delta import read_gated_delta, split_names
from bateleur.runner.checkpoint.families.base import Family, read_layers
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import MIXERS, Names, OwnNames, Part, weight_names
from bateleur.runner.models.rope import RopeSpec
from bateleur.runner.models.spec import DeltaLayer, Layer, MlpLayer, ModelSpec, ParallelLayer

_MIXERS = {**MIXERS, DeltaLayer: OwnNames(("linear_attn", "input_layernorm"), split_names)}
_OUTPUT_NORM_EPS = 1e-5  # output norm of a delta net; not in the configuration


def _rope(fields: ConfigFields) -> RopeSpec | None:
    """Read the rotary embedding. It is None in published models, whose delta nets carry the order of tokens."""
    parameters = fields.raw("rope_parameters")
    return None if not parameters or parameters.get("rope_theta") is None else fields.rope(partial=False)


def _read_spec(fields: ConfigFields) -> ModelSpec:
    mlp = MlpLayer(fields["intermediate_size"])

    def delta() -> Layer:
        negative = fields["linear_allow_neg_eigval"]
        return read_gated_delta(fields, _OUTPUT_NORM_EPS, allow_neg_eigval=negative)

    def attention() -> Layer:
        made = fields.attention(
            rope=_rope(fields), bias=fields["attention_bias"], qk_norm_eps=fields["rms_norm_eps"], qk_norm_whole=True
        )
        return ParallelLayer((made,), (1.0,), norm_last=True)

    readers = {"linear_attention": delta, "full_attention": attention}
    kinds = fields.raw("layer_types") or ()
    blocks = read_layers("layer_types[{i}] is {kind!r}", kinds, readers)
    after: dict[str, Layer] = {"linear_attention": mlp, "full_attention": ParallelLayer((mlp,), (1.0,), norm_last=True)}
    layers = tuple(each for kind, block in zip(kinds, blocks, strict=True) for each in (block, after[kind]))
    return fields.model(FAMILY.architecture, layers, branches_per_layer=2)


def _names(spec: ModelSpec) -> Names:
    names = weight_names(spec, ("mlp", "post_attention_layernorm"), _MIXERS)
    return dict(_with_norms(spec, names))


def _with_norms(spec: ModelSpec, names: Names) -> Iterator[tuple[str, Part]]:
    """Yield the names of norms, both as published files and as transformers' files have them."""
    before = {
        "input_layernorm": ("attention_layer_norm", "input_layernorm"),
        "post_attention_layernorm": ("feedforward_layer_norm", "post_attention_layernorm"),
    }
    after = {
        "input_layernorm": ("post_attention_layernorm", "feedforward_layer_norm"),
        "post_attention_layernorm": ("post_feedforward_layernorm",),
    }
    for name, part in names.items():
        layer, _, norm = name.removesuffix(".weight").rpartition(".")
        if norm not in before:
            yield name, part
            continue
        kind = spec.layers[int(part.target.split(".")[1])]
        first, *others = (after if isinstance(kind, ParallelLayer) else before)[norm]
        instead = {f"{layer}.{other}.weight": part for other in others}
        yield f"{layer}.{first}.weight", Part(part.target, instead=instead)


FAMILY = Family(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    _read_spec,
    _names,
    kinds=("linear_attention", "full_attention"),
    needs=("layer_types",),
)
