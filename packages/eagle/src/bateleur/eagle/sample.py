"""Sampling from truncated and tempered logits without materialising the processed logits.

Legend for shapes: N logit rows, V tokens of the vocabulary, or of a shard.
"""

from torch import Tensor
from torch.library import Library

from bateleur.eagle import native
from bateleur.eagle.draw import SampledTokens, argmax, fake_token_rows, first_maxima, perturbed
from bateleur.eagle.noise import HashedVocab, Keys, Role, gumbel_, hashed, mixed, names, unit
from bateleur.eagle.rules import apply_temperature
from bateleur.eagle.sampling_metadata import SamplingMetadata, mask_truncated_
from bateleur.metadata.dispatch import Implementations, define_op

_library = Library("bateleur", "FRAGMENT")


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
    return SampledTokens(*first_maxima(*_perturbed_max(logits, *row, *metadata.thresholds(logits))))


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

    The maximum is NaN if the row holds a NaN, and -inf if no token is left.

    logits: (N, V), as for `sample`. values: (N, 4) float32, see `SamplingMetadata`. hashes: (V,) int32, see
        `HashedVocab`. seeds, name: (N,) int64, see `noise.names`. least, last: as of `SamplingMetadata.thresholds`.
    """
    temperature_N = values[:, 0]
    scaled_NV = apply_temperature(logits.float(), temperature_N)
    if least is not None and last is not None:
        mask_truncated_(scaled_NV, least.unsqueeze(1), last.unsqueeze(1))
    noise_NV = gumbel_(unit(mixed(hashes, *hashed(seeds, name))))
    best_N, index_N = perturbed(noise_NV, scaled_NV, temperature_N).max(-1)
    return best_N, index_N


PERTURBED_MAX = Implementations(_perturbed_max, triton="bateleur.eagle.kernels.vocab_shard:perturbed_max_rows")


def _rows(logits: Tensor, values: Tensor, hashes: Tensor, seeds: Tensor, name: Tensor) -> tuple[Tensor, Tensor]:
    tokens, bad = native.draw_rows(logits, values, hashes, seeds, name)
    open_M = (tokens < 0).nonzero().squeeze(1)
    if len(open_M):
        logits, values = logits[open_M], values[open_M]
        kept = SamplingMetadata(values.numpy(), values).thresholds(logits)
        best = _perturbed_max(logits, values, hashes, seeds[open_M], name[open_M], *kept)
        tokens[open_M], bad[open_M] = first_maxima(*best)
    return tokens, bad


_sample_rows = define_op(_library, _rows, Implementations(_rows), mutates=(), fake=fake_token_rows, name="sample_rows")
"""A torch operator, so that a recorded graph holds it."""
