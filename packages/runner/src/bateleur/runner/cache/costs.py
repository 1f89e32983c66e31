"""What keys, values and states take, by what they grow with: the one answer for plans, tensors and `bateleur info`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bateleur.mamba import CacheLayout, MambaCacheMode, PrefixRetention
from bateleur.runner.config.engine_config import EngineConfig
from bateleur.runner.config.state_options import StateOptions
from bateleur.runner.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCosts:
    """Bytes that a drafter keeps beside its target's caches."""

    token_bytes: int = 0
    """Keys and values of a token, which lie in the blocks of the target's."""
    logits_bytes: int = 0
    """Logits of a draft, kept until its test; 0 under a rule that doesn't look at them."""
    row_bytes: int = 0
    """What it keeps of a running request, however long it is: its tokens, for prompt lookup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """How keys, values and states are kept, as it follows from what a user chose."""

    block_size: int
    """Tokens in a KV block."""
    share_prefixes: bool
    """Whether requests share what they computed of equal prefixes."""
    states: StateOptions
    draft: DraftCosts = DraftCosts()

    @classmethod
    def of(cls, config: EngineConfig, spec: ModelSpec, device: torch.device) -> CacheOptions:
        """Complete what a user chose; errors as of `StateOptions.of`."""
        return cls(
            block_size=config.cache.block_size,
            share_prefixes=config.cache.enable_prefix_caching,
            states=StateOptions.of(config.cache, spec, config.speculative.num_drafts, device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCosts:
    """Bytes over all layers, for a model and the way its caches are kept."""

    options: CacheOptions
    token_bytes: int
    """Keys and values of a token, those of a draft head included."""
    page_bytes: int
    """A state of all recurrent layers, and the window of inputs in front of it."""
    state_bytes: int
    """Of a page, the state alone."""
    ring_bytes: int
    """Of a running request, under FOLD."""
    window_bytes: int
    """The live window of a running request, under FOLD."""
    layout: CacheLayout | None
    """Where the states of a request lie; None without recurrent layers."""
    retention: PrefixRetention | None
    """Which of them others may find; None where they are not shared."""

    @classmethod
    def of(cls, spec: ModelSpec, dtype: torch.dtype, max_model_len: int, options: CacheOptions) -> CacheCosts:
        """Raises ValueError for a cache mode that does not go with `share_prefixes`, and as `StateOptions.layout`."""
        states, share = options.states, options.share_prefixes
        heads = sum(each.num_kv_heads * each.head_dim for each in spec.attention)
        token_bytes = 2 * heads * dtype.itemsize
        layers = states.specs(spec, dtype)
        page_bytes, ring_bytes = sum(each.page_bytes for each in layers), 0
        layout, retention = None, None
        if layers:
            if share == (states.mode is MambaCacheMode.NONE):
                raise ValueError(
                    f"mamba_cache_mode is {states.mode.value!r} and enable_prefix_caching {share}; prefixes are "
                    "shared in the modes 'align' and 'all', and in these alone"
                )
            layout = states.layout(options.block_size if token_bytes else 1, max_model_len)
            ring_bytes = sum(each.ring_bytes(layout.ring_capacity) for each in layers)
            retention = states.retained(layout, page_bytes, token_bytes) if share else None
        return cls(
            options=options,
            token_bytes=token_bytes + options.draft.token_bytes,
            page_bytes=page_bytes,
            state_bytes=sum(each.state_bytes for each in layers),
            ring_bytes=ring_bytes,
            window_bytes=sum(each.request_conv_bytes for each in layers),
            layout=layout,
            retention=retention,
        )

    @property
    def block_bytes(self) -> int:
        """A KV block; 0 for a model without attention."""
        return self.options.block_size * self.token_bytes

    @property
    def row_bytes(self) -> int:
        """What a running request holds beside its pages."""
        return self.ring_bytes + self.window_bytes

    @property
    def pages_per_request(self) -> int:
        """Pages that a running request holds at most and shares with nobody."""
        return 0 if self.layout is None else self.layout.slots_per_request()

    @property
    def state_bytes_per_request(self) -> int:
        """Those, and what it holds beside them."""
        return self.pages_per_request * self.page_bytes + self.row_bytes

    @property
    def logits_bytes_per_request(self) -> int:
        """Logits of the drafts that wait for their test."""
        return self.options.states.num_speculative_tokens * self.options.draft.logits_bytes

    @property
    def pages_to_share(self) -> int:
        """Pages that others may find of the longest request."""
        if self.retention is None or self.layout is None:
            return 0
        longest = self.layout.max_model_len
        return len(self.retention.columns_to_publish(0, longest, longest))

    def fixed_bytes(self, num_rows: int) -> int:
        """Everything but keys, values and pages to share: of `num_rows` requests, and of a null row, page and draft."""
        null = self.page_bytes + self.row_bytes + self.options.draft.logits_bytes
        own = self.logits_bytes_per_request + self.options.draft.row_bytes
        return null + num_rows * (self.state_bytes_per_request + own)
