"""The declaration of a model family."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import Names
from bateleur.runner.models.spec import Layer, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpNames:
    """How a family's MTP head is read. The tensors of its layers are named as the target's.

    layers: returns the branches (attention, MLP) of all layers, and the number of branches per layer. The other fields
    are tensor names without `mtp.` and `.weight`. token_norm, hidden_norm: norms of the token's embedding and of the
    target's hidden state. fc: projection of both. final_norm: norm of the last layer's output.
    """

    layers: Callable[[ConfigFields, ModelSpec], tuple[tuple[Layer, ...], int]]
    """Raises ValueError without a supported head."""
    token_norm: str
    hidden_norm: str
    fc: str
    """Projection of the embedding and the hidden state, concatenated in this order."""
    final_norm: str
    """May have `{last}`, the index of the last layer."""


@dataclass(frozen=True, slots=True)
class Family:
    """A Hugging Face model type: how its configuration and weight names are read.

    architecture: class in `architectures` of config.json. read: returns the model that a configuration describes.
    names: returns the tensor names in a model's files, and the weights that they fill. other_prefixes: (prefix of
    tensor names in some files, prefix in `names` that it stands for). fold: returns the names with multipliers of the
    configuration folded into weights. inside: field with the configuration of the text model. kinds: supported
    `layer_types`. plain: fields whose values transformers passes through unchanged. If a file has no others,
    transformers is asked only for fields that are missing in it. needs: a file must have at least one of these fields.
    """

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
    """Fields that transformers passes through unchanged. If a file has no others, transformers is asked only for fields
    that are missing in it."""
    needs: tuple[str, ...] = ("num_hidden_layers",)
    """Fields of which a configuration must have at least one, because transformers has a default for them."""

    def read_spec(self, fields: ConfigFields) -> ModelSpec:
        """Return the model that a configuration describes. Raises ValueError as `read`."""
        return replace(self.read(fields), architecture=self.architecture)

    @property
    def architectures(self) -> frozenset[str]:
        """Accepted classes in `architectures` of config.json: causal language model, without a head, and multimodal."""
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
