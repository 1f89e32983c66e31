"""Divides a model among ranks: layers with fewer heads and channels, and parts of weights.

Every branch reads the whole residual stream and returns a partial sum, so each ends with one all-reduce. Divided are
attention heads, channels of MLPs and of every expert, heads of Mamba-2 with their groups, value heads of delta rules
with their key heads, channels of short convolutions, and the vocabulary. KV heads and groups are replicated if there
are fewer than ranks. Data-parallel ranks have the whole model except for experts, which they share (`shard_experts`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TypeVar

from bateleur.mamba import GatedDelta
from bateleur.runner.distributed.ranks import Range, Ranks
from bateleur.runner.models.spec import (
    AttentionLayer,
    DeltaLayer,
    ExpertsLayer,
    LatentLayer,
    MambaLayer,
    MlpLayer,
    ModelSpec,
    ShortConvLayer,
    SingleLayer,
)

F = TypeVar("F", MlpLayer, ExpertsLayer)
Cut = Mapping[int, tuple[Range, ...]]
"""Ranges of a weight that a rank has, in order, by axis. The rank has all of an axis that is not listed."""
Cuts = dict[str, Cut]
"""`Cut` of each weight, by the weight's name."""


@dataclass(frozen=True, slots=True)
class WeightShard:
    """This rank's part of a model's weights.

    `cuts`: ranges of rows and columns by weight name. `once`: names of biases that are 0 here, as rank 0 adds them.
    """

    cuts: Cuts = field(default_factory=dict)
    once: frozenset[str] = frozenset()
    """Weights that one rank adds and that are 0 on others: biases added after the sum."""


WHOLE = WeightShard()
_ONCE = ("o_bias", "out_bias", "down_bias", "latent_out_bias", "shared_down_bias")
"""Biases after the sum over ranks."""


def shard_model(spec: ModelSpec, ranks: Ranks) -> tuple[ModelSpec, WeightShard]:
    """Return `spec` with this rank's part of each layer, and its share of the weights. `vocab_size` is unchanged.

    Raises ValueError, with the possible sizes, if a layer can't be divided.
    """
    if ranks.alone:
        return spec, WHOLE
    vocabulary: Cut = {0: (ranks.about(spec.vocab_size),)}
    cuts: Cuts = {"embedding": vocabulary, "lm_head": vocabulary}
    once: set[str] = set()

    def shard(prefix: str, layer: SingleLayer) -> SingleLayer:
        own, of_layer = _shard_layer(layer, ranks)
        cuts.update({prefix + name: cut for name, cut in of_layer.items()})
        once.update(prefix + name for name in _ONCE if ranks.rank)
        return own

    return spec.with_branches(shard), WeightShard(cuts, frozenset(once))


def shard_experts(spec: ModelSpec, ranks: Ranks) -> tuple[ModelSpec, WeightShard]:
    """Return `spec` with this rank's experts, as evenly as possible, and its share of the weights.

    Raises ValueError for a model without experts, or with fewer experts than ranks.
    """
    size, cuts = ranks.size, Cuts()

    def shard(prefix: str, layer: SingleLayer) -> SingleLayer:
        if not isinstance(layer, ExpertsLayer):
            return layer
        if layer.num_experts < size:
            raise ValueError(
                f"data_parallel_size is {size}; it must be at most the number of experts, {layer.num_experts}"
            )
        own = ranks.about(layer.num_experts)
        cuts.update({prefix + name: {0: (own,)} for name in ("up_proj", "up_bias", "down_proj", "down_bias")})
        return replace(layer, own=own)

    spec = spec.with_branches(shard)
    if not cuts:
        raise ValueError(
            f"data_parallel_size is {size}; it must be 1 for a model without experts: use bateleur serve --replicas"
        )
    return spec, WeightShard(cuts)


def num_sums(spec: ModelSpec) -> int:
    """Return the number of all-reduces in a forward pass of a rank's `spec`."""
    return 1 + len(spec.layers) + len(_squares(spec))


def sum_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Return the bytes per token of all all-reduces in a forward pass. itemsize: bytes per element of hidden states."""
    return (1 + len(spec.layers)) * spec.hidden_size * itemsize + sum(4 * each for each in _squares(spec))


def _squares(spec: ModelSpec) -> list[int]:
    """Return the number of float32 sums per token that are all-reduced, for each norm over elements of all ranks.

    They are sums of squares: two for the norms of queries and keys, one per norm group for a Mamba-2 layer.
    """
    counts = []
    for part in spec.mixers:
        if isinstance(part, AttentionLayer) and part.of_heads is not None:
            counts.append(2)
        if isinstance(part, MambaLayer) and part.norm != "gate only" and part.of_groups is not None:
            counts.append(part.of_groups[1])
    return counts


def _shard_layer(layer: SingleLayer, ranks: Ranks) -> tuple[SingleLayer, Cuts]:
    """Return this rank's part of a layer, and the ranges of each weight that this rank has, by the weight's name
    without the layer's prefix.
    """
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
            own = ranks.even("hidden_size", width := layer.state.channels)
            rows = _stacked_rows([(own, width)] * 3)
            cuts = _cuts(0, in_proj=rows, in_bias=rows, conv=(own,), conv_bias=(own,)) | _cuts(1, out_proj=(own,))
            return replace(layer, state=replace(layer.state, channels=_size(own))), cuts
        case MlpLayer():
            return _feed_forward(layer, ranks.even("intermediate_size", layer.intermediate_size), 0)
        case ExpertsLayer():
            inner = ranks.even("the experts' intermediate_size", layer.intermediate_size)
            experts, cuts = _feed_forward(layer, inner, 1)
            if layer.shared is not None:
                channels = ranks.even("intermediate_size", layer.shared.intermediate_size)
                shared, of_shared = _feed_forward(layer.shared, channels, 0)
                experts = replace(experts, shared=shared)
                cuts |= {f"shared_{name}": cut for name, cut in of_shared.items()}
            return experts, cuts


def _attention(layer: AttentionLayer, ranks: Ranks) -> tuple[SingleLayer, Cuts]:
    head_dim, q, kv = layer.head_dim, layer.num_heads, layer.num_kv_heads
    own_q, own_kv = ranks.even("num_attention_heads", q), ranks.shared("num_key_value_heads", kv)
    heads = [*[(own_q, q)] * (1 + layer.gated), (own_kv, kv), (own_kv, kv)]
    rows = _stacked_rows([(_elements(own, head_dim), count * head_dim) for own, count in heads])
    queries, keys = (_elements(own_q, head_dim),), (_elements(own_kv, head_dim),)
    cuts = _cuts(0, qkv_proj=rows, qkv_bias=rows, sinks=(own_q,)) | _cuts(1, o_proj=queries)
    if layer.qk_norm_whole:
        cuts |= _cuts(0, q_norm=queries, k_norm=keys)
    of_heads = (q, kv) if layer.qk_norm_whole else None
    scales = {name: getattr(layer, name)[slice(*own_kv)] for name in ("k_scales", "v_scales")}
    return replace(layer, num_heads=_size(own_q), num_kv_heads=_size(own_kv), of_heads=of_heads, **scales), cuts


def _latent(layer: LatentLayer, ranks: Ranks) -> tuple[SingleLayer, Cuts]:
    heads, own = layer.num_heads, ranks.even("num_attention_heads", layer.num_heads)
    query, made = layer.key_dim + layer.shared_dim, layer.key_dim + layer.value_dim
    rest = heads * query, heads * query + layer.rank + layer.shared_dim
    cuts = _cuts(0, in_proj=(_elements(own, query), rest), latent_proj=(_elements(own, made),))
    cuts |= _cuts(1, o_proj=(_elements(own, layer.value_dim),))
    return replace(layer, num_heads=_size(own), num_kv_heads=_size(own)), cuts


def _mamba(layer: MambaLayer, ranks: Ranks) -> tuple[SingleLayer, Cuts]:
    state = layer.state
    heads, groups = ranks.even("Mamba heads", state.num_heads), ranks.shared("n_groups", state.num_groups)
    inner, group_elements = _elements(heads, state.head_dim), _elements(groups, state.state_size)
    x, bc = (inner, state.inner_size), (group_elements, state.num_groups * state.state_size)
    conv = _stacked_rows([x, bc, bc])
    rows = _stacked_rows([x, x, bc, bc, (heads, state.num_heads)])  # the gate is as wide as x
    cuts = _cuts(0, in_proj=rows, in_bias=rows, conv=conv, conv_bias=conv, norm=(inner,))
    cuts |= _cuts(0, A=(heads,), D=(heads,), dt_bias=(heads,)) | _cuts(1, out_proj=(inner,))
    own = replace(state, num_heads=_size(heads), num_groups=_size(groups))
    of_groups = (groups[0], state.num_groups) if state.num_groups < ranks.size else None
    return replace(layer, state=own, of_groups=of_groups), cuts


def _delta(layer: DeltaLayer, ranks: Ranks) -> tuple[SingleLayer, Cuts]:
    state = layer.state
    (keys, values), (key_dim, value_dim) = state.heads, state.head_dims
    own_v, own_k = ranks.even("value heads", values), ranks.shared("key heads", keys)
    v, decay_dim = (_elements(own_v, value_dim), values * value_dim), 1 if isinstance(state, GatedDelta) else key_dim
    qkv = [*[(_elements(own_k, key_dim), keys * key_dim)] * 2, v]
    gate, decays = v, (_elements(own_v, decay_dim), values * decay_dim)
    cuts = _cuts(0, conv=_stacked_rows(qkv), A=(own_v,), dt_bias=(own_v,)) | _cuts(1, out_proj=(v[0],))
    if layer.rank is not None:
        cuts |= _cuts(0, gate_proj=(gate[0],), decay_proj=(decays[0],))
        gate = decays = (0, layer.rank), layer.rank  # every rank has all low-rank numbers
    cuts |= _cuts(0, in_proj=_stacked_rows([*qkv, gate, (own_v, values), decays]))
    if isinstance(state, GatedDelta):
        return replace(layer, state=replace(state, num_key_heads=_size(own_k), num_value_heads=_size(own_v))), cuts
    return replace(layer, state=replace(state, num_heads=_size(own_v))), cuts


def _feed_forward(layer: F, own: Range, axis: int) -> tuple[F, Cuts]:
    """Return the layer with only the intermediate channels `own`, and its weight ranges.

    axis: axis of the weights' rows: 0 for weights (rows, columns), 1 for weights (experts, rows, columns).
    """
    rows = _stacked_rows([(own, layer.intermediate_size)] * (1 + layer.gated))
    cuts = _cuts(axis, up_proj=rows, up_bias=rows) | _cuts(axis + 1, down_proj=(own,))
    return replace(layer, intermediate_size=_size(own)), cuts


def _cuts(axis: int, **ranges: tuple[Range, ...]) -> Cuts:
    return {name: {axis: each} for name, each in ranges.items()}


def _size(own: Range) -> int:
    return own[1] - own[0]


def _elements(own: Range, size: int) -> Range:
    """Return the range of elements of the heads `own`, with `size` elements per head."""
    return own[0] * size, own[1] * size


def _stacked_rows(parts: list[tuple[Range, int]]) -> tuple[Range, ...]:
    """Return this rank's row ranges in several stacked matrices. parts: (this rank's rows, all rows) of each matrix."""
    starts = accumulate((count for _, count in parts), initial=0)
    return tuple((own[0] + start, own[1] + start) for (own, _), start in zip(parts, starts, strict=False))
