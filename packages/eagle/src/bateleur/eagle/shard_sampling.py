"""Sampling with vocabulary-parallel logits: each rank finds the best token of its shard, and all agree on the best.

Legend for shapes: N logit rows, L tokens of the shard.
"""

from __future__ import annotations

from torch import Tensor
from torch.library import Library

from bateleur.eagle import native
from bateleur.eagle.draw import Drawn, fake_value_rows, perturbed
from bateleur.eagle.noise import Keys, Lanes, Role, gumbel_, hashed, mixed, names, unit
from bateleur.eagle.rules import apply_temperature
from bateleur.eagle.sampling_metadata import TEMPERATURE, SamplingMetadata, mask_truncated_
from bateleur.eagle.shard_truncation import shard_thresholds
from bateleur.eagle.vocab_shard import VocabShard
from bateleur.metadata.dispatch import UNSUPPORTED, Implementations, Unsupported, define_op


def sample_shard(
    logits: Tensor, metadata: SamplingMetadata, keys: Keys, role: Role, lanes: Lanes, shard: VocabShard
) -> Drawn:
    """Sample one token per row from the logits (N, L) of a vocabulary shard. All ranks return the same tokens."""
    name = names(keys, role)
    if metadata.penalties is not None:
        logits, metadata = metadata.penalties.apply(logits), SamplingMetadata(metadata.host, metadata.values)
    least, last = shard_thresholds(logits, metadata, shard) if metadata.truncates(shard.vocab_size) else (None, None)
    return Drawn(
        *shard.reduce_argmax(*perturbed_max_rows(logits, metadata.values, least, last, lanes.words, keys.seed, name))
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
    kept = None if least is None or last is None else (least, last)
    return _scores(logits, values, kept, words, seeds, name).max(-1)


def perturbed_max_native(
    logits: Tensor,
    values: Tensor,
    least: Tensor | None,
    last: Tensor | None,
    words: Tensor,
    seeds: Tensor,
    name: Tensor,
) -> tuple[Tensor, Tensor] | Unsupported:
    """Find each row's best token of the shard in C; torch redoes rows that C cannot decide within float32 rounding."""
    if not native.takes(logits):
        return UNSUPPORTED
    kept = None if least is None or last is None else (least, last)
    lead_N, lane_N = native.perturbed_max_rows(logits, values, kept, words, seeds, name)
    if len(open_M := (lane_N < 0).nonzero().squeeze(1)):
        some = None if kept is None else (kept[0][open_M], kept[1][open_M])
        rows_ML, values_M4 = logits[open_M].float(), values[open_M]
        lane_M = _scores(rows_ML, values_M4, some, words, seeds[open_M], name[open_M]).argmax(-1)
        lane_N[open_M] = lane_M
        lead_N[open_M] = apply_temperature(rows_ML.gather(1, lane_M.unsqueeze(1)), values_M4[:, TEMPERATURE]).squeeze(1)
    # Computed as in `_scores`, so that it has the same bits.
    noise_N1 = gumbel_(unit(mixed(words[lane_N].unsqueeze(1), *hashed(seeds, name))))
    return perturbed(noise_N1, lead_N.unsqueeze(1), values[:, TEMPERATURE]).squeeze(1), lane_N


def _scores(
    logits: Tensor, values: Tensor, kept: tuple[Tensor, Tensor] | None, words: Tensor, seeds: Tensor, name: Tensor
) -> Tensor:
    scaled_NL = apply_temperature(logits.float(), values[:, TEMPERATURE])
    if kept is not None:
        mask_truncated_(scaled_NL, *(each.unsqueeze(1) for each in kept))
    noise_NL = gumbel_(unit(mixed(words, *hashed(seeds, name))))
    return perturbed(noise_NL, scaled_NL, values[:, TEMPERATURE])


_library = Library("bateleur", "FRAGMENT")
PERTURBED_MAX = Implementations(
    _perturbed_max,
    triton="bateleur.eagle.kernels.vocab_shard:perturbed_max_rows",
    native="bateleur.eagle.shard_sampling:perturbed_max_native",
)
perturbed_max_rows = define_op(
    _library, _perturbed_max, PERTURBED_MAX, mutates=(), fake=fake_value_rows, name="perturbed_max_rows"
)
"""The maximum of the perturbed logits of each row, (N,) float32, and its index in the shard, (N,) int64. The maximum
is NaN if the row holds a NaN, and -inf if no token is left.

logits: (N, L), as for `sample`. values: (N, 4) float32, see `SamplingMetadata`. least, last: thresholds as of
    `shard_thresholds`; None keeps all tokens. words: (L,) int32, see `Lanes`. seeds, name: (N,) int64, see
    `noise.names`.
"""
