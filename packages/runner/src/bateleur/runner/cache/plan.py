"""Plans the sizes of all caches within a memory budget.

Mamba states come in pages, each with the states of all layers after some tokens. A running request holds a few pages;
with prefix caching, more are kept for requests with the same prefix. A page costs as much as keys and values of
thousands of tokens, so memory is assigned in this order:

1. states, ring buffers of recent inputs, and draft memory of all running requests;
2. keys and values of the longest request, or as many of its tokens as fit without prefix caching. If prefix caching
leaves too little memory for them, fewer requests run at once; if not even one fits, prefix caching is off. So a
request that fits without prefix caching also fits with it. Only if `max_model_len` has to be lowered in any case, keys
and values of the longest request get just half of the memory. If the user did not choose the number of requests, it is
first halved until point 1 leaves enough for the longest request. Half is enough unless the user chose `max_model_len`;
3. keys and values of a working set, WORKING_TOKENS for each other running request, unless pages are cheap (smaller
than the keys and values of the tokens from one state to the next);
4. the rest: equal bytes for keys and values and for cached pages; if pages are cheap, a page for each stretch of
cached keys and values from one state to the next.
"""

import warnings
from dataclasses import dataclass, replace
from typing import Self

import torch

from bateleur.mamba import CacheLayout, MambaCacheMode
from bateleur.runner.cache.costs import CacheCosts, CacheOptions
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.models.spec import ModelSpec

WORKING_TOKENS = 2048
"""Tokens per request in the working set: further tokens are worth less than one more cached state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """Sizes of the KV cache and of the Mamba cache.
    max_num_seqs: maximum running requests, as requested or as memory allows. num_blocks: KV blocks, including the null
    block; 0 for a model without attention. max_blocks: KV blocks of the longest request. num_state_slots: Mamba state
    slots, including the null slot; 0 for a model without Mamba layers. max_model_len: tokens of the longest request, as
    requested or as the KV blocks hold.
    """

    costs: CacheCosts
    max_num_seqs: int
    num_blocks: int
    max_blocks: int
    num_state_slots: int
    max_model_len: int

    @property
    def block_size(self) -> int:
        """Tokens in a KV block."""
        return self.costs.options.block_size

    @property
    def share_prefixes(self) -> bool:
        """Whether prefix caching is on."""
        return self.costs.options.share_prefixes

    @property
    def layout(self) -> CacheLayout | None:
        """Layout of the Mamba cache: block-table columns and state slots of a request. None without Mamba layers."""
        return self.costs.layout

    def common(self, ranks: Ranks) -> Self:
        """Return the plan with the smallest sizes over all ranks. Each rank passes its own plan."""
        sizes = [self.max_num_seqs, self.num_blocks, self.num_state_slots, self.max_blocks, self.max_model_len]
        rows, blocks, slots, longest, tokens = map(min, zip(*ranks.gather_ints(sizes), strict=True))
        return replace(
            self, max_num_seqs=rows, num_blocks=blocks, num_state_slots=slots, max_blocks=longest, max_model_len=tokens
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the KV blocks hold, without the null block. 0 for a model without attention."""
        return max(self.num_blocks - 1, 0) * self.block_size

    @property
    def num_missing_blocks(self) -> int:
        """Number of KV blocks that are missing for the longest request; 0 if it fits."""
        return max(1 + self.max_blocks - self.num_blocks, 0) if self.max_blocks else 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values, including those of a draft head."""
        return self.num_blocks * self.costs.block_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of state pages, ring buffers and conv windows, including those for padding."""
        return self.num_state_slots * self.costs.page_bytes + (1 + self.max_num_seqs) * self.costs.row_bytes

    @property
    def draft_bytes(self) -> int:
        """Bytes of the logits of unverified drafts (and one entry for padding), and of token ids for prompt lookup."""
        draft = self.costs.options.draft
        each = self.costs.logits_bytes_per_request + draft.row_bytes
        return draft.logits_bytes + self.max_num_seqs * each

    @property
    def total_bytes(self) -> int:
        """Bytes of all caches."""
        return self.kv_bytes + self.state_bytes + self.draft_bytes


def plan_caches(
    spec: ModelSpec,
    dtype: torch.dtype,
    limits: EngineLimits,
    options: CacheOptions,
    budget_bytes: int,
    *,
    rows_chosen: bool = True,
    length_chosen: bool | None = None,
) -> CachePlan:
    """Fit all caches into `budget_bytes`, in the order described at the top of this file.

    If prefix caching is on, or `rows_chosen` is False, the plan may allow fewer requests than `limits.max_num_seqs`. It
    may also turn prefix caching off. A RuntimeWarning says so.

    rows_chosen: whether the user chose `limits.max_num_seqs`.
    length_chosen: whether the user chose `limits.max_model_len`. It decides what happens if the KV blocks hold fewer
    tokens of one request. True: raise a ValueError with the length that fits. False: lower the plan's `max_model_len`
    to the length that fits, with a RuntimeWarning; with prefix caching, that request's keys and values may then get
    only half of the memory. None: return the plan as it is.

    Raises ValueError with needed and available bytes if two KV blocks and the states of `max_num_seqs` requests do not
    fit without prefix caching. If `rows_chosen` is False, the states of one request are enough. Also raises as
    `CacheCosts.of`.
    """
    costs = alone = CacheCosts.of(spec, dtype, limits.max_model_len, options)
    if costs.retention is not None:
        states = replace(options.states, mode=MambaCacheMode.NONE, block_size=None, retention=None)
        without = replace(options, share_prefixes=False, states=states)
        alone = CacheCosts.of(spec, dtype, limits.max_model_len, without)

    def planned(budget: int) -> CachePlan:
        rows = limits.max_num_seqs
        if not rows_chosen:
            rows = _rows_beside_keys(alone, limits, budget, bool(length_chosen))
        needed = alone.fixed_bytes(rows) + 2 * alone.block_bytes
        if needed > budget:
            raise ValueError(
                f"kv_cache_memory_bytes is {budget}; the state of max_num_seqs = {rows} requests and two KV blocks "
                f"take {needed} bytes"
            )
        plan = _fill(alone, replace(limits, max_num_seqs=rows), budget, pages=0)
        if costs.retention is not None:
            shared = replace(limits, max_num_seqs=rows)
            plan = _plan_shared(costs, shared, budget, plan, length_chosen is False) or plan
        return plan

    plan = larger = planned(budget_bytes)
    if length_chosen is not None and plan.num_missing_blocks:
        needed = budget_bytes
        while larger.num_missing_blocks:
            needed += larger.num_missing_blocks * costs.block_bytes
            larger = planned(needed)
        held = f"the KV cache holds {plan.num_tokens} tokens of one request in {budget_bytes} bytes"
        numbers = f"{held}, and {limits.max_model_len} tokens need {needed} bytes"
        plan = _shortened(plan, limits, numbers, chosen=length_chosen)
    for lost in _losses(plan, limits.max_num_seqs, costs.retention is not None, rows_chosen):
        warnings.warn(f"kv_cache_memory_bytes is {budget_bytes}; {lost}", RuntimeWarning, stacklevel=3)
    return plan


def _shortened(plan: CachePlan, limits: EngineLimits, numbers: str, *, chosen: bool) -> CachePlan:
    """Return the plan with `max_model_len` lowered to what its KV blocks hold, and warn. Raises ValueError instead if
    the user has `chosen` the length, or the blocks are too few for a step. numbers: tokens and bytes, for both texts.
    """
    fits, wanted, least = plan.num_tokens, limits.max_model_len, limits.max_query_len + 1
    if chosen or fits < least:
        fix = f"set max_model_len to at most {fits}, or " if fits >= least else ""
        raise ValueError(
            f"max_model_len={wanted}: {numbers}; {fix}raise kv_cache_memory_bytes or gpu_memory_utilization, or lower "
            f"max_num_seqs={plan.max_num_seqs}"
        )
    warnings.warn(
        f"max_model_len is lowered from {wanted} to {fits}: {numbers}. To change this, raise kv_cache_memory_bytes or "
        f"gpu_memory_utilization, or lower max_num_seqs={plan.max_num_seqs}",
        RuntimeWarning,
        stacklevel=4,
    )
    return replace(plan, max_model_len=fits, max_blocks=plan.num_blocks - 1)


def _losses(plan: CachePlan, num_reqs: int, share: bool, rows_chosen: bool) -> list[str]:
    """Return texts that say what the plan lacks: some of the `num_reqs` requests, and prefix caching if `share`.
    rows_chosen: whether the user chose `num_reqs`.
    """
    lost, rows = [], plan.max_num_seqs
    holds = "with prefix caching, and with the keys and values of the longest request, it holds"
    if share and plan.costs.retention is None:
        lost.append(f"{holds} no cached state: prefix caching is off")
    if rows < num_reqs and rows_chosen:
        lost.append(f"{holds} the states of {rows} of max_num_seqs = {num_reqs} requests at once")
    elif rows < num_reqs:
        lost.append(
            f"with keys and values it holds the states of {rows} of {num_reqs} requests at once, so max_num_seqs is "
            f"{rows}; a value that you give is used or refused"
        )
    return lost


def _rows_beside_keys(costs: CacheCosts, limits: EngineLimits, budget_bytes: int, length_chosen: bool) -> int:
    """Return `max_num_seqs`, halved until the states fit in addition to the keys and values of the longest
    request, which take at most half of the budget unless `length_chosen`.
    """
    longest = (1 + -(-limits.max_model_len // costs.options.block_size)) * costs.block_bytes
    keys = longest if length_chosen else min(longest, budget_bytes // 2)  # `max_model_len` may be lowered
    room, rows = budget_bytes - keys, limits.max_num_seqs
    while rows > 1 and costs.fixed_bytes(rows) > room:
        rows //= 2
    return rows


def _plan_shared(
    costs: CacheCosts, limits: EngineLimits, budget_bytes: int, plain: CachePlan, shortens: bool
) -> CachePlan | None:
    """Plan with prefix caching. Return None if not even one request fits with cached states. plain: plan without prefix
    caching, whose longest request must still fit. shortens: whether `max_model_len` may be lowered. If so, and if
    `plain` does not hold the longest request, keys and values of that request get half of the memory.
    """
    longest = min(plain.num_blocks, 1 + plain.max_blocks)
    if shortens and plain.num_missing_blocks:
        keys = min(budget_bytes // 2, budget_bytes - costs.fixed_bytes(1))
        longest = min(longest, max(keys // costs.block_bytes, 2))
    room = budget_bytes - longest * costs.block_bytes - costs.fixed_bytes(0)
    rows = min(limits.max_num_seqs, room // (costs.fixed_bytes(1) - costs.fixed_bytes(0)))
    if rows < 1:
        return None
    working = longest + (rows - 1) * min(plain.max_blocks, -(-WORKING_TOKENS // plain.block_size))
    assert costs.layout is not None
    between = costs.layout.block_size * costs.token_bytes
    if costs.page_bytes < between:  # a working set is only useful with its pages
        working = longest
    spare = budget_bytes - costs.fixed_bytes(rows) - working * costs.block_bytes
    kv_bytes = max(costs.page_bytes, between)
    pages = max(spare, 0) // (costs.page_bytes + kv_bytes)
    return _fill(costs, replace(limits, max_num_seqs=rows), budget_bytes, pages)


def _fill(costs: CacheCosts, limits: EngineLimits, budget_bytes: int, pages: int) -> CachePlan:
    """Plan about `pages` cached state pages, and KV blocks in the remaining memory; of both, no more than
    `limits.max_num_seqs` requests can use.
    """
    rows = limits.max_num_seqs
    spare = budget_bytes - costs.fixed_bytes(rows)
    useful = rows * costs.pages_to_share
    pages, num_blocks, max_blocks = min(pages, useful), 0, 0
    if costs.block_bytes:
        max_blocks = -(-limits.max_model_len // costs.options.block_size)
        num_blocks = min((spare - pages * costs.page_bytes) // costs.block_bytes, 1 + rows * max_blocks)
    if useful:  # pages get what keys and values cannot use
        pages = min((spare - num_blocks * costs.block_bytes) // costs.page_bytes, useful)
    return CachePlan(
        costs=costs,
        max_num_seqs=rows,
        num_blocks=num_blocks,
        max_blocks=max_blocks,
        num_state_slots=1 + rows * costs.pages_per_request + pages if costs.layout is not None else 0,
        max_model_len=limits.max_model_len,
    )
