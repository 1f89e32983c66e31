"""What a decode step has to read, write and compute, by arithmetic: the bound beside which times are put.

A step of B rows, each of `tokens` tokens (1 and its drafts) behind `context` others, takes no less time than its bytes
at the memory's bandwidth, and no less than its operations at the processor's rate. Counted are weights, once for all
rows; keys and values of every row; recurrent states by the policy that keeps them; and what goes in and out of every
product.
Of experts, as many are read as a step of so many tokens meets, if each token goes to `top_k` of them at random: real
routers meet fewer. Norms, activations and sampling are counted as they would be fused with the products around them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, fields

import torch

from bateleur.mamba import GatedDelta, KimiDelta, Mamba2, Recurrence, StatePolicy, memory_traffic
from bateleur.runner.cache.costs import CacheCosts, CacheOptions
from bateleur.runner.config.engine_config import EngineConfig
from bateleur.runner.config.state_options import StateOptions
from bateleur.runner.diagnose.costs import EMBEDDINGS, KINDS
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.experts import ROUTED
from bateleur.runner.models.spec import AttentionLayer, ExpertsLayer, ModelSpec, parts_of

_STATE_FLOPS: dict[type[Recurrence], int] = {Mamba2: 5, GatedDelta: 7, KimiDelta: 7}
"""Operations on each entry of a state for a token: decay, what is added, what is read; a delta rule reads it twice."""
_LOGITS = 4
"""Bytes of a logit, which is float32."""


@dataclass(frozen=True, slots=True)
class StepPart:
    """What all layers of a kind do in a step, or the sum of several kinds. Bytes are read and written, together."""

    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    state_bytes: float = 0.0
    activation_bytes: float = 0.0
    flops: float = 0.0

    @property
    def total_bytes(self) -> float:
        """All of them."""
        return self.weight_bytes + self.kv_bytes + self.state_bytes + self.activation_bytes

    def __add__(self, other: StepPart) -> StepPart:
        return StepPart(
            *(getattr(self, name) + getattr(other, name) for name in (each.name for each in fields(self)))
        )

    def bound_us(self, bytes_per_s: float, flops_per_s: float = float("inf")) -> float:
        """The least time that it can take, whatever does it: bytes and operations overlap."""
        return 1e6 * max(self.total_bytes / bytes_per_s, self.flops / flops_per_s)


def step_costs(
    model: HybridDecoder, caches: CacheCosts, batch: int, context: int, tokens: int = 1
) -> dict[str, StepPart]:
    """By kind of layer, as `bateleur info` names them, and `embeddings`.

    model: of the dtype that it is run in; one on the `meta` device will do. caches: how states are kept, and for how
        many drafts. batch: rows. context: tokens behind each row. tokens: of a row in this step.

    Raises ValueError for a count below 1, or more tokens than caches are laid out for.
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
        found[KINDS[type(keys)]] += _keys(keys, model.dtype, batch, context, tokens)
    states = caches.options.states.specs(model.spec, model.dtype)
    for layer, state in zip(model.spec.recurrent, states, strict=True):
        found[KINDS[type(layer)]] += _states(state, caches, batch, tokens)
    return dict(found)


def total(parts: dict[str, StepPart]) -> StepPart:
    """The whole step."""
    return sum(parts.values(), StepPart())


def experts_met(layer: ExpertsLayer, num_tokens: int) -> float:
    """Experts that a step of so many tokens reads, on average, if each token takes any `top_k` of them."""
    return layer.num_experts * (1.0 - (1.0 - layer.top_k / layer.num_experts) ** num_tokens)


def _weights(model: HybridDecoder, num_tokens: int) -> list[tuple[str, StepPart]]:
    """Products with matrices, and reads of what is no matrix, in the order of the weights."""
    spec, size = model.spec, model.dtype.itemsize
    layers = [parts_of(layer) for layer in spec.layers]
    rows = StepPart(weight_bytes=num_tokens * spec.hidden_size * size)
    logits = StepPart(activation_bytes=num_tokens * spec.vocab_size * _LOGITS)
    head = _product(model.lm_head, num_tokens, 1.0)
    found = [(EMBEDDINGS, rows + logits + head)]
    for name, weight in model.weights().items():
        where = name.split(".")
        if where[0] != "layers":
            continue
        layer = layers[int(where[1])][int(where[2]) if where[2].isdecimal() else 0]
        share, takers = 1.0, float(num_tokens)
        if isinstance(layer, ExpertsLayer) and where[-1] in ROUTED:
            share = experts_met(layer, num_tokens) / layer.num_experts
            takers = num_tokens * layer.top_k / layer.num_experts
        found.append((KINDS[type(layer)], _product(weight, takers, share)))
    stream = StepPart(activation_bytes=2 * num_tokens * spec.hidden_size * size)
    return [*found, *((KINDS[type(parts[0])], stream) for parts in layers)]


def _product(weight: torch.Tensor, takers: float, share: float) -> StepPart:
    """Of `share` of a weight, each of whose matrices `takers` tokens are multiplied with."""
    read = StepPart(weight_bytes=share * weight.nbytes)
    if weight.dim() < 2:
        return read
    *count, out, into = weight.shape
    lanes = takers * (out + into) * (count[0] if count else 1)
    return read + StepPart(
        activation_bytes=lanes * weight.dtype.itemsize, flops=2.0 * takers * weight.numel()
    )


def _keys(layer: AttentionLayer, dtype: torch.dtype, batch: int, context: int, tokens: int) -> StepPart:
    """Keys and values of every row read once, and those of its tokens written."""
    seen = context if layer.sliding_window is None else min(context, layer.sliding_window)
    each = 2 * layer.num_kv_heads * layer.head_dim * dtype.itemsize
    flops = 4.0 * batch * tokens * (seen + tokens) * layer.num_heads * layer.head_dim
    return StepPart(kv_bytes=batch * (seen + tokens) * each, flops=flops)


def _states(state: Recurrence, caches: CacheCosts, batch: int, tokens: int) -> StepPart:
    """States and windows as `bateleur.mamba.memory_traffic` counts them; under FOLD on average from fold to fold."""
    assert caches.layout is not None, "a model with recurrent layers has a layout"
    if state.policy is StatePolicy.FOLD:
        moved = memory_traffic.fold_step_bytes(
            state, tokens, memory_traffic.FoldCycle.of(caches.layout, tokens)
        )
    else:
        moved = float(memory_traffic.slots_step_bytes(state, tokens))
    entries = math.prod(state.state_shape)
    flops = _STATE_FLOPS.get(type(state), 0) * entries + 2.0 * state.conv_width * state.conv_dim
    return StepPart(state_bytes=batch * moved, flops=batch * tokens * flops)


def caches_of(spec: ModelSpec, dtype: torch.dtype, longest: int, device: str, drafts: int = 0) -> CacheCosts:
    """As an engine on a device of this kind would keep them with so many drafts and no other options."""
    config = EngineConfig.of()
    states = StateOptions.of(config.cache, spec, drafts, torch.device(device))
    options = CacheOptions(block_size=config.cache.block_size, share_prefixes=False, states=states)
    return CacheCosts.of(spec, dtype, longest, options)
