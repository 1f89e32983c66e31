"""A draw from what a model says, truncated and tempered: `draw` of a whole law, without making the whole of it.

Legend for shapes: N rows of logits, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor
from torch.library import Library

from bateleur.eagle import native
from bateleur.eagle.draw import Drawn, argmax, perturbed, rows_fake
from bateleur.eagle.law import Law
from bateleur.eagle.noise import Keys, Lanes, Role, gumbel_, hashed, mixed, names, unit
from bateleur.metadata.forms import Forms, define, load

_library = Library("bateleur", "FRAGMENT")


def sample(
    logits: Tensor, law: Law, keys: Keys, role: Role = Role.TARGET, *, lanes: Lanes | None = None
) -> Drawn:
    """Draw one token per row from `law` of it: the tokens of `draw(law.apply(logits), ...)`, bit for bit.

    logits: (N, V) float32 or narrower, of which the law is that of the same numbers in float32; not written to.
    keys, role, lanes: as of `draw`; with the lanes of a part, of which these are logits, it is a draw of all ranks.

    `ValueError` if the numbers of rows disagree. In C (`native`) a row costs little more than one pass over its logits,
    without sorting them; without a compiler torch applies the whole law.
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
    name = names(keys, role)
    if law.penalties is not None:
        logits, law = law.penalties.apply(logits), Law(law.host, law.values)
    if native.takes(logits):
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
    tokens, bad = native.draw_rows(logits, values, words, seeds, name)
    open_M = (tokens < 0).nonzero().squeeze(1)
    if len(open_M):
        some = values[open_M]
        law = Law(some.numpy(), some)
        tokens[open_M], bad[open_M] = argmax(_whole(logits[open_M], law, words, seeds[open_M], name[open_M]))
    return tokens, bad


_sample_rows = define(_library, _rows, Forms(_rows), mutates=(), fake=rows_fake, name="sample_rows")
"""An operator, so that a recorded graph holds it."""
