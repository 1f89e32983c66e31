"""Draft heads: EAGLE-1, EAGLE-3 with the options of 3.1; and loaders for the published checkpoint layouts."""

from bateleur.eagle.heads.layers import DenseAttend
from bateleur.eagle.heads.load import LoadReport, load_head
from bateleur.eagle.heads.spec import Attend, Head, HeadSpec, Rope, TargetInfo

__all__ = ["Attend", "DenseAttend", "Head", "HeadSpec", "LoadReport", "Rope", "TargetInfo", "load_head"]
