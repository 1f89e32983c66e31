"""One draw per row: the only place where logits become token ids.

Legend for shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.library import Library

from bateleur.eagle import native
from bateleur.eagle.noise import Keys, Lanes, Role, gumbel
from bateleur.metadata.forms import Forms, define

if TYPE_CHECKING:
    from bateleur.eagle.part import Part

_library = Library("bateleur", "FRAGMENT")


class Drawn(NamedTuple):
    """What `draw` returns.

    token_ids: (R,) int64. In a bad row it is 0: a placeholder that is safe to embed, and not a draw.
    bad: (R,) bool: the row held a NaN, or no lane above -inf. The caller must end that request with an error.
    """

    token_ids: Tensor
    bad: Tensor


def argmax(logits: Tensor, part: Part | None = None) -> Drawn:
    """Return the first maximum of every row of (R, V) floating logits; ties go to the lowest id.

    part: whose logits they are, if not those of the whole vocabulary.
    """
    if part is not None:
        best_R, lane_R = _best_rows(logits) if native.takes(logits) else logits.max(dim=-1)
        return Drawn(*part.elect(best_R, lane_R))
    if native.takes(logits):
        return Drawn(*_argmax_rows(logits))
    best_R, token_ids_R = logits.max(dim=-1)
    # `max` propagates NaN and no number is above it: one comparison finds NaN rows and rows without support.
    bad_R = (best_R > -torch.inf).logical_not_()
    return Drawn(token_ids_R.masked_fill_(bad_R, 0), bad_R)


def _rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    return native.argmax_rows(logits)


def rows_fake(logits: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    """Of an operator over rows: a token of each, and whether it is bad."""
    tokens = logits.new_empty(len(logits), dtype=torch.int64)
    return tokens, tokens.new_empty(len(logits), dtype=torch.bool)


_argmax_rows = define(_library, _rows, Forms(_rows), mutates=(), fake=rows_fake, name="argmax_rows")
"""An operator, so that a recorded graph holds it."""


def _best(logits: Tensor) -> tuple[Tensor, Tensor]:
    return native.best_rows(logits)


def best_fake(logits: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    """Of an operator over rows: a value of each, and where it is."""
    values = logits.new_empty(len(logits), dtype=torch.float32)
    return values, values.new_empty(len(logits), dtype=torch.int64)


_best_rows = define(_library, _best, Forms(_best), mutates=(), fake=best_fake, name="best_rows")
"""The same for a part: the first maximum of every row and its place, NaN if the row holds one."""


def draw(
    logits: Tensor, temperature: Tensor, keys: Keys, role: Role = Role.TARGET, *, lanes: Lanes | None = None
) -> Drawn:
    """Draw one token per row from softmax(logits), or take the argmax where the temperature is 0.

    logits: (R, V) float32, processed, divided by the temperature in rows that sample; not written to.
    temperature: (R,) floating; only whether it is above 0 is read here.
    keys: R keys. A row's noise depends on its key, `role` and the lane alone, never on the other rows.
    lanes: the V lanes, hashed beforehand; by default the ids 0 .. V-1. Those of a part have its logits, and draw from
        those of all ranks.

    `ValueError` if the numbers of rows disagree. Law: Gumbel-max (Gumbel 1954; Maddison et al. 2014).
    """
    if logits.dim() != 2 or logits.shape[0] != len(keys) or temperature.shape != (len(keys),):
        raise ValueError(
            f"logits {tuple(logits.shape)}, temperature {tuple(temperature.shape)} and {len(keys)} keys "
            "must agree in their number of rows"
        )
    noise_RV = gumbel(keys, role, logits.shape[1] if lanes is None else lanes)
    return argmax(perturbed(noise_RV, logits, temperature), None if lanes is None else lanes.part)


def perturbed(noise_RV: Tensor, logits: Tensor, temperature: Tensor) -> Tensor:
    """What `draw` takes the argmax of, (R, V), with Gumbel noise that was made beforehand and is overwritten."""
    # Finite noise times 0 is 0, so greedy rows keep their logits and one argmax serves both kinds.
    return noise_RV.mul_((temperature > 0).to(noise_RV.dtype).unsqueeze(1)).add_(logits)
