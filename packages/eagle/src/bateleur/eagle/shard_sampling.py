"""Sampling with vocabulary-parallel logits: each rank finds the best token of its shard, and all agree on the best.

Legend for shapes: N logit rows, L tokens of the shard.
"""

from torch import Tensor

from bateleur.eagle.draw import SampledTokens, perturbed
from bateleur.eagle.noise import Keys, Lanes, Role, gumbel_, hashed, mixed, names, unit
from bateleur.eagle.rules import apply_temperature
from bateleur.eagle.sampling_metadata import TEMPERATURE, SamplingMetadata, mask_truncated_
from bateleur.eagle.shard_truncation import shard_thresholds
from bateleur.eagle.vocab_shard import VocabShard
from bateleur.metadata.dispatch import Implementations


def sample_shard(
    logits: Tensor, metadata: SamplingMetadata, keys: Keys, role: Role, lanes: Lanes, shard: VocabShard
) -> SampledTokens:
    """Sample one token per row from the logits (N, L) of a vocabulary shard. All ranks return the same tokens."""
    name = names(keys, role)
    if metadata.penalties is not None:
        logits, metadata = metadata.penalties.apply(logits), SamplingMetadata(metadata.host, metadata.values)
    least, last = shard_thresholds(logits, metadata, shard) if metadata.truncates(shard.vocab_size) else (None, None)
    find = PERTURBED_MAX.on(logits)
    return SampledTokens(
        *shard.reduce_argmax(*find(logits, metadata.values, least, last, lanes.words, keys.seed, name))
    )


def _perturbed_max(
    logits: Tensor,
    values: Tensor,
    least: Tensor | None,
    last: Tensor | None,
    words: Tensor,
    seeds: Tensor,
    name: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the maximum of the perturbed logits of each row, (N,) float32, and its index in the shard, (N,) int64.

    The maximum is NaN if the row holds a NaN, and -inf if no token is left.

    logits: (N, L), as for `sample`. values: (N, 4) float32, see `SamplingMetadata`. least, last: thresholds as of
        `shard_thresholds`; None keeps all tokens. words: (L,) int32, see `Lanes`. seeds, name: (N,) int64, see
        `noise.names`.
    """
    scaled_NL = apply_temperature(logits.float(), values[:, TEMPERATURE])
    if least is not None and last is not None:
        mask_truncated_(scaled_NL, least.unsqueeze(1), last.unsqueeze(1))
    noise_NL = gumbel_(unit(mixed(words, *hashed(seeds, name))))
    best_N, lane_N = perturbed(noise_NL, scaled_NL, values[:, TEMPERATURE]).max(-1)
    return best_N, lane_N


PERTURBED_MAX = Implementations(_perturbed_max, triton="bateleur.eagle.kernels.vocab_shard:perturbed_max_rows")
