"""Sampling from truncated and tempered logits without materialising the processed logits.

Legend for shapes: N logit rows, V vocabulary.
"""

from torch import Tensor
from torch.library import Library

from bateleur.eagle import native
from bateleur.eagle.draw import SampledTokens, argmax, fake_token_rows, perturbed
from bateleur.eagle.noise import Keys, Lanes, Role, gumbel_, hashed, mixed, names, unit
from bateleur.eagle.sampling_metadata import SamplingMetadata
from bateleur.metadata.dispatch import Implementations, define_op, load

_library = Library("bateleur", "FRAGMENT")


def sample(
    logits: Tensor, metadata: SamplingMetadata, keys: Keys, role: Role = Role.TARGET, *, lanes: Lanes | None = None
) -> SampledTokens:
    """Sample one token per row: the tokens of `draw(metadata.apply(logits), ...)`, bit for bit.

    logits: (N, V) float32 or narrower; not written to.
    metadata: temperature, truncation and penalties of each row.
    keys, role, lanes: as for `draw`. With the lanes of a vocabulary shard it samples over all ranks.

    Raises `ValueError` if the numbers of rows disagree. In C (`native`) a row costs little more than one pass over
    its logits. Without a compiler, torch materialises the processed logits.
    """
    if logits.dim() != 2 or logits.shape[0] != len(keys) or len(metadata) != len(keys):
        raise ValueError(
            f"logits={tuple(logits.shape)}, metadata of {len(metadata)} rows, keys={len(keys)}: must have the same "
            "number of rows"
        )
    if metadata.greedy and metadata.penalties is None:
        return argmax(logits, None if lanes is None else lanes.shard)
    lanes = Lanes.of(logits.shape[1], logits.device) if lanes is None else lanes
    if lanes.shard is not None:
        drawn: SampledTokens = load("bateleur.eagle.shard_sampling:sample_shard")(
            logits, metadata, keys, role, lanes, lanes.shard
        )
        return drawn
    return SAMPLE.on(logits)(logits, metadata, keys, role, lanes)


def _drawn(logits: Tensor, metadata: SamplingMetadata, keys: Keys, role: Role, lanes: Lanes) -> SampledTokens:
    name = names(keys, role)
    if metadata.penalties is not None:
        logits, metadata = metadata.penalties.apply(logits), SamplingMetadata(metadata.host, metadata.values)
    # Not in `Implementations`: the torch form uses `metadata.host`, which an operator cannot take.
    if native.takes(logits):
        return SampledTokens(*_sample_rows(logits, metadata.values, lanes.words, keys.seed, name))
    return argmax(_whole(logits, metadata, lanes.words, keys.seed, name))


SAMPLE = Implementations(_drawn, triton="bateleur.eagle.kernels.rejection_sampler:sample")
"""Forms of `sample` for a whole vocabulary."""


def _whole(logits: Tensor, metadata: SamplingMetadata, words: Tensor, seeds: Tensor, name: Tensor) -> Tensor:
    """Return the perturbed logits (N, V): processed logits plus noise, whose argmax is the sample."""
    noise_NV = gumbel_(unit(mixed(words, *hashed(seeds, name))))
    return perturbed(noise_NV, metadata.apply(logits.float()), metadata.temperature)


def _rows(logits: Tensor, values: Tensor, words: Tensor, seeds: Tensor, name: Tensor) -> tuple[Tensor, Tensor]:
    tokens, bad = native.draw_rows(logits, values, words, seeds, name)
    open_M = (tokens < 0).nonzero().squeeze(1)
    if len(open_M):
        some = values[open_M]
        metadata = SamplingMetadata(some.numpy(), some)
        tokens[open_M], bad[open_M] = argmax(_whole(logits[open_M], metadata, words, seeds[open_M], name[open_M]))
    return tokens, bad


_sample_rows = define_op(_library, _rows, Implementations(_rows), mutates=(), fake=fake_token_rows, name="sample_rows")
"""A torch operator, so that a recorded graph holds it."""
