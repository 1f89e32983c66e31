"""A check that anybody's drafter can be put to: it raises with everything that is wrong, or reports."""

from bateleur.eagle.conformance.check import DrafterReport, check_drafter
from bateleur.eagle.conformance.toy_engine import ToyEngine
from bateleur.eagle.conformance.toy_target import ToyTarget
from bateleur.metadata.conformance import ConformanceError, Violation

__all__ = ["ConformanceError", "DrafterReport", "ToyEngine", "ToyTarget", "Violation", "check_drafter"]
