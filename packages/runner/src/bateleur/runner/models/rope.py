"""Rotary position embedding: frequencies, and a table of cosines and sines."""

from dataclasses import dataclass

import torch
from torch import Tensor

_FIRST_ROWS = 256


@dataclass(frozen=True, slots=True)
class LongRope:
    """Rotary frequencies for sequences longer than the original length (rope_type "longrope")."""

    original_length: int
    inv_freq: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DynamicRope:
    """RoPE with a base that grows with the sequence length n above the original length (rope_type "dynamic", NTK).

    The base is then `theta * (factor * n / original_length - (factor - 1)) ** (R / (R - 2))` for R rotated elements.
    """

    original_length: int
    """Length in tokens up to which the base is `theta`."""
    theta: float
    """The base up to the original length."""
    factor: float


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding of the first `rotary_dim` elements of a head, in neox style (halves, not pairs).

    `beyond` (LongRoPE or dynamic NTK) makes the frequencies depend on the sequence length, as in transformers. Tokens
    of a prompt use the prompt's length; later tokens use the length up to themselves.
    """

    inv_freq: tuple[float, ...]
    """Radians per position of each pair of elements, with scaling applied."""
    attention_scaling: float = 1.0
    """Factor on cosine and sine (YaRN)."""
    beyond: LongRope | DynamicRope | None = None
    """Frequencies of sequences longer than the original length; None if they are the same."""

    def __post_init__(self) -> None:
        if not self.inv_freq:
            raise ValueError("inv_freq is empty; rotary embedding needs at least one pair of lanes")

    @property
    def rotary_dim(self) -> int:
        """Number of rotated elements of a head."""
        return 2 * len(self.inv_freq)


class RopeTable:
    """Table of cosines and sines (the first half negated, see `rotate`) by position.

    It grows to the longest sequence of any step. Growing allocates, so call `reserve` before a CUDA graph is captured
    over the table. If frequencies depend on the length of the sequence, the table is valid for one prompt length, see
    `set_prompt_length`.
    """

    def __init__(self, spec: RopeSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self._dtype = spec, dtype
        # Uploaded once, because a table may grow within a step.
        self._inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float32, device=device)
        self._table_P2R = torch.empty(0, 2 * spec.rotary_dim, dtype=dtype, device=device)
        self._prompt_len = 0

    def reserve(self, num_positions: int) -> None:
        """Compute the table for positions 0 .. num_positions - 1, if it is shorter."""
        if num_positions > (rows := len(self._table_P2R)):
            self._table_P2R = self._rows(max(num_positions, 2 * rows, _FIRST_ROWS))

    def set_prompt_length(self, prompt_len: int) -> None:
        """Recompute the table in place for a prompt length, if frequencies depend on it (`ModelSpec.rope_length`)."""
        if self.spec.beyond is not None and prompt_len != self._prompt_len:
            self._prompt_len = prompt_len
            self._table_P2R.copy_(self._rows(len(self._table_P2R)))

    def _rows(self, count: int) -> Tensor:
        """Return the first `count` rows of the table. Angles are float32, rounded once at the end, as in training."""
        positions_P = torch.arange(count, dtype=torch.float32, device=self._inv_freq.device)
        angle_PR = positions_P[:, None] * self._frequencies(positions_P + 1)
        cos, sin = angle_PR.cos(), angle_PR.sin()
        return torch.cat((cos, cos, -sin, sin), dim=-1).mul_(self.spec.attention_scaling).to(self._dtype)

    def _frequencies(self, length_P: Tensor) -> Tensor:
        """Return radians per position, (P, rotary_dim / 2), or (rotary_dim / 2,) if they do not depend on the length.

        length_P: length of the sequence up to each position.
        """
        beyond = self.spec.beyond
        if beyond is None:
            return self._inv_freq
        length_P1 = length_P.clamp(min=self._prompt_len)[:, None]
        if isinstance(beyond, LongRope):
            longer = torch.tensor(beyond.inv_freq, dtype=torch.float32, device=length_P.device)
        else:
            dim, original = self.spec.rotary_dim, beyond.original_length
            growth = beyond.factor * length_P1 / original - (beyond.factor - 1)
            base_P1 = beyond.theta * growth ** (dim / (dim - 2))
            longer = 1.0 / base_P1 ** (torch.arange(0, dim, 2, device=length_P.device).float() / dim)
        return torch.where(length_P1 > beyond.original_length, longer, self._inv_freq)

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, (T, 1, rotary_dim) each, as `rotate` takes them. The table must be long enough.

        positions_T: (T,) integers.
        """
        cos_T1R, sin_T1R = self._table_P2R.index_select(0, positions_T).unsqueeze(1).chunk(2, -1)
        return cos_T1R, sin_T1R


def rotate(x_THD: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Return x (T, heads, D) with the first R elements of every head rotated, possibly in place.

    Element i is paired with element i + R/2. cos, sin: (T, 1, R), of R/2 angles, then of the same angles again.
    The first half of `sin` is negated.
    """
    rotary_dim = cos_T1R.shape[-1]
    if rotary_dim == x_THD.shape[-1]:
        return torch.addcmul(x_THD * cos_T1R, x_THD.roll(rotary_dim // 2, -1), sin_T1R)
    part_THR = x_THD[..., :rotary_dim]
    part_THR.copy_(torch.addcmul(part_THR * cos_T1R, part_THR.roll(rotary_dim // 2, -1), sin_T1R))
    return x_THD
