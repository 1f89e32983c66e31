"""Collectives outside of layers: share errors, keep the CUDA graphs that all ranks have, compare steps."""

import warnings
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray

from bateleur.cudagraph import CudaGraphManager
from bateleur.cudagraph.data_parallel import RankStep, RankStepCodec
from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.errors import PrefixRefused, RankFailed

T = TypeVar("T")

_MESSAGE_BYTES = 1024  # longest error message that is sent to other ranks
_KINDS: tuple[type[Exception], ...] = (ValueError, OSError, PrefixRefused)


def run_on_all_ranks(ranks: Ranks, work: Callable[[], T]) -> T:
    """Run `work` on every rank. Raise the ValueError, PrefixRefused or OSError of the first failed rank on all ranks.

    One collective is needed for that. Other errors are raised on their rank only, and then the other ranks end.
    """
    if ranks.alone:
        return work()
    error: Exception | None = None
    try:
        result = work()
    except (ValueError, OSError) as raised:
        error = raised
    message = b"" if error is None else _encode(error)
    messages = ranks.every(torch.tensor([*message, *bytes(_MESSAGE_BYTES - len(message))], dtype=torch.uint8))
    failed = [rank for rank, first in enumerate(messages[:, 0].tolist()) if first]
    if not failed:
        return result
    if failed[0] == ranks.rank and error is not None:
        raise error
    raise _decode(failed[0], bytes(messages[failed[0]].tolist()))


def _encode(error: Exception) -> bytes:
    """Encode an error as bytes: 1 + the index of its type in `_KINDS`, then its message."""
    kind = next(number for number in (3, 2, 1) if isinstance(error, _KINDS[number - 1]))
    reason = error.reason if isinstance(error, PrefixRefused) else ""
    return bytes([kind]) + f"{reason}\n{error}".encode()[: _MESSAGE_BYTES - 1]


def _decode(rank: int, message: bytes) -> Exception:
    reason, _, words = message[1:].rstrip(b"\0").decode(errors="replace").partition("\n")
    text = f"rank {rank}: {words}"
    return PrefixRefused(reason, text) if message[0] == 3 else _KINDS[message[0] - 1](text)


def keep_common_graphs(manager: CudaGraphManager[Any, Any], ranks: Ranks) -> None:
    """Release the graphs that some rank could not capture. Raises RankFailed if ranks have planned different ones."""
    if ranks.alone:
        return
    codec = RankStepCodec(manager.dispatcher)
    by_rank = ranks.gather_ints([codec.fingerprint, *codec.encode(RankStep(None, manager.ready))])
    for rank, (fingerprint, *_) in enumerate(by_rank):
        if fingerprint != codec.fingerprint:
            raise RankFailed(rank, f"disagrees with rank {ranks.rank} about which graphs to capture")
    for rank, (_, *vector) in enumerate(by_rank):
        ready = codec.decode(vector).ready
        missing = [] if ready is None else [key for key in manager.ready if key not in ready]
        if missing:
            names = ", ".join(map(str, missing))
            warnings.warn(f"no graph for {names}: rank {rank} has none", RuntimeWarning, stacklevel=2)
            manager.release(missing, reason=f"rank {rank} has none")


def check_equal_steps(ranks: Ranks, fields: Mapping[str, NDArray[Any]]) -> None:
    """Raise RankFailed on every rank, with field and rank, if fields of a step differ. fields: arrays by name."""
    digests = [blake2b(field.tobytes(), digest_size=7).digest() for field in fields.values()]
    by_rank = ranks.gather_ints([int.from_bytes(digest, "big") for digest in digests])
    for name, *values in zip(fields, *by_rank, strict=True):
        for rank, value in enumerate(values):
            if value != values[0]:
                raise RankFailed(rank, f"disagrees with rank 0 about {name} of the step")
