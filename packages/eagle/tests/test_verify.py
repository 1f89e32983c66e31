"""What verification promises row by row: shapes, ragged drafts, missing drafts, bad rows, ties, refusals."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bateleur.eagle import HashedVocab, Keys, Role, argmax, draw
from bateleur.eagle.rejection_sampler import draw_draft, verify
from bateleur.eagle.rules import (
    Coupled,
    DraftDistribution,
    Drafts,
    Logits,
    OneHot,
    RejectionOutput,
    Rows,
    Rule,
    apply_temperature,
)

V, K = 11, 3
NAN, INF = float("nan"), float("inf")
REJECTION = (Rule.RATIO, Rule.BLOCK)


def rows_of(lens: Sequence[int], temperature: Sequence[float] | None = None, *, seed: int = 0) -> Rows:
    """Requests with `lens` logit rows."""
    starts = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)
    seeds = torch.arange(len(lens)) * 17 - 4 + seed
    heat = torch.tensor([1.0] * len(lens) if temperature is None else list(temperature))
    return Rows(starts, seeds, torch.arange(len(lens)) * 100 + 7, heat)


def random_logits(num: int, seed: int = 0, size: int = V) -> Tensor:
    return torch.randn(num, size, generator=torch.Generator().manual_seed(seed)) * 1.5


def distribution_for(rule: Rule, num_reqs: int, num_drafts: int = K, seed: int = 5) -> DraftDistribution:
    if rule is Rule.COUPLED:
        return Coupled()
    return Logits(random_logits(num_reqs * num_drafts, seed).view(num_reqs, num_drafts, V))


def by_hand(logits: Tensor, tokens: Tensor, rows: Rows) -> list[tuple[list[int], bool]]:
    """COUPLED, one request and one row at a time."""
    out, starts = [], rows.query_start_loc.tolist()
    for r in range(len(rows)):
        emitted, bad = [], False
        for i in range(starts[r + 1] - starts[r]):
            keys = Keys(rows.seeds[r : r + 1], rows.first_position[r : r + 1] + i)
            drawn = draw(logits[starts[r] + i : starts[r] + i + 1], rows.temperature[r : r + 1], keys)
            bad = bool(drawn.bad)
            if not bad:
                emitted.append(int(drawn.token_ids))
            if bad or i == tokens.shape[1] or emitted[-1] != int(tokens[r, i]):
                break
        out.append((emitted, bad))
    return out


def lists(output: RejectionOutput) -> list[tuple[list[int], bool]]:
    """The same form; what is behind the emitted tokens must be -1."""
    out = []
    for tokens, num, bad in zip(*(shard.tolist() for shard in output), strict=True):
        assert tokens[num:] == [-1] * (len(tokens) - num)
        out.append((tokens[:num], bad))
    return out


def likely(logits: Tensor, rows: Rows, num_drafts: int, seed: int) -> Tensor:
    """Drafts of which about two in three are the target's own draws, and some are missing."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.full((len(rows), num_drafts), -1)
    for _ in range(num_drafts):
        found = verify(logits, Drafts(tokens, Coupled()), rows).tokens[:, :num_drafts]
        tokens = torch.where(tokens < 0, found, tokens)
    noise = torch.rand(tokens.shape, generator=generator)
    return torch.where(noise < 0.65, tokens, torch.where(noise < 0.75, -1, (tokens + 1) % logits.shape[1]))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, K + 1), st.sampled_from([0.0, 0.8, 1.0])), min_size=1, max_size=6),
    st.integers(0, 2),
    st.integers(0, 1000),
)
def test_a9_coupled_is_draw_row_by_row(requests: list[tuple[int, float]], padding: int, seed: int) -> None:
    lens, heat = zip(*requests, strict=True)
    rows = rows_of(lens, heat, seed=seed)
    logits = random_logits(sum(lens) + padding, seed)
    tokens = likely(logits, rows, K, seed)
    output = verify(logits, Drafts(tokens, Coupled()), rows)
    assert lists(output) == by_hand(logits, tokens, rows)
    with_lanes = verify(logits, Drafts(tokens, OneHot()), rows, vocab=HashedVocab.of(V, logits.device))
    assert lists(with_lanes) == lists(output)


@pytest.mark.parametrize("rule", Rule)
def test_a9_a10_requests_do_not_depend_on_their_neighbours(rule: Rule) -> None:
    lens = [4, 1, 3, 2, 4, 1, 4] * 6
    rows = rows_of(lens, [1, 1, 0, 0.5, 1, 0, 2] * 6)
    logits, distribution = random_logits(sum(lens)), distribution_for(rule, len(lens))
    tokens = likely(logits, rows, K, 3)
    together = lists(verify(logits, Drafts(tokens, distribution), rows, rule=rule))
    starts = rows.query_start_loc.tolist()
    for r in range(len(lens)):
        only = distribution if isinstance(distribution, Coupled) else Logits(distribution.logits[r : r + 1])
        alone = Rows(
            torch.tensor([0, lens[r]], dtype=torch.int32),
            *(value[r : r + 1] for value in (rows.seeds, rows.first_position, rows.temperature)),
        )
        one = verify(logits[starts[r] : starts[r + 1]], Drafts(tokens[r : r + 1], only), alone, rule=rule)
        assert lists(one) == [together[r]]


@pytest.mark.parametrize("rule", Rule)
def test_a10_seeds_decide_and_only_they(rule: Rule) -> None:
    num = 64
    logits = torch.zeros(num, 1000)
    rows = rows_of([1] * num)
    rows = dataclasses.replace(rows, first_position=torch.full((num,), 3))
    drafts = Drafts(torch.empty(num, 0, dtype=torch.int64), OneHot())
    tokens = verify(logits, drafts, rows, rule=rule).tokens.flatten().tolist()
    assert len(set(tokens)) > 50
    same = dataclasses.replace(rows, seeds=torch.full((num,), 9))
    assert len(set(verify(logits, drafts, same, rule=rule).tokens.flatten().tolist())) == 1


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("num_drafts", [0, K])
def test_requests_without_drafts_get_the_plain_draw(rule: Rule, num_drafts: int) -> None:
    lens, heat = [1, 1, 1], [1.0, 0.0, 0.6]
    rows, logits = rows_of(lens, heat), random_logits(3)
    tokens = torch.full((3, num_drafts), 5)  # behind the rows: not drafts at all
    output = verify(logits, Drafts(tokens, distribution_for(rule, 3, num_drafts)), rows, rule=rule)
    want = draw(logits, rows.temperature, Keys(rows.seeds, rows.first_position)).token_ids
    assert torch.equal(output.tokens[:, 0], want)
    assert output.num_emitted.tolist() == [1, 1, 1]


@pytest.mark.parametrize("rule", Rule)
def test_a_request_without_rows_emits_nothing(rule: Rule) -> None:
    rows, logits = rows_of([2, 0, 1, 0]), random_logits(3)
    distribution = distribution_for(rule, 4)
    output = verify(logits, Drafts(torch.zeros(4, K, dtype=torch.int64), distribution), rows, rule=rule)
    assert output.num_emitted[[1, 3]].tolist() == [0, 0]
    assert output.tokens[[1, 3]].eq(-1).all()
    assert not output.bad.any()
    assert (output.num_emitted[[0, 2]] > 0).all()
    none = verify(logits[:0], Drafts(torch.zeros(2, K, dtype=torch.int64), OneHot()), rows_of([0, 0]), rule=rule)
    assert lists(none) == [([], False)] * 2
    nobody = verify(logits, Drafts(torch.zeros(0, K, dtype=torch.int64), OneHot()), rows_of([]), rule=rule)
    assert nobody.tokens.shape == (0, K + 1)


@pytest.mark.parametrize("kind", ["drawn", "one-hot"])
@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a6_no_draft_here_at_every_place(rule: Rule, kind: str, temperature: float) -> None:
    """Verification stops at a -1 and draws there; what stands behind it does not matter."""
    patterns = list(itertools.product([False, True], repeat=K)) * 20
    num = len(patterns)
    missing = torch.tensor(patterns)
    rows, logits = rows_of([K + 1] * num, [temperature] * num), random_logits(4 * num)
    likely_tokens = argmax(logits).token_ids.view(num, K + 1)[:, :K]
    distribution = OneHot() if kind == "one-hot" else distribution_for(rule, num)
    results = []
    for absent, behind in ((-1, 0), (-7, 1)):
        first = torch.where(missing, torch.arange(K), K).amin(1)
        tokens = torch.where(torch.arange(K) > first.unsqueeze(1), behind, likely_tokens)
        tokens = torch.where(missing, absent, tokens)
        output = verify(logits, Drafts(tokens, distribution), rows, rule=rule)
        assert (output.num_emitted >= 1).all()
        assert (output.num_emitted <= first + 1).all()
        assert all(min(emitted) >= 0 for emitted, _ in lists(output))
        results.append(lists(output))
        keys = Keys(rows.seeds, rows.first_position + first)
        own = draw(logits.view(num, K + 1, V)[torch.arange(num), first], rows.temperature, keys).token_ids
        ended = output.num_emitted == first + 1
        assert torch.equal(output.tokens[torch.arange(num), first][ended], own[ended])
        assert ended.any()
    assert results[0] == results[1]


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("what", ["nan", "all-nan", "no-support"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a7_bad_rows_at_every_place(rule: Rule, what: str, temperature: float) -> None:
    """Tokens before the bad row are emitted, then the request is flagged; a bad row behind the stop does not matter."""
    num = 40
    for place in range(K + 1):
        logits = random_logits(num * (K + 1)).view(num, K + 1, V)
        tokens = argmax(logits.flatten(0, 1)).token_ids.view(num, K + 1)[:, :K].clone()
        # The law of the drafts is the target's own: BLOCK accepts all of them but for the bad row.
        distribution = distribution_for(rule, num) if rule is Rule.COUPLED else Logits(logits[:, :K].clone())
        clean = verify(
            logits.flatten(0, 1), Drafts(tokens, distribution), rows_of([K + 1] * num, [temperature] * num), rule=rule
        )
        logits[:, place] = {"nan": logits[:, place], "all-nan": NAN, "no-support": -INF}[what]
        if what == "nan":
            logits[:, place, 4] = NAN
        tokens[: num // 2, place:] = 0  # the placeholder of a bad row must not look like an accepted draft
        rows = rows_of([K + 1] * num, [temperature] * num)
        output = verify(logits.flatten(0, 1), Drafts(tokens, distribution), rows, rule=rule)
        reached = clean.num_emitted > place
        assert reached.any()
        assert torch.equal(output.bad, reached)
        assert (
            torch.equal(output.num_emitted, clean.num_emitted.clamp(max=place))
            if place
            else (output.num_emitted.tolist() == [0] * num)
        )
        for (emitted, _), (before, _) in zip(lists(output), lists(clean), strict=True):
            assert emitted == before[: len(emitted)]
            assert all(0 <= token < V for token in emitted)


@pytest.mark.parametrize("rule", Rule)
def test_an_infinite_logit_decides(rule: Rule) -> None:
    num = 30
    logits = random_logits(num * 2)
    logits[::2, 6] = INF
    tokens = torch.where(torch.arange(num) % 2 == 0, 6, 1).unsqueeze(1)
    rows = rows_of([2] * num)
    output = verify(logits, Drafts(tokens, distribution_for(rule, num, 1)), rows, rule=rule)
    assert not output.bad.any()
    assert output.tokens[:, 0].eq(6).all()


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("drawn", [False, True])
def test_greedy_rows_are_the_same_under_every_rule(rule: Rule, drawn: bool) -> None:
    """Temperature 0 among rows that sample; ties of coarse logits go to the lowest id."""
    lens = [4, 3, 4, 1, 4, 2, 4] * 6
    heat = [0.0 if i % 3 else 1.0 for i in range(len(lens))]
    rows = rows_of(lens, heat)
    logits = random_logits(sum(lens), size=64).mul(2).round().to(torch.bfloat16).float()
    assert (logits == logits.amax(1, keepdim=True)).sum(1).gt(1).any()
    tokens = likely(logits, rows, K, 1)
    laws = random_logits(len(lens) * K, 3, 64).view(len(lens), K, 64)
    distribution = Logits(laws) if drawn else OneHot()
    got = lists(verify(logits, Drafts(tokens, distribution), rows, rule=rule))
    want = by_hand(logits, tokens, rows)
    greedy = [i for i, t in enumerate(heat) if t == 0]
    assert [got[i] for i in greedy] == [want[i] for i in greedy]
    assert max(len(want[i][0]) for i in greedy) == K + 1
    starts = rows.query_start_loc.tolist()
    assert all(token == int(logits[starts[i] + n].argmax()) for i in greedy for n, token in enumerate(got[i][0]))


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a3_the_target_as_its_own_drafter_is_accepted_whole(rule: Rule, temperature: float) -> None:
    """The law that drafts are tested against is the one they were drawn from, to the bit: K + 1 tokens, always."""
    num = 300
    raw, heat = random_logits(num * (K + 1), 8, 50).view(num, K + 1, 50), torch.full((num,), temperature)
    rows = rows_of([K + 1] * num, heat.tolist())
    drawn = [
        draw_draft(raw[:, k], heat, rows.seeds, rows.first_position + k, rule=rule, draft_index=k).token_ids
        for k in range(K)
    ]
    drafts = Drafts(torch.stack(drawn, 1), Coupled() if rule is Rule.COUPLED else Logits(raw[:, :K]))
    logits = apply_temperature(raw, heat).flatten(0, 1)
    assert verify(logits, drafts, rows, rule=rule).num_emitted.eq(K + 1).all()
    if rule is not Rule.COUPLED and temperature == 0.7:  # the control: another temperature on one side
        hotter = dataclasses.replace(drafts, distribution=Logits(raw[:, :K] * 1.05))
        assert verify(logits, hotter, rows, rule=rule).num_emitted.lt(K + 1).any()


def test_coupled_drafts_of_a_reduced_vocabulary_share_lanes() -> None:
    """The target draws from the reduced vocabulary only: its draws are the drafts."""
    num, ids = 200, torch.tensor([9, 2, 7, 4])
    reduced = random_logits(num, 1, 4)
    logits = torch.full((num * 2, V), -INF)
    logits[::2] = logits[::2].index_copy(1, ids, reduced)
    logits[1::2] = 0
    rows = rows_of([2] * num)
    lane = draw_draft(
        reduced, rows.temperature, rows.seeds, rows.first_position, vocab=HashedVocab.of(ids, ids.device)
    ).token_ids
    assert verify(logits, Drafts(ids[lane].unsqueeze(1), Coupled()), rows).num_emitted.eq(2).all()
    apart = draw_draft(reduced, rows.temperature, rows.seeds, rows.first_position).token_ids
    assert verify(logits, Drafts(ids[apart].unsqueeze(1), Coupled()), rows).num_emitted.eq(1).any()


@pytest.mark.parametrize("rule", Rule)
def test_a8_a_draft_beyond_the_target_vocabulary_is_rejected(rule: Rule) -> None:
    for temperature in (0.0, 1.0):
        rows, logits = rows_of([2] * 20, [temperature] * 20), random_logits(40)
        wide = Logits(torch.zeros(20, 1, V + 3))
        for distribution in (wide, OneHot()):
            output = verify(logits, Drafts(torch.full((20, 1), V + 1), distribution), rows, rule=rule)
            assert output.num_emitted.eq(1).all()
            assert output.tokens[:, 0].ge(0).all()
            assert output.tokens[:, 0].lt(V).all()


@pytest.mark.parametrize("rule", REJECTION)
def test_a_bad_law_of_the_draft_is_no_draft(rule: Rule) -> None:
    num = 50
    rows, logits, laws = (rows_of([K + 1] * num), random_logits(num * (K + 1)), random_logits(num * K).view(num, K, V))
    laws[:, 1, 3] = NAN
    tokens = likely(logits, rows, K, 2).clamp_min(0)
    missing = tokens.clone()
    missing[:, 1] = -1
    got = verify(logits, Drafts(tokens, Logits(laws)), rows, rule=rule)
    want = verify(logits, Drafts(missing, Logits(random_logits(num * K).view(num, K, V))), rows, rule=rule)
    assert lists(got) == lists(want)
    assert got.num_emitted.eq(2).any()


def test_inputs_are_left_alone_and_padding_is_not_looked_at() -> None:
    rows, logits = rows_of([3, 4]), random_logits(9)
    logits[7:] = NAN
    for rule in Rule:
        distribution = distribution_for(rule, 2)
        tokens = likely(logits, rows, K, 4)
        kept = [logits.clone(), tokens.clone(), rows.first_position.clone()]
        output = verify(logits, Drafts(tokens, distribution), rows, rule=rule)
        assert not output.bad.any()
        for now, before in zip((logits, tokens, rows.first_position), kept, strict=True):
            assert torch.equal(now.nan_to_num(123.0), before.nan_to_num(123.0))


class NoReads(TorchDispatchMode):
    """Refuses every operator that would wait for the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        by_mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in WAITING or by_mask:
            raise AssertionError(f"{name} reads the device")
        return func(*args, **(kwargs or {}))


WAITING = ("_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim")


@pytest.mark.parametrize("rule", Rule)
def test_nothing_reads_the_device(rule: Rule) -> None:
    rows, logits = rows_of([4, 1, 3]), random_logits(9)
    laws = Logits(torch.zeros(3, K, 5), torch.arange(5))
    drafts = Drafts(torch.zeros(3, K, dtype=torch.int64), Coupled() if rule is Rule.COUPLED else laws)
    with NoReads():
        for distribution in {drafts.distribution, OneHot()}:
            verify(logits, dataclasses.replace(drafts, distribution=distribution), rows, rule=rule)
        with pytest.raises(AssertionError, match="reads the device"):
            logits[logits > 0]


def test_roles_and_keys_of_the_rules() -> None:
    seeds = torch.tensor([1])
    assert [rule.draft_role for rule in Rule] == [Role.TARGET, Role.DRAFT, Role.DRAFT]
    assert [rule.keys(seeds, seeds, 7).draft_index for rule in Rule] == [0, 0, 7]


@pytest.mark.parametrize("rule", REJECTION)
def test_a_rule_that_does_not_fit_the_proposal_is_refused(rule: Rule) -> None:
    with pytest.raises(ValueError, match=f"rule {rule.name} does not fit the distribution Coupled"):
        rule.require(Coupled)
    with pytest.raises(ValueError, match=f"rule {rule.name} does not fit the distribution Coupled"):
        verify(random_logits(1), Drafts(torch.zeros(1, 0, dtype=torch.int64), Coupled()), rows_of([1]), rule=rule)
    for distribution in (OneHot, OneHot(), Logits):
        rule.require(distribution)
        Rule.COUPLED.require(distribution)
    with pytest.raises(ValueError, match="distribution is int"):
        Rule.COUPLED.require(int)  # type: ignore[arg-type]


INT = torch.zeros(2, dtype=torch.int64)
STARTS = torch.zeros(3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Rows(STARTS[:2], INT, INT, torch.ones(2)), r"query_start_loc must be int32 of shape \(3,\)"),
        (lambda: Rows(STARTS.long(), INT, INT, torch.ones(2)), "query_start_loc must be int32"),
        (lambda: Rows(STARTS, INT, INT.int(), torch.ones(2)), "first_position must be int64"),
        (lambda: Rows(STARTS, INT, INT, torch.ones(3)), "temperature must be floating of shape"),
        (lambda: Drafts(INT, OneHot()), r"tokens must be int64 \(R, K\)"),
        (lambda: Drafts(INT.view(2, 1).int(), OneHot()), "tokens must be int64"),
        (lambda: Drafts(INT.view(2, 1), Logits(torch.zeros(2, 2, 5))), "distribution has logits for"),
        (lambda: Logits(torch.zeros(2, 5)), r"logits=.*: must be floating \(R, K, Vd\)"),
        (lambda: Logits(torch.zeros(2, 1, 5), INT), "ids must be int64 with one id for each of Vd = 5 draft logits"),
        (lambda: verify(torch.zeros(5), Drafts(INT.view(2, 1), OneHot()), rows_of([1, 1])), r"logits must be \(N, V\)"),
        (
            lambda: verify(torch.zeros(2, 5), Drafts(INT.view(2, 1), OneHot()), rows_of([1, 1, 1])),
            "drafts as many as the 3 rows",
        ),
    ],
)
def test_bad_input(make: object, match: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=match):
        make()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, K + 1), min_size=1, max_size=6), st.integers(0, 2), st.integers(0, 1000))
def test_greedy_rows_need_no_noise(lens: list[int], padding: int, seed: int) -> None:
    """The promise changes no bit, bad rows included, and reads neither seeds nor positions."""
    rows = rows_of(lens, [0.0] * len(lens))
    logits = random_logits(sum(lens) + padding, seed).round()  # ties
    logits[torch.rand(len(logits), generator=torch.Generator().manual_seed(seed)) < 0.2] = NAN
    tokens = likely(logits, rows, K, seed) if len(logits) else torch.full((len(lens), K), -1)
    drafts, other = Drafts(tokens, Coupled()), dataclasses.replace(rows, seeds=rows.seeds + 1)
    want = verify(logits, drafts, rows)
    for found, expected in zip(verify(logits, drafts, other, greedy=True), want, strict=True):
        assert torch.equal(found, expected)
    with patch.object(import_module("bateleur.eagle.rejection_sampler"), "draw", side_effect=AssertionError):
        verify(logits, drafts, rows, greedy=True)
