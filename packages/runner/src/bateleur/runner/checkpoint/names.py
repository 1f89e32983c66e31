"""Maps tensors of checkpoints to weights of the model, or to parts of them."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from bateleur.runner.checkpoint.tensors import TensorEntry
from bateleur.runner.models.spec import (
    AttentionLayer,
    ExpertsLayer,
    MambaLayer,
    MlpLayer,
    ModelSpec,
    ParallelLayer,
    SingleLayer,
    parts_of,
)


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
        """Return the weight for a stored tensor. Computed weights are float32, to be rounded once."""
        match self:
            case StorageForm.A_LOG:
                return -torch.exp(tensor.float())
            case StorageForm.LESS_ONE:
                return 1.0 + tensor.float()
        return tensor


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A part of a weight that one tensor fills: rows [start, start + rows) of weight `target`; `rows` None: all."""

    target: str
    start: int = 0
    rows: int | None = None
    form: StorageForm = StorageForm.PLAIN
    pieces: tuple[tuple[int, int], ...] = ()
    """If rows are stored group by group: the rows [first, end) of a group, in the order of the weight, which has the
    first piece of every group, then the second one of every group."""
    factors: tuple[tuple[int | None, float], ...] = ()
    """(rows, factor): factors of consecutive rows; None means all remaining rows."""
    stored: tuple[int, ...] | None = None
    """Shape in the file, if it differs but has as many entries."""
    axis: int = 0
    """Axis of the rows in `pieces`: 1 in a weight with one matrix or vector for each expert."""
    transposed: bool = False
    """Whether the last two axes are swapped in the file."""
    expert: int | None = None
    """Index of the expert whose matrix this is; None means all experts."""
    instead: Mapping[str, WeightPart] = field(default_factory=dict)
    """What fills the same weight in files of another layout, which lack this name."""

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

    def placed(self, source: str, target: str) -> WeightPart:
        """Return the part with a prefix added to names in files (`source`) and to names of weights (`target`)."""
        instead = {source + name: part.placed(source, target) for name, part in self.instead.items()}
        return replace(self, target=target + self.target, instead=instead)


Names = dict[str, WeightPart]
"""Checkpoint tensor names and the parts that they fill."""
Called = tuple[str, str]
"""Names of a branch and of the norm before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Tensor names of a layer's experts, without the name of the layer.

    `other_*` are names in another layout: `{}` means one tensor for each expert, two names mean separate gate and up.
    """

    norm: str = "post_attention_layernorm"
    router: str = "mlp.gate.weight"
    other_router: tuple[str, ...] = ()
    correction: str = "mlp.gate.e_score_correction_bias"
    up: str = "mlp.experts.gate_up_proj"
    """All experts, (E, rows, columns); the gate in the upper rows."""
    other_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight")
    down: str = "mlp.experts.down_proj"
    other_down: tuple[str, ...] = ("mlp.experts.{}.down_proj.weight",)
    latent: tuple[str, str] = ("mlp.fc1_latent_proj", "mlp.fc2_latent_proj")
    """Projections to the experts' width and back."""
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True, slots=True)
class LayerTensorNames:
    """Tensor names of a layer type that differ by family: the branch, the norm before it, and the branch's weights."""

    called: Called
    names: Callable[[Any], Names]
    """Returns the names of a layer, after the name of the branch."""


Call = Called | ExpertNames | LayerTensorNames
MIXERS: Mapping[type[SingleLayer], Call] = {
    AttentionLayer: ("self_attn", "input_layernorm"),
    MambaLayer: ("mamba", "input_layernorm"),
    ExpertsLayer: ExpertNames(),
}


def weight_names(
    spec: ModelSpec,
    mlp: Called | LayerTensorNames,
    mixers: Mapping[type[SingleLayer], Call] = MIXERS,
    *,
    stem: str = "model",
    embedding: str = "embed_tokens",
    final_norm: str = "norm",
    fused_mlp: bool = False,
) -> Names:
    """Return the weight names of a decoder, which begin with `stem`.

    mlp, mixers: names of MLPs, and of other branches by their type. fused_mlp: whether gate and up are one tensor in
    the file.
    """
    names: Names = {
        f"{stem}.{embedding}.weight": WeightPart("embedding"),
        f"{stem}.{final_norm}.weight": WeightPart("final_norm"),
        "lm_head.weight": WeightPart("lm_head"),
    }
    for i, layer in enumerate(spec.layers):
        source, parts = f"{stem}.layers.{i // spec.branches_per_layer}.", parts_of(layer)
        for j, mixer in enumerate(parts):
            called = mlp if isinstance(mixer, MlpLayer) else mixers[type(mixer)]
            target = f"layers.{i}.{j}." if isinstance(layer, ParallelLayer) else f"layers.{i}."
            norm, named = _layer_names(mixer, called, fused_mlp)
            names[f"{source}{norm}.weight"] = WeightPart(f"layers.{i}.input_norm")
            names |= {source + name: part.placed(source, target) for name, part in named.items()}
    return names


def resolve_layout(names: Names, tensors: Container[str]) -> Names:
    """Return the weight names of the layout that a file uses. tensors: tensor names of the file."""
    resolved: Names = {}
    for name, part in names.items():
        other = name not in tensors and any(each in tensors for each in part.instead)
        resolved |= part.instead if other else {name: part}
    return resolved


def with_prefix(tensors: Mapping[str, TensorEntry], names: Names) -> Mapping[str, TensorEntry]:
    """Return a file's tensors under the names of a model with a head.

    A model saved without its head lacks the first part of the names, such as `model.`; `lm_head` is unchanged.
    """
    (embedding,) = (name for name, part in names.items() if part.target == "embedding")
    prefix, _, rest = embedding.partition(".")
    if embedding in tensors or rest not in tensors:
        return tensors
    outside = {name for name in names if not name.startswith(f"{prefix}.")}
    return {
        name if name in outside or name.startswith("mtp.") else f"{prefix}.{name}": entry
        for name, entry in tensors.items()
    }


def cut_evenly(names: Names, tensors: Mapping[str, TensorEntry]) -> Names:
    """Return the names, adapted to files that split a joined convolution into equal parts, as transformers saves it."""
    stacks: dict[str, dict[str, WeightPart]] = {}
    for name, part in names.items():
        if part.form is StorageForm.CONV and part.rows is not None:
            stacks.setdefault(part.target, {})[name] = part
    moved: Names = {}
    for parts in stacks.values():
        total, found = (sum(part.rows or 0 for part in parts.values()), {name: tensors.get(name) for name in parts})
        rows = total // len(parts)
        if all(entry is not None and entry.shape[:1] == (rows,) for entry in found.values()):
            moved |= {name: replace(part, start=i * rows, rows=rows) for i, (name, part) in enumerate(parts.items())}
    return names | moved


def norms_less_one(names: Names) -> Names:
    """Return the names, for files with norm weights w - 1 in place of w (residual stream, queries and keys)."""
    norms = ("input_norm", "output_norm", "final_norm", "q_norm", "k_norm")
    stored = {name: part for name, part in names.items() if part.target.rpartition(".")[2] in norms}
    return names | {name: replace(part, form=StorageForm.LESS_ONE) for name, part in stored.items()}


def _layer_names(layer: SingleLayer, called: Call, fused_mlp: bool) -> tuple[str, Names]:
    """Return the name of the norm before a layer, and all other weight names, without the layer's prefix."""
    if isinstance(called, ExpertNames):
        assert isinstance(layer, ExpertsLayer)
        return called.norm, _expert_names(layer, called, fused_mlp)
    if isinstance(called, LayerTensorNames):
        branch, norm = called.called
        return norm, _behind(branch, called.names(layer))
    assert isinstance(layer, AttentionLayer | MlpLayer | MambaLayer)
    branch, norm = called
    return norm, _behind(branch, _branch_names(layer, fused_mlp))


def _behind(branch: str, names: Names) -> Names:
    return {f"{branch}.{name}": part.placed(f"{branch}.", "") for name, part in names.items()}


def _expert_names(layer: ExpertsLayer, names: ExpertNames, fused_mlp: bool) -> Names:
    count, inner = layer.num_experts, layer.intermediate_size
    found = {
        names.router: WeightPart("router_proj", instead=_instead("router_proj", names.other_router)),
        names.up: WeightPart("up_proj", instead=_instead("up_proj", names.other_up, count, inner)),
        names.down: WeightPart("down_proj", instead=_instead("down_proj", names.other_down, count)),
    }
    if layer.router.bias:
        found[names.router.removesuffix("weight") + "bias"] = WeightPart("router_bias")
    if layer.bias:
        found |= {f"{names.up}_bias": WeightPart("up_bias"), f"{names.down}_bias": WeightPart("down_bias")}
    if layer.router.corrected:
        found[names.correction] = WeightPart("correction")
    if layer.latent_size is not None:
        into, out = names.latent
        found |= _projection("latent_in", {into: None}, layer.latent_bias)
        found |= _projection("latent_out", {out: None}, layer.latent_bias)
    if layer.shared is not None:
        shared = _behind(names.shared, _branch_names(layer.shared, fused_mlp))
        found |= {name: part.placed("", "shared_") for name, part in shared.items()}
    if layer.shared_gate:
        found |= _projection("shared_gate", {names.shared_gate: None}, bias=False)
    return found


def _instead(target: str, others: tuple[str, ...], count: int = 0, rows: int = 0) -> Names:
    """Return the weight names of another layout. `{}` in a name stands for each of `count` experts.

    Several names are stacked by rows to one weight, with `rows` rows each.
    """
    if not others or "{}" not in others[0]:
        return {other: WeightPart(target) for other in others}
    several = len(others) > 1
    return {
        other.format(e): WeightPart(target, i * rows, rows if several else None, expert=e)
        for e in range(count)
        for i, other in enumerate(others)
    }


def _branch_names(layer: AttentionLayer | MlpLayer | MambaLayer, fused_mlp: bool) -> Names:
    match layer:
        case AttentionLayer():
            return _attention_names(layer)
        case MlpLayer():
            rows = layer.intermediate_size
            ups = {"gate_proj": rows, "up_proj": rows} if layer.gated else {"up_proj": rows}
            return {
                **_projection("up", {"input_linear": None} if fused_mlp else ups, layer.bias),
                **_projection("down", {"output_linear" if fused_mlp else "down_proj": None}, layer.bias),
            }
        case MambaLayer():
            return {
                **_projection("in", {"in_proj": None}, layer.proj_bias),
                "conv1d.weight": WeightPart("conv", form=StorageForm.CONV),
                **({"conv1d.bias": WeightPart("conv_bias")} if layer.conv_bias else {}),
                "A_log": WeightPart("A", form=StorageForm.A_LOG),
                "D": WeightPart("D"),
                "dt_bias": WeightPart("dt_bias"),
                **({} if layer.norm == "gate only" else {"norm.weight": WeightPart("norm")}),
                **_projection("out", {"out_proj": None}, layer.proj_bias),
            }


def _attention_names(layer: AttentionLayer) -> Names:
    q, kv, lanes = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim, layer.head_dim
    heads = {"q_proj": 2 * q if layer.gated else q, "k_proj": kv, "v_proj": kv}
    names = _projection("qkv", heads, layer.qkv_bias) | _projection("o", {"o_proj": None}, layer.o_bias)
    if layer.gated:  # stored head by head, query and gate; here the gates of all heads come first
        pieces = ((lanes, 2 * lanes), (0, lanes))
        names |= {name: replace(names[name], pieces=pieces) for name in names if name.startswith("q_proj")}
    if layer.sinks:
        names["sinks"] = WeightPart("sinks")
    if layer.qk_norm_eps is not None:
        names |= {f"{norm}.weight": WeightPart(norm) for norm in ("q_norm", "k_norm")}
    return names


def _projection(target: str, sources: Mapping[str, int | None], bias: bool) -> Names:
    """Return the names of tensors that are stacked to one matrix, and of their biases. sources: row counts by name."""
    names, start = {}, 0
    for source, rows in sources.items():
        names[f"{source}.weight"] = WeightPart(f"{target}_proj", start, rows)
        if bias:
            names[f"{source}.bias"] = WeightPart(f"{target}_bias", start, rows)
        start += rows or 0
    return names
