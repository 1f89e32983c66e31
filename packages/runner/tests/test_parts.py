"""Token rules, penalties, draws and log probabilities over vocabulary shards equal those of the whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.eagle import VocabShard
from bateleur.runner.sampling.logprobs import Logprobs
from bateleur.runner.sampling.rejection_sampler import draw
from bateleur.runner.sampling.sampler import Sampler
from bateleur.runner.sampling.token_rules import mask_words
from bateleur.runner.sampling_params import SamplingParams
from together import Together, at_once, parts_of

V = 1003
STOPS, WORDS = (2, 501, 1002), ((5,), (1, 502), (700, 7, 1001))
KINDS = {
    "greedy": SamplingParams(temperature=0),
    "plain": SamplingParams(),
    "top_k": SamplingParams(top_k=30),
    "top_p": SamplingParams(temperature=0.8, top_p=0.8),
    "all three": SamplingParams(temperature=1.3, top_k=40, top_p=0.9, min_p=0.01),
    "repetition": SamplingParams(temperature=0, repetition_penalty=1.8),
    "frequency, presence": SamplingParams(frequency_penalty=0.7, presence_penalty=-0.4, top_p=0.9),
    "too early": SamplingParams(temperature=0, min_tokens=9),
    "biases": SamplingParams(logit_bias={0: 4.0, 501: 3.0, 1002: -9.0}, top_k=7),
    "few allowed": SamplingParams(allowed_token_ids=[1, 333, 334, 335, 1002]),
    "bad words": SamplingParams(bad_words=["x"], min_p=0.05),
    "none allowed": SamplingParams(allowed_token_ids=[5], bad_words=["x"]),
}
DRAFTS = torch.tensor([[-1, -1], [1, -1], [700, 7]])
"""Before the three places of each request."""

Found = tuple[Tensor, Tensor, Tensor | None, Logprobs | None]


def steps_of(shard: VocabShard | None, logits: list[Tensor], allowed: Tensor | None, top: int | None) -> list[Found]:
    """Two mixed steps: the first with three positions per request as if it had drafts, the next with one."""
    state, rows = Sampler(len(KINDS), V, "cpu", shard), np.arange(len(KINDS))
    for row, params in enumerate(KINDS.values()):
        words = WORDS if params.bad_words else ()
        state.admit(row, replace(params, logprobs=top), row, [3, 501, 2, 900], [1], STOPS, words)
    found = []
    for step, each in enumerate(logits):
        own = each if shard is None else each[:, shard.first : shard.end]
        places: NDArray[np.int64] = np.repeat(rows, 3) if step == 0 else rows
        before = DRAFTS.repeat(len(rows), 1) if step == 0 else None
        generated = np.ones(len(places), np.int64) + (np.tile(np.arange(3), len(rows)) if step == 0 else 0)
        processed = state.process(own, places, generated, before, allowed if step == 0 else None)
        drawn = draw(state, processed, torch.from_numpy(places), torch.arange(len(places)) + 4)
        state.count(rows, drawn.token_ids.view(len(rows), -1))
        found.append((*drawn, processed.empty, state.logprobs(own, drawn.token_ids, places)))
    return found


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_ranks_together_find_what_one_does(num_ranks: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(num_ranks)
    logits = [torch.randn(len(KINDS) * n, V, generator=generator) * 3 for n in (3, 1)]
    logits[0][4, 990] = torch.nan
    allowed = None
    if masked:
        shape = (len(KINDS) * 3, mask_words(V))
        allowed = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).int()
    top = 5 if masked else None
    wanted = steps_of(None, logits, allowed, top)
    together = Together(num_ranks)
    parts = parts_of(V, together)
    for found in at_once(together, lambda rank: steps_of(parts[rank], logits, allowed, top)):
        for one, other in zip(found, wanted, strict=True):
            for mine, theirs in zip(one[:3], other[:3], strict=True):
                assert (mine is None) == (theirs is None)
                assert mine is None or theirs is None or torch.equal(mine, theirs)
            assert (one[3] is None) == (other[3] is None) == (top is None)
            for name, mine in (one[3]._asdict() if one[3] else {}).items():
                torch.testing.assert_close(mine, getattr(other[3], name), equal_nan=True)
    assert wanted[0][2] is not None
    assert wanted[0][2].any()
    assert not wanted[0][2].all()
