"""Estimates the memory that steps and graphs need in addition to weights and caches, before anything runs.

On a GPU the engine measures that memory when it starts (`engine/memory_profile.py`). The estimate gives the number of
requests for the measurement, and `bateleur info` shows it.
"""

from __future__ import annotations

from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.spec import ExpertsLayer

LIBRARIES = 128 << 20
"""Bytes that libraries and kernels keep for themselves."""
_STREAM = 4
"""Copies of a token's hidden state: the residual stream in float32, its norm, the output of a branch."""
_WIDE = 3
"""Copies of the widest inner state: the output of a projection, its activation, and the next projection's input."""
_LOGITS = 3
"""Copies of logits in float32: raw, processed, and one for logprobs."""


def workspace_bytes(model: HybridDecoder, limits: EngineLimits, block_size: int, graph_tokens: int) -> int:
    """Return an approximate upper bound of the memory in bytes.

    It includes activations of the largest step, logits, penalties, block tables and `graph_bytes`.

    graph_tokens: number of tokens of the largest graph; 0 without graphs.
    """
    spec = model.spec
    rows, vocab_size = limits.max_num_seqs, spec.vocab_size
    penalties = rows * vocab_size * (4 + 1)  # counts and the prompt's mask, if a request has penalties
    tables = (
        2 * 2 * rows * -(-limits.max_model_len // block_size) * 4
    )  # two KV cache groups, for the batch and for all rows
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
    """Return the approximate bytes of the activations of one token."""
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
