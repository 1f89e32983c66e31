"""CUDA graphs. Today: modes, keys, and the plan that decides what a batch runs on and says why."""

from bateleur.cudagraph.counters import DecisionCounter
from bateleur.cudagraph.coverage import Coverage, Span
from bateleur.cudagraph.descriptor import BatchExecutionDescriptor, Variant
from bateleur.cudagraph.modes import CudaGraphMode
from bateleur.cudagraph.plan import Ask, CapturePlan, Decision, Why

__all__ = [
    "Ask",
    "BatchExecutionDescriptor",
    "CapturePlan",
    "Coverage",
    "CudaGraphMode",
    "Decision",
    "DecisionCounter",
    "Span",
    "Variant",
    "Why",
]
