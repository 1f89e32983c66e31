"""Recurrences of published models: Mamba-2, gated delta rule, Kimi delta attention, short convolution."""

from bateleur.mamba.recurrences.delta_rule import GatedDelta, KimiDelta
from bateleur.mamba.recurrences.mamba2 import Mamba2
from bateleur.mamba.recurrences.short_conv import ShortConv

__all__ = ["GatedDelta", "KimiDelta", "Mamba2", "ShortConv"]
