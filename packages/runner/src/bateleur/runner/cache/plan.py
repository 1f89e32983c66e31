"""How much of everything the caches hold, decided once from a budget: numbers alone, no tensors.

Mamba states come in pages, one state after some tokens in all layers. A running request holds a few of its own; with
prefix caching others are kept for whoever begins with the same tokens. A page costs as much as the keys and values of
thousands of tokens, so what comes first decides what an engine can serve:

1. states, rings and logits of drafts for the requests that run at once;
2. keys and values of the longest request, or as many as there would be without prefix caching: sharing never refuses
   what ran without it. If need be fewer requests run at once, and if that isn't enough nothing is shared;
3. keys and values of a working set, WORKING_TOKENS for each other request that runs;
4. keys and values, and pages to keep: as many bytes of each, or where pages are cheap, as many tokens.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch

from bateleur.mamba import CacheLayout, MambaCacheMode, Retention
from bateleur.runner.config.engine_config import EngineConfig
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.config.state_options import StateOptions
from bateleur.runner.models.spec import AttentionLayer, ModelSpec

WORKING_TOKENS = 2048
"""Tokens of a request of the working set: more of them are worth less than a state that is found again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """How keys, values and states are kept, as it follows from what a user chose."""

    block_size: int
    """Tokens in a KV block."""
    share_prefixes: bool
    """Whether requests share what they computed of equal prefixes."""
    states: StateOptions

    @classmethod
    def of(cls, config: EngineConfig, device: torch.device) -> CacheOptions:
        """What a user chose, completed. Raises ValueError as `StateOptions.of`."""
        return cls(
            block_size=config.cache.block_size,
            share_prefixes=config.cache.enable_prefix_caching,
            states=StateOptions.of(config.cache, config.speculative.num_drafts, device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCosts:
    """What a draft head keeps beside its target's caches; nothing without one."""

    token_bytes: int = 0
    """Keys and values of a token, which lie in the blocks of the target's."""
    logits_bytes: int = 0
    """Logits of a draft, kept until its test; 0 under a rule that doesn't look at them."""
    num_drafts: int = 0
    """K, drafts that wait of each request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCosts:
    """Bytes by what they grow with, for a model and the way its states are kept."""

    token_bytes: int
    """Keys and values of a token over all attention layers, those of a draft head included."""
    page_bytes: int
    """A Mamba state in all layers."""
    pages: int
    """Pages of its own that a running request holds at most."""
    row_bytes: int
    """What it holds beside them, over all layers: a ring and a live window, under FOLD."""
    logits_bytes: int
    """Logits of a draft."""
    num_drafts: int
    """Drafts of a request whose logits are kept."""
    kept: int
    """Pages that others may find of the longest request."""
    layout: CacheLayout | None
    """Where the states of a request lie; None without Mamba layers."""
    retention: Retention | None
    """Which of them others may find; None where there is no sharing."""

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        dtype: torch.dtype,
        max_model_len: int,
        options: CacheOptions,
        draft: DraftCosts | None = None,
    ) -> CacheCosts:
        """Raises ValueError for a cache mode that does not go with `share_prefixes`, and as `StateOptions.layout`."""
        states, share = options.states, options.share_prefixes
        draft = draft or DraftCosts()
        own_bytes = kv_bytes_per_token(spec, dtype)
        layers = states.specs(spec, dtype)
        page_bytes = sum(each.page_bytes for each in layers)
        layout, retention, kept, pages, row_bytes = None, None, 0, 0, 0
        if layers:
            if share == (states.mode is MambaCacheMode.NONE):
                raise ValueError(
                    f"mamba_cache_mode is {states.mode.value!r} and enable_prefix_caching {share}; prefixes are "
                    "shared in the modes 'align' and 'all', and in these alone"
                )
            layout = states.layout(options.block_size if own_bytes else 1, max_model_len)
            pages = layout.slots_per_request()
            row_bytes = sum(each.max_memory_usage_bytes(layout) for each in layers) - pages * page_bytes
            if share:
                retention = states.kept(layout, page_bytes, own_bytes)
                kept = len(retention.published(0, max_model_len, max_model_len))
        return cls(
            token_bytes=own_bytes + draft.token_bytes,
            page_bytes=page_bytes,
            pages=pages,
            row_bytes=row_bytes,
            logits_bytes=draft.logits_bytes,
            num_drafts=draft.num_drafts,
            kept=kept,
            layout=layout,
            retention=retention,
        )

    @property
    def state_bytes_per_request(self) -> int:
        """Bytes of Mamba states that a running request holds at most and shares with nobody."""
        return self.pages * self.page_bytes + self.row_bytes

    def fixed_bytes(self, num_rows: int) -> int:
        """Everything but keys, values and kept pages: of `num_rows` requests, and of a null row, page and draft."""
        null = self.page_bytes + self.row_bytes + self.logits_bytes
        each = self.state_bytes_per_request + self.num_drafts * self.logits_bytes
        return null + num_rows * each


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """The sizes of both caches."""

    block_size: int
    """Tokens in a KV block."""
    num_blocks: int
    """KV blocks, the null block included; 0 for a model without attention."""
    max_blocks: int
    """KV blocks of the longest request."""
    num_state_slots: int
    """Mamba state slots, the null slot included; 0 for a model without Mamba layers."""
    max_num_seqs: int
    """Requests that run at once: as many as were asked for, or as there is memory for."""
    share_prefixes: bool
    """Whether requests share what they computed of equal prefixes."""
    states: StateOptions
    costs: CacheCosts

    @property
    def layout(self) -> CacheLayout | None:
        """Columns and slots of a request in the Mamba cache."""
        return self.costs.layout

    @property
    def kv_bytes(self) -> int:
        """Keys and values, a draft head's included."""
        return self.num_blocks * self.block_size * self.costs.token_bytes

    @property
    def state_bytes(self) -> int:
        """Pages and rings, the null page and the null row included."""
        return self.num_state_slots * self.costs.page_bytes + (1 + self.max_num_seqs) * self.costs.row_bytes

    @property
    def logits_bytes(self) -> int:
        """Logits of drafts that wait for their test."""
        return (1 + self.max_num_seqs * self.costs.num_drafts) * self.costs.logits_bytes

    @property
    def total_bytes(self) -> int:
        """What all of it occupies."""
        return self.kv_bytes + self.state_bytes + self.logits_bytes


def kv_bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token occupies over all attention layers."""
    layers = (layer for layer in spec.layers if isinstance(layer, AttentionLayer))
    return sum(2 * layer.num_kv_heads * layer.head_dim * dtype.itemsize for layer in layers)


def plan_caches(
    spec: ModelSpec,
    dtype: torch.dtype,
    limits: EngineLimits,
    options: CacheOptions,
    budget_bytes: int,
    draft: DraftCosts | None = None,
) -> CachePlan:
    """Fit all that a `CachePlan` counts into `budget_bytes`, in the order that stands on top of this file.

    With prefix caching the plan may have fewer rows than `limits.max_num_seqs`, or share nothing: a RuntimeWarning says
    so, with the numbers.

    Raises ValueError with both numbers when the states of `max_num_seqs` requests and two KV blocks do not fit without
    sharing, and as `CacheCosts.of`.
    """
    costs = CacheCosts.of(spec, dtype, limits.max_model_len, options, draft)
    if costs.retention is None:
        return _plan_alone(costs, limits, options, budget_bytes)
    alone = replace(options.states, mode=MambaCacheMode.NONE, block_size=None, retention=None)
    without = replace(options, share_prefixes=False, states=alone)
    without_costs = CacheCosts.of(spec, dtype, limits.max_model_len, without, draft)
    plain = _plan_alone(without_costs, limits, without, budget_bytes)
    shared = _plan_shared(costs, limits, options, budget_bytes, plain)
    if shared is None:
        lost = "no state that others could find: prefix caching is off"
    elif shared.max_num_seqs < limits.max_num_seqs:
        lost = f"the states of {shared.max_num_seqs} of max_num_seqs = {limits.max_num_seqs} requests at once"
    else:
        return shared
    beside = "with prefix caching, and beside the keys and values of the longest request, it holds"
    warnings.warn(f"kv_cache_memory_bytes is {budget_bytes}; {beside} {lost}", RuntimeWarning, stacklevel=3)
    return shared or plain


def _plan_alone(
    costs: CacheCosts, limits: EngineLimits, options: CacheOptions, budget_bytes: int
) -> CachePlan:
    """States of all rows, and as many KV blocks as fit and could ever be used."""
    rows = limits.max_num_seqs
    needed = costs.fixed_bytes(rows) + 2 * options.block_size * costs.token_bytes
    if needed > budget_bytes:
        raise ValueError(
            f"kv_cache_memory_bytes is {budget_bytes}; the state of max_num_seqs = {rows} requests and two KV blocks "
            f"take {needed} bytes"
        )
    return _fill(costs, limits, options, budget_bytes - costs.fixed_bytes(rows), kept=0)


def _plan_shared(
    costs: CacheCosts, limits: EngineLimits, options: CacheOptions, budget_bytes: int, plain: CachePlan
) -> CachePlan | None:
    """Beside every request that `plain` could serve; None if not even one would run with states to share."""
    block_bytes = options.block_size * costs.token_bytes
    longest = min(plain.num_blocks, 1 + plain.max_blocks)
    room = budget_bytes - longest * block_bytes
    each = costs.fixed_bytes(1) - costs.fixed_bytes(0)
    rows = min(limits.max_num_seqs, (room - costs.fixed_bytes(0)) // each)
    if rows < 1:
        return None
    spare = budget_bytes - costs.fixed_bytes(rows)
    working = longest + (rows - 1) * min(plain.max_blocks, -(-WORKING_TOKENS // options.block_size))
    assert costs.layout is not None
    beside = max(costs.page_bytes, costs.layout.block_size * costs.token_bytes)
    kept = max(spare - working * block_bytes, 0) // (costs.page_bytes + beside)
    return _fill(costs, replace(limits, max_num_seqs=rows), options, spare, kept)


def _fill(
    costs: CacheCosts, limits: EngineLimits, options: CacheOptions, spare_bytes: int, kept: int
) -> CachePlan:
    """KV blocks beside about `kept` pages in `spare_bytes`; of neither more than could ever be used."""
    rows, block_bytes = limits.max_num_seqs, options.block_size * costs.token_bytes
    max_blocks = -(-limits.max_model_len // options.block_size) if block_bytes else 0
    most_kept = rows * costs.kept
    kept = min(kept, most_kept)
    num_blocks = 0
    if block_bytes:
        num_blocks = min((spare_bytes - kept * costs.page_bytes) // block_bytes, 1 + rows * max_blocks)
    if most_kept:  # pages get what keys and values have no use for
        kept = min((spare_bytes - num_blocks * block_bytes) // costs.page_bytes, most_kept)
    return CachePlan(
        block_size=options.block_size,
        num_blocks=num_blocks,
        max_blocks=max_blocks,
        num_state_slots=1 + rows * costs.pages + kept if costs.layout is not None else 0,
        max_num_seqs=rows,
        share_prefixes=options.share_prefixes,
        states=options.states,
        costs=costs,
    )
