"""That all ranks are about to run the same step, compared where checks are asked for."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bateleur.cudagraph import DispatchDecision
from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.errors import RankFailed
from bateleur.runner.requests.request_table import RequestTable
from bateleur.runner.scheduling.scheduler import StepPlan


def compare(ranks: Ranks, plan: StepPlan, decision: DispatchDecision, table: RequestTable) -> None:
    """One exchange of a digest of each field. Raises RankFailed, on every rank, that names a field and who differs."""
    rows = plan.rows
    fields: dict[str, NDArray[Any]] = {
        "rows": rows,
        "query_lens": plan.query_lens,
        "num_computed": table.num_computed[rows],
        "num_drafts": table.num_drafts[rows],
        "token_ids": table.token_ids[rows],
        "block_table": table.block_table[rows],
        "samples": plan.samples,
        "key": np.frombuffer(repr(decision.descriptor).encode(), np.uint8),
    }
    digests = [blake2b(field.tobytes(), digest_size=7).digest() for field in fields.values()]
    told = ranks.tell_all([int.from_bytes(digest, "big") for digest in digests])
    for name, *values in zip(fields, *told, strict=True):
        for rank, value in enumerate(values):
            if value != values[0]:
                raise RankFailed(rank, f"disagrees with rank 0 about {name} of the step")
