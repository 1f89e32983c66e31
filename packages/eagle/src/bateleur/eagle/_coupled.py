"""COUPLED in torch: the target draws every row, and drafts that are the same draws save their forward passes."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.eagle._places import Places
from bateleur.eagle.draw import argmax, draw
from bateleur.eagle.noise import Lanes
from bateleur.eagle.rules import Drafts, Rows, Verdict


def coupled(
    logits: Tensor, drafts: Drafts, rows: Rows, lanes: Lanes | None, *, greedy: bool = False
) -> Verdict:
    """See `bateleur.eagle.verify`. What the Triton form is held to."""
    places = Places.of(logits.shape[0], drafts, rows)
    if greedy:
        drawn = argmax(logits)
    else:
        owner_N, keys = places.owners(logits.shape[0])
        drawn = draw(logits, rows.temperature[owner_N], keys, lanes=lanes)
    # A bad row draws -1, which no draft that is there equals: the run ends at it, and it emits nothing.
    token_RC = drawn.token_ids.masked_fill(drawn.bad, -1)[places.index]
    accepted_R = places.run(token_RC[:, :-1] == places.tokens)
    reached_RC = places.place <= accepted_R.masked_fill(~places.occupied, -1).unsqueeze(1)
    tokens_RC = torch.where(reached_RC, token_RC, -1)
    num_emitted_R = (tokens_RC >= 0).sum(1)
    return Verdict(tokens_RC, num_emitted_R, (num_emitted_R <= accepted_R) & places.occupied)
