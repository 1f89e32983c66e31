"""A draw of several ranks that have a part of the vocabulary each: what each puts up against the others' best.

Legend for shapes: N rows of logits, L tokens of the part.
"""

from __future__ import annotations

from torch import Tensor
from torch.library import Library

from bateleur.eagle import native
from bateleur.eagle.draw import Drawn, best_fake, perturbed
from bateleur.eagle.law import TEMPERATURE, Law, drop_
from bateleur.eagle.noise import Keys, Lanes, Role, gumbel_, hashed, mixed, names, unit
from bateleur.eagle.part import Part
from bateleur.eagle.part_cut import cut_part
from bateleur.eagle.rules import tempered
from bateleur.metadata.forms import Forms, define


def sample_part(logits: Tensor, law: Law, keys: Keys, role: Role, lanes: Lanes, part: Part) -> Drawn:
    """`sample` of the logits of a part, (N, L): on every rank the same tokens."""
    name = names(keys, role)
    if law.penalties is not None:
        logits, law = law.penalties.apply(logits), Law(law.host, law.values)
    least, last = cut_part(logits, law, part) if law.cuts(part.vocab_size) else (None, None)
    return Drawn(*part.elect(*lead_rows(logits, law.values, least, last, lanes.words, keys.seed, name)))


def _lead(
    logits: Tensor,
    values: Tensor,
    least: Tensor | None,
    last: Tensor | None,
    words: Tensor,
    seeds: Tensor,
    name: Tensor,
) -> tuple[Tensor, Tensor]:
    kept = None if least is None or last is None else (least, last)
    if not native.takes(logits):
        return _scores(logits, values, kept, words, seeds, name).max(-1)
    lead_N, lane_N = native.lead_rows(logits, values, kept, words, seeds, name)
    if len(open_M := (lane_N < 0).nonzero().squeeze(1)):
        some = None if kept is None else (kept[0][open_M], kept[1][open_M])
        rows_ML, law_M4 = logits[open_M].float(), values[open_M]
        lane_M = _scores(rows_ML, law_M4, some, words, seeds[open_M], name[open_M]).argmax(-1)
        lane_N[open_M] = lane_M
        lead_N[open_M] = tempered(rows_ML.gather(1, lane_M.unsqueeze(1)), law_M4[:, TEMPERATURE]).squeeze(1)
    # Its score has the bits that it has among all scores.
    noise_N1 = gumbel_(unit(mixed(words[lane_N].unsqueeze(1), *hashed(seeds, name))))
    return perturbed(noise_N1, lead_N.unsqueeze(1), values[:, TEMPERATURE]).squeeze(1), lane_N


def _scores(
    logits: Tensor,
    values: Tensor,
    kept: tuple[Tensor, Tensor] | None,
    words: Tensor,
    seeds: Tensor,
    name: Tensor,
) -> Tensor:
    scaled_NL = tempered(logits.float(), values[:, TEMPERATURE])
    if kept is not None:
        drop_(scaled_NL, *(each.unsqueeze(1) for each in kept))
    noise_NL = gumbel_(unit(mixed(words, *hashed(seeds, name))))
    return perturbed(noise_NL, scaled_NL, values[:, TEMPERATURE])


_library = Library("bateleur", "FRAGMENT")
LEAD = Forms(_lead, triton="bateleur.eagle.kernels.part:lead")
lead_rows = define(_library, _lead, LEAD, mutates=(), fake=best_fake, name="lead_rows")
"""Of each row the first largest score, (N,) float32, NaN if the row holds one and -inf if nothing is left, and its
place in the part, (N,) int64.

logits: (N, L), as of `sample`. values: (N, 4) float32, see `Law`. least, last: what the law leaves, as `law.cut` says
it, of places in the part; None leaves all. words: (L,) int32, see `Lanes`. seeds, name: (N,) int64, see `noise.names`.

An operator, so that a recorded graph holds it."""
