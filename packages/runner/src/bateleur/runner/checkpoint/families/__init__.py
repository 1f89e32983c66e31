"""The supported model families, by kind of their layers."""

from bateleur.runner.checkpoint.families import delta, gpt_oss, lfm2, llama, mamba
from bateleur.runner.checkpoint.families.base import Family

_ALL = (*delta.FAMILIES, *gpt_oss.FAMILIES, *lfm2.FAMILIES, *llama.FAMILIES, *mamba.FAMILIES)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ALL}
"""Families by `model_type` of config.json."""

__all__ = ["FAMILIES", "Family"]
