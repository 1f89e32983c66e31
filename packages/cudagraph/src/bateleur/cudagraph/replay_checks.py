"""Checks before a replay that the graph reads the batch that was staged for it."""

from enum import IntEnum

from torch import Tensor

from bateleur.cudagraph._trees import named_tensors
from bateleur.cudagraph.captured_state import CapturedState
from bateleur.cudagraph.errors import AddressMoved, SignatureMismatch
from bateleur.cudagraph.execution import S
from bateleur.cudagraph.modes import CudaGraphMode
from bateleur.cudagraph.staging import StagedBatch, check_current


class ReplayChecks(IntEnum):
    """Level of the checks before each replay: none, host values of the batch, addresses, and tensors of the batch.
    Each level includes the levels below.
    """

    OFF = 0
    """No checks. Use it to measure what the checks cost."""
    CHEAP = 1
    """Host only: the batch was staged for this key, it is the latest batch, and its host scalars fit."""
    ADDRESSES = 2
    """Every declared buffer has the same address as at capture, and no external memory was freed."""
    PARANOID = 3
    """The tensors of the batch are the captured ones. Also poisons buffers before staging, and the outputs of all
    graphs before a replay."""


def check_staged(captured: CapturedState[S], staged: StagedBatch[S]) -> None:
    """Raise `KeyMismatch`, `StaleState` or `SignatureMismatch` if `staged` does not fit the captured graph."""
    check_current(captured.producer, captured.key, staged)
    difference = _signature_difference(captured.staged, staged)
    if difference is not None:
        raise SignatureMismatch(f"{captured.key}: {difference}")


def check_tensors(captured: CapturedState[S], staged: StagedBatch[S]) -> None:
    """Raise `AddressMoved` unless the tensors of `staged` are the captured ones.

    This finds a tensor that was allocated in this step, and a batch that another producer staged. It compares tensors
    in memory that the graph is known to use. For a FULL key it also compares all device tensors, because a kernel may
    read one without an operator. For a PIECEWISE key it compares storages only, because eager parts may use other views
    of the same storage in every step, or none.
    """
    full = captured.key.mode is CudaGraphMode.FULL
    identity = _view_of if full else _storage_of
    used = {external.address for external in captured.externals}
    now = dict(named_tensors(staged.state, "state"))
    storages = set() if full else {_storage_of(tensor) for tensor in now.values()}
    for path, tensor in named_tensors(captured.staged.state, "state"):
        on_device = full and tensor.device.type != "cpu"
        if tensor.numel() and (on_device or _storage_of(tensor) in used):
            found = now.get(path)
            same = identity(tensor) in storages if found is None else identity(found) == identity(tensor)
            if not same:
                raise AddressMoved(
                    f"{captured.key}: {path} was captured as {_text(tensor)}, and in this batch is {_text(found)}; "
                    "stage batches as views of the same buffers"
                )


def check_warmup(warmup: StagedBatch[S], captured: StagedBatch[S]) -> None:
    """Raise `SignatureMismatch` unless warm-up and capture have the same host scalars and launch the same kernels."""
    difference = _signature_difference(captured, warmup) or _signature_difference(warmup, captured)
    if difference is not None:
        raise SignatureMismatch(
            f"{captured.key}: warm-up and capture were staged with different host scalars, so the capture might "
            f"launch kernels that are not loaded: {difference}"
        )


def _signature_difference(captured: StagedBatch[S], staged: StagedBatch[S]) -> str | None:
    """Return why a graph with the host scalars of `captured` cannot run `staged`. None if it can."""
    fixed, runtime = captured.signature, staged.signature
    if fixed is runtime:
        return None
    if fixed is None or runtime is None:
        unsigned = "captured without" if fixed is None else "staged without"
        return f"was {unsigned} a signature, so its host scalars can't be compared"
    return fixed.admits(runtime)


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _view_of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _text(tensor: Tensor | None) -> str:
    if tensor is None:
        return "missing"
    return f"{tuple(tensor.shape)} with strides {tensor.stride()} at {tensor.data_ptr():#x}"
