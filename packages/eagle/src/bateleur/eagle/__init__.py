"""Eagle drafting. Today: keyed noise and the draw, on which lossless verification rests."""

from bateleur.eagle.drafter import DraftContext, Drafter, TargetNeeds
from bateleur.eagle.draw import Drawn, argmax, draw
from bateleur.eagle.noise import Keys, Lanes, Role, bits, gumbel, uniform

__all__ = [
    "DraftContext",
    "Drafter",
    "Drawn",
    "Keys",
    "Lanes",
    "Role",
    "TargetNeeds",
    "argmax",
    "bits",
    "draw",
    "gumbel",
    "uniform",
]
