"""COUPLED in torch: the target draws every row, and drafts that are the same draws save their forward passes."""

from __future__ import annotations

from torch import Tensor

from bateleur.eagle._ladder import Ladder
from bateleur.eagle.draw import Drawn, draw
from bateleur.eagle.noise import Lanes
from bateleur.eagle.rules import Drafts, Rows, Verdict


def coupled(logits: Tensor, drafts: Drafts, rows: Rows, lanes: Lanes | None) -> Verdict:
    """See `bateleur.eagle.verify`. What the Triton form is held to."""
    ladder = Ladder.of(logits.shape[0], drafts, rows)
    owner_N, keys = ladder.owners(logits.shape[0])
    drawn = draw(logits, rows.temperature[owner_N], keys, lanes=lanes)
    token_RC, bad_RC = drawn.token_ids[ladder.index], drawn.bad[ladder.index]
    # The id of a bad row is a placeholder, which a draft may equal by chance.
    accepted_R = ladder.run((token_RC[:, :-1] == ladder.tokens) & ~bad_RC[:, :-1])
    end_R1 = accepted_R.unsqueeze(1)
    last = Drawn(token_RC.gather(1, end_R1).squeeze(1), bad_RC.gather(1, end_R1).squeeze(1))
    return ladder.verdict(accepted_R, last)
