"""What all ranks do, or none of them has done: an error on one is raised on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.errors import PrefixRefused

T = TypeVar("T")

_MOST = 1024
"""Bytes of what is told of an error."""
_KINDS: tuple[type[Exception], ...] = (ValueError, OSError, PrefixRefused)


def together(ranks: Ranks, work: Callable[[], T]) -> T:
    """What `work` returns, if it does on every rank. One exchange, no part of a step.

    Raises on every rank the ValueError, PrefixRefused or OSError that the first rank of those where there is one has
    raised; what else is raised is raised here alone, and ends the others.
    """
    if ranks.alone:
        return work()
    error: Exception | None = None
    try:
        done = work()
    except (ValueError, OSError) as raised:
        error = raised
    message = b"" if error is None else _written(error)
    told = ranks.every(torch.tensor([*message, *bytes(_MOST - len(message))], dtype=torch.uint8))
    failed = [rank for rank, first in enumerate(told[:, 0].tolist()) if first]
    if not failed:
        return done
    if failed[0] == ranks.rank and error is not None:
        raise error
    raise _read(failed[0], bytes(told[failed[0]].tolist()))


def _written(error: Exception) -> bytes:
    """Its kind, counted from 1, and its words."""
    kind = next(number for number in (3, 2, 1) if isinstance(error, _KINDS[number - 1]))
    reason = error.reason if isinstance(error, PrefixRefused) else ""
    return bytes([kind]) + f"{reason}\n{error}".encode()[: _MOST - 1]


def _read(rank: int, message: bytes) -> Exception:
    reason, _, words = message[1:].rstrip(b"\0").decode(errors="replace").partition("\n")
    text = f"rank {rank}: {words}"
    return PrefixRefused(reason, text) if message[0] == 3 else _KINDS[message[0] - 1](text)
