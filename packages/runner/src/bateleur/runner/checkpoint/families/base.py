"""What a model family tells the checkpoint reader, and how most of them are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import Names
from bateleur.runner.models.spec import AttentionLayer, Layer, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpNames:
    """What files call the parts of an MTP head, behind `mtp.`; its layers are called as those of the target."""

    layers: Callable[[ConfigFields, ModelSpec], tuple[tuple[Layer, ...], int]]
    """Branches of the head of this target, and how many make a layer. Raises ValueError for no head, or one of a kind
    that is not supported."""
    token_norm: str
    hidden_norm: str
    fc: str
    """The product with both, side by side, the embedding first."""
    final_norm: str
    """With `{last}`, the number of the last layer, if need be."""


@dataclass(frozen=True, slots=True)
class Family:
    """One Hugging Face model type: how its configuration and its weight names are read."""

    model_type: str
    architecture: str
    """The causal-language-model class, as `architectures` in config.json names it."""
    read_spec: Callable[[ConfigFields], ModelSpec]
    """Raises ValueError for impossible or unsupported settings."""
    names: Callable[[ModelSpec], Names]
    other_prefixes: tuple[tuple[str, str], ...] = ()
    """(other, ours): prefixes of tensor names that some files have in place of those in `names`."""
    fold: Callable[[ConfigFields, Names], Names] = lambda _, names: names
    """The names, with numbers of the configuration that are multiplied into weights."""
    inside: str | None = None
    """The field of a larger configuration that holds the model's own; the other parts of such files are not read."""
    kinds: tuple[str, ...] = ()
    """What `layer_types` may hold, where transformers would refuse others in its own words."""
    mtp: MtpNames | None = None
    """Where files of this family may hold an MTP head, what its parts are called."""
    plain: frozenset[str] = frozenset()
    """Fields that transformers takes as a file has them. A file that holds no others is read without asking it, but for
    what the file leaves out."""
    needs: tuple[str, ...] = ()
    """Fields of which a configuration must have one, as a library's layers would stand in for them."""

    @property
    def architectures(self) -> frozenset[str]:
        """Values of `architectures` that name this text model: with a head, in a larger model, or without a head."""
        stem = self.architecture
        for ending in ("ForCausalLM", "ForConditionalGeneration"):
            stem = stem.removesuffix(ending)
        if stem == self.architecture:
            return frozenset((stem,))
        endings = ("ForCausalLM", "ForConditionalGeneration", "Model", "TextModel")
        return frozenset(stem + ending for ending in endings)


_INERT = (
    "architectures attention_bias attention_dropout bos_token_id dtype hidden_dropout initializer_range model_type "
    "num_labels output_router_logits pad_token_id pretraining_tp torch_dtype transformers_version use_cache"
)
INERT = frozenset(_INERT.split())
"""Fields that many files have and nobody reads, or that mean the same everywhere."""


def read_layers(
    named: str, kinds: Sequence[str], readers: Mapping[str, Callable[[], Layer]], *behind: Layer
) -> tuple[Layer, ...]:
    """The branches of layers of these kinds: what the reader of a kind makes, and those `behind` it.

    Raises ValueError for a kind that nobody reads. named: what it says of entry i, as a format.
    """
    made: dict[str, Layer] = {}
    for i, kind in enumerate(kinds):
        if kind not in readers:
            raise ValueError(f"{named.format(i=i, kind=kind)}; supported are {', '.join(readers)}")
        if kind not in made:
            made[kind] = readers[kind]()
    return followed([made[kind] for kind in kinds], *behind)


WINDOW_KINDS = ("full_attention", "sliding_attention")


def read_windows(
    fields: ConfigFields, attention: AttentionLayer, **windowed: Any
) -> tuple[AttentionLayer, ...]:
    """One attention layer per entry of `layer_types`. windowed: fields that sliding-window layers replace."""
    kinds, made = fields.raw("layer_types") or (), {"full_attention": attention}
    if "sliding_attention" in kinds:
        made["sliding_attention"] = replace(attention, sliding_window=fields["sliding_window"], **windowed)
    for i, kind in enumerate(kinds):
        if kind not in made:
            raise ValueError(f"layer_types[{i}] is {kind!r}; supported are {', '.join(WINDOW_KINDS)}")
    return tuple(made[kind] for kind in kinds)


def followed(blocks: Sequence[Layer], *behind: Layer) -> tuple[Layer, ...]:
    """Each block, followed by the layers `behind`."""
    return tuple(layer for block in blocks for layer in (block, *behind))
