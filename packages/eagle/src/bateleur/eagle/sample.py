"""Samples one token per row by the Gumbel-max trick: the only module that turns logits into token ids.

`draw` takes processed logits. `sample` takes sampling parameters, and does not materialise processed logits.

Legend for shapes: R or N rows of logits, V tokens of the vocabulary, or of a shard.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import Library

from bateleur.eagle import native
from bateleur.eagle.noise import HashedVocab, Keys, Role, gumbel, gumbel_, hashed, mixed, names, unit
from bateleur.eagle.rules import apply_temperature
from bateleur.eagle.sampling_metadata import SamplingMetadata, mask_truncated_
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
    return _first_maxima(*logits.max(dim=-1))


def _first_maxima(best_R: Tensor, token_ids_R: Tensor) -> tuple[Tensor, Tensor]:
    # `max` propagates NaN, and NaN > -inf is False: one comparison finds both kinds of bad rows.
    bad_R = (best_R > -torch.inf).logical_not_()
    return token_ids_R.masked_fill_(bad_R, 0), bad_R


def _fake_rows(logits: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    tokens = logits.new_empty(len(logits), dtype=torch.int64)
    return tokens, tokens.new_empty(len(logits), dtype=torch.bool)


ARGMAX = Implementations(_argmax, native="bateleur.eagle.native:argmax_rows")
_argmax_rows = define_op(_library, _argmax, ARGMAX, mutates=(), fake=_fake_rows, name="argmax_rows")


def draw(
    logits: Tensor, temperature: Tensor, keys: Keys, role: Role = Role.TARGET, *, vocab: HashedVocab | None = None
) -> SampledTokens:
    """Sample one token per row from softmax(logits), or take the argmax where the temperature is 0.

    logits: (R, V) float32, processed, and divided by the temperature in rows that sample; not written to.
    temperature: (R,) floating; only whether it is above 0 is read.
    keys, role: seed and position of each row's token, and its purpose. Noise depends on nothing else but the token id.
    vocab: token ids of the V columns, hashed; by default 0 .. V-1. With the ids of a vocabulary shard, logits are those
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
    return argmax(_perturbed(gumbel(keys, role, vocab), logits, temperature), vocab.shard)


DRAW = Implementations(_draw, triton="bateleur.eagle.kernels.rejection_sampler:draw")
"""Forms of `draw` for at least one row over a whole vocabulary."""


def _perturbed(noise_RV: Tensor, logits: Tensor, temperature: Tensor) -> Tensor:
    """Return perturbed logits (R, V). `draw` takes their argmax. Overwrites the Gumbel noise `noise_RV`."""
    # Finite noise times 0 is 0, so greedy rows keep their logits.
    return noise_RV.mul_((temperature > 0).to(noise_RV.dtype).unsqueeze(1)).add_(logits)


def sample(
    logits: Tensor,
    metadata: SamplingMetadata,
    keys: Keys,
    role: Role = Role.TARGET,
    *,
    vocab: HashedVocab | None = None,
) -> SampledTokens:
    """Sample one token per row: the tokens of `draw(metadata.apply(logits), ...)`, bit for bit.

    logits: (N, V) float32 or narrower; not written to.
    metadata: temperature, truncation and penalties of each row.
    keys, role, vocab: as for `draw`. With the ids of a vocabulary shard it samples over all ranks.

    Raises `ValueError` if the numbers of rows disagree. In C (`native`) a row costs little more than one pass over
    its logits. Without a compiler, torch materialises the processed logits.
    """
    if logits.dim() != 2 or logits.shape[0] != len(keys) or len(metadata) != len(keys):
        raise ValueError(
            f"logits={tuple(logits.shape)}, metadata of {len(metadata)} rows, keys={len(keys)}: must have the same "
            "number of rows"
        )
    if metadata.greedy and metadata.penalties is None:
        return argmax(logits, None if vocab is None else vocab.shard)
    vocab = HashedVocab.of(logits.shape[1], logits.device) if vocab is None else vocab
    return (SAMPLE.on(logits) if vocab.shard is None else _sample_shard)(logits, metadata, keys, role, vocab)


def _sample(logits: Tensor, metadata: SamplingMetadata, keys: Keys, role: Role, vocab: HashedVocab) -> SampledTokens:
    logits, metadata = metadata.penalised(logits)
    row = metadata.values, vocab.hashes, keys.seed, names(keys, role)
    # Not in `Implementations`: the torch form uses `metadata.host`, which an operator cannot take.
    if native.takes(logits):
        return SampledTokens(*_sample_rows(logits, *row))
    return SampledTokens(*_first_maxima(*_perturbed_max(logits, *row, *metadata.thresholds(logits))))


SAMPLE = Implementations(_sample, triton="bateleur.eagle.kernels.rejection_sampler:sample")
"""Forms of `sample` for a whole vocabulary."""


def _sample_shard(
    logits: Tensor, metadata: SamplingMetadata, keys: Keys, role: Role, vocab: HashedVocab
) -> SampledTokens:
    """Sample from the logits of a vocabulary shard: all ranks agree on the best of the best tokens of all shards."""
    assert vocab.shard is not None
    logits, metadata = metadata.penalised(logits)
    thresholds, name = metadata.thresholds(logits, vocab.shard), names(keys, role)
    best = PERTURBED_MAX.on(logits)(logits, metadata.values, vocab.hashes, keys.seed, name, *thresholds)
    return SampledTokens(*vocab.shard.reduce_argmax(*best))


def _perturbed_max(
    logits: Tensor,
    values: Tensor,
    hashes: Tensor,
    seeds: Tensor,
    name: Tensor,
    least: Tensor | None = None,
    last: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the maximum of the perturbed logits of each row, (N,) float32, and its index in the shard, (N,) int64.

    The maximum is NaN if the row holds a NaN, and -inf if no token is left. logits: (N, V) float32 or narrower.
    values: `SamplingMetadata.values`. hashes: (V,) int32 hashed token ids. seeds, name: (N,) int64, seeds and packed
    noise keys (`noise.names`). least, last: (N,) truncation thresholds (`SamplingMetadata.thresholds`).
    """
    temperature_N = values[:, 0]
    scaled_NV = apply_temperature(logits.float(), temperature_N)
    if least is not None and last is not None:
        mask_truncated_(scaled_NV, least.unsqueeze(1), last.unsqueeze(1))
    noise_NV = gumbel_(unit(mixed(hashes, *hashed(seeds, name))))
    best_N, index_N = _perturbed(noise_NV, scaled_NV, temperature_N).max(-1)
    return best_N, index_N


PERTURBED_MAX = Implementations(_perturbed_max, triton="bateleur.eagle.kernels.vocab_shard:perturbed_max_rows")


def _rows(logits: Tensor, values: Tensor, hashes: Tensor, seeds: Tensor, name: Tensor) -> tuple[Tensor, Tensor]:
    tokens, bad = native.draw_rows(logits, values, hashes, seeds, name)
    open_M = (tokens < 0).nonzero().squeeze(1)
    if len(open_M):
        logits, values = logits[open_M], values[open_M]
        kept = SamplingMetadata(values.numpy(), values).thresholds(logits)
        best = _perturbed_max(logits, values, hashes, seeds[open_M], name[open_M], *kept)
        tokens[open_M], bad[open_M] = _first_maxima(*best)
    return tokens, bad


_sample_rows = define_op(_library, _rows, Implementations(_rows), mutates=(), fake=_fake_rows, name="sample_rows")
"""A torch operator, so that a recorded graph holds it."""
