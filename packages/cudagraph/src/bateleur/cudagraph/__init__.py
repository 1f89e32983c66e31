"""CUDA graphs: which one a batch runs on and why, captures that return what they baked, replays against proof."""

from bateleur.cudagraph._memory import External
from bateleur.cudagraph.backends import get_backend
from bateleur.cudagraph.backends.base import GraphBackend, Recording
from bateleur.cudagraph.backends.eager import EagerBackend
from bateleur.cudagraph.backends.recorded import RecordedBackend
from bateleur.cudagraph.consensus import Agreement, Bid, Consensus, LocalConsensus, TorchDistConsensus, fold
from bateleur.cudagraph.decision import Ask, Decision, DecisionCounter, Why
from bateleur.cudagraph.descriptor import BatchExecutionDescriptor, Variant
from bateleur.cudagraph.errors import (
    AddressMoved,
    CaptureError,
    DanglingExternal,
    GraphError,
    HostSync,
    KeyMismatch,
    NotCaptured,
    ReplayFailed,
    SharedState,
    SignatureMismatch,
    StaleState,
)
from bateleur.cudagraph.execution import Body, Execution
from bateleur.cudagraph.manager import CudaGraphManager
from bateleur.cudagraph.modes import CudaGraphMode
from bateleur.cudagraph.plan import CapturePlan, Coverage, Span
from bateleur.cudagraph.report import CaptureReport, KeyNote, KeyReport
from bateleur.cudagraph.staged import Fuzzable, Phase, Poisonable, Producer, SignatureLike, Staged
from bateleur.cudagraph.states import Borrowed, CapturedState, CapturedStates, Checks
from bateleur.cudagraph.verify import Comparison, VerifyReport

__all__ = [
    "AddressMoved",
    "Agreement",
    "Ask",
    "BatchExecutionDescriptor",
    "Bid",
    "Body",
    "Borrowed",
    "CaptureError",
    "CapturePlan",
    "CaptureReport",
    "CapturedState",
    "CapturedStates",
    "Checks",
    "Comparison",
    "Consensus",
    "Coverage",
    "CudaGraphManager",
    "CudaGraphMode",
    "DanglingExternal",
    "Decision",
    "DecisionCounter",
    "EagerBackend",
    "Execution",
    "External",
    "Fuzzable",
    "GraphBackend",
    "GraphError",
    "HostSync",
    "KeyMismatch",
    "KeyNote",
    "KeyReport",
    "LocalConsensus",
    "NotCaptured",
    "Phase",
    "Poisonable",
    "Producer",
    "RecordedBackend",
    "Recording",
    "ReplayFailed",
    "SharedState",
    "SignatureLike",
    "SignatureMismatch",
    "Span",
    "Staged",
    "StaleState",
    "TorchDistConsensus",
    "Variant",
    "VerifyReport",
    "Why",
    "fold",
    "get_backend",
]
