"""Delta-rule layers of checkpoints: configuration fields, and weight names in the layouts of published checkpoints."""

from __future__ import annotations

from dataclasses import replace

from bateleur.mamba import GatedDelta, KimiDelta
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import Form, Names, Part
from bateleur.runner.models.spec import DeltaLayer

CHUNK = 64
"""Tokens of a chunk in a scan; configurations have no such field."""


def read_gated_delta(fields: ConfigFields, norm_eps: float, *, allow_neg_eigval: bool = False) -> DeltaLayer:
    """Read a gated delta net from the fields `linear_*`. norm_eps: epsilon of the output norm."""
    fields.choice("hidden_act", ("silu",))
    fields.divides("linear_num_key_heads", "linear_num_value_heads")
    state = GatedDelta(
        fields["linear_num_key_heads"],
        fields["linear_num_value_heads"],
        fields["linear_key_head_dim"],
        fields["linear_value_head_dim"],
        allow_neg_eigval,
        conv_width=fields["linear_conv_kernel_dim"],
    )
    return DeltaLayer(state, CHUNK, norm_eps)


def joined_names(layer: DeltaLayer) -> Names:
    """Return Qwen3.5's weight names: q, k and v in one matrix, one matrix for each other part of the projection."""
    sizes = _sizes(layer)
    rows = {"in_proj_qkv": sum(sizes[:3]), "in_proj_z": sizes[3], "in_proj_b": sizes[4], "in_proj_a": sizes[5]}
    return _stacked("in_proj", rows) | _rest("norm", "out_proj") | _CONV


def packed_names(layer: DeltaLayer) -> Names:
    """Return Qwen3-Next's weight names: rows are ordered by key head, each followed by the value heads it serves."""
    sizes, state = _sizes(layer), layer.state
    assert isinstance(state, GatedDelta)
    first, second = sum(sizes[:4]), sum(sizes[4:])
    names = _stacked("in_proj", {"in_proj_qkvz": first, "in_proj_ba": second})
    for name, rows in (("in_proj_qkvz.weight", sizes[:4]), ("in_proj_ba.weight", sizes[4:])):
        ends = [sum(rows[: i + 1]) // state.num_key_heads for i in range(len(rows))]
        names[name] = replace(names[name], pieces=tuple(zip([0, *ends], ends, strict=False)))
    return names | _rest("norm", "out_proj") | _CONV


def split_names(layer: DeltaLayer) -> Names:
    """Return OLMo-hybrid's weight names: one matrix per part of the projection; separate or joined convolutions."""
    named = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
    names = _stacked("in_proj", dict(zip(named, _sizes(layer), strict=True)))
    return names | _rest("o_norm", "o_proj") | split_convolutions(layer)


def factored_names(layer: DeltaLayer) -> Names:
    """Return Kimi Linear's weight names: one matrix for each part; gate and decay are products of two matrices."""
    state, rank = layer.state, layer.rank
    assert isinstance(state, KimiDelta)
    assert rank is not None
    heads, decays = state.num_heads, state.num_heads * state.key_dim
    first = dict(zip(("q_proj", "k_proj", "v_proj"), _channels(layer), strict=True))
    return {
        **_stacked("in_proj", {**first, "g_a_proj": rank, "b_proj": heads, "f_a_proj": rank}),
        "g_b_proj.weight": Part("gate_proj"),
        "f_b_proj.weight": Part("decay_proj"),
        **_rest("o_norm", "o_proj"),
        "A_log": Part("A", form=Form.A_LOG, stored=(1, 1, heads, 1)),
        "dt_bias": Part("dt_bias", stored=(decays,)),
        **split_convolutions(layer),
    }


def split_convolutions(layer: DeltaLayer) -> Names:
    """Return the weight names of separate convolutions for q, k and v, or of one joined convolution."""
    rows = dict(zip(("q_conv1d", "k_conv1d", "v_conv1d"), _channels(layer), strict=True))
    apart = {name: replace(part, form=Form.CONV) for name, part in _stacked("conv", rows).items()}
    name, joined = next(iter(_CONV.items()))
    return {name: replace(joined, instead=apart)}


_CONV: Names = {"conv1d.weight": Part("conv", form=Form.CONV)}


def _rest(norm: str, out: str) -> Names:
    return {
        "A_log": Part("A", form=Form.A_LOG),
        "dt_bias": Part("dt_bias"),
        f"{norm}.weight": Part("norm"),
        f"{out}.weight": Part("out_proj"),
    }


def _channels(layer: DeltaLayer) -> tuple[int, int, int]:
    """Return the numbers of rows of queries, keys and values."""
    (key_heads, value_heads), (key_dim, value_dim) = layer.state.heads, layer.state.lanes
    return key_heads * key_dim, key_heads * key_dim, value_heads * value_dim


def _sizes(layer: DeltaLayer) -> tuple[int, ...]:
    """Return the numbers of rows of queries, keys, values, gate, b and a."""
    channels, heads = _channels(layer), layer.state.heads[1]
    return *channels, channels[2], heads, heads


def _stacked(target: str, rows: dict[str, int]) -> Names:
    """Return the names of weights that are stacked by rows to one weight. rows: number of rows by name."""
    names, start = {}, 0
    for name, count in rows.items():
        names[f"{name}.weight"] = Part(target, start, count)
        start += count
    return names
