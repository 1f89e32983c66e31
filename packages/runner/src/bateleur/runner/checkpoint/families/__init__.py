"""The supported model families, one file each."""

from bateleur.runner.checkpoint.families import (
    bamba,
    falcon_h1,
    granitemoehybrid,
    kimi_linear,
    lfm2,
    llama,
    mistral,
    nemotron_h,
    olmo_hybrid,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
)
from bateleur.runner.checkpoint.families.base import Family

_ALL = (
    bamba.FAMILY,
    falcon_h1.FAMILY,
    granitemoehybrid.FAMILY,
    kimi_linear.FAMILY,
    lfm2.DENSE,
    lfm2.EXPERTS,
    llama.FAMILY,
    mistral.FAMILY,
    nemotron_h.FAMILY,
    olmo_hybrid.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen3_5.DENSE,
    qwen3_5.DENSE_INSIDE,
    qwen3_5.EXPERTS,
    qwen3_5.EXPERTS_INSIDE,
    qwen3_moe.FAMILY,
    qwen3_next.FAMILY,
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ALL}
"""By `model_type` of config.json."""

__all__ = ["FAMILIES", "Family"]
