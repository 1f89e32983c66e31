"""Sampled drafts under RATIO and BLOCK in the whole engine.

Target and head are Markov chains, so the exact distribution of every text is known. The target is a one-layer Llama
whose logits are a row of a table, selected by the last token.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bateleur.eagle import (
    AcceptStats,
    Coupled,
    DraftContext,
    EagleSpeculator,
    Keys,
    Logits,
    OneHot,
    Role,
    Rule,
    distribution_of,
    noise,
)
from bateleur.runner import LLM, RequestOutput, SamplingParams
from bateleur.runner.spec_decode.draft_head import DraftHead
from eagle_doubles.drafters import NoDrafts
from eagle_doubles.expected import expected_accepted
from eagle_doubles.markov import Toy, chi_square, exact_accepted, exact_law

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "lossless.py"


def script() -> Any:
    """`benchmarks/lossless.py`, the long form of these tests, whose target, head and policy they share."""
    spec = importlib.util.spec_from_file_location("lossless", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lossless = script()
TOY, LAW, Ragged, V, K, LENGTH = (getattr(lossless, name) for name in ("TOY", "LAW", "Ragged", "V", "K", "LENGTH"))
MANY, FEW = 12_000, 4000
RULES = ("ratio", "block")
REDUCED = torch.tensor([4, 0, 2])
pytestmark = pytest.mark.filterwarnings("ignore:draft_policy is <.*Ragged")
RIGHT, WRONG = 4.0, 6.0
"""z of a correct sample is below the first, that of a wrong one above the second. z is normal for a correct sampler."""


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LLM]:
    """`make(rule, draft table, ids)`: an engine of the target with K drafts; without a rule it has no drafts."""
    target = tmp_path_factory.mktemp("markov")
    lossless.write_target(target)

    def made(rule: str | None = None, law: Tensor = TOY.draft, ids: Tensor | None = None, **settings: Any) -> LLM:
        llm: LLM = lossless.engine(target, rule, law, ids=ids, **settings)
        return llm

    return made


def params(seed: int, **changes: Any) -> SamplingParams:
    base = {"temperature": 1.0, "seed": seed, "max_tokens": 1 + LENGTH, "ignore_eos": True}
    return SamplingParams(**(base | changes))


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def sample(llm: LLM, count: int = MANY, **changes: Any) -> Tensor:
    """(count, LENGTH) tokens after the first one, for as many seeds. K more tokens are generated, so that the last ones
    have drafts.
    """
    prompts: Any = [{"prompt_token_ids": [0]}] * count
    changes = {"max_tokens": 1 + LENGTH + K} | changes
    gc.disable()  # the collector would traverse thousands of live requests again and again
    try:
        outputs = llm.generate(prompts, seeded(**changes)[:count])
    finally:
        gc.enable()
    return torch.tensor(ids(outputs))[:, 1 : 1 + LENGTH]


@cache
def seeded(**changes: Any) -> list[SamplingParams]:
    """Cached parameters of the largest number of requests: constructing and checking them takes as long as sampling."""
    return [params(seed, **changes) for seed in range(MANY)]


def z_of(tokens: Tensor) -> float:
    return chi_square(tokens, LAW, V).z


# ---- laws


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", ["plain", "ragged", "reduced"])
def test_the_joint_law_is_the_target_s(make: Callable[..., LLM], rule: str, case: str) -> None:
    """The plain case has enough samples to find the shared noise of the next test."""
    settings: dict[str, Any] = {}
    if case == "ragged":
        settings = {"draft_policy": Ragged(), "max_num_seqs": 256}
    elif case == "reduced":
        settings = {"ids": REDUCED}
    llm = make(rule, **settings)
    assert abs(z_of(sample(llm, MANY if case == "plain" else FEW))) < RIGHT
    acceptance = llm.get_metrics().acceptance
    assert acceptance is not None
    assert 0.1 < acceptance.kept[0] / acceptance.tried[0] < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_control_noise_shared_with_the_target_is_found(
    make: Callable[..., LLM], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rule, "draft_role", property(lambda rule: Role.TARGET))
    # The target's noise keys have no draft index.
    monkeypatch.setattr(Rule, "keys", lambda rule, seeds, positions, place: Keys(seeds, positions))
    assert z_of(sample(make(rule))) > WRONG


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_control_drafts_from_another_law_than_declared_are_found(
    make: Callable[..., LLM], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Declaring one-hot drafts is no such fault: it is exact for drafts from any independent noise."""
    uniform = Logits(torch.zeros(512, K, V))
    monkeypatch.setattr(
        EagleSpeculator, "distribution", lambda self, rows: replace(uniform, logits=uniform.logits[: len(rows)])
    )
    assert z_of(sample(make(rule), FEW)) > WRONG


@pytest.mark.parametrize("case", ["few rows", "ragged", "preempted"])
def test_no_number_of_block_is_used_twice(make: Callable[..., LLM], case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """BLOCK reads numbers after the position where it stops, so every step needs new draft noise. Samples of this size
    do not show a fault.
    """
    names: list[tuple[int, ...]] = []
    row_words = noise.row_words

    def listen(keys: Keys, role: Role) -> tuple[Tensor, Tensor]:
        index = (
            keys.draft_index if isinstance(keys.draft_index, Tensor) else torch.full_like(keys.seed, keys.draft_index)
        )
        columns = (keys.seed.tolist(), keys.position.tolist(), index.tolist())
        names.extend((int(role), *name) for name in zip(*columns, strict=True))
        return row_words(keys, role)

    monkeypatch.setattr(noise, "row_words", listen)
    list(drive(engine_for(make, "block", case, TOY.draft)))
    # A preempted request draws its unverified drafts again.
    for role in (Role.ACCEPT,) if case == "preempted" else (Role.DRAFT, Role.ACCEPT):
        named = [name for name in names if name[0] == role and name[1] % 4 != 2]  # greedy rows use no noise
        assert len(set(named)) == len(named) > 100


HARD = {"temperature": 0.7, "top_k": 4, "top_p": 0.95, "repetition_penalty": 1.4, "frequency_penalty": 0.5}


def histogram(llm: LLM, **changes: Any) -> Tensor:
    """(V ** LENGTH,) counts of each text under HARD with changes."""
    place = V ** torch.arange(LENGTH - 1, -1, -1)
    tokens = sample(llm, 3000, **(HARD | changes))
    return torch.bincount((tokens * place).sum(1), minlength=V**LENGTH).double()


@pytest.fixture(scope="module")
def undrafted(make: Callable[..., LLM]) -> tuple[Tensor, Tensor]:
    """Histograms of plain decoding: under HARD, and with one penalty less."""
    return histogram(make()), histogram(make(), frequency_penalty=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_penalties_and_truncation_are_part_of_the_law(
    make: Callable[..., LLM], undrafted: tuple[Tensor, Tensor], rule: str
) -> None:
    """Compare two samples, one of them of plain decoding, without cells of few counts."""
    drafted, (plain, other) = histogram(make(rule)), undrafted
    assert two_samples(drafted, plain) < RIGHT
    assert two_samples(drafted, other) > WRONG


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_what_may_not_be_drawn_is_part_of_the_law(
    make: Callable[..., LLM], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases, allowed tokens and bad words of two tokens leave a Markov chain, so the distribution is known exactly."""
    words = ((1, 2), (4, 4), (2, 0))
    monkeypatch.setattr("bateleur.runner.engine.input_processor.bad_words_token_ids", lambda *_: words)
    table = TOY.target.log()
    table[:, 2] += 1.5
    table[:, 3] = table[[1, 4, 2], [2, 4, 0]] = -torch.inf
    law = exact_law(table.softmax(-1), 1 + LENGTH).view(V, -1).sum(0)
    llm = make(rule)
    tokens = sample(llm, FEW, logit_bias=Biases({2: 1.5}), allowed_token_ids=(0, 1, 2, 4))
    assert abs(chi_square(tokens, law, V).z) < RIGHT
    table[2, 0] = TOY.target[2, 0].log()
    without = exact_law(table.softmax(-1), 1 + LENGTH).view(V, -1).sum(0)
    assert chi_square(tokens, without, V).z > WRONG
    acceptance = llm.get_metrics().acceptance
    assert acceptance is not None
    assert acceptance.kept[0] / acceptance.tried[0] > 0.1


class Biases(dict[int, float]):
    """A hashable mapping, for the cache of `seeded`."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


def two_samples(left: Tensor, right: Tensor) -> float:
    """z of the chi-square statistic of two histograms of equal size."""
    often = left + right > 20
    statistic = float(((left - right) ** 2 / (left + right))[often].sum())
    spread = 2 / (9 * int(often.sum()))
    return float(((statistic / int(often.sum())) ** (1 / 3) - (1 - spread)) / spread**0.5)


# ---- how much is accepted


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_as_many_drafts_are_accepted_as_the_laws_say(
    make: Callable[..., LLM], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of K + 2 tokens, only the second step can use all K drafts; the first token has a known distribution."""
    update = AcceptStats.update

    def only_all(self: AcceptStats, num_drafts: Any, num_accepted: Any) -> None:
        update(self, num_drafts[num_drafts == K], num_accepted[num_drafts == K])

    monkeypatch.setattr(AcceptStats, "update", only_all)
    llm = make(rule)
    sample(llm, max_tokens=2 + K)
    acceptance = llm.get_metrics().acceptance
    assert acceptance is not None
    exact = torch.zeros(K, dtype=torch.float64)
    for first, weight in enumerate(TOY.target[0].tolist()):
        order = torch.tensor([first, *(v for v in range(V) if v != first)])
        renamed = Toy(TOY.target[order][:, order], TOY.draft[order][:, order])
        exact += weight * exact_accepted(renamed, Rule(rule), K)
    reached = torch.from_numpy(acceptance.kept) / MANY
    assert acceptance.tried[0] == MANY
    assert bool(((reached - exact).abs() < 4.5 * (exact * (1 - exact) / MANY).sqrt()).all())


class MostLikely(NoDrafts):
    """The head's most likely tokens, as drafts without a declared distribution."""

    def __init__(self, inner: EagleSpeculator) -> None:
        super().__init__(inner.num_speculative_tokens)
        self.inner, self.needs = inner, inner.needs

    def propose(self, context: DraftContext) -> Tensor:
        assert context.greedy
        assert not context.temperature.any()
        return self.inner.propose(context)


def test_more_drawn_drafts_are_accepted_than_most_likely_ones(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    law = 0.5 * TOY.target + 0.5 * TOY.draft  # imperfect, but right about the likely tokens
    rates = []
    speculator = DraftHead.speculator
    for one_hot in (False, True):
        if one_hot:

            def most_likely(self: DraftHead, *args: Any) -> Any:
                return MostLikely(speculator(self, *args[:-1], Rule.COUPLED))

            monkeypatch.setattr(DraftHead, "speculator", most_likely)
        llm = make("ratio", law)
        assert abs(z_of(sample(llm, 4000))) < RIGHT
        acceptance = llm.get_metrics().acceptance
        assert acceptance is not None
        rates.append(acceptance.kept[0] / acceptance.tried[0])
    drawn, guessed = rates
    p, best = TOY.target, law.argmax(1)
    least = float(expected_accepted(p, law, Rule.RATIO).min())
    most = float(p.gather(1, best.unsqueeze(1)).max())
    assert drawn > least - 0.02 > most + 0.02 > guessed, (drawn, least, most, guessed)


SIZES = [8, 28]
"""Capture sizes: two rows with drafts, and all seven rows; or eight rows without drafts."""
CHURN: dict[str, dict[str, Any]] = {
    "plain": {},
    "few rows": {"max_num_seqs": 5, "max_num_batched_tokens": 24},
    "ragged": {"max_num_seqs": 5},
    "prefixes": {"enable_prefix_caching": True, "max_num_seqs": 5},
    "preempted": {"max_num_seqs": 7, "num_blocks": 15},
    "graphs": {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_checks": "PARANOID", "max_num_seqs": 7},
}


def engine_for(make: Callable[..., LLM], rule: str, case: str, law: Tensor, **more: Any) -> LLM:
    settings = CHURN[case] | more
    num_blocks = settings.pop("num_blocks", None)
    if num_blocks is not None:
        plan = make(rule, **settings).cache_plan
        block = plan.kv_bytes // plan.num_blocks
        settings["kv_cache_memory_bytes"] = plan.total_bytes - (plan.num_blocks - num_blocks) * block
    if case == "ragged":
        settings["draft_policy"] = Ragged()
    if "cudagraph_mode" in settings:
        settings |= {"cudagraph_backend": "recorded", "cudagraph_capture_sizes": SIZES}
    return make(rule, law, **settings)


def drive(llm: LLM, aborted: Callable[[int], bool] = lambda i: False) -> Iterator[RequestOutput]:
    """Run requests of all lengths, some greedy; some are aborted between a proposal and its verification."""
    waiting = [
        ([0, *(1 + np.arange(i % 7) % 3).tolist()], params(i, max_tokens=1 + 4 * (1 + i % 5), temperature=heat))
        for i, heat in enumerate([0.7, 1.0, 0.0, 1.5] * 9)
    ]
    number = 0
    while waiting or llm.has_unfinished_requests:
        for _ in range(2 if number % 3 else 5):
            if waiting:
                index = 36 - len(waiting)
                prompt, how = waiting.pop(0)
                llm.add_request({"prompt_token_ids": prompt}, how, request_id=str(index))
        yield from (output for output in llm.step() if output.finished)
        number += 1
        for request_id in list(llm.engine.requests):
            if number % 4 == 0 and aborted(int(request_id)):
                llm.abort(request_id)


@pytest.fixture(scope="module")
def said(make: Callable[..., LLM]) -> Callable[..., dict[str, list[int]]]:
    """The tokens of all requests of `drive` by id, in a new engine; cached per engine."""

    @cache
    def tokens(rule: str | None = None, **settings: Any) -> dict[str, list[int]]:
        return {each.request_id: each.outputs[0].token_ids for each in drive(make(rule, **settings))}

    return tokens


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", CHURN)
def test_who_knows_the_target_is_never_rejected(make: Callable[..., LLM], rule: str, case: str) -> None:
    """p == q up to rounding, so RATIO accepts with probability 1 - 1e-6. Logits of a wrong row, position or step would
    be rejected sometimes.
    """
    llm = engine_for(make, rule, case, TOY.target)
    finished = list(drive(llm, aborted=lambda i: i % 5 == 3))
    assert 36 - 8 <= len(finished) < 36
    stats = llm.get_metrics()
    assert stats.acceptance is not None
    assert stats.acceptance.tried.min() > 4
    assert stats.acceptance.kept.tolist() == stats.acceptance.tried.tolist()
    assert (stats.num_preemptions > 5) == (case == "preempted")
    if case in ("plain", "few rows", "graphs"):
        assert stats.tokens_per_step == pytest.approx(1 + K, abs=0.2)  # a preempted row first has no drafts


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", ["plain", "ragged"])
def test_greedy_rows_are_plain_decoding(
    make: Callable[..., LLM], said: Callable[..., dict[str, list[int]]], rule: str, case: str
) -> None:
    """The tokens also equal those of a batch of one, with which the tests below compare."""
    plain, alone, found = said(), said(rule, max_num_seqs=1), 0
    greedy = [each for each in plain if int(each) % 4 == 2]
    assert [alone[each] for each in greedy] == [plain[each] for each in greedy]
    for each in drive(engine_for(make, rule, case, TOY.draft)):
        if int(each.request_id) % 4 == 2:
            assert each.outputs[0].token_ids == plain[each.request_id]
            found += 1
    assert found == 9


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", ["few rows", "prefixes", "preempted", "graphs"])
def test_a_request_has_the_tokens_that_it_has_alone(
    make: Callable[..., LLM], said: Callable[..., dict[str, list[int]]], rule: str, case: str
) -> None:
    """Random numbers are keyed by seed and position, so they depend neither on other rows, the index in the batch, nor
    earlier steps. After a preemption the unverified drafts are drawn again.
    """
    alone = said(rule, max_num_seqs=1)
    llm = engine_for(make, rule, case, TOY.draft)
    for _ in range(2):
        together = list(drive(llm, aborted=lambda i: i % 5 == 3))
        assert len(together) > 27
        for each in together:
            assert each.outputs[0].token_ids == alone[each.request_id]
    assert (llm.get_metrics().num_preemptions > 10) == (case == "preempted")


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", ["prefixes", "preempted", "graphs"])
def test_steps_that_are_prepared_ahead_test_the_same_drafts(
    make: Callable[..., LLM], said: Callable[..., dict[str, list[int]]], rule: str, case: str
) -> None:
    """If the number of drafts depends on what the last step accepted, as near the end, the row waits for it."""
    alone = said(rule, max_num_seqs=1)
    llm = engine_for(make, rule, case, TOY.draft, async_scheduling=True)
    together = list(drive(llm, aborted=lambda i: i % 5 == 3))
    assert len(together) > 27
    for each in together:
        assert each.outputs[0].token_ids == alone[each.request_id]
    assert (llm.get_metrics().num_preemptions > 5) == (case == "preempted")


@pytest.mark.parametrize("policy", ["auto", {1: 3, 4: 1}, Ragged()])
def test_policies_under_which_seeds_do_not_decide_are_named(make: Callable[..., LLM], policy: Any) -> None:
    for rule in RULES:
        with pytest.warns(UserWarning, match=f"draft_policy is .* with speculative_rule '{rule}', under which"):
            make(rule, draft_policy=policy)
    make("coupled", draft_policy=policy)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "policy"), [("ratio", True), ("block", False)])
def test_graphs_give_the_tokens_of_eager_passes(make: Callable[..., LLM], rule: str, policy: bool) -> None:
    """Drafts of different lengths and of one length; those of a rule and of a policy have graphs of their own."""

    def texts(mode: str) -> dict[str, list[list[int]]]:
        llm = make(
            rule,
            ids=REDUCED,
            max_num_seqs=7,
            draft_policy=Ragged() if policy else "fixed",
            cudagraph_mode=mode,
            cudagraph_backend="recorded",
            cudagraph_capture_sizes=SIZES,
            cudagraph_checks="PARANOID",
        )
        return {each.request_id: ids([each]) for each in drive(llm)}

    assert texts("FULL_DECODE_ONLY") == texts("FULL_AND_PIECEWISE") == texts("NONE")


@pytest.mark.parametrize("rule", RULES)
def test_graphs_of_a_real_head(make_llm: Callable[..., LLM], random_head: Path, rule: str) -> None:
    texts = []
    for graphs in ("NONE", "FULL_DECODE_ONLY"):
        llm = make_llm(
            max_model_len=64,
            max_num_seqs=3,
            draft=random_head,
            num_speculative_tokens=2,
            speculative_rule=rule,
            cudagraph_mode=graphs,
            cudagraph_backend="recorded",
            cudagraph_capture_sizes=[3, 9],
        )
        prompts = ["def fibonacci(n):", "import os\n", "x", "class Stack:"]
        texts.append(ids(llm.generate(prompts, [params(i, max_tokens=12) for i in range(4)])))
    assert texts[0] == texts[1]


# ---- what is refused


class Declares(NoDrafts):
    """Declares how it samples."""

    def __init__(self, rule: Rule, distribution: Any) -> None:
        super().__init__(K)
        self.rule, self._distribution = rule, distribution

    def distribution(self, rows: Tensor) -> Any:
        return self._distribution


def test_drafters_that_do_not_fit_the_rule_are_refused(make: Callable[..., LLM]) -> None:
    with pytest.raises(ValueError, match="drafter draws for rule COUPLED; drafts are tested under RATIO"):
        make("ratio", drafter=Declares(Rule.COUPLED, Coupled()))
    with pytest.raises(ValueError, match="drafter draws for rule RATIO; drafts are tested under BLOCK"):
        make("block", drafter=Declares(Rule.RATIO, OneHot()))
    with pytest.raises(ValueError, match="rule RATIO does not fit the distribution Coupled"):
        make("ratio", drafter=Declares(Rule.RATIO, Coupled()))
    make("block", drafter=Declares(Rule.BLOCK, OneHot()))


def test_who_says_nothing_is_one_hot_or_coupled() -> None:
    rows = torch.zeros(1, dtype=torch.int64)
    assert distribution_of(NoDrafts(K), Rule.COUPLED)(rows) == Coupled()
    assert distribution_of(NoDrafts(K), Rule.BLOCK)(rows) == distribution_of(None, Rule.RATIO)(rows) == OneHot()


def test_coupled_keeps_no_logits(make: Callable[..., LLM]) -> None:
    for rule, kept in (("coupled", False), ("ratio", True)):
        drafting = make(rule).engine.runner.proposer
        assert drafting is not None
        assert isinstance(drafting.drafter, EagleSpeculator)
        assert (drafting.drafter.inputs.logits is not None) == kept
