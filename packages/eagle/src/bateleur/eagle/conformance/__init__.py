"""Conformance check for drafters: raises an error that lists all violations, or returns a report."""

from bateleur.eagle.conformance.check import DrafterReport, check_drafter
from bateleur.eagle.conformance.toy_engine import ToyEngine, ToyTarget
from bateleur.metadata.conformance import ConformanceError, Violation

__all__ = ["ConformanceError", "DrafterReport", "ToyEngine", "ToyTarget", "Violation", "check_drafter"]
