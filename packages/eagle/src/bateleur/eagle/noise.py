"""Keyed noise: random numbers that are a pure function of a name (key) instead of a generator's state.

A random number is named by (seed, position, draft index, role, token id). It is an integer hash of that name, so it has
the same bits on every device, in every batch and in every order. No generator state is saved, restored or advanced.

Legend for shapes: R rows, V token ids, always of the *target's* vocabulary.

The definition (arithmetic modulo 2^64 or 2^32, `>>>` is the logical shift)::

    fmix64(x):  x ^= x >>> 33, x *= 0xFF51AFD7ED558CCD, x ^= x >>> 33, x *= 0xC4CEB9FE1A85EC53, x ^= x >>> 33
    fmix32(x):  x ^= x >>> 16, x *= 0x85EBCA6B,         x ^= x >>> 13, x *= 0xC2B2AE35,         x ^= x >>> 16
    name   = position + draft_index * 2^32 + role * 2^56  # injective: position < 2^32, draft_index < 2^24, role < 2^7
    row    = fmix64(fmix64(seed + 0x9E3779B97F4A7C15) ^ name)
    (a, b) = low and high 32 bits of row
    x      = ((fmix32(token_id + 0x9E3779B9) ^ a) * 0x7FEB352D) ^ b
    y      = (x ^ (x >>> 15)) * 0x846CA68B
    bits   = (y ^ (y >>> 16)) * 0x2C1B3C6D
    u      = float32(bits mod 2^31) * (1 - 2^-24) * 2^-31 + 2^-32        # in [2^-32, 1 - 2^-24]
    gumbel = -log(-log1p(-u))                                            # in [-2.82, 22.2], always finite

`fmix64` and `fmix32` are the finalisers of MurmurHash3 (Austin Appleby, public domain); the multipliers of
the pass over token ids are those of `lowbias32` and one more of its search (Chris Wellons, public domain). Every step
is a bijection: for one seed different names give different rows, for one name different seeds do, and in one row
different ids give different bits. A row carries 64 bits, because 32 would repeat the noise of a whole vocabulary
after some 65,000 tokens (birthday).

The relation of the noise of two ids depends only on the difference of their hashed ids, because `a` is uniform. Two
multiplications do not suffice: a difference in the top bit passes the first one unchanged, and the `bits` of the two
ids differed by a constant. `benchmarks/law.py` scans differences of every part of a name.

Why not the usual u = (k + 0.5) * 2^-24: in float32 the largest k rounds to u = 1, and a Gumbel variate of
+inf then wins against any logit, once in 2^24 ids, which is every hundred tokens with a vocabulary of
150,000. The form above stays finite and keeps float32's relative precision at the end that decides an argmax,
so that ties are rare.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from bateleur.eagle.vocab_shard import VocabShard


def _signed(value: int, width: int) -> int:
    """Return the signed (two's-complement) value of an unsigned constant of `width` bits, for torch's types."""
    return value - (1 << width) if value >> (width - 1) else value


_SEED_OFFSET = _signed(0x9E3779B97F4A7C15, 64)
_FMIX64 = (_signed(0xFF51AFD7ED558CCD, 64), _signed(0xC4CEB9FE1A85EC53, 64))
_ID_OFFSET = _signed(0x9E3779B9, 32)
_FMIX32 = (_signed(0x85EBCA6B, 32), _signed(0xC2B2AE35, 32))
_ID_MIX = (_signed(0x7FEB352D, 32), _signed(0x846CA68B, 32), _signed(0x2C1B3C6D, 32))
_SCALE = (1.0 - 2.0**-24) * 2.0**-31
_FLOOR = 2.0**-32


class Role(IntEnum):
    """Purpose of a random number. Numbers of different roles are independent.

    TARGET is for samples of the target; a drafter for the acceptance rule `Rule.COUPLED` uses the same numbers on
    purpose. DRAFT is for drafts that must be independent of the target's sample. ACCEPT is for the acceptance tests of
    `Rule.RATIO` and `Rule.BLOCK`.
    """

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2


@dataclass(frozen=True, slots=True)
class Keys:
    """Names (keys) of the random numbers of R samples.

    seed: (R,) int64, any value, one per request.
    position: (R,) int64 in [0, 2^32): index in its sequence of the sampled token, never a clamped RoPE position.
    draft_index: int in [0, 2^24), or (R,) int64: separates samples of one role at one position.

    Raises `ValueError` for a wrong dtype or shape, or an int draft_index out of range. Values in tensors are not
    checked, because this would read the device.
    """

    seed: Tensor
    position: Tensor
    draft_index: Tensor | int = 0

    def __post_init__(self) -> None:
        for name, value in (("seed", self.seed), ("position", self.position), ("draft_index", self.draft_index)):
            if isinstance(value, int):
                if not 0 <= value < 1 << 24:
                    raise ValueError(f"{name}={value} must be in [0, 2^24)")
            elif value.dtype != torch.int64 or value.shape != self.seed.shape or value.dim() != 1:
                raise ValueError(
                    f"{name} must be int64 of shape (R,) like seed {tuple(self.seed.shape)}, "
                    f"got {value.dtype} {tuple(value.shape)}"
                )

    def __len__(self) -> int:
        return self.seed.shape[0]


@dataclass(frozen=True, slots=True)
class HashedVocab:
    """Hashed token ids of a vocabulary, for callers that sample over it in every step.

    hashes: (V,) int32, hashed ids, on the device of the keys.
    shard: the vocabulary shard of the ids. Logits are then those of the shard, and all ranks sample the same token of
        the whole vocabulary.
    """

    hashes: Tensor
    shard: VocabShard | None = None

    @classmethod
    def of(cls, ids: int | Tensor | VocabShard, device: torch.device) -> HashedVocab:
        """Hash the ids 0 .. ids-1, the (V,) integer tensor `ids`, or those of a vocabulary shard. Raises `ValueError`
        for a count below 1.
        """
        if isinstance(ids, int) and ids < 1:
            raise ValueError(f"vocab={ids} must be at least 1")
        if isinstance(ids, Tensor):
            x_V = ids.to(device=device, dtype=torch.int32, copy=True)
        else:
            first, end = (0, ids) if isinstance(ids, int) else (ids.first, ids.end)
            x_V = torch.arange(first, end, dtype=torch.int32, device=device)
        x_V += _ID_OFFSET
        for shift, factor in zip((16, 13), _FMIX32, strict=True):
            _shifted_(x_V, shift).mul_(factor)
        return cls(_shifted_(x_V, 16), ids if isinstance(ids, VocabShard) else None)


def bits(keys: Keys, role: Role, vocab: int | Tensor | HashedVocab) -> Tensor:
    """Return the 32 random bits of every (row, token id), (R, V) int32.

    vocab: a count V for the token ids 0 .. V-1; a (V,) integer tensor of token ids (a reduced draft vocabulary passes
        its target ids and so shares the noise of the target); or either of them hashed as `HashedVocab`.
    """
    if not isinstance(vocab, HashedVocab):
        vocab = HashedVocab.of(vocab, keys.seed.device)
    return mixed(vocab.hashes, *row_words(keys, role))


def uniform(keys: Keys, role: Role, vocab: int | Tensor | HashedVocab = 1) -> Tensor:
    """Return uniform numbers in [2^-32, 1 - 2^-24], (R, V) float32. `vocab` as for `bits`."""
    return unit(bits(keys, role, vocab))


def gumbel(keys: Keys, role: Role, vocab: int | Tensor | HashedVocab) -> Tensor:
    """Return finite Gumbel noise, (R, V) float32; argmax(logits + gumbel) is a sample of softmax(logits).

    `vocab` as for `bits`. The bits agree on every device; the two logarithms may differ in the last place.
    """
    return gumbel_(uniform(keys, role, vocab))


def mixed(hashes_V: Tensor, low_R1: Tensor, high_R1: Tensor) -> Tensor:
    """Return the random bits (R, V) of hashed token ids. low, high: words of each row's hashed key, see `row_words`."""
    x_RV = hashes_V.bitwise_xor(low_R1)
    x_RV.mul_(_ID_MIX[0]).bitwise_xor_(high_R1)
    for shift, factor in zip((15, 16), _ID_MIX[1:], strict=True):
        _shifted_(x_RV, shift).mul_(factor)
    return x_RV


def unit(bits_RV: Tensor) -> Tensor:
    """Turn random bits (R, V) int32 into uniform numbers, float32; overwrites its argument."""
    return bits_RV.bitwise_and_(0x7FFFFFFF).to(torch.float32).mul_(_SCALE).add_(_FLOOR)


def gumbel_(u_RV: Tensor) -> Tensor:
    """Turn uniform numbers into Gumbel variates, in place."""
    return u_RV.neg_().log1p_().neg_().log_().neg_()


def names(keys: Keys, role: Role) -> Tensor:
    """Pack position, draft index and role of each key into one number, (R,) int64, injectively."""
    name_R = keys.position + (int(role) << 56) if role else keys.position
    if isinstance(keys.draft_index, Tensor) or keys.draft_index:
        name_R = name_R + (keys.draft_index << 32)
    return name_R


def row_words(keys: Keys, role: Role) -> tuple[Tensor, Tensor]:
    """Hash the key of each row (seed, position, draft index, role) to two (R, 1) int32 words, low and high."""
    return hashed(keys.seed, names(keys, role))


def hashed(seed: Tensor, name: Tensor) -> tuple[Tensor, Tensor]:
    """Hash seeds and `names`, (R,) int64 each, to low and high words, (R, 1) int32 each, as `row_words`."""
    row_R1 = _fmix64_(_fmix64_(seed + _SEED_OFFSET).bitwise_xor_(name)).unsqueeze(1)
    return row_R1.to(torch.int32), (row_R1 >> 32).to(torch.int32)


def _fmix64_(x: Tensor) -> Tensor:
    for factor in _FMIX64:
        _shifted_(x, 33).mul_(factor)
    return _shifted_(x, 33)


def _shifted_(x: Tensor, shift: int) -> Tensor:
    """Compute x ^= x >>> shift in place. The mask makes torch's arithmetic shift a logical one."""
    keep = (1 << (8 * x.element_size() - shift)) - 1
    return x.bitwise_xor_((x >> shift).bitwise_and_(keep))
