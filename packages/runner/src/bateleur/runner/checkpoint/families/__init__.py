"""The supported model families, one file each."""

from bateleur.runner.checkpoint.families import (
    bamba,
    falcon_h1,
    gemma3,
    gpt_oss,
    granite,
    granitemoehybrid,
    kimi_linear,
    lfm2,
    llama,
    mamba2,
    mistral,
    nemotron_h,
    olmo3,
    olmo_hybrid,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    smollm3,
)
from bateleur.runner.checkpoint.families.base import Family

_ALL = (
    bamba.FAMILY,
    falcon_h1.FAMILY,
    gemma3.INSIDE,
    gemma3.TEXT,
    gpt_oss.FAMILY,
    granite.FAMILY,
    granitemoehybrid.FAMILY,
    kimi_linear.FAMILY,
    lfm2.DENSE,
    lfm2.EXPERTS,
    llama.FAMILY,
    mamba2.FAMILY,
    mistral.FAMILY,
    nemotron_h.FAMILY,
    olmo3.FAMILY,
    olmo_hybrid.FAMILY,
    phi3.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen3_5.DENSE,
    qwen3_5.DENSE_INSIDE,
    qwen3_5.EXPERTS,
    qwen3_5.EXPERTS_INSIDE,
    qwen3_moe.FAMILY,
    qwen3_next.FAMILY,
    smollm3.FAMILY,
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ALL}
"""Families by `model_type` of config.json."""

__all__ = ["FAMILIES", "Family"]
