"""Bytes and flops of a decode step, computed from shapes: a lower bound for its time.

A step cannot be faster than its bytes at memory bandwidth, or its flops at the peak rate. Counted are the weights, once
per step; keys and values of every request; recurrent states; inputs and outputs of matrix products.
The number of experts that are read assumes that each token goes to `top_k` experts at random; real routers read fewer.
Norms, activations and sampling count as fused with the products around them.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, fields
from typing import Self

import torch

from bateleur.mamba import GatedDelta, KimiDelta, Mamba2, Recurrence, StatePolicy, memory_traffic
from bateleur.runner.cache.costs import CacheCosts, CacheOptions
from bateleur.runner.config.engine_config import EngineConfig
from bateleur.runner.config.resolve import choose_kv_cache_dtype
from bateleur.runner.config.state_options import StateOptions
from bateleur.runner.diagnose.part_facts import EMBEDDINGS, KINDS, layer_of
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.experts import ROUTED
from bateleur.runner.models.memory_report import WeightSize, weight_sizes
from bateleur.runner.models.spec import AttentionLayer, ExpertsLayer, ModelSpec, parts_of

_STATE_FLOPS: dict[type[Recurrence], int] = {Mamba2: 5, GatedDelta: 7, KimiDelta: 7}
"""Flops per state entry and token: decay, update and read; a delta rule reads twice."""


@dataclass(frozen=True, slots=True)
class StepPart:
    """Bytes (reads plus writes) and flops of a step, in all layers of one type or summed over types."""

    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    state_bytes: float = 0.0
    activation_bytes: float = 0.0
    flops: float = 0.0

    @property
    def total_bytes(self) -> float:
        """Sum of all bytes."""
        return self.weight_bytes + self.kv_bytes + self.state_bytes + self.activation_bytes

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def bound_us(self, bytes_per_s: float, flops_per_s: float = float("inf")) -> float:
        """Return the least time in microseconds, if memory accesses and flops overlap perfectly."""
        return 1e6 * max(self.total_bytes / bytes_per_s, self.flops / flops_per_s)


def step_costs(
    model: HybridDecoder, caches: CacheCosts, batch: int, context: int, tokens: int = 1
) -> dict[str, StepPart]:
    """Return the costs of a step by type of layer (the names of `bateleur info`), and of `embeddings`.

    model: may be on the `meta` device. context: cached tokens per request. tokens: tokens per request in this step, 1
    plus drafts. Raises ValueError for a count below 1, or for more tokens than the caches have room for.
    """
    for name, value in (("batch", batch), ("context", context), ("tokens", tokens)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if (drafts := caches.options.states.num_speculative_tokens) < tokens - 1:
        raise ValueError(f"tokens is {tokens}; it must be at most 1 + num_speculative_tokens = {1 + drafts}")
    found: defaultdict[str, StepPart] = defaultdict(StepPart)
    for kind, part in _weights(model, batch * tokens):
        found[kind] += part
    for keys in model.spec.attention:
        found[KINDS[type(keys)]] += _keys(keys, caches.kv_dtype, batch, context, tokens)
    for layer, state in zip(model.spec.recurrent, caches.options.states.specs(model.spec, model.dtype), strict=True):
        found[KINDS[type(layer)]] += _states(state, caches, batch, tokens)
    return dict(found)


def total(parts: dict[str, StepPart]) -> StepPart:
    """Return the sum over all types of layers."""
    return sum(parts.values(), StepPart())


def experts_met(layer: ExpertsLayer, num_tokens: int) -> float:
    """Return the mean number of experts that `num_tokens` tokens read, if each token goes to `top_k` random experts."""
    return layer.num_experts * (1.0 - (1.0 - layer.top_k / layer.num_experts) ** num_tokens)


def _weights(model: HybridDecoder, num_tokens: int) -> list[tuple[str, StepPart]]:
    """Return pairs (layer type, costs) of matrix products and reads of other weights, in the order of the weights."""
    spec, sizes = model.spec, weight_sizes(model.weights(), model.matrices)
    row_bytes = num_tokens * spec.hidden_size * model.dtype.itemsize
    logit_bytes = 4 * num_tokens * spec.vocab_size  # float32
    head = _product(sizes["embedding" if model.ties_lm_head else "lm_head"], num_tokens, 1.0)
    found = [(EMBEDDINGS, head + StepPart(weight_bytes=row_bytes, activation_bytes=logit_bytes))]
    for name, weight in sizes.items():
        if (layer := layer_of(spec, name)) is None:
            continue
        share, inputs = 1.0, float(num_tokens)
        if isinstance(layer, ExpertsLayer) and name.rpartition(".")[2] in ROUTED:
            share = experts_met(layer, num_tokens) / layer.num_experts
            inputs = num_tokens * layer.top_k / layer.num_experts
        found.append((KINDS[type(layer)], _product(weight, inputs, share)))
    stream = StepPart(activation_bytes=2 * row_bytes)
    return [*found, *((KINDS[type(parts[0])], stream) for parts in map(parts_of, spec.layers))]


def _product(weight: WeightSize, num_inputs: float, share: float) -> StepPart:
    """Return the costs of a weight, such as the matrices of all experts.

    num_inputs: mean tokens that each matrix multiplies. share: part of the weight that is read, in [0, 1].
    """
    read = StepPart(weight_bytes=share * weight.num_bytes)
    if len(weight.shape) < 2:
        return read
    *count, out, into = weight.shape
    lanes = num_inputs * (out + into) * (count[0] if count else 1)
    return read + StepPart(activation_bytes=lanes * weight.dtype.itemsize, flops=2.0 * num_inputs * weight.numel)


def _keys(layer: AttentionLayer, dtype: torch.dtype, batch: int, context: int, tokens: int) -> StepPart:
    """Return the costs of keys and values, see `step_costs`: reads for all tokens of requests, writes for new ones.

    dtype: the KV cache's.
    """
    seen = context if layer.sliding_window is None else min(context, layer.sliding_window)
    each = 2 * layer.num_kv_heads * layer.head_dim * dtype.itemsize
    flops = 4.0 * batch * tokens * (seen + tokens) * layer.num_heads * layer.head_dim
    return StepPart(kv_bytes=batch * (seen + tokens) * each, flops=flops)


def _states(state: Recurrence, caches: CacheCosts, batch: int, tokens: int) -> StepPart:
    """Return the costs of states and conv windows in a step, see `bateleur.mamba.memory_traffic`.

    With state policy FOLD they are means over the steps from one fold (update of the saved state) to the next.
    """
    assert caches.layout is not None, "a model with recurrent layers has a layout"
    if state.policy is StatePolicy.FOLD:
        moved = memory_traffic.fold_step_bytes(state, tokens, memory_traffic.FoldCycle.of(caches.layout, tokens))
    else:
        moved = float(memory_traffic.slots_step_bytes(state, tokens))
    flops = _STATE_FLOPS.get(type(state), 0) * math.prod(state.state_shape) + 2.0 * state.conv_width * state.conv_dim
    return StepPart(state_bytes=batch * moved, flops=batch * tokens * flops)


def default_cache_costs(
    spec: ModelSpec, dtype: torch.dtype, longest: int, device: str, drafts: int = 0, kv_cache_dtype: str = "auto"
) -> CacheCosts:
    """Return the cache costs of an engine with default options apart from these.

    dtype: the model's. longest: `max_model_len`. device: "cpu" or "cuda". drafts: maximum drafts of a request.
    """
    cache, kv_dtype = EngineConfig.of().cache, choose_kv_cache_dtype(kv_cache_dtype, spec)
    states = StateOptions.of(cache, drafts, torch.device(device))
    options = CacheOptions(block_size=cache.block_size, share_prefixes=False, states=states, kv_dtype=kv_dtype)
    return CacheCosts.of(spec, dtype, longest, options)
