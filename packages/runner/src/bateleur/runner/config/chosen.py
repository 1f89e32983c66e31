"""What a user chose of what decides in which dtype a model is computed."""

from __future__ import annotations

from bateleur.runner.config.engine_config import EngineConfig
from bateleur.runner.device import DTYPES
from bateleur.runner.models.exact import Chosen


def chosen_of(config: EngineConfig) -> Chosen:
    """The options of an engine that name kernels, or keep some from being used."""
    return Chosen(
        attention_backend=config.model.attention_backend,
        ssm_dtype=DTYPES.get(str(config.cache.mamba_ssm_cache_dtype)),
        num_speculative_tokens=config.speculative.num_drafts,
        ranks=config.parallel.tensor_parallel_size,
    )
