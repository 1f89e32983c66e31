"""Bits that forbid tokens: against a loop, and in the sampler."""

import numpy as np
import pytest
import torch

from bateleur.runner.sampling.rejection_sampler import draw
from bateleur.runner.sampling.sampler import Sampler
from bateleur.runner.sampling.token_rules import forbid_, mask_words
from bateleur.runner.sampling_params import SamplingParams


def words_of(allowed_SV: torch.Tensor) -> torch.Tensor:
    """The bits of a table of bools, one after the other."""
    rows, width = allowed_SV.shape
    words = torch.zeros(rows, mask_words(width), dtype=torch.int64)
    for row, token in allowed_SV.nonzero().tolist():
        words[row, token // 32] += 1 << (token % 32)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


@pytest.mark.parametrize("width", [1, 31, 32, 33, 61, 96, 130])
def test_what_has_no_bit_is_out(width: int) -> None:
    allowed = torch.rand(5, width, generator=torch.Generator().manual_seed(width)) < 0.5
    allowed[0], allowed[1] = True, False
    logits = torch.randn(5, width)
    logits[1] = logits[2] = torch.nan
    expected = torch.where(allowed, logits, -torch.inf)
    forbid_(logits, words_of(allowed))
    assert torch.equal(logits.isnan(), expected.isnan())
    assert torch.equal(logits.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_draw_is_of_what_is_allowed(temperature: float) -> None:
    """A row without any such token says so; one of numbers that are none doesn't; the logits stay as they are."""
    width, params = 61, SamplingParams(temperature=temperature, top_k=5)
    state = Sampler(5, width, "cpu")
    for row in range(5):
        state.admit(row, params, 3, [1])
    logits = torch.randn(5, width)
    logits[3] = torch.nan
    allowed = torch.arange(width) % 5 == torch.arange(5).unsqueeze(1)
    allowed[2] = False
    rows, generated, before = np.arange(5), np.zeros(5, np.int64), logits.clone()
    processed = state.process(logits, rows, generated, allowed=words_of(allowed))
    drawn = draw(state, processed, torch.full((5,), 3), torch.full((5,), 9))
    assert drawn.bad.tolist() == [False, False, True, True, False]
    assert processed.empty is not None
    assert processed.empty.tolist() == [False, False, True, False, False]
    assert (drawn.token_ids % 5)[~drawn.bad].tolist() == [0, 1, 4]
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    assert state.process(logits, rows, generated).empty is None
