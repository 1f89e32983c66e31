"""Laws of the rules: the joint law of several tokens through the whole loop, and negative controls that must fail."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bateleur.eagle import Keys, Role, draw, noise
from bateleur.eagle.rejection_sampler import draw_draft, verify
from bateleur.eagle.rules import Coupled, Drafts, Logits, OneHot, Rows, Rule
from eagle_doubles.expected import accepted_law, expected_accepted
from eagle_doubles.markov import Fault, Toy, chi_square, exact_accepted, exact_law, plain, simulate

V, LENGTH, K, MANY = 4, 3, 3, 60_000
TOY = Toy.random(V, seed=1, likeness=0.1)
LAW = exact_law(TOY.target, LENGTH)
REJECTION = (Rule.RATIO, Rule.BLOCK)


def z_of(tokens: Tensor) -> float:
    return chi_square(tokens, LAW, V).z


def close(got: Tensor, want: Tensor) -> None:
    assert float((got - want).abs().max()) < 1e-9


# ---- the kit itself


def test_exact_law_sums_over_paths() -> None:
    assert float(LAW.sum()) == pytest.approx(1)
    p = TOY.target
    assert float(LAW.view(V, V, V)[2, 0, 3]) == pytest.approx(float(p[0, 2] * p[2, 0] * p[0, 3]))


def test_chi_square_of_an_exact_law_is_normal_and_of_another_is_not() -> None:
    z = torch.tensor([z_of(plain(TOY, 4000 * (i + 1), LENGTH)[4000 * i :]) for i in range(10)])
    assert float(z.abs().max()) < 4
    assert chi_square(plain(TOY, 4000, LENGTH), exact_law(TOY.draft, LENGTH), V).z > 20


def test_cells_that_are_rare_count_as_one() -> None:
    metadata = torch.tensor([0.98, 0.01, 0.01], dtype=torch.float64)
    fit = chi_square(torch.tensor([[0]] * 98 + [[1], [2]]), metadata, 3)
    assert (fit.freedom, fit.statistic) == (1, 0.0)


# ---- joint laws


@pytest.mark.parametrize("ragged", [False, True], ids=["full", "ragged"])
@pytest.mark.parametrize("kind", [Logits, OneHot])
@pytest.mark.parametrize("rule", REJECTION)
def test_joint_law_through_the_whole_loop(rule: Rule, kind: type, ragged: bool) -> None:
    assert abs(z_of(simulate(TOY, rule, MANY, LENGTH, K, kind=kind, ragged=ragged).tokens)) < 6


@pytest.mark.parametrize("rule", REJECTION)
def test_a1_draft_noise_shared_with_the_residual_is_found(rule: Rule) -> None:
    shared = Fault(draft_role=Role.TARGET)
    assert z_of(simulate(TOY, rule, 2 * MANY, LENGTH, K, fault=shared).tokens) > 8
    assert abs(z_of(simulate(TOY, rule, 2 * MANY, LENGTH, K).tokens)) < 6


@pytest.mark.parametrize("rule", REJECTION)
def test_proposals_not_drawn_from_the_declared_law_are_found(rule: Rule) -> None:
    other = Fault(drawn_from=Toy.random(V, seed=9).draft)
    assert z_of(simulate(TOY, rule, MANY, LENGTH, K, fault=other).tokens) > 50


def test_a2_block_keys_reused_over_steps_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rule, "keys", lambda rule, seeds, positions, place: Keys(seeds, positions))
    assert z_of(simulate(TOY, Rule.BLOCK, MANY, LENGTH, K).tokens) > 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", [Coupled, OneHot, Logits])
def test_coupled_is_plain_decoding_on_every_path(kind: type, temperature: float) -> None:
    want = plain(TOY, 3000, 12, temperature=temperature)
    for num_drafts in (0, 1, 2, 3, 7):
        for ragged in (False, True):
            run = simulate(TOY, Rule.COUPLED, 3000, 12, num_drafts, kind=kind, ragged=ragged, temperature=temperature)
            assert torch.equal(run.tokens, want)
    other = Fault(draft_role=Role.DRAFT)
    run = simulate(TOY, Rule.COUPLED, 3000, 12, 3, kind=kind, fault=other, temperature=temperature)
    assert torch.equal(run.tokens, want)


@pytest.mark.parametrize("rule", REJECTION)
def test_greedy_loops_emit_the_same_under_every_rule(rule: Rule) -> None:
    want = plain(TOY, 500, 12, temperature=0.0)
    for kind in (OneHot, Logits):
        run = simulate(TOY, rule, 500, 12, K, kind=kind, temperature=0.0)
        assert torch.equal(run.tokens, want)


# ---- how much is accepted


@pytest.mark.parametrize("rule", Rule)
def test_first_step_accepts_what_every_path_sums_up_to(rule: Rule) -> None:
    reached = simulate(TOY, rule, MANY, 1, K).reached
    exact = exact_accepted(TOY, rule, K)
    error = (exact * (1 - exact) / MANY).sqrt()
    assert bool(((reached - exact).abs() < 4.5 * error).all())
    other = exact_accepted(TOY, Rule.RATIO if rule is not Rule.RATIO else Rule.COUPLED, K)
    assert not bool(((reached - other).abs() < 4.5 * error).all())


def test_block_accepts_at_least_as_much_as_ratio_and_that_as_coupled() -> None:
    for seed in range(5):
        toy = Toy.random(5, seed=seed, likeness=0.3)
        by_rule = [exact_accepted(toy, rule, 4) for rule in (Rule.COUPLED, Rule.RATIO, Rule.BLOCK)]
        assert bool((by_rule[0] < by_rule[1]).all())
        assert float(by_rule[2].sum()) > float(by_rule[1].sum())
        assert float(by_rule[2][0]) == pytest.approx(float(by_rule[1][0]))


def laws(rows: int, size: int, seed: int, zeros: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.rand(rows, size, generator=generator, dtype=torch.float64).log().neg()
    weight[torch.rand(rows, size, generator=generator) < zeros] = 0
    weight[:, 0] += weight.sum(1) == 0
    return weight / weight.sum(1, keepdim=True)


@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_coupled_acceptance_is_the_sum_over_all_pairs(zeros: float) -> None:
    p, q = laws(60, 7, 0, zeros), laws(60, 7, 1, zeros)
    q[::3] = p[::3]
    pairs = torch.maximum(p[:, None, :] / p[:, :, None], q[:, None, :] / q[:, :, None])
    want = torch.where((p > 0) & (q > 0), 1 / pairs.nan_to_num(torch.inf).sum(-1), 0.0)
    close(accepted_law(p, q, Rule.COUPLED), want)
    accepted, distance = expected_accepted(p, q, Rule.COUPLED), (p - q).abs().sum(-1) / 2
    assert bool((accepted >= (1 - distance) / (1 + distance) - 1e-9).all())
    assert bool((accepted <= 1 - distance + 1e-9).all())
    close(accepted[::3], torch.ones(20, dtype=torch.float64))
    close(expected_accepted(p, q, Rule.RATIO), 1 - distance)


@pytest.mark.parametrize("rule", Rule)
def test_a_one_hot_draft_is_accepted_with_the_probability_of_its_token(rule: Rule) -> None:
    p, token = laws(9, 6, 2), torch.arange(9) % 6
    one_hot = torch.nn.functional.one_hot(token, 6).double()
    got = expected_accepted(p, one_hot, rule)
    close(got, p.gather(1, token.unsqueeze(1)).squeeze(1))
    with pytest.raises(ValueError, match=r"p \(9, 6\) and q \(9, 5\) must have the same shape"):
        expected_accepted(p, p[:, :5], rule)


# ---- one step over laws that know no context, so that any shape of draft vocabulary can be tried


def fit_of_a_step(
    p: Tensor, q: Tensor, rule: Rule, ids: Tensor | None = None, *, lie: bool = False, pin: int | None = None
) -> float:
    """z of the first C tokens against p_0 x p_1 x ..: what the step emitted, and behind it draws of the target.

    p: (C, V) of each place; q: (K, Vd). `lie`: drafts are uniform, and not what is declared.
    `pin`: drafts of this token are replaced by -1.
    """
    (places, size), num_drafts, seeds = p.shape, q.shape[0], torch.arange(MANY)
    heat = torch.full((MANY,), 0.5)
    raw = (q.log() * 0.5).float()  # before the temperature
    drawn = torch.stack(
        [
            draw_draft(
                (torch.zeros_like(raw[k]) if lie else raw[k]).expand(MANY, -1), heat, seeds, seeds * 0 + 5 + k,
                rule=rule, draft_index=k,
            ).token_ids
            for k in range(num_drafts)
        ], 1,
    )  # fmt: skip
    if pin is not None:
        drawn[drawn == pin] = -1
    drafts = Drafts(drawn if ids is None else ids[drawn], Logits(raw.expand(MANY, -1, -1), ids))
    starts = torch.arange(MANY + 1, dtype=torch.int32) * places
    logits = p.log().float().repeat(MANY, 1)
    output = verify(logits, drafts, Rows(starts, seeds, seeds * 0 + 5, heat), rule=rule)
    assert not output.bad.any()
    position = (5 + torch.arange(places)).repeat(MANY)
    behind = draw(logits, heat.repeat_interleave(places), Keys(seeds.repeat_interleave(places), position))
    tokens = torch.where(output.tokens >= 0, output.tokens, behind.token_ids.view(MANY, places))
    metadata = p[0]
    for k in range(1, places):
        metadata = (metadata.unsqueeze(1) * p[k]).flatten()
    return chi_square(tokens, metadata, size).z


A8 = {
    "narrower": (4, 3, None),
    "wider": (4, 6, None),
    "reduced": (5, 3, [4, 0, 2]),
    "reduced-beyond": (4, 3, [1, 6, 0]),
}


@pytest.mark.parametrize("rule", REJECTION)
@pytest.mark.parametrize("case", A8)
def test_a8_draft_vocabulary_of_another_width(case: str, rule: Rule) -> None:
    size, width, ids = A8[case]
    lanes = None if ids is None else torch.tensor(ids)
    p, q = laws(3, size, 3), laws(2, width, 4)
    assert abs(fit_of_a_step(p, q, rule, lanes)) < 6
    assert fit_of_a_step(p, q, rule, lanes, lie=True) > 8


@pytest.mark.parametrize("rule", REJECTION)
def test_a6_a_draft_that_the_target_forbids_is_kept_and_not_replaced(rule: Rule) -> None:
    """To replace a draft because of what it is hides from the rule that it was rejected, and is biased."""
    p = torch.tensor([[0.5, 0.5, 0.0]] * 3).double()
    q = torch.tensor([[0.5, 0.1, 0.4]] * 2).double()
    assert abs(fit_of_a_step(p, q, rule)) < 6
    assert fit_of_a_step(p, q, rule, pin=2) > 50


def test_the_residual_of_block_is_weighted() -> None:
    """An unlikely first draft leaves a weight of 0.56, with which the residual of place 1 is token 2 alone."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.4, 0.5], [0.2, 0.2, 0.6]]).double()
    q = torch.tensor([[0.9, 0.05, 0.05], [0.6, 0.35, 0.05]]).double()
    for rule in REJECTION:
        assert abs(fit_of_a_step(p, q, rule)) < 6


@pytest.mark.parametrize("rule", REJECTION)
def test_disjoint_and_equal_supports(rule: Rule) -> None:
    p, q = torch.tensor([[0.5, 0.5, 0, 0]] * 3).double(), torch.tensor([[0, 0, 0.3, 0.7]] * 2).double()
    assert abs(fit_of_a_step(p, q, rule)) < 6
    assert abs(fit_of_a_step(p, p[:2], rule)) < 6


@pytest.mark.parametrize("rule", REJECTION)
def test_a5_one_hot_residual_and_the_bonus_row_on_a_grid(rule: Rule) -> None:
    """K = 1, every (p, d): (d, bonus token) or another first token, with their exact probabilities."""
    each, place = 6000, 0
    bonus = torch.tensor([0.2, 0.5, 0.3])
    for p in ([0.1, 0.2, 0.7], [0.5, 0.5, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.98, 0.01, 0.01]):
        for d in range(3):
            seeds = torch.arange(each) + each * (place := place + 1)
            logits = torch.stack([torch.tensor(p), bonus]).log().repeat(each, 1)
            starts = torch.arange(each + 1, dtype=torch.int32) * 2
            rows = Rows(starts, seeds, torch.zeros_like(seeds), torch.ones(each))
            output = verify(logits, Drafts(torch.full((each, 1), d), OneHot()), rows, rule=rule)
            metadata = torch.zeros(3, 4, dtype=torch.float64)
            metadata[:, 3] = torch.tensor(p)
            metadata[d] = torch.cat([bonus * p[d], torch.zeros(1)])
            cell = output.tokens.where(output.tokens >= 0, 3)
            assert not bool(metadata.flatten()[(cell * torch.tensor([4, 1])).sum(1)].eq(0).any())
            assert abs(chi_square(cell, metadata.flatten(), 4).z) < 5


# ---- names of the noise


@pytest.mark.parametrize("rule", Rule)
def test_a1_a11_names_of_all_draws_are_disjoint(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number of a run: no name twice, but for what COUPLED shares and RATIO never looked at."""
    names: list[tuple[int, int, int, int]] = []
    row_words = noise.row_words

    def listen(keys: Keys, role: Role) -> tuple[Tensor, Tensor]:
        index = (
            keys.draft_index if isinstance(keys.draft_index, Tensor) else torch.full_like(keys.seed, keys.draft_index)
        )
        columns = (keys.seed.tolist(), keys.position.tolist(), index.tolist(), [int(role)] * len(keys))
        names.extend(zip(*columns, strict=True))
        return row_words(keys, role)

    monkeypatch.setattr(noise, "row_words", listen)
    simulate(TOY, rule, 40, 12, K)
    monkeypatch.undo()
    roles = {name[3] for name in names}
    if rule is Rule.COUPLED:
        assert roles == {Role.TARGET}
        return
    assert roles == set(Role)
    if rule is Rule.BLOCK:
        assert len(set(names)) == len(names)
    final = [name for name in names if name[3] == Role.TARGET]
    assert len(set(final)) == len(final)
    assert all(name[2] == 0 for name in final), "the target's own stream has no draft indices"


def test_a11_every_place_has_noise_of_its_own() -> None:
    places, size = 8, 1000
    flat = torch.zeros(places, size)
    starts = torch.tensor([0, places], dtype=torch.int32)
    rows = Rows(starts, torch.tensor([5]), torch.tensor([4090]), torch.ones(1))
    drafts = Drafts(torch.zeros(1, places - 1, dtype=torch.int64), Coupled())
    for _ in range(places):  # the drafts become the target's own draws
        output = verify(flat, drafts, rows)
        drafts = Drafts(output.tokens[:, :-1], Coupled())
    assert output.num_emitted.tolist() == [places]
    assert len(set(output.tokens[0].tolist())) > places - 2
