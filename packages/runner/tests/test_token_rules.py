"""Rules of tokens: place by place behind drafts, against loops and against transformers; and what they hold."""

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from bateleur.runner.sampling.sampler import Sampler
from bateleur.runner.sampling_params import SamplingParams

V = 5
RULED = SamplingParams(temperature=0, logit_bias={0: 1.5}, bad_words=["x"], allowed_token_ids=[0, 1, 2, 4])


def naive(logits: torch.Tensor, words: list[tuple[int, ...]], output: list[int]) -> torch.Tensor:
    """One row of logits behind `output`."""
    x = logits.clone()
    x[3] = -torch.inf
    for *start, last in words:
        if len(start) <= len(output) and output[len(output) - len(start) :] == start:
            x[last] = -torch.inf
    x[0] += 1.5
    return x


def test_words_are_found_across_what_was_emitted_and_what_is_drafted() -> None:
    """Few tokens and many words of all lengths, so that a lot of them match; rows come and go, and some draft less."""
    random, num_rows, num_drafts = np.random.default_rng(0), 6, 4
    state = Sampler(num_rows + 1, V, "cpu")
    outputs: dict[int, list[int]] = {}
    words: dict[int, list[tuple[int, ...]]] = {}
    found = longest = 0
    for step in range(60):
        for row in range(num_rows):
            if row not in outputs or random.random() < 0.1:
                outputs[row] = random.integers(0, 2, random.integers(0, 9)).tolist()
                lengths = random.integers(1, 8, random.integers(0, 9))
                words[row] = [tuple(random.integers(0, 2 + (step % 3 == 0), n).tolist()) for n in lengths]
                state.admit(row, RULED, 1, [3, 0, 1], outputs[row], (), words[row])
        rows = random.permutation(num_rows)[: random.integers(1, num_rows + 1)]
        counts = random.integers(1, num_drafts + 2, len(rows))
        if step % 4 == 0:
            counts[:] = 1
        drafts = random.integers(0, 2, (len(rows), num_drafts))
        spots = np.concatenate([np.arange(n) for n in counts])
        before = np.repeat(drafts, counts, 0)
        before[np.arange(num_drafts) >= spots[:, None]] = -1
        logits = torch.randn(len(spots), V)
        generated = np.repeat([len(outputs[row]) for row in rows], counts) + spots
        given = None if (counts == 1).all() else torch.from_numpy(before)
        seen = state.process(logits, np.repeat(rows, counts), generated, given).logits
        at = 0
        for row, count, drafted in zip(rows.tolist(), counts, drafts.tolist(), strict=True):
            for spot in range(count):
                expected = naive(logits[at], words[row], outputs[row] + drafted[:spot])
                assert torch.equal(seen[at], expected)
                found += int((expected[:2] == -torch.inf).sum())
                at += 1
            longest = max([longest, *map(len, words[row])])
        kept = random.integers(0, counts + 1)
        emitted = np.where(np.arange(num_drafts + 1) < kept[:, None], np.pad(drafts, ((0, 0), (0, 1))), -1)
        state.count(rows, torch.from_numpy(emitted))
        for row, tokens, n in zip(rows.tolist(), emitted.tolist(), kept, strict=True):
            outputs[row] += tokens[:n]
    assert found > 200
    assert longest == 7


@pytest.mark.parametrize("seed", range(4))
def test_as_transformers_processes_them(seed: int) -> None:
    """Sums agree in the order of float32's rounding: a bias is added before penalties divide."""
    random, width = np.random.default_rng(seed), 40
    output = random.integers(0, 6, 9).tolist()
    words = [tuple(random.integers(0, 6, n).tolist()) for n in (1, 2, 2, 2, 3, 3)] + [(*output[-3:], 7)]
    allowed = sorted(set(random.integers(0, width, 25).tolist()) | {7})
    bias = {int(token): float(value) for token, value in zip((1, 7, 20, 33), random.normal(0, 3, 4), strict=True)}
    params = SamplingParams(
        temperature=0, logit_bias=bias, bad_words=["x"], allowed_token_ids=allowed, repetition_penalty=1.7
    )
    state = Sampler(1, width, "cpu")
    state.admit(0, params, 1, [], output, (), words)
    logits = torch.randn(1, width, generator=torch.Generator().manual_seed(seed))
    theirs = LogitsProcessorList(
        [
            PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, num_beams=1),
            NoBadWordsLogitsProcessor([list(word) for word in words]),
            SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()}),
            RepetitionPenaltyLogitsProcessor(1.7),
        ]
    )
    expected = theirs(torch.tensor([output]), logits.clone())
    ours = state.process(logits, np.zeros(1, np.int64), np.array([len(output)])).logits
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    assert 0 < int((expected == -torch.inf).sum()) < width


def test_what_rules_hold_follows_what_requests_bring() -> None:
    """10,000 allowed ids for each of 64 rows over 250,000 tokens are bits; biases are what was given; and a row whose
    neighbours have rules keeps the bits of its logits."""
    rows, width = 64, 250_000
    state = Sampler(rows + 1, width, "cpu")
    rules = state.rules
    assert rules._allowed is None
    ids = range(0, width, 25)
    params = SamplingParams(temperature=0, allowed_token_ids=ids, logit_bias={25: 3.0, width - 25: 1.0})
    for row in range(rows):
        state.admit(row, params, 1, [1], (), (), [(1, 50)])
    state.admit(rows, SamplingParams(temperature=0), 1, [1])
    assert rules._allowed is not None
    assert rules._allowed.numel() * 4 < 3 << 20
    logits = torch.randn(2, width)
    processed = state.process(logits, np.array([3, rows]), np.zeros(2, np.int64))
    assert torch.equal(processed.logits[1], logits[1])
    assert (processed.logits[0] > -torch.inf).sum() == len(ids)
    assert processed.logits[0, 25] == logits[0, 25] + 3.0
    held = [each.numel() for table in rules.biases._on_device() for each in table]
    assert sum(held) <= rows * (2 * 3 + 4)
    state.release(4)
    bare = state.process(logits, np.array([3, 4]), np.zeros(2, np.int64)).logits
    assert torch.equal(bare[1], logits[1]), "what a row was allowed before doesn't stay"
    for row in range(rows):
        state.release(row)
    assert not rules.biases._on_device()
    state.admit(3, SamplingParams(temperature=0, logit_bias={1: 1.0}), 1, [1])
    bare = state.process(logits, np.array([4, 3]), np.zeros(2, np.int64)).logits
    assert torch.equal(bare[0], logits[0])
    untouched = state.process(logits, np.array([4, rows]), np.zeros(2, np.int64))
    assert untouched.logits is logits, "where no row has rules, nothing is done"
