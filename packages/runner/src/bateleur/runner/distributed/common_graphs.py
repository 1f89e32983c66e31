"""Ranks keep the graphs that all of them have: what each decides of a step is then what the others decide."""

from __future__ import annotations

import warnings
from typing import Any

from bateleur.cudagraph import CudaGraphManager
from bateleur.cudagraph.data_parallel import RankStep, RankStepCodec
from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.errors import RankFailed


def keep_common(manager: CudaGraphManager[Any, Any], ranks: Ranks) -> None:
    """Release the graphs that some rank could not capture, behind a capture; all ranks call it together.

    Raises RankFailed if their plans are not the same.
    """
    if ranks.alone:
        return
    codec = RankStepCodec(manager.dispatcher)
    told = ranks.tell_all([codec.fingerprint, *codec.encode(RankStep(None, manager.ready))])
    for rank, (fingerprint, *_) in enumerate(told):
        if fingerprint != codec.fingerprint:
            raise RankFailed(rank, f"disagrees with rank {ranks.rank} about which graphs to capture")
    for rank, (_, *vector) in enumerate(told):
        ready = codec.decode(vector).ready
        lacking = [] if ready is None else [key for key in manager.ready if key not in ready]
        if lacking:
            names = ", ".join(map(str, lacking))
            warnings.warn(f"no graph for {names}: rank {rank} has none", RuntimeWarning, stacklevel=2)
            manager.release(lacking, reason=f"rank {rank} has none")
