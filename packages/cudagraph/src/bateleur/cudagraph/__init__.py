"""CUDA graphs for inference engines: dispatch of batches to graphs, capture, checked replay, and verification."""

from bateleur.cudagraph._memory import ExternalMemory
from bateleur.cudagraph.backends import get_backend
from bateleur.cudagraph.backends.base import CapturedBody, EagerBackend, GraphBackend
from bateleur.cudagraph.backends.recorded import RecordedBackend
from bateleur.cudagraph.batch_descriptor import BatchExecutionDescriptor, UnpaddedBatch, Variant
from bateleur.cudagraph.capture_report import CaptureCost, CaptureReport, KeyEvent
from bateleur.cudagraph.captured_state import CapturedState, CapturedStateProducer, CapturedStates
from bateleur.cudagraph.data_parallel import (
    DispatchCoordinator,
    JointDispatch,
    LocalCoordinator,
    RankStep,
    TorchDistCoordinator,
    dispatch_jointly,
)
from bateleur.cudagraph.dispatcher import (
    Coverage,
    CudagraphDispatcher,
    DispatchCounter,
    DispatchDecision,
    DispatchReason,
    SizeRange,
)
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
from bateleur.cudagraph.replay_checks import ReplayChecks
from bateleur.cudagraph.staging import Fuzzable, Phase, Poisonable, Producer, SignatureLike, StagedBatch
from bateleur.cudagraph.verify import ReplayComparison, VerifyReport, rounding_tolerance

__all__ = [
    "AddressMoved", "BatchExecutionDescriptor", "Body", "CaptureCost", "CaptureError", "CaptureReport", "CapturedBody",
    "CapturedState", "CapturedStateProducer", "CapturedStates", "Coverage", "CudaGraphManager", "CudaGraphMode",
    "CudagraphDispatcher", "DanglingExternal", "DispatchCoordinator", "DispatchCounter", "DispatchDecision",
    "DispatchReason", "EagerBackend", "Execution", "ExternalMemory", "Fuzzable", "GraphBackend", "GraphError",
    "HostSync", "JointDispatch", "KeyEvent", "KeyMismatch", "LocalCoordinator", "NotCaptured", "Phase", "Poisonable",
    "Producer", "RankStep", "RecordedBackend", "ReplayChecks", "ReplayComparison", "ReplayFailed", "SharedState",
    "SignatureLike", "SignatureMismatch", "SizeRange", "StagedBatch", "StaleState", "TorchDistCoordinator",
    "UnpaddedBatch", "Variant", "VerifyReport", "dispatch_jointly", "get_backend", "rounding_tolerance",
]  # fmt: skip
