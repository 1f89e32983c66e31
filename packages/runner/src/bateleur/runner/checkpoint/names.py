"""Maps tensors of checkpoints to weights of the model, or to parts of them."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from bateleur.runner.distributed.ranks import Range
from bateleur.runner.models.spec import AttentionLayer, ExpertsLayer, MambaLayer, MlpLayer, ModelSpec, SingleLayer
from bateleur.runner.utils.tensor_files import TensorEntry


class StorageForm(Enum):
    """Storage form of a weight in a checkpoint: plain, or a function of the weight."""

    PLAIN = "plain"
    CONV = "conv"
    """(C, 1, W) for a weight (C, W)."""
    A_LOG = "A_log"
    """log(-A), for a weight A."""
    LESS_ONE = "less one"
    """w - 1, for a weight w of a norm."""

    def read(self, tensor: Tensor) -> Tensor:
        """Return the weight for a stored tensor; float32 for A_LOG and LESS_ONE, so that it is rounded only once."""
        if self is StorageForm.A_LOG:
            return -torch.exp(tensor.float())
        return 1.0 + tensor.float() if self is StorageForm.LESS_ONE else tensor


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A part of a weight that one stored tensor fills: rows [start, start + rows) of weight `target`; `rows` None: all.

    pieces: () if the file has the rows in the weight's order. Otherwise it has equal groups of rows, such as heads, and
    `pieces` are ranges [first, end) within a group: the weight has the first range of all groups, then the second one.
    axis: axis of the rows in `pieces`, 1 if axis 0 counts experts. factors: (rows, factor) for consecutive rows; rows
    None: all remaining. stored: shape in the file, if it differs but has as many entries. transposed: whether the last
    two axes are swapped in the file. expert: index of the only expert that the tensor fills; None: all. instead: parts
    of the same weight by tensor name, for files that have these tensors in place of this one.
    """

    target: str
    start: int = 0
    rows: int | None = None
    form: StorageForm = StorageForm.PLAIN
    pieces: tuple[tuple[int, int], ...] = ()
    factors: tuple[tuple[int | None, float], ...] = ()
    stored: tuple[int, ...] | None = None
    axis: int = 0
    transposed: bool = False
    expert: int | None = None
    instead: Mapping[str, "WeightPart"] = field(default_factory=dict)

    def row_order(self, count: int) -> Tensor | None:
        """Return (count,) int64, the row in the file for each row of the weight; None if the order is equal."""
        if not self.pieces:
            return None
        rows = torch.arange(count).view(-1, max(end for _, end in self.pieces))
        return torch.cat([rows[:, first:end].flatten() for first, end in self.pieces])

    def row_factors(self, count: int) -> Tensor:
        """Return (count,) float32, the factor on each row."""
        column, first = torch.ones(count), 0
        for rows, factor in self.factors:
            column[first : None if rows is None else first + rows] = factor
            first += rows or 0
        return column

    def read(self, tensor: Tensor) -> Tensor:
        """Return the values of this part for a stored tensor: converted, transposed, reordered and scaled."""
        tensor = self.form.read(tensor)
        tensor = tensor.transpose(-1, -2) if self.transposed else tensor
        if (order := self.row_order(tensor.shape[self.axis])) is not None:
            tensor = tensor.index_select(self.axis, order)
        if self.factors:
            tensor = tensor.float() * self.row_factors(len(tensor)).view(-1, *[1] * (tensor.ndim - 1))
        return tensor

    def own_rows(self, ranges: Sequence[Range] | None, count: int) -> Iterator[tuple[Range, Range]]:
        """Yield pairs of row ranges to copy: from (in this part, which has `count` rows), and to (in a rank's weight).

        ranges: rows of the whole weight that the rank has; None for all.
        """
        begin, end, local = self.start, self.start + count, 0
        for first, last in ranges or ((0, end),):
            low, high = max(first, begin), min(last, end)
            if low < high:
                yield (low - begin, high - begin), (local + low - first, local + high - first)
            local += last - first

    def placed(self, source: str, target: str) -> Self:
        """Return the part with a prefix added to names in files (`source`) and to names of weights (`target`)."""
        instead = {source + name: part.placed(source, target) for name, part in self.instead.items()}
        return replace(self, target=target + self.target, instead=instead)


Names = dict[str, WeightPart]
"""Checkpoint tensor names and the parts that they fill."""


class Called(NamedTuple):
    """Prefix of a module (attention, MLP, ...) in tensor names, and name of the norm before this module.

    names: returns tensor names for a layer spec, without the prefix `branch`; None: those of most families.
    """

    branch: str
    norm: str
    names: Callable[[Any], Names] | None = None


def stacked(target: str, sources: Mapping[str, int | None], ending: str = "weight") -> Names:
    """Return the tensors `{source}.{ending}` that are stacked by rows to `target`. sources: rows by name; None: all."""
    names, start = {}, 0
    for source, rows in sources.items():
        names[f"{source}.{ending}"] = WeightPart(target, start, rows)
        start += rows or 0
    return names


def projection(target: str, sources: Mapping[str, int | None], bias: bool = False) -> Names:
    """Return the names of tensors that are stacked to `{target}_proj` and, with `bias`, to its bias, see `stacked`."""
    biases = stacked(f"{target}_bias", sources, "bias") if bias else {}
    return stacked(f"{target}_proj", sources) | biases


def whole(**sources: str) -> Callable[[Any], Names]:
    """Return a function that names weights of any layer, but no biases: `up="x"` means that `x.weight` is `up_proj`."""
    return lambda _: {f"{source}.weight": WeightPart(f"{target}_proj") for target, source in sources.items()}


def mlp_names(layer: MlpLayer) -> Names:
    """Return the tensor names of an MLP in most families: `gate_proj` (if gated), `up_proj` and `down_proj`."""
    ups = ("gate_proj", "up_proj") if layer.gated else ("up_proj",)
    up = projection("up", dict.fromkeys(ups, layer.intermediate_size), layer.bias)
    return up | projection("down", {"down_proj": None}, layer.bias)


def _attention_names(layer: AttentionLayer) -> Names:
    q, kv, lanes = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim, layer.head_dim
    heads = {"q_proj": 2 * q if layer.gated else q, "k_proj": kv, "v_proj": kv}
    names = projection("qkv", heads, layer.qkv_bias) | projection("o", {"o_proj": None}, layer.o_bias)
    if layer.gated:  # stored head by head, query and gate; here the gates of all heads come first
        pieces = ((lanes, 2 * lanes), (0, lanes))
        names |= {name: replace(names[name], pieces=pieces) for name in names if name.startswith("q_proj")}
    if layer.sinks:
        names["sinks"] = WeightPart("sinks")
    if layer.qk_norm_eps is not None:
        names |= {f"{norm}.weight": WeightPart(norm) for norm in ("q_norm", "k_norm")}
    return names


def _mamba_names(layer: MambaLayer) -> Names:
    return {
        **projection("in", {"in_proj": None}, layer.proj_bias),
        "conv1d.weight": WeightPart("conv", form=StorageForm.CONV),
        **({"conv1d.bias": WeightPart("conv_bias")} if layer.conv_bias else {}),
        "A_log": WeightPart("A", form=StorageForm.A_LOG),
        "D": WeightPart("D"),
        "dt_bias": WeightPart("dt_bias"),
        **({} if layer.norm == "gate only" else {"norm.weight": WeightPart("norm")}),
        **projection("out", {"out_proj": None}, layer.proj_bias),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Tensor names of a layer's experts, without the prefix `branch`. norm: name of the norm before the experts.

    correction: bias that is added to router scores to choose experts. up, down: tensors (E, rows, columns) of all E
    experts; `up` has the gate in its first rows. shared: prefix of the shared expert. `other_*`: names in files that
    lack the name before: `{}` means one tensor for each expert, two names mean separate gate and up.
    """

    branch: str = "mlp"
    norm: str = "post_attention_layernorm"
    router: str = "gate.weight"
    other_router: tuple[str, ...] = ()
    correction: str = "gate.e_score_correction_bias"
    up: str = "experts.gate_up_proj"
    other_up: tuple[str, ...] = ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight")
    down: str = "experts.down_proj"
    other_down: tuple[str, ...] = ("experts.{}.down_proj.weight",)
    shared: str = "mlp.shared_expert"
    shared_names: Callable[[MlpLayer], Names] = mlp_names

    def of(self, layer: ExpertsLayer) -> Names:
        """Return the weight names of a layer, without the layer's prefix."""
        count, inner = layer.num_experts, layer.intermediate_size
        found = {
            self.router: WeightPart("router_proj", instead=_instead("router_proj", self.other_router)),
            self.up: WeightPart("up_proj", instead=_instead("up_proj", self.other_up, count, inner)),
            self.down: WeightPart("down_proj", instead=_instead("down_proj", self.other_down, count)),
        }
        if layer.router.bias:
            found[self.router.removesuffix("weight") + "bias"] = WeightPart("router_bias")
        if layer.bias:
            found |= {f"{self.up}_bias": WeightPart("up_bias"), f"{self.down}_bias": WeightPart("down_bias")}
        if layer.router.corrected:
            found[self.correction] = WeightPart("correction")
        if layer.latent_size is not None:
            found |= projection("latent_in", {"fc1_latent_proj": None}, layer.latent_bias)
            found |= projection("latent_out", {"fc2_latent_proj": None}, layer.latent_bias)
        if layer.shared_gate:
            found |= projection("shared_gate", {"shared_expert_gate": None})
        found = _behind(self.branch, found)
        if layer.shared is not None:
            shared = _behind(self.shared, self.shared_names(layer.shared))
            found |= {name: part.placed("", "shared_") for name, part in shared.items()}
        return found


_MLP = Called("mlp", "post_attention_layernorm")
_MIXERS: Mapping[type[SingleLayer], Called | ExpertNames] = {
    AttentionLayer: Called("self_attn", "input_layernorm"),
    MambaLayer: Called("mamba", "input_layernorm"),
    ExpertsLayer: ExpertNames(),
}
_USUAL: Mapping[type[SingleLayer], Callable[[Any], Names]] = {
    AttentionLayer: _attention_names,
    MlpLayer: mlp_names,
    MambaLayer: _mamba_names,
}


def weight_names(
    spec: ModelSpec,
    mlp: Called = _MLP,
    mixers: Mapping[type[SingleLayer], Called | ExpertNames] = {},
    *,
    stem: str = "model",
    embedding: str = "embed_tokens",
    final_norm: str = "norm",
) -> Names:
    """Return the weight names of a decoder.

    mlp: names of the MLP. mixers: names of other layers by type; types that are left out have those of most families.
    stem: prefix of all names but `lm_head`.
    """
    names: Names = {
        f"{stem}.{embedding}.weight": WeightPart("embedding"),
        f"{stem}.{final_norm}.weight": WeightPart("final_norm"),
        "lm_head.weight": WeightPart("lm_head"),
    }
    branches = {**_MIXERS, **mixers, MlpLayer: mlp}
    for i in range(len(spec.layers)):
        source = f"{stem}.layers.{i // spec.branches_per_layer}."
        for prefix, branch in spec.prefixed(i):
            norm, named = _layer_names(branch, branches[type(branch)])
            names[f"{source}{norm}.weight"] = WeightPart(f"layers.{i}.input_norm")
            names |= {source + name: part.placed(source, prefix) for name, part in named.items()}
    return names


def _layer_names(layer: SingleLayer, called: Called | ExpertNames) -> tuple[str, Names]:
    """Return the name of the norm before a layer, and all other weight names, without the layer's prefix."""
    if isinstance(called, ExpertNames):
        assert isinstance(layer, ExpertsLayer)
        return called.norm, called.of(layer)
    names = called.names or _USUAL[type(layer)]
    return called.norm, _behind(called.branch, names(layer))


def _behind(branch: str, names: Names) -> Names:
    return {f"{branch}.{name}": part.placed(f"{branch}.", "") for name, part in names.items()}


def _instead(target: str, others: tuple[str, ...], count: int = 0, rows: int = 0) -> Names:
    """Return alternative tensor names of the weight `target`: `others`, with `{}` replaced by each of `count` experts.

    The tensors of several names are stacked to one weight; each fills `rows` rows.
    """
    if not others or "{}" not in others[0]:
        return {other: WeightPart(target) for other in others}
    height = rows if len(others) > 1 else None
    return {
        other.format(e): WeightPart(target, i * rows, height, expert=e)
        for e in range(count)
        for i, other in enumerate(others)
    }


def resolve_layout(names: Names, tensors: Container[str]) -> Names:
    """Return `names` with `WeightPart.instead` in place of names that a file lacks. tensors: names in the file."""
    resolved: Names = {}
    for name, part in names.items():
        other = name not in tensors and any(each in tensors for each in part.instead)
        resolved |= part.instead if other else {name: part}
    return resolved


def with_prefix(tensors: Mapping[str, TensorEntry], names: Names) -> Mapping[str, TensorEntry]:
    """Return a file's tensors under the names that `names` uses.

    A model saved without its LM head lacks the first part of the names, such as `model.`; `lm_head` is unchanged.
    """
    prefix, _, rest = embedding_name(names).partition(".")
    if f"{prefix}.{rest}" in tensors or rest not in tensors:
        return tensors
    outside = {name for name in names if not name.startswith(f"{prefix}.")}
    return {
        name if name in outside or name.startswith("mtp.") else f"{prefix}.{name}": entry
        for name, entry in tensors.items()
    }


def embedding_name(names: Names) -> str:
    """Return the name of the tensor that fills the embedding."""
    (name,) = (name for name, part in names.items() if part.target == "embedding")
    return name


def cut_evenly(names: Names, tensors: Mapping[str, TensorEntry]) -> Names:
    """Return the names, with other rows for convolutions that a file splits into tensors with equal numbers of rows.

    A convolution over q, k and v may be stored as three tensors. Usually each has its own channels. transformers joins
    them, and when it saves them, it cuts the rows into three equal parts. Names for other files are unchanged.
    """
    stacks: dict[str, dict[str, WeightPart]] = {}
    for name, part in names.items():
        if part.form is StorageForm.CONV and part.rows is not None:
            stacks.setdefault(part.target, {})[name] = part
    moved: Names = {}
    for parts in stacks.values():
        rows = sum(part.rows or 0 for part in parts.values()) // len(parts)
        if all(name in tensors and tensors[name].shape[:1] == (rows,) for name in parts):
            moved |= {name: replace(part, start=i * rows, rows=rows) for i, (name, part) in enumerate(parts.items())}
    return names | moved


def norms_less_one(names: Names) -> Names:
    """Return a copy of `names` for files that store w - 1 in place of the weights w of norms: those of the residual
    stream, queries and keys, and no others. 1 is added when they are read.
    """
    norms = ("input_norm", "output_norm", "final_norm", "q_norm", "k_norm")
    stored = {name: part for name, part in names.items() if part.target.rpartition(".")[2] in norms}
    return names | {name: replace(part, form=StorageForm.LESS_ONE) for name, part in stored.items()}
