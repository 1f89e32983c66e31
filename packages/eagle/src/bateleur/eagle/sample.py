"""A draw from what a model says, truncated and tempered: `draw` of a whole law, without making the whole of it.

Legend for shapes: N rows of logits, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library

from bateleur.eagle import native
from bateleur.eagle.draw import Drawn, argmax, perturbed, rows_fake
from bateleur.eagle.law import Law
from bateleur.eagle.noise import Keys, Lanes, Role, gumbel_, hashed, mixed, names, unit
from bateleur.metadata.forms import Forms, define, load

_WIDE, _WIDE_WHOLE = 8192, 32_768
"""Without a compiler: tokens of a vocabulary from which on it pays on a CPU to look for those that can win; where
nothing is truncated."""
_library = Library("bateleur", "FRAGMENT")


def sample(
    logits: Tensor, law: Law, keys: Keys, role: Role = Role.TARGET, *, lanes: Lanes | None = None
) -> Drawn:
    """Draw one token per row from `law` of it: the tokens of `draw(law.apply(logits), ...)`, bit for bit.

    logits: (N, V) float32 or narrower, of which the law is that of the same numbers in float32; not written to.
    keys, role, lanes: as of `draw`; with the lanes of a part, of which these are logits, it is a draw of all ranks.

    `ValueError` if the numbers of rows disagree. On a CPU a row costs little more than a look at its logits, and never
    an order of them: in C (`native`), or where there is no compiler by numpy (`_winners`).
    """
    if logits.dim() != 2 or logits.shape[0] != len(keys) or len(law) != len(keys):
        raise ValueError(
            f"logits {tuple(logits.shape)}, a law of {len(law)} rows and {len(keys)} keys "
            "must agree in their number of rows"
        )
    if law.greedy and law.penalties is None:
        return argmax(logits, None if lanes is None else lanes.part)
    lanes = Lanes.of(logits.shape[1], logits.device) if lanes is None else lanes
    if lanes.part is not None:
        drawn: Drawn = load("bateleur.eagle.lead:sample_part")(logits, law, keys, role, lanes, lanes.part)
        return drawn
    if role is Role.TARGET and isinstance(keys.place, int) and not keys.place:
        return SAMPLE.on(logits)(logits, law, keys, lanes)
    return _drawn(logits, law, keys, role, lanes)


def _drawn(logits: Tensor, law: Law, keys: Keys, role: Role, lanes: Lanes) -> Drawn:
    size, name = logits.shape[1], names(keys, role)
    if law.penalties is not None:
        logits, law = law.penalties.apply(logits), Law(law.host, law.values)
    wide = size >= _WIDE and (size >= _WIDE_WHOLE or len(law.truncated(size)) > 0)
    if native.takes(logits) or (logits.is_cpu and wide and lanes.whole):
        return Drawn(*_sample_rows(logits, law.values, lanes.words, keys.seed, name))
    return argmax(_whole(logits, law, lanes.words, keys.seed, name))


def _by_torch(logits: Tensor, law: Law, keys: Keys, lanes: Lanes) -> Drawn:
    return _drawn(logits, law, keys, Role.TARGET, lanes)


SAMPLE = Forms(_by_torch, triton="bateleur.eagle.kernels.verify:sample")
"""In the role TARGET, at place 0."""


def _whole(logits: Tensor, law: Law, words: Tensor, seeds: Tensor, name: Tensor) -> Tensor:
    """What the whole law of every row takes the argmax of, (N, V)."""
    noise_NV = gumbel_(unit(mixed(words, *hashed(seeds, name))))
    return perturbed(noise_NV, law.apply(logits.float()), law.temperature)


def _rows(
    logits: Tensor, values: Tensor, words: Tensor, seeds: Tensor, name: Tensor
) -> tuple[Tensor, Tensor]:
    if native.takes(logits):
        tokens, bad = native.draw_rows(logits, values, words, seeds, name)
    else:
        draw_rows = load("bateleur.eagle._winners:draw_rows")
        tokens = torch.from_numpy(draw_rows(logits.float(), values, words, *hashed(seeds, name)))
        bad = tokens == -1
        tokens.masked_fill_(bad, 0)
    open_M = (tokens < 0).nonzero().squeeze(1)
    if len(open_M):
        some = values[open_M]
        law = Law(some.numpy(), some)
        tokens[open_M], bad[open_M] = argmax(_whole(logits[open_M], law, words, seeds[open_M], name[open_M]))
    return tokens, bad


_sample_rows = define(_library, _rows, Forms(_rows), mutates=(), fake=rows_fake, name="sample_rows")
"""An operator, so that a recorded graph holds it."""
