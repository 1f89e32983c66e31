"""Lossless verification: how many drafts stay, and what comes after them.

Legend for shapes: R requests, N logit rows, K draft tokens at most, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.eagle._places import Places
from bateleur.eagle.draw import Drawn, argmax, draw
from bateleur.eagle.law import Law
from bateleur.eagle.noise import Lanes
from bateleur.eagle.rules import Drafts, OneHot, Rows, Rule, Verdict, tempered
from bateleur.eagle.sample import sample
from bateleur.metadata.forms import Forms, load


def verify(
    logits: Tensor,
    drafts: Drafts,
    rows: Rows,
    *,
    rule: Rule = Rule.COUPLED,
    lanes: Lanes | None = None,
    greedy: bool = False,
    law: Law | None = None,
) -> Verdict:
    """Test the drafts of every request and emit what stays plus one token, all on the device.

    logits: (N, V) floating, of the target, processed (penalties, grammar, truncation) and divided by the temperature in
        rows that sample, as `draw` takes them. Not written to.
    lanes: the V lanes, hashed beforehand; by default the ids 0 .. V-1. Those of a part have its logits, and all ranks
        emit what one would that has all of them.
    law: what each row of logits is drawn from; then `logits` are float32 and neither truncated nor divided by the
        temperature, and COUPLED never makes the whole of what they become.
    greedy: the caller's promise that every temperature is 0, which saves the noise; False is always right.

    Under COUPLED the tokens are those that `draw` gives row by row, bit for bit. Under every rule a request
    without drafts gets just that draw. `ValueError` if the shapes disagree or the rule does not fit the distribution.
    """
    rule.require(drafts.distribution)
    num_reqs, num_drafts = drafts.tokens.shape
    if logits.dim() != 2 or num_reqs != len(rows):
        raise ValueError(
            f"logits must be (N, V) and drafts as many as the {len(rows)} rows, "
            f"got logits {tuple(logits.shape)} and tokens {tuple(drafts.tokens.shape)}"
        )
    if law is not None and len(law) != len(logits):
        raise ValueError(f"law has {len(law)} rows, logits have {len(logits)}; a row of each is one law")
    if not num_reqs or not logits.shape[0]:
        none_R = drafts.tokens.new_zeros(num_reqs)
        return Verdict(drafts.tokens.new_full((num_reqs, num_drafts + 1), -1), none_R, none_R.bool())
    part = None if lanes is None else lanes.part
    if rule is not Rule.COUPLED:
        if law is not None and (law.penalties is not None or not greedy):
            logits = law.apply(logits, part)
        tests = "ratio" if rule is Rule.RATIO or isinstance(drafts.distribution, OneHot) else "block"
        verdict: Verdict = load(f"bateleur.eagle._rejection:{tests}")(logits.float(), drafts, rows, lanes)
        return verdict
    by_torch = logits.dtype is torch.float64 or part is not None
    form = COUPLED.torch if by_torch else COUPLED.on(logits)
    return form(logits, drafts, rows, lanes, greedy=greedy, law=law)


def draw_draft(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    rule: Rule = Rule.COUPLED,
    place: int | Tensor = 0,
    lanes: Lanes | None = None,
) -> Drawn:
    """Draw one draft token per row with the noise that `rule` asks for; where the temperature is 0, the argmax.

    logits: (R, Vd) floating, before the temperature; as given to `Logits`, if the rule needs them.
    positions: (R,) int64 index in its sequence of the token that is drafted; beyond all limits, never clamped.
    place: int or (R,) int64, which draft of the step it is, from 0.
    lanes: of a reduced draft vocabulary its target ids, `Lanes.of(ids, device)`, so that it couples; then the result is
        the lane, and the token is ids[lane].
    """
    scaled_RD = tempered(logits.float(), temperature)
    return draw(scaled_RD, temperature, rule.keys(seeds, positions, place), rule.draft_role, lanes=lanes)


def _coupled(
    logits: Tensor,
    drafts: Drafts,
    rows: Rows,
    lanes: Lanes | None,
    *,
    greedy: bool = False,
    law: Law | None = None,
) -> Verdict:
    """The target draws every row, and drafts that are the same draws save their forward passes."""
    places = Places.of(logits.shape[0], drafts, rows)
    if greedy and (law is None or law.penalties is None):
        drawn = argmax(logits, None if lanes is None else lanes.part)
    else:
        owner_N, keys = places.owners(logits.shape[0])
        if law is None:
            drawn = draw(logits, rows.temperature[owner_N], keys, lanes=lanes)
        else:
            drawn = sample(logits, law, keys, lanes=lanes)
    # A bad row draws -1, which no draft that is there equals: the run ends at it, and it emits nothing.
    token_RC = drawn.token_ids.masked_fill(drawn.bad, -1)[places.index]
    accepted_R = places.run(token_RC[:, :-1] == places.tokens)
    reached_RC = places.place <= accepted_R.masked_fill(~places.occupied, -1).unsqueeze(1)
    tokens_RC = torch.where(reached_RC, token_RC, -1)
    num_emitted_R = (tokens_RC >= 0).sum(1)
    return Verdict(tokens_RC, num_emitted_R, (num_emitted_R <= accepted_R) & places.occupied)


COUPLED = Forms(_coupled, triton="bateleur.eagle.kernels.verify:coupled")
