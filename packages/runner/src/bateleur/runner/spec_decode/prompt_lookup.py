"""Creates the prompt-lookup drafter (`bateleur.eagle.NGramDrafter`) for the limits of an engine."""

from __future__ import annotations

import torch

from bateleur.eagle import NGramDrafter
from bateleur.runner.cache.costs import DraftCosts
from bateleur.runner.config.engine_config import SpeculativeConfig
from bateleur.runner.config.limits import EngineLimits


def lookup_costs(max_model_len: int) -> DraftCosts:
    """Return the memory of prompt lookup per running request: the token ids of the request."""
    return DraftCosts(row_bytes=NGramDrafter.token_bytes(max_model_len))


def prompt_lookup(config: SpeculativeConfig, limits: EngineLimits, device: torch.device) -> NGramDrafter:
    """Create the prompt-lookup drafter of the configuration, for requests within `limits`.

    Raises ValueError as `NGramDrafter` does.
    """
    least, most = config.prompt_lookup
    return NGramDrafter(
        limits.num_speculative_tokens,
        limits.max_num_seqs,
        limits.max_model_len,
        device,
        prompt_lookup_min=least,
        prompt_lookup_max=most,
    )
