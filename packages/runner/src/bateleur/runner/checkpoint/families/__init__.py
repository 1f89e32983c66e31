"""The supported model families, one file each."""

from bateleur.runner.checkpoint.families import bamba, falcon_h1, granitemoehybrid, llama, nemotron_h
from bateleur.runner.checkpoint.families.base import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (bamba.FAMILY, falcon_h1.FAMILY, granitemoehybrid.FAMILY, llama.FAMILY, nemotron_h.FAMILY)
}
"""By `model_type` of config.json."""

__all__ = ["FAMILIES", "Family"]
