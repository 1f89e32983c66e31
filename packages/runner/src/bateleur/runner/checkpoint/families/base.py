"""The declaration of a model family, and functions that read the layers of most families."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import Names
from bateleur.runner.models.spec import AttentionLayer, ExpertsLayer, Layer, MlpLayer, ModelSpec, RouterSpec
from bateleur.runner.utils.arguments import Integer

L = TypeVar("L", bound=Layer)


@dataclass(frozen=True, slots=True)
class MtpNames:
    """Layers of an MTP head (tensors named as the target's), and names of its other tensors, without `mtp.`."""

    layers: Callable[[ConfigFields, ModelSpec], tuple[tuple[Layer, ...], int]]
    """Returns the branches of a target's head, and their number per layer. Raises ValueError without supported head."""
    token_norm: str
    hidden_norm: str
    fc: str
    """Projection of the embedding and the hidden state, concatenated in this order."""
    final_norm: str
    """May have `{last}`, the index of the last layer."""


@dataclass(frozen=True, slots=True)
class Family:
    """A Hugging Face model type: how its configuration and weight names are read."""

    model_type: str
    architecture: str
    """The causal-language-model class in `architectures` of config.json."""
    read: Callable[[ConfigFields], ModelSpec]
    """Reads everything but the architecture. Raises ValueError for invalid or unsupported settings."""
    names: Callable[[ModelSpec], Names]
    other_prefixes: tuple[tuple[str, str], ...] = ()
    """(other, ours): prefixes of tensor names in some files, and the ones of `names` that they stand for."""
    fold: Callable[[ConfigFields, Names], Names] = lambda _, names: names
    """Returns the names with multipliers of the configuration folded into weights."""
    inside: str | None = None
    """Field of a larger configuration that holds the model's own; other parts are not read."""
    kinds: tuple[str, ...] = ()
    """Supported values of `layer_types`; checked before transformers sees them."""
    mtp: MtpNames | None = None
    """Tensor names of an MTP head, if files of this family may have one."""
    plain: frozenset[str] = frozenset()
    """Fields that transformers passes through unchanged. A file with no others is read without transformers, except for
    missing fields."""
    needs: tuple[str, ...] = ("num_hidden_layers",)
    """Fields of which a configuration must have at least one, because transformers has a default for them."""

    def read_spec(self, fields: ConfigFields) -> ModelSpec:
        """Return the model that a configuration describes. Raises ValueError as `read`."""
        return replace(self.read(fields), architecture=self.architecture)

    @property
    def architectures(self) -> frozenset[str]:
        """Supported `architectures` of config.json: of the causal language model, without a head, and multimodal."""
        stem, ending, _ = self.architecture.partition("For")
        endings = ("ForCausalLM", "ForConditionalGeneration", "Model", "TextModel") if ending else ("",)
        return frozenset(stem + each for each in endings)


_INERT = (
    "architectures attention_bias attention_dropout bos_token_id dtype hidden_dropout initializer_range model_type "
    "num_labels output_router_logits pad_token_id pretraining_tp quantization_config torch_dtype "
    "transformers_version use_cache"
)
INERT = frozenset(_INERT.split())
"""Common fields that are not read, or mean the same in all families."""


def gated_mlp(fields: ConfigFields) -> MlpLayer:
    """Read a gated MLP from Llama's field names. Without a field `mlp_bias` there are no biases."""
    fields.choice("hidden_act", ("silu",))
    return MlpLayer(fields["intermediate_size"], bias=fields.optional("mlp_bias") or False)


def granite_multipliers(fields: ConfigFields) -> dict[str, Any]:
    """Read Granite's multipliers of embeddings, branches and logits, as arguments of `ModelSpec`."""
    return {
        "embedding_multiplier": fields["embedding_multiplier"],
        "residual_multiplier": fields["residual_multiplier"],
        "logits_divisor": fields["logits_scaling"],
    }


def read_layers(fields: ConfigFields, listed: str, readers: Mapping[str, Callable[[], L]]) -> tuple[L, ...]:
    """Return a branch for each entry of the field `listed`. readers: make it, by the supported entries."""
    kinds = fields.raw(listed) or ()
    for i, kind in enumerate(kinds):
        if kind not in readers:
            raise ValueError(f"{listed}[{i}] is {kind!r}; supported are {', '.join(readers)}")
    made = {kind: readers[kind]() for kind in dict.fromkeys(kinds)}
    return tuple(made[kind] for kind in kinds)


WINDOW_KINDS = ("full_attention", "sliding_attention")


def read_windows(fields: ConfigFields, attention: AttentionLayer, **windowed: Any) -> tuple[AttentionLayer, ...]:
    """Return a layer for each of `layer_types`. windowed: fields that differ in sliding-window layers."""

    def sliding() -> AttentionLayer:
        return replace(attention, sliding_window=fields["sliding_window"], **windowed)

    return read_layers(fields, "layer_types", dict(zip(WINDOW_KINDS, (lambda: attention, sliding), strict=True)))


_FIELDS = {"num_experts": "num_experts", "top_k": "num_experts_per_tok", "intermediate_size": "moe_intermediate_size"}
LOCAL_FIELDS = {"num_experts": "num_local_experts", "intermediate_size": "intermediate_size"}
"""Fields of GraniteMoeHybrid and gpt-oss."""
_SCORES = ("scoring_func", "moe_router_activation_func")
"""Fields of some files that transformers does not read."""


def at_least_1(fields: ConfigFields, name: str) -> int:
    """Return a size field. Raises ValueError for 0, which configurations of models without experts have."""
    return Integer(1)(fields.called(name), fields[name])


def read_experts(fields: ConfigFields, router: RouterSpec, names: Mapping[str, str] = {}, **more: Any) -> ExpertsLayer:
    """Read a layer of experts. names: config fields of sizes, if not `_FIELDS`. more: arguments of `ExpertsLayer`.

    Raises ValueError if the configuration has other scores than the router, or more experts per token than exist.
    """
    for name in _SCORES:
        if fields.raw(name) is not None:
            fields.choice(name, (router.scores,))
    names = {**_FIELDS, **names}
    sizes: dict[str, Any] = {ours: at_least_1(fields, name) for ours, name in names.items()}
    top, among = sizes["top_k"], sizes["num_experts"]
    most = among // router.num_groups * router.top_groups
    if top > most:
        of, named, tops = (fields.called(name) for name in (names["num_experts"], "n_group", names["top_k"]))
        groups = f"topk_group = {router.top_groups} of {named} = {router.num_groups} groups of "
        where = f"{groups if router.num_groups > 1 else ''}{of} = {among}"
        raise ValueError(f"{tops} is {top}; it must be at most {most}: {where}")
    return ExpertsLayer(**sizes, router=router, **more)


def sparse_layers(fields: ConfigFields, count: int, mlp: MlpLayer, experts: ExpertsLayer) -> tuple[Layer, ...]:
    """Return `count` branches: `mlp` in `mlp_only_layers` and off `decoder_sparse_step`, else `experts`."""
    dense, step = fields["mlp_only_layers"], fields["decoder_sparse_step"]
    if bad := [i for i in dense if i >= count]:
        raise ValueError(f"mlp_only_layers holds {bad[0]}; it must be in [0, num_hidden_layers = {count})")
    return tuple(mlp if i in dense or (i + 1) % step else experts for i in range(count))


def sigmoid_router(fields: ConfigFields, num_experts: str) -> RouterSpec:
    """Read the router of NemotronH and Kimi. num_experts: name of the field with the number of experts."""
    count, groups, top = (at_least_1(fields, name) for name in (num_experts, "n_group", "topk_group"))
    fields.divides("n_group", num_experts)
    if top > groups:
        raise ValueError(f"topk_group is {top}; it must be at most {fields.called('n_group')} = {groups}")
    if groups > 1 and count < 2 * groups:
        of = fields.called(num_experts)
        raise ValueError(f"{fields.called('n_group')} is {groups}; a group needs two of {of} = {count}")
    return RouterSpec(
        scores="sigmoid",
        normalised=fields["norm_topk_prob"],
        sum_eps=1e-20,
        scale=fields["routed_scaling_factor"],
        corrected=True,
        num_groups=groups,
        top_groups=top,
    )
