"""The proofs that a staged batch may replay what was captured."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from bateleur.cudagraph._trees import tensors
from bateleur.cudagraph.checks import check_current, require_book
from bateleur.cudagraph.errors import AddressMoved, SignatureMismatch
from bateleur.cudagraph.modes import CudaGraphMode
from bateleur.cudagraph.staged import SignatureLike, Staged
from bateleur.cudagraph.states import CapturedState

S = TypeVar("S")


def check_staged(captured: CapturedState[S], staged: Staged[S]) -> None:
    """Prove that `staged` is of the captured key and the latest, and that its host scalars are admitted."""
    check_current(captured.producer, captured.key, staged)
    offence = _offence(captured.signature, staged.signature)
    if offence is not None:
        raise SignatureMismatch(f"{captured.key}: {offence}")


def check_warm(warm: Staged[S], staged: Staged[S]) -> None:
    """Prove that a warm-up was given the host scalars of its capture, so that it launched the same kernels."""
    offence = _offence(staged.signature, warm.signature) or _offence(warm.signature, staged.signature)
    if offence is not None:
        raise SignatureMismatch(
            f"{staged.key}: warm-up and capture were staged with different host scalars, so that the capture might "
            f"launch kernels that nothing has loaded: {offence}"
        )


def _offence(captured: SignatureLike | None, offered: SignatureLike | None) -> str | None:
    """Why what was captured with one signature does not admit the other, None if it does."""
    if captured is offered:
        return None
    if captured is None or offered is None:
        odd = "captured without" if captured is None else "staged without"
        return f"was {odd} a signature, so its host scalars can't be compared"
    return captured.admits(offered)


def check_addresses(captured: CapturedState[S], staged: Staged[S]) -> None:
    """Prove that no buffer has moved since the capture; new ones may have come."""
    require_book(captured.key, captured.addresses, captured.producer.addresses())


def check_tensors(captured: CapturedState[S], staged: Staged[S]) -> None:
    """Prove that the batch's tensors are those that the graph reads, so that it reads this batch.

    What was made anew for the step, or staged by another producer, lies elsewhere. Looked at are tensors in memory that
    the graph was seen to use, and those of a FULL key on a device, where a kernel may use them unseen. Eager parts may
    view the same memory otherwise in every step, so that for a PIECEWISE key only the memory counts.
    """
    full = captured.key.mode is CudaGraphMode.FULL
    used = {external.address for external in captured.externals}
    now = dict(tensors(staged.state, "state"))
    for path, tensor in tensors(captured.staged.state, "state"):
        on_device = full and tensor.device.type != "cpu"
        if tensor.numel() and (on_device or _memory(tensor) in used):
            found = now.get(path)
            place = _place if full else _memory
            if found is None or place(found) != place(tensor):
                raise AddressMoved(
                    f"{captured.key}: {path} was captured as {_text(tensor)} and the batch's is {_text(found)}"
                )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _text(tensor: Tensor | None) -> str:
    if tensor is None:
        return "not there"
    return f"{tuple(tensor.shape)} with strides {tensor.stride()} at {tensor.data_ptr():#x}"
