"""Divides a model among ranks: layers with fewer heads and channels, and parts of weights.

Every branch reads the whole residual stream and returns a partial sum, so each ends with one all-reduce. These
are divided:

attention heads (KV heads are replicated if there are fewer than ranks), channels of MLPs and of every expert, heads of
Mamba-2 with their groups (B and C are replicated if there are fewer groups), value heads of delta rules with their key
heads, channels of short convolutions, and the vocabulary.

Data-parallel ranks have the whole model except for experts, which they share (`shard_experts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from bateleur.mamba import GatedDelta
from bateleur.runner.distributed.ranks import Range, Ranks
from bateleur.runner.models.spec import (
    AttentionLayer,
    DeltaLayer,
    ExpertsLayer,
    LatentLayer,
    Layer,
    MambaLayer,
    MlpLayer,
    ModelSpec,
    ParallelLayer,
    ShortConvLayer,
    SingleLayer,
    parts_of,
)

Cut = Mapping[int, tuple[Range, ...]]
"""Ranges of a weight that a rank has, by axis, in order; of other axes it has everything."""


@dataclass(frozen=True, slots=True)
class WeightShard:
    """This rank's part of the weights of a layer or model: ranges (`cuts`), and biases that are 0 here (`once`)."""

    cuts: dict[str, Cut] = field(default_factory=dict)
    once: frozenset[str] = frozenset()
    """Weights that one rank adds and that are 0 on others: biases added after the sum."""


def shard_model(spec: ModelSpec, ranks: Ranks) -> tuple[ModelSpec, WeightShard]:
    """Return `spec` with this rank's part of each layer, and its share of the weights.

    The vocabulary size is unchanged.
    Raises ValueError, with the possible sizes, if a layer can't be divided.
    """
    vocabulary: Cut = {0: (ranks.about(spec.vocab_size),)}
    cuts: dict[str, Cut] = {"embedding": vocabulary, "lm_head": vocabulary}
    once: set[str] = set()
    layers: list[Layer] = []
    for i, layer in enumerate(spec.layers):
        parts = layer.parts if isinstance(layer, ParallelLayer) else (layer,)
        own, shares = zip(*(shard_layer(part, ranks) for part in parts), strict=True)
        parallel = isinstance(layer, ParallelLayer)
        layers.append(replace(layer, parts=own) if isinstance(layer, ParallelLayer) else own[0])
        for j, share in enumerate(shares):
            prefix = f"layers.{i}.{j}." if parallel else f"layers.{i}."
            cuts |= {prefix + name: cut for name, cut in share.cuts.items()}
            once |= {prefix + name for name in share.once}
    return replace(spec, layers=tuple(layers)), WeightShard(cuts, frozenset(once) if ranks.rank else frozenset())


def shard_experts(spec: ModelSpec, ranks: Ranks) -> tuple[ModelSpec, WeightShard]:
    """Return `spec` with this rank's experts, and its share of the weights. Other weights are whole on every rank.

    Experts are whole and divided as evenly as possible. Raises ValueError for a model without experts, or with fewer
    experts than ranks.
    """
    size, cuts = ranks.size, dict[str, Cut]()
    layers: list[Layer] = []
    for i, layer in enumerate(spec.layers):
        parts = list(parts_of(layer))
        for j, part in enumerate(parts):
            if isinstance(part, ExpertsLayer):
                if part.num_experts < size:
                    raise ValueError(
                        f"data_parallel_size is {size}; it must be at most the number of experts, {part.num_experts}"
                    )
                own = ranks.about(part.num_experts)
                parts[j] = replace(part, own=own)
                prefix = f"layers.{i}.{j}." if isinstance(layer, ParallelLayer) else f"layers.{i}."
                cuts |= {prefix + name: {0: (own,)} for name in ("up_proj", "up_bias", "down_proj", "down_bias")}
        layers.append(replace(layer, parts=tuple(parts)) if isinstance(layer, ParallelLayer) else parts[0])
    if not cuts:
        raise ValueError(
            f"data_parallel_size is {size}; it must be 1 for a model without experts: use bateleur serve --replicas"
        )
    return replace(spec, layers=tuple(layers)), WeightShard(cuts)


def num_sums(spec: ModelSpec) -> int:
    """Return the number of all-reduces in a forward pass of a rank's `spec`."""
    return 1 + len(spec.layers) + len(_squares(spec))


def sum_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Return the bytes per token of all all-reduces in a forward pass. itemsize: bytes per number of hidden states."""
    return (1 + len(spec.layers)) * spec.hidden_size * itemsize + sum(4 * each for each in _squares(spec))


def _squares(spec: ModelSpec) -> list[int]:
    """Return the number of sums of squares per token, for each norm over elements of several ranks."""
    counts = []
    for part in (part for layer in spec.layers for part in parts_of(layer)):
        if isinstance(part, AttentionLayer) and part.of_heads is not None:
            counts.append(2)
        if isinstance(part, MambaLayer) and part.norm != "gate only" and part.of_groups is not None:
            counts.append(part.of_groups[1])
    return counts


def shard_layer(layer: SingleLayer, ranks: Ranks) -> tuple[SingleLayer, WeightShard]:
    """Return this rank's part of a layer, and its share of the weights by their names in the branch."""
    match layer:
        case LatentLayer():
            return _latent(layer, ranks)
        case AttentionLayer():
            return _attention(layer, ranks)
        case MambaLayer():
            return _mamba(layer, ranks)
        case DeltaLayer():
            return _delta(layer, ranks)
        case ShortConvLayer():
            return _short_conv(layer, ranks)
        case MlpLayer():
            return _mlp(layer, ranks)
        case ExpertsLayer():
            return _experts(layer, ranks)


def _attention(layer: AttentionLayer, ranks: Ranks) -> tuple[SingleLayer, WeightShard]:
    head_dim, q, kv = layer.head_dim, layer.num_heads, layer.num_kv_heads
    own_q, own_kv = ranks.even("num_attention_heads", q), ranks.shared("num_key_value_heads", kv)
    stacked = [*([(own_q, q)] if layer.gated else []), (own_q, q), (own_kv, kv), (own_kv, kv)]
    rows = _stacked_rows([(_elements(own, head_dim), count * head_dim) for own, count in stacked])
    cuts: dict[str, Cut] = {"qkv_proj": {0: rows}, "qkv_bias": {0: rows}, "o_proj": {1: (_elements(own_q, head_dim),)}}
    if layer.sinks:
        cuts["sinks"] = {0: (own_q,)}
    if layer.qk_norm_whole:
        cuts |= {"q_norm": {0: (_elements(own_q, head_dim),)}, "k_norm": {0: (_elements(own_kv, head_dim),)}}
    of_heads = (q, kv) if layer.qk_norm_whole and not ranks.alone else None
    scales = {name: getattr(layer, name)[slice(*own_kv)] for name in ("k_scales", "v_scales")}
    own = replace(layer, num_heads=_size(own_q), num_kv_heads=_size(own_kv), of_heads=of_heads, **scales)
    return own, WeightShard(cuts, frozenset(("o_bias",)))


def _latent(layer: LatentLayer, ranks: Ranks) -> tuple[SingleLayer, WeightShard]:
    heads, own = layer.num_heads, ranks.even("num_attention_heads", layer.num_heads)
    query, made = layer.key_dim + layer.shared_dim, layer.key_dim + layer.value_dim
    rest = heads * query, heads * query + layer.rank + layer.shared_dim
    share = WeightShard(
        {
            "in_proj": {0: (_elements(own, query), rest)},
            "latent_proj": {0: (_elements(own, made),)},
            "o_proj": {1: (_elements(own, layer.value_dim),)},
        }
    )
    return replace(layer, num_heads=_size(own), num_kv_heads=_size(own)), share


def _mamba(layer: MambaLayer, ranks: Ranks) -> tuple[SingleLayer, WeightShard]:
    state = layer.state
    heads, groups = ranks.even("Mamba heads", state.num_heads), ranks.shared("n_groups", state.num_groups)
    inner, group_elements = _elements(heads, state.head_dim), _elements(groups, state.state_size)
    x, bc = (inner, state.inner_size), (group_elements, state.num_groups * state.state_size)
    conv = _stacked_rows([x, bc, bc])
    rows = _stacked_rows([x, x, bc, bc, (heads, state.num_heads)])  # the gate is as wide as x
    share = WeightShard(
        {
            "in_proj": {0: rows},
            "in_bias": {0: rows},
            "conv": {0: conv},
            "conv_bias": {0: conv},
            **{name: {0: (heads,)} for name in ("A", "D", "dt_bias")},
            "norm": {0: (inner,)},
            "out_proj": {1: (inner,)},
        },
        frozenset(("out_bias",)),
    )
    own = replace(state, num_heads=_size(heads), num_groups=_size(groups))
    of_groups = (groups[0], state.num_groups) if state.num_groups < ranks.size else None
    return replace(layer, state=own, of_groups=of_groups), share


def _delta(layer: DeltaLayer, ranks: Ranks) -> tuple[SingleLayer, WeightShard]:
    state = layer.state
    (keys, values), (key_dim, value_dim) = state.heads, state.head_dims
    own_v, own_k = ranks.even("value heads", values), ranks.shared("key heads", keys)
    qkv = [*[(_elements(own_k, key_dim), keys * key_dim)] * 2, (_elements(own_v, value_dim), values * value_dim)]
    decay_dim = 1 if isinstance(state, GatedDelta) else key_dim
    gate, decays = (
        (_elements(own_v, value_dim), values * value_dim),
        (_elements(own_v, decay_dim), values * decay_dim),
    )
    low = layer.rank
    whole = None if low is None else ((0, low), low)
    rows = _stacked_rows([*qkv, whole or gate, (own_v, values), whole or decays])
    cuts: dict[str, Cut] = {
        "in_proj": {0: rows},
        "conv": {0: _stacked_rows(qkv)},
        "A": {0: (own_v,)},
        "dt_bias": {0: (own_v,)},
        "out_proj": {1: (gate[0],)},
    }
    if low is not None:
        cuts |= {"gate_proj": {0: (gate[0],)}, "decay_proj": {0: (decays[0],)}}
    if isinstance(state, GatedDelta):
        return replace(
            layer, state=replace(state, num_key_heads=_size(own_k), num_value_heads=_size(own_v))
        ), WeightShard(cuts)
    return replace(layer, state=replace(state, num_heads=_size(own_v))), WeightShard(cuts)


def _short_conv(layer: ShortConvLayer, ranks: Ranks) -> tuple[SingleLayer, WeightShard]:
    width = layer.state.channels
    own = ranks.even("hidden_size", width)
    rows, conv = _stacked_rows([(own, width)] * 3), (own,)
    share = WeightShard(
        {"in_proj": {0: rows}, "in_bias": {0: rows}, "conv": {0: conv}, "conv_bias": {0: conv}, "out_proj": {1: conv}},
        frozenset(("out_bias",)),
    )
    return replace(layer, state=replace(layer.state, channels=_size(own))), share


def _mlp(layer: MlpLayer, ranks: Ranks) -> tuple[MlpLayer, WeightShard]:
    inner = layer.intermediate_size
    own = ranks.even("intermediate_size", inner)
    rows = _stacked_rows([(own, inner)] * (2 if layer.gated else 1))
    cuts: dict[str, Cut] = {"up_proj": {0: rows}, "up_bias": {0: rows}, "down_proj": {1: (own,)}}
    return replace(layer, intermediate_size=_size(own)), WeightShard(cuts, frozenset(("down_bias",)))


def _experts(layer: ExpertsLayer, ranks: Ranks) -> tuple[SingleLayer, WeightShard]:
    inner = layer.intermediate_size
    own = ranks.even("the experts' intermediate_size", inner)
    rows = _stacked_rows([(own, inner)] * (2 if layer.gated else 1))
    share = WeightShard(
        {"up_proj": {1: rows}, "up_bias": {1: rows}, "down_proj": {2: (own,)}},
        frozenset(("latent_out_bias", "down_bias")),
    )
    shared = layer.shared
    if shared is not None:
        shared, of_shared = _mlp(shared, ranks)
        share.cuts.update({f"shared_{name}": cut for name, cut in of_shared.cuts.items()})
        share = replace(share, once=share.once | {f"shared_{name}" for name in of_shared.once})
    return replace(layer, intermediate_size=_size(own), shared=shared), share


def _size(own: Range) -> int:
    return own[1] - own[0]


def _elements(own: Range, size: int) -> Range:
    """Return the range of elements of the heads `own`, with `size` elements per head."""
    return own[0] * size, own[1] * size


def _moved(own: Range, start: int) -> Range:
    return own[0] + start, own[1] + start


def _stacked_rows(parts: list[tuple[Range, int]]) -> tuple[Range, ...]:
    """Return this rank's row ranges in several stacked matrices. parts: (own rows, number of rows) of each matrix."""
    ranges, start = [], 0
    for own, count in parts:
        ranges.append(_moved(own, start))
        start += count
    return tuple(ranges)
