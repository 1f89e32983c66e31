"""A draw from what a model says, truncated and tempered: `draw` of a whole law, without making the whole of it.

Legend for shapes: N rows of logits, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library

from bateleur.eagle._winners import draw_rows
from bateleur.eagle.draw import Drawn, argmax, perturb
from bateleur.eagle.law import Law
from bateleur.eagle.noise import Keys, Lanes, Role, gumbel_, mixed, row_words, unit
from bateleur.metadata.forms import Forms, define

_WIDE, _WIDE_WHOLE = 8192, 32_768
"""Tokens of a vocabulary from which on it pays on a CPU to look for those that can win; where nothing is truncated."""
_library = Library("bateleur", "FRAGMENT")


def sample(
    logits: Tensor, law: Law, keys: Keys, role: Role = Role.TARGET, *, lanes: Lanes | None = None
) -> Drawn:
    """Draw one token per row from `law` of it: the tokens of `draw(law.apply(logits), ...)`, bit for bit.

    logits: (N, V) float32, not written to. keys, role, lanes: as of `draw`.

    `ValueError` if the numbers of rows disagree. On a CPU a row costs little more than a look at its logits (see
    `_winners`), and never an order of them.
    """
    if logits.dim() != 2 or logits.shape[0] != len(keys) or len(law) != len(keys):
        raise ValueError(
            f"logits {tuple(logits.shape)}, a law of {len(law)} rows and {len(keys)} keys "
            "must agree in their number of rows"
        )
    if law.greedy:
        return argmax(logits)
    lanes = Lanes.of(logits.shape[1], logits.device) if lanes is None else lanes
    if role is Role.TARGET and isinstance(keys.place, int) and not keys.place:
        return SAMPLE.on(logits)(logits, law, keys, lanes)
    return _drawn(logits, law, row_words(keys, role), lanes)


def _drawn(logits: Tensor, law: Law, name: tuple[Tensor, Tensor], lanes: Lanes) -> Drawn:
    low, high = name
    size = logits.shape[1]
    wide = size >= _WIDE and (size >= _WIDE_WHOLE or len(law.truncated(size)) > 0)
    if logits.is_cpu and wide and lanes.whole:
        return Drawn(*_sample_wide(logits, law.values, lanes.words, low, high))
    return _whole(logits, law, lanes.words, low, high)


def _by_torch(logits: Tensor, law: Law, keys: Keys, lanes: Lanes) -> Drawn:
    return _drawn(logits, law, row_words(keys, Role.TARGET), lanes)


SAMPLE = Forms(_by_torch, triton="bateleur.eagle.kernels.verify:sample")
"""In the role TARGET, at place 0."""


def _whole(logits: Tensor, law: Law, words: Tensor, low: Tensor, high: Tensor) -> Drawn:
    """By the whole law of every row."""
    return perturb(gumbel_(unit(mixed(words, low, high))), law.apply(logits), law.temperature)


def _wide(logits: Tensor, values: Tensor, words: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    tokens = torch.from_numpy(draw_rows(logits, values, words, low, high))
    open_M = (tokens == -2).nonzero().squeeze(1)
    bad = tokens == -1
    tokens.masked_fill_(bad, 0)
    if len(open_M):
        some = values[open_M]
        drawn = _whole(logits[open_M], Law(some.numpy(), some), words, low[open_M], high[open_M])
        tokens[open_M], bad[open_M] = drawn
    return tokens, bad


def _wide_fake(
    logits: Tensor, values: Tensor, words: Tensor, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor]:
    tokens = logits.new_empty(len(logits), dtype=torch.int64)
    return tokens, tokens.new_empty(len(logits), dtype=torch.bool)


_sample_wide = define(_library, _wide, Forms(_wide), mutates=(), fake=_wide_fake, name="sample_wide")
"""An operator, so that a recorded graph holds it."""
