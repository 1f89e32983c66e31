"""The sampler against a naive one, row by row, and rows against their neighbours, bit by bit."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
import torch

from bateleur.eagle import Keys, Role, gumbel
from bateleur.runner.sampling.logprobs import Logprobs
from bateleur.runner.sampling.rejection_sampler import draw
from bateleur.runner.sampling.sampler import Sampler
from bateleur.runner.sampling_params import SamplingParams

V = 61
WORDS = ((30,), (9, 30, 5), (4, 4, 9, 30, 12), (9, 4, 4, 9, 30, 13), (30, 4, 6), (7, 30, 14))
"""Token ids of words that are bad where a request has any."""


class Sampled(NamedTuple):
    """Of each row: its token, whether it has none, and log probabilities."""

    token_ids: torch.Tensor
    bad: torch.Tensor
    logprobs: Logprobs | None


@dataclass
class Case:
    """A request at some step."""

    params: SamplingParams
    seed: int = 7
    prompt: list[int] = field(default_factory=lambda: [1, 2, 2, 9])
    output: list[int] = field(default_factory=lambda: [4, 4, 9, 30])
    stops: tuple[int, ...] = (5, 6)


def ruled(case: Case, x: list[float]) -> list[float]:
    """What rules of tokens leave, and add."""
    p = case.params
    if p.allowed_token_ids is not None:
        x = [value if i in p.allowed_token_ids else -math.inf for i, value in enumerate(x)]
    for *start, last in WORDS if p.bad_words else ():
        if case.output[len(case.output) - len(start) :] == start and len(start) <= len(case.output):
            x[last] = -math.inf
    if len(case.output) < p.min_tokens:
        for i in case.stops:
            x[i] = -math.inf
    return [value + (p.logit_bias or {}).get(i, 0.0) for i, value in enumerate(x)]


def processed(case: Case, logits: list[float]) -> list[float]:
    """What the distribution is over, by loops in float64; -inf is out."""
    p, x = case.params, ruled(case, [float(value) for value in logits])
    for i in range(len(x)):
        count = case.output.count(i)
        if count or i in case.prompt:
            x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
        x[i] -= p.frequency_penalty * count + (p.presence_penalty if count else 0.0)
    if p.greedy:
        return x
    x = [value / p.temperature for value in x]
    best = max(x)
    x = [value if p.min_p == 0 or math.exp(value - best) >= p.min_p else -math.inf for value in x]
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if p.top_k > 0:
        for i in order[p.top_k :]:
            x[i] = -math.inf
    mass = [math.exp(x[i] - best) for i in order]
    before, limit = 0.0, p.top_p * sum(mass)
    for i, shard in zip(order, mass, strict=True):
        if p.top_p < 1 and before >= limit:
            x[i] = -math.inf
        before += shard
    return x


def expected_token(case: Case, logits: torch.Tensor) -> int:
    x = torch.tensor(processed(case, logits.tolist()), dtype=torch.float64)
    if not case.params.greedy:
        keys = Keys(torch.tensor([case.seed]), torch.tensor([position(case)]))
        x = x + gumbel(keys, Role.TARGET, len(x))[0].double()
    return int(x.argmax())


def position(case: Case) -> int:
    return len(case.prompt) + len(case.output)


def step(cases: list[Case], logits: torch.Tensor, rows: list[int] | None = None) -> Sampled:
    """One step of a fresh state; `rows` are the table rows of the cases."""
    rows = list(range(len(cases))) if rows is None else rows
    state = Sampler(max(rows) + 2, logits.shape[1], "cpu")
    for row, case in zip(rows, cases, strict=True):
        admit(state, row, case)
    return sample(state, cases, logits, rows)


def admit(state: Sampler, row: int, case: Case) -> None:
    words = WORDS if case.params.bad_words else ()
    state.admit(row, case.params, case.seed, case.prompt, case.output, case.stops, words)


def sample(state: Sampler, cases: list[Case], logits: torch.Tensor, rows: list[int]) -> Sampled:
    positions = torch.tensor([position(case) for case in cases])
    generated = np.array([len(case.output) for case in cases])
    seeds = torch.tensor([case.seed for case in cases])
    drawn = draw(state, state.process(logits, np.array(rows), generated), seeds, positions)
    return Sampled(*drawn, state.logprobs(logits, drawn.token_ids, np.array(rows)))


def random_logits(num_rows: int, seed: int = 0, scale: float = 3.0, width: int = V) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)) * scale


KINDS = {
    "greedy": SamplingParams(temperature=0),
    "plain": SamplingParams(),
    "warm": SamplingParams(temperature=0.7),
    "hot": SamplingParams(temperature=1e30),
    "top_k": SamplingParams(top_k=3),
    "top_k_1": SamplingParams(top_k=1),
    "top_k_all": SamplingParams(top_k=V + 5),
    "top_p": SamplingParams(top_p=0.8),
    "top_p_tiny": SamplingParams(top_p=1e-60),
    "min_p": SamplingParams(min_p=0.2),
    "min_p_1": SamplingParams(min_p=1.0),
    "all_three": SamplingParams(temperature=1.3, top_k=9, top_p=0.9, min_p=0.01),
    "repetition": SamplingParams(repetition_penalty=1.8),
    "negative": SamplingParams(repetition_penalty=0.5, frequency_penalty=-1.5, presence_penalty=-2),
    "counts": SamplingParams(frequency_penalty=1.5, presence_penalty=1.0, temperature=0),
    "min_tokens": SamplingParams(min_tokens=5),
    "min_tokens_done": SamplingParams(min_tokens=4),
    "bias": SamplingParams(logit_bias={5: -4.0, 59: 3.5, 60: 100, 9: -100}, top_k=3),
    "bias_greedy": SamplingParams(temperature=0, logit_bias={4: -2.5, 0: 6.0}),
    "allowed": SamplingParams(allowed_token_ids=[17, 5, 0, 31, 32, 60, 4, 33]),
    "bad_words": SamplingParams(bad_words=["what they are, WORDS says"]),
    "all_rules": SamplingParams(
        temperature=0.9,
        logit_bias={17: 2.0, 4: 1.0, 12: 9.0},
        allowed_token_ids=range(4, 31),
        bad_words=["as above"],
        min_tokens=9,
        repetition_penalty=1.3,
        top_p=0.9,
    ),
    "everything": SamplingParams(
        temperature=0.9, top_k=20, top_p=0.7, repetition_penalty=1.2, presence_penalty=0.4, min_tokens=9
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_equals_the_naive_sampler(name: str) -> None:
    logits = random_logits(40)
    logits[:, 5] += 4  # let the stop ids and the seen tokens matter
    logits[:, [4, 9, 30]] += 3
    cases = [Case(KINDS[name], seed=seed) for seed in range(40)]
    before = logits.clone()
    sampled = step(cases, logits)
    assert sampled.token_ids.tolist() == [expected_token(c, x) for c, x in zip(cases, logits, strict=True)]
    assert not sampled.bad.any()
    assert sampled.logprobs is None
    assert torch.equal(logits, before)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "all_three"])
def test_the_support_is_exact_with_ties(name: str) -> None:
    """Coarse logits are full of ties; many seeds reveal the whole support."""
    logits = random_logits(1, seed=3, scale=1.5).round()
    cases = [Case(KINDS[name], seed=seed) for seed in range(4000)]
    drawn = set(step(cases, logits.expand(4000, -1).contiguous()).token_ids.tolist())
    allowed = {i for i, value in enumerate(processed(cases[0], logits[0].tolist())) if value > -math.inf}
    assert drawn <= allowed
    if name == "top_k":
        assert drawn == allowed


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 0.5, -0.5]])
    params = SamplingParams(temperature=0.8)
    cases = [Case(params, seed=seed, prompt=[0], output=[]) for seed in range(20_000)]
    drawn = step(cases, logits.expand(20_000, -1).contiguous()).token_ids
    counts = torch.bincount(drawn, minlength=5).double()

    def z(metadata: torch.Tensor) -> float:
        expected = metadata.double() * 20_000
        return float((((counts - expected) ** 2 / expected).sum() - 4) / math.sqrt(8))

    assert abs(z((logits[0] / 0.8).softmax(0))) < 5
    assert z(logits[0].softmax(0)) > 20  # the test would notice a forgotten temperature


@pytest.mark.parametrize("width", [V, 1000, 20_011])
def test_a_row_does_not_depend_on_its_neighbours(width: int) -> None:
    cases = [Case(params, seed=i) for i, params in enumerate(KINDS.values())]
    logits = random_logits(len(cases), width=width)
    batch = step(cases, logits).token_ids.tolist()
    for i, case in enumerate(cases):
        assert step([case], logits[i : i + 1]).token_ids.tolist() == [batch[i]]
    order = np.random.default_rng(0).permutation(len(cases)).tolist()
    shuffled = step([cases[i] for i in order], logits[order], rows=[3 * i for i in order])
    assert shuffled.token_ids.tolist() == [batch[i] for i in order]


@pytest.mark.parametrize("width", [67, 4099])
def test_processing_is_bitwise_independent_of_neighbours(width: int) -> None:
    """Not only the token: the logits that a draw is from have the same bits alone and in company."""

    def whole(some: list[Case], logits: torch.Tensor) -> torch.Tensor:
        rows, state = np.arange(len(some)), Sampler(len(some), width, "cpu")
        for row, case in enumerate(some):
            admit(state, row, case)
        processed = state.process(logits, rows, np.array([len(case.output) for case in some]))
        assert processed.metadata is not None
        return processed.metadata.apply(processed.logits)

    cases = [Case(params) for params in KINDS.values() if not params.greedy]
    logits = random_logits(len(cases), width=width, scale=25)
    together = whole(cases, logits)
    for i, case in enumerate(cases):
        assert torch.equal(whole([case], logits[i : i + 1])[0], together[i])


def test_large_batch_then_small_and_rows_are_reused() -> None:
    state = Sampler(8, V, "cpu")
    everything = [Case(KINDS["everything"], seed=i) for i in range(8)]
    for row, case in enumerate(everything):
        admit(state, row, case)
    sample(state, everything, random_logits(8), list(range(8)))
    for row in range(8):
        state.release(row)
    logits = random_logits(2, seed=5)
    logits[:, 4] = 50.0
    new = [Case(KINDS["greedy"]), Case(KINDS["counts"], output=[], prompt=[3])]
    for row, case in zip([6, 1], new, strict=True):
        admit(state, row, case)
    assert sample(state, new, logits, [6, 1]).token_ids.tolist() == [4, 4]


def test_drawn_tokens_are_counted_like_resumed_ones() -> None:
    """Running on, and being preempted and resumed with the output so far, agree."""
    params = SamplingParams(temperature=0.8, frequency_penalty=1.2, repetition_penalty=1.3)
    case = Case(params, output=[], prompt=[1, 2])
    other = Case(SamplingParams(), seed=1, output=[])
    state = Sampler(3, V, "cpu")
    for row, c in ((2, case), (0, other)):
        admit(state, row, c)
    for n in range(12):
        logits = random_logits(2, seed=n, scale=0.5)
        resumed = step([case], logits[:1]).token_ids.item()
        assert resumed == expected_token(case, logits[0])
        drawn = sample(state, [case, other], logits, [2, 0]).token_ids
        assert drawn[0].item() == resumed
        state.count(np.array([2, 0]), drawn[:, None])
        case.output.append(int(resumed))
        other.output.append(0)
    assert len(set(case.output)) > 4


@pytest.mark.parametrize("name", KINDS)
def test_rows_with_nan_or_no_token_are_flagged_and_the_others_are_not(name: str) -> None:
    logits = random_logits(5)
    logits[0, 17] = torch.nan
    logits[2] = torch.nan
    logits[3] = -torch.inf
    cases = [Case(KINDS[name], seed=i) for i in range(5)]
    sampled = step(cases, logits)
    assert sampled.bad.tolist() == [True, False, True, True, False]
    for i in (1, 4):
        assert sampled.token_ids[i].item() == expected_token(cases[i], logits[i])


def test_min_tokens_with_stop_lists_of_different_lengths() -> None:
    logits = torch.zeros(3, V)
    logits[:, 5], logits[:, 0], logits[:, 6] = 9.0, 8.0, 7.0  # 0 must not be masked by mere padding
    masked = SamplingParams(temperature=0, min_tokens=9)
    cases = [Case(masked, stops=(6, 5, 60)), Case(masked, stops=(5,)), Case(masked, stops=())]
    assert step(cases, logits).token_ids.tolist() == [0, 0, 5]


def test_logprobs_of_named_tokens_replace_the_most_likely_ones() -> None:
    logits = random_logits(3)
    cases = [Case(SamplingParams(logprob_token_ids=ids, logprobs=2)) for ids in ([7, 0, 59], None, [5])]
    sampled = step(cases, logits)
    assert sampled.logprobs is not None
    raw = logits.double().log_softmax(-1)
    best = raw.topk(3).indices.tolist()
    wanted = [[7, 0, 59], best[1], [5, *best[2][1:]]]
    assert sampled.logprobs.top_ids.tolist() == wanted
    torch.testing.assert_close(sampled.logprobs.top_values.double(), raw.gather(1, torch.tensor(wanted)))
    state = Sampler(1, V, "cpu")
    admit(state, 0, cases[0])
    admit(state, 0, cases[1])
    again = sample(state, cases[1:2], logits[1:2], [0]).logprobs
    assert again is not None
    assert again.top_ids.tolist() == [best[1][:2]], "a row forgets the tokens of its last request"


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(3)
    cases = [
        Case(SamplingParams(temperature=0, logprobs=2, repetition_penalty=1.5)),
        Case(SamplingParams(top_k=2, logprobs=4)),
        Case(SamplingParams(logprobs=None)),
    ]
    sampled = step(cases, logits)
    assert sampled.logprobs is not None
    raw = logits.double().log_softmax(-1)
    ids = sampled.token_ids
    assert sampled.logprobs.top_ids.tolist() == raw.topk(4).indices.tolist()
    torch.testing.assert_close(sampled.logprobs.top_values.double(), raw.topk(4).values, atol=1e-5, rtol=0)
    own = raw.gather(1, ids[:, None])
    torch.testing.assert_close(sampled.logprobs.sampled.double(), own[:, 0], atol=1e-5, rtol=0)
    assert sampled.logprobs.rank.tolist() == ((raw > own).sum(-1) + 1).tolist()
    none = step([Case(SamplingParams(logprobs=0))], logits[:1])
    assert none.logprobs is not None
    assert none.logprobs.top_ids.shape == (1, 0)
    assert none.logprobs.sampled.shape == (1,)


def test_a_seed_and_a_position_decide() -> None:
    logits = torch.zeros(1, 5000)
    base = Case(SamplingParams(), seed=-(2**63))
    again = step([base], logits).token_ids.item()
    assert step([Case(SamplingParams(), seed=-(2**63))], logits).token_ids.item() == again
    assert step([Case(SamplingParams(), seed=2**63 - 1)], logits).token_ids.item() != again
    assert step([Case(SamplingParams(), seed=-(2**63), output=[1])], logits).token_ids.item() != again


def test_penalty_counts_are_allocated_when_needed() -> None:
    state = Sampler(4, V, "cpu")
    state.admit(0, KINDS["all_three"], 1, [1], [], (5,))
    assert state._output_counts is None
    state.admit(1, KINDS["repetition"], 1, [1], [], (5,))
    assert state._output_counts is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_never_waits_for_the_device() -> None:
    cases = [Case(params, seed=i) for i, params in enumerate(KINDS.values())]
    logits = random_logits(len(cases))
    state = Sampler(len(cases), V, "cuda")
    for row, case in enumerate(cases):
        admit(state, row, case)
    on_device = logits.cuda()
    positions = torch.tensor([position(case) for case in cases]).cuda()
    seeds = torch.tensor([case.seed for case in cases]).cuda()
    generated = np.array([len(case.output) for case in cases])
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows = np.arange(len(cases))
        sampled = draw(state, state.process(on_device, rows, generated), seeds, positions)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = [expected_token(c, x) for c, x in zip(cases, logits, strict=True)]
    assert sampled.token_ids.tolist() == expected
