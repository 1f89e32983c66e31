"""Samples one token per row by the Gumbel-max trick: the only module that turns logits into token ids.

Legend for shapes: R rows of logits, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import Library

from bateleur.eagle.noise import HashedVocab, Keys, Role, gumbel
from bateleur.eagle.vocab_shard import VocabShard
from bateleur.metadata.dispatch import Implementations, define_op

_library = Library("bateleur", "FRAGMENT")


class SampledTokens(NamedTuple):
    """One sampled token for each row of logits.

    token_ids: (R,) int64. In a bad row it is 0: a valid id to embed, but not a sample.
    bad: (R,) bool: the row held a NaN, or no logit above -inf. The caller must end this request with an error.
    """

    token_ids: Tensor
    bad: Tensor


def argmax(logits: Tensor, shard: VocabShard | None = None) -> SampledTokens:
    """Return the first maximum of every row of (R, V) floating logits; ties go to the lowest id.

    shard: the vocabulary shard of the logits; None for the whole vocabulary.
    """
    if shard is not None:
        return SampledTokens(*shard.reduce_argmax(*logits.max(-1)))
    return SampledTokens(*_argmax_rows(logits))


def _argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    return first_maxima(*logits.max(dim=-1))


def first_maxima(best_R: Tensor, token_ids_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token ids and bad flags of `SampledTokens` for the maximum of each row and its index."""
    # `max` propagates NaN, and NaN > -inf is False: one comparison finds both kinds of bad rows.
    bad_R = (best_R > -torch.inf).logical_not_()
    return token_ids_R.masked_fill_(bad_R, 0), bad_R


def fake_token_rows(logits: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    """Fake implementation of operators that return a token id and a bad flag for each row."""
    tokens = logits.new_empty(len(logits), dtype=torch.int64)
    return tokens, tokens.new_empty(len(logits), dtype=torch.bool)


ARGMAX = Implementations(_argmax, native="bateleur.eagle.native:argmax_rows")
_argmax_rows = define_op(_library, _argmax, ARGMAX, mutates=(), fake=fake_token_rows, name="argmax_rows")


def draw(
    logits: Tensor, temperature: Tensor, keys: Keys, role: Role = Role.TARGET, *, vocab: HashedVocab | None = None
) -> SampledTokens:
    """Sample one token per row from softmax(logits), or take the argmax where the temperature is 0.

    logits: (R, V) float32, processed, and divided by the temperature in rows that sample; not written to.
    temperature: (R,) floating; only whether it is above 0 is read.
    keys: R keys. The noise of a row depends on its key, `role` and the token ids only, never on other rows.
    vocab: the V hashed token ids; by default the ids 0 .. V-1. With the vocab of a vocabulary shard, logits are those
        of the shard, and the token is sampled over all ranks.

    Raises `ValueError` if the numbers of rows disagree. Gumbel-max: Gumbel 1954; Maddison et al. 2014.
    """
    if logits.dim() != 2 or logits.shape[0] != len(keys) or temperature.shape != (len(keys),):
        raise ValueError(
            f"logits={tuple(logits.shape)}, temperature={tuple(temperature.shape)}, keys={len(keys)}: must have the "
            "same number of rows"
        )
    vocab = HashedVocab.of(logits.shape[1], logits.device) if vocab is None else vocab
    whole = vocab.shard is None and len(keys) > 0
    return (DRAW.on(logits) if whole else _draw)(logits, temperature, keys, role, vocab)


def _draw(logits: Tensor, temperature: Tensor, keys: Keys, role: Role, vocab: HashedVocab) -> SampledTokens:
    return argmax(perturbed(gumbel(keys, role, vocab), logits, temperature), vocab.shard)


DRAW = Implementations(_draw, triton="bateleur.eagle.kernels.rejection_sampler:draw")
"""Forms of `draw` for at least one row over a whole vocabulary."""


def perturbed(noise_RV: Tensor, logits: Tensor, temperature: Tensor) -> Tensor:
    """Return the perturbed logits (R, V) of which `draw` takes the argmax. Overwrites the Gumbel noise `noise_RV`."""
    # Finite noise times 0 is 0, so greedy rows keep their logits.
    return noise_RV.mul_((temperature > 0).to(noise_RV.dtype).unsqueeze(1)).add_(logits)
