"""Bytes of keys, values and states, for cache plans, cache tensors and `bateleur info`. Estimates the memory of steps.

On a GPU the engine measures the memory of steps and graphs when it starts (`engine/memory_profile.py`). The estimate
limits the number of requests in that measurement, and `bateleur info` shows it.
"""

from dataclasses import dataclass
from typing import Self

import torch

from bateleur.mamba import CacheLayout, MambaCacheMode, PrefixRetention
from bateleur.runner.config.engine_config import EngineConfig
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.config.resolve import choose_kv_cache_dtype
from bateleur.runner.config.state_options import StateOptions
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.spec import ExpertsLayer, ModelSpec

LIBRARIES = 128 << 20
"""Bytes that libraries and kernels keep for themselves."""
_STREAM = 4
"""Copies of a token's hidden state: the residual stream in float32, its norm, the output of a branch."""
_WIDE = 3
"""Copies of the widest inner state: the output of a projection, its activation, and the next projection's input."""
_LOGITS = 3
"""Copies of logits in float32: raw, processed, and one for logprobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCosts:
    """Bytes that a drafter needs in addition to the target model's caches.
    token_bytes: keys and values of one token, stored in the target's KV blocks. logits_bytes: logits of one draft,
    stored until it is verified; 0 if the acceptance rule does not need them. row_bytes: bytes per running request,
    whatever its length: its token ids, for prompt lookup.
    """

    token_bytes: int = 0
    logits_bytes: int = 0
    row_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Options of KV and state caches: those of the user, with defaults filled in.
    share_prefixes: whether prefix caching is on. kv_dtype: dtype of keys and values; None for the dtype of the model.
    """

    block_size: int
    share_prefixes: bool
    states: StateOptions
    draft: DraftCosts = DraftCosts()
    kv_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, config: EngineConfig, spec: ModelSpec, device: torch.device) -> Self:
        """Fill in the defaults of the user's options. Raises as `StateOptions.of` and `choose_kv_cache_dtype`."""
        return cls(
            block_size=config.cache.block_size,
            share_prefixes=config.cache.enable_prefix_caching,
            states=StateOptions.of(config.cache, config.speculative.num_drafts, device),
            kv_dtype=choose_kv_cache_dtype(str(config.cache.kv_cache_dtype), spec),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCosts:
    """Bytes of keys, values and states over all layers of a model, for given cache options.
    token_bytes: keys and values of one token, including a draft head's. page_bytes: a state page, which has the state
    and the convolution window of every recurrent layer after the same token. state_bytes: a page without its windows.
    ring_bytes, window_bytes: ring buffers of recent inputs, and current convolution windows, of a running request; 0
    unless the state policy is FOLD (one saved state and a ring of later inputs per request). layout: layout of a
    request's states; None without recurrent layers. retention: states that stay in the prefix cache; None without
    prefix caching.
    """

    options: CacheOptions
    kv_dtype: torch.dtype
    token_bytes: int
    page_bytes: int
    state_bytes: int
    ring_bytes: int
    window_bytes: int
    layout: CacheLayout | None
    retention: PrefixRetention | None

    @classmethod
    def of(cls, spec: ModelSpec, dtype: torch.dtype, max_model_len: int, options: CacheOptions) -> Self:
        """Compute the bytes for a model. Raises ValueError if it has recurrent layers, and their block size does not
        fit, or prefix caching is on in cache mode NONE or off in another mode.
        """
        states, share = options.states, options.share_prefixes
        heads = sum(each.num_kv_heads * each.head_dim for each in spec.attention)
        kv_dtype = options.kv_dtype or dtype
        token_bytes = 2 * heads * kv_dtype.itemsize
        layers = states.specs(spec, dtype)
        page_bytes, ring_bytes = sum(each.page_bytes for each in layers), 0
        layout, retention = None, None
        if layers:
            if share == (states.mode is MambaCacheMode.NONE):
                raise ValueError(
                    f"mamba_cache_mode is {states.mode.value!r} and enable_prefix_caching {share}; prefix "
                    "caching needs the mode 'align' or 'all', and only these"
                )
            layout = states.layout(options.block_size if token_bytes else 1, max_model_len)
            ring_bytes = sum(each.ring_bytes(layout.ring_capacity) for each in layers)
            retention = states.retained(layout, page_bytes, token_bytes) if share else None
        return cls(
            options=options,
            kv_dtype=kv_dtype,
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
        """Bytes of a KV block in all layers; 0 for a model without attention."""
        return self.options.block_size * self.token_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of the rings and conv windows of a running request, in addition to its state pages."""
        return self.ring_bytes + self.window_bytes

    @property
    def pages_per_request(self) -> int:
        """Maximum number of state pages of a running request, without those in the prefix cache."""
        return 0 if self.layout is None else self.layout.slots_per_request()

    @property
    def state_bytes_per_request(self) -> int:
        """Bytes of the state pages, rings and conv windows that a running request holds for itself."""
        return self.pages_per_request * self.page_bytes + self.row_bytes

    @property
    def logits_bytes_per_request(self) -> int:
        """Bytes of the logits of a request's unverified drafts."""
        return self.options.states.num_speculative_tokens * self.options.draft.logits_bytes

    @property
    def pages_to_share(self) -> int:
        """Number of state pages that the longest request leaves in the prefix cache."""
        if self.retention is None or self.layout is None:
            return 0
        longest = self.layout.max_model_len
        return len(self.retention.columns_to_cache(0, longest, longest))

    def fixed_bytes(self, num_rows: int) -> int:
        """Return the bytes of states and drafts for `num_rows` requests and a padding row, without prefix cache."""
        null = self.page_bytes + self.row_bytes + self.options.draft.logits_bytes
        own = self.logits_bytes_per_request + self.options.draft.row_bytes
        return null + num_rows * (self.state_bytes_per_request + own)


def workspace_bytes(model: HybridDecoder, limits: EngineLimits, block_size: int, graph_tokens: int) -> int:
    """Return an approximate upper bound of the bytes of steps and graphs: activations of the largest step, logits,
    penalties, block tables, libraries and `graph_bytes`. graph_tokens: tokens of the largest graph; 0 without graphs.
    """
    spec = model.spec
    rows, vocab_size = limits.max_num_seqs, spec.vocab_size
    penalties = rows * vocab_size * (4 + 1)  # counts and the prompt's mask, if a request has penalties
    # Two KV cache groups, for the batch and for all rows.
    tables = 2 * 2 * rows * -(-limits.max_model_len // block_size) * 4
    steps = limits.max_num_batched_tokens * _token_bytes(model) + _logits_bytes(model, limits)
    return LIBRARIES + steps + penalties + tables + graph_bytes(model, limits, graph_tokens)


def graph_bytes(model: HybridDecoder, limits: EngineLimits, graph_tokens: int) -> int:
    """Return the approximate bytes that all graphs share: activations of `graph_tokens` tokens, and logits.
    The driver's memory for each graph is not included.
    """
    return graph_tokens * _token_bytes(model) + (_logits_bytes(model, limits) if graph_tokens else 0)


def _logits_bytes(model: HybridDecoder, limits: EngineLimits) -> int:
    each = model.spec.vocab_size * (_LOGITS * 4 + model.dtype.itemsize)
    return limits.max_num_seqs * limits.max_query_len * each


def _token_bytes(model: HybridDecoder) -> int:
    spec, size = model.spec, model.dtype.itemsize
    top_k = max((each.top_k for each in spec.mixers if isinstance(each, ExpertsLayer)), default=1)
    if model.exchange is not None:  # experts here take the tokens of all ranks
        top_k *= model.exchange.ranks.size
    widest = max(
        weight.shape[-2] * (top_k if weight.ndim == 3 else 1)
        for name, weight in model.weights().items()
        if name.startswith("layers.") and weight.ndim > 1
    )
    return _STREAM * 4 * spec.hidden_size + _WIDE * size * max(widest, top_k * spec.hidden_size)
