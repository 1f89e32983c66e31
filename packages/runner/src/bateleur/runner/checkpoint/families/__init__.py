"""The supported model families, in one module per kind of layer."""

from bateleur.runner.checkpoint.families import delta, llama, mamba
from bateleur.runner.checkpoint.families.base import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (*delta.FAMILIES, *llama.FAMILIES, *mamba.FAMILIES)
}
"""Families by `model_type` of config.json."""

__all__ = ["FAMILIES", "Family"]
