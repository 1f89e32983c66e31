"""Known bugs of speculative decoding in whole engines, by their ids in the catalogue: bookkeeping of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bateleur.eagle import DraftContext, EagleSpeculator
from bateleur.runner import LLM, RequestOutput, SamplingParams
from bateleur.runner.sampling.rejection_sampler import SampledStep
from bateleur.runner.scheduling.step_batch import StepBatch
from eagle_doubles.drafters import ScriptedDrafter

VOCAB = 97
K = 3


class Texts:
    """The texts of requests, from plain runs."""

    def __init__(self, plain: LLM) -> None:
        self._plain = plain
        self._texts: dict[str, list[int]] = {}

    def of(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """Prompt and output tokens."""
        name = f"{prompt} {params}"
        if name not in self._texts:
            (output,) = self._plain.generate([{"prompt_token_ids": prompt}], params)
            self._texts[name] = prompt + output.outputs[0].token_ids
        return self._texts[name]

    def __call__(self, tokens: list[int]) -> list[int]:
        known = self._texts.values()
        return next((text[len(tokens) :] for text in known if text[: len(tokens)] == tokens), [])


class Patterned(ScriptedDrafter):
    """The number of right drafts follows a list; each request starts at another place of it."""

    def __init__(self, script: Texts, k: int, pattern: Sequence[int]) -> None:
        super().__init__(script, k, None, VOCAB)
        self._pattern = list(pattern)
        self._turns: dict[int, Iterator[int]] = {}
        self.steps: list[dict[str, Any]] = []
        """The context of each step."""

    def admit(self, row: int, token_ids: list[int]) -> None:
        super().admit(row, token_ids)
        shift = 5 * row % len(self._pattern)
        self._turns[row] = cycle(self._pattern[shift:] + self._pattern[:shift])

    def propose(self, context: DraftContext) -> Tensor:
        batch, rows = context.batch, len(context.rows)
        told = {
            "row": context.rows,
            "before": batch.num_computed_tokens[:rows],
            "tokens": batch.query_start_loc[1 : rows + 1] - batch.query_start_loc[:rows],
            "prompt": batch.is_prefilling[:rows],
            "valid": context.num_valid,
            "next": context.next_token,
            "emitted": (context.emitted >= 0).sum(1),
        }
        self.steps.append({name: tensor.tolist() for name, tensor in told.items()})
        return super().propose(context)

    def _row(self, row: int, emitted: list[int], next_token: int) -> list[int]:
        if emitted:
            self._right = next(self._turns[row])
        return super()._row(row, emitted, next_token)


def steer(monkeypatch: pytest.MonkeyPatch, script: Texts, right: Sequence[int]) -> None:
    """Let the engine's head run, but propose tokens of the script, with these numbers of right drafts."""
    scripts: dict[int, Patterned] = {}
    admit, propose = EagleSpeculator.admit, EagleSpeculator.propose

    def of(head: EagleSpeculator) -> Patterned:
        return scripts.setdefault(id(head), Patterned(script, head.num_speculative_tokens, right))

    def both_admit(self: EagleSpeculator, row: int, token_ids: list[int]) -> None:
        admit(self, row, token_ids)
        of(self).admit(row, token_ids)

    def both_propose(self: EagleSpeculator, context: DraftContext) -> Tensor:
        propose(self, context)
        return of(self).propose(context)

    monkeypatch.setattr(EagleSpeculator, "admit", both_admit)
    monkeypatch.setattr(EagleSpeculator, "propose", both_propose)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]


def tokens_of(seed: int, length: int) -> list[int]:
    random = Random(seed)
    return [random.randint(3, VOCAB - 1) for _ in range(length)]


def asked(prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def drain(llm: LLM, *, each_step: Callable[[], None] = lambda: None) -> list[RequestOutput]:
    """Run until all requests have ended; returns outputs in the order in which they ended."""
    done = []
    while llm.has_unfinished_requests:
        done += [output for output in llm.step() if output.finished]
        each_step()
    return done


@pytest.fixture(scope="module")
def make_llm(make_llm: Callable[..., LLM], tiny_hybrid: Path) -> Callable[..., LLM]:
    return partial(make_llm, model=tiny_hybrid)


@pytest.fixture(scope="module")
def random_head(tiny_head: Path) -> Path:
    return tiny_head


@pytest.fixture(scope="module")
def texts(make_llm: Callable[..., LLM]) -> Texts:
    return Texts(make_llm(max_model_len=224, max_num_seqs=1))


@pytest.fixture(scope="module")
def make(make_llm: Callable[..., LLM], random_head: Path) -> Callable[..., LLM]:
    """Engines with the untrained head, or with the given drafter."""

    def build(**overrides: Any) -> LLM:
        settings: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 4, "block_size": 4}
        settings |= {"num_speculative_tokens": K}
        if overrides.get("drafter") is None and overrides.get("num_speculative_tokens", K):
            settings["draft"] = random_head
        if overrides.get("enable_prefix_caching"):
            settings["mamba_block_size"] = 8
        if "cudagraph_mode" in overrides:
            settings |= {"cudagraph_backend": "recorded", "cudagraph_checks": "PARANOID"}
        return make_llm(**(settings | overrides))

    return build


PROMPTS = [tokens_of(1, 5), tokens_of(2, 21), tokens_of(3, 1), tokens_of(4, 16)]
PARAMS = [
    SamplingParams(temperature=t, seed=7 + i, max_tokens=12 + 5 * i, ignore_eos=True)
    for i, t in enumerate((0.0, 0.8, 0.8, 0.0))
]


@pytest.mark.parametrize("k", [0, 1, 2, 3, 7])
def test_tokens_are_the_same_for_every_draft_length_order_and_schedule(
    make: Callable[..., LLM], texts: Texts, monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    """The head itself, whose drafts are all wrong, and scripted drafts that are partly right."""
    wanted = [texts.of(*pair) for pair in zip(PROMPTS, PARAMS, strict=True)]
    settings = {"enable_prefix_caching": True, "max_num_batched_tokens": 11 + 3 * k, "max_num_seqs": 3}
    rate = []
    for right in ((), range(k + 1)):
        with monkeypatch.context() as patch:
            if right:
                steer(patch, texts, right)
            llm = make(num_speculative_tokens=k, **settings)
            assert ids(llm.generate(asked(PROMPTS), PARAMS)) == wanted
            assert ids(llm.generate(asked(PROMPTS[::-1]), PARAMS[::-1])) == wanted[::-1]
            rate.append(llm.get_metrics().tokens_per_step)
    assert rate[0] < 1.1
    assert rate[1] > 1.3 or not k


@pytest.mark.parametrize("policy", ["fold", "slots"])
def test_b4_host_counts_are_those_of_the_device_after_every_step(
    make: Callable[..., LLM], texts: Texts, policy: str
) -> None:
    """B1 to B4: every sequence of three steps that accept 0, 1 or K drafts each, for two requests with different
    offsets.
    """
    pattern = [right for triple in product((0, 1, K), repeat=3) for right in triple]
    drafter = Patterned(texts, K, pattern)
    llm = make(drafter=drafter, mamba_state_policy=policy, max_model_len=224)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=190, ignore_eos=True)
    prompts = [tokens_of(11, 9), tokens_of(12, 14)]
    wanted = [texts.of(prompt, params) for prompt in prompts]
    verifier, table = llm.engine.runner.rejection_sampler, llm.engine.table
    on_device = torch.zeros(4, dtype=torch.int64)
    verify = verifier.verify

    def spy(batch: StepBatch, *args: Any) -> SampledStep:
        ended = verify(batch, *args)
        assert ended.num_valid is not None
        on_device.index_add_(0, batch.index.rows, ended.num_valid)
        return ended

    verifier.verify = spy  # type: ignore[method-assign]
    for prompt in prompts:
        llm.add_request({"prompt_token_ids": prompt}, params)

    def compare() -> None:
        for request in llm.engine.scheduler.running:
            row = request.row
            assert on_device[row] == table.num_computed[row]
            assert table.num_tokens[row] == table.num_computed[row] + 1 == request.num_tokens
            assert verifier.rows.next_ids[row, 0] == table.token_ids[row, table.num_tokens[row] - 1]

    assert sorted(ids(drain(llm, each_step=compare))) == sorted(wanted)
    accepted = [valid for step in drafter.steps for valid in step["valid"]]
    assert {1, 2, 1 + K} <= set(accepted)
    assert len(drafter.steps) > 80


@pytest.fixture(scope="module")
def told(make: Callable[..., LLM], texts: Texts) -> list[tuple[dict[str, Any], list[list[int]]]]:
    """The contexts that a drafter gets while two requests decode and two prompts are computed in chunks."""
    drafter = Patterned(texts, K, [K, 1, 0])
    llm = make(drafter=drafter, max_num_batched_tokens=16)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [tokens_of(21, 6), tokens_of(22, 3), tokens_of(23, 37), tokens_of(24, 25)]
    wanted = [texts.of(prompt, params) for prompt in prompts]
    for prompt in prompts[:2]:
        llm.add_request({"prompt_token_ids": prompt}, params)
    drafter.steps.clear()
    outputs = [llm.step() for _ in range(3)][-1]
    for prompt in prompts[2:]:
        llm.add_request({"prompt_token_ids": prompt}, params)
    outputs = drain(llm)
    assert sorted(ids(outputs)) == sorted(wanted)
    return [(step, wanted) for step in drafter.steps]


def test_b5_a_chunk_that_ends_inside_a_prompt_is_followed_by_the_prompts_next_token(told: list[Any]) -> None:
    """SGLang #26329: the token after such a chunk is the prompt's next token, not a sampled one."""
    chunks = 0
    for step, texts in told:
        for i, row in enumerate(step["row"]):
            end = step["before"][i] + step["valid"][i]
            if end < len(texts[row]):  # after a request's last step, drafts may exceed its text
                assert step["next"][i] == texts[row][end]
            if step["prompt"][i]:
                assert step["valid"][i] == step["tokens"][i]
                chunks += step["emitted"][i] == 0
    assert chunks >= 3


def test_b6_a_prompt_that_ends_beside_decodes_emits_one_token(told: list[Any]) -> None:
    met = 0
    for step, _ in told:
        ending = [i for i, prompt in enumerate(step["prompt"]) if prompt and step["emitted"][i]]
        assert all(step["emitted"][i] == 1 for i in ending)
        decodes = [i for i, prompt in enumerate(step["prompt"]) if not prompt]
        assert all(step["emitted"][i] == step["valid"][i] for i in decodes)
        met += bool(ending) and any(step["valid"][i] > 1 for i in decodes)
    assert met


def test_b7_penalties_count_what_was_accepted_and_nothing_else(make: Callable[..., LLM], texts: Texts) -> None:
    params = SamplingParams(temperature=0, frequency_penalty=0.9, presence_penalty=0.4, max_tokens=40, ignore_eos=True)
    prompt = tokens_of(31, 4) * 3
    wanted = texts.of(prompt, params)
    drafter = Patterned(texts, K, [K, 0, 2, 1])
    llm = make(drafter=drafter)
    llm.add_request({"prompt_token_ids": prompt}, params)
    sampling = llm.engine.runner.sampler

    def compare() -> None:
        for request in llm.engine.scheduler.running:
            counts = np.bincount(request.output_token_ids, minlength=VOCAB)
            assert sampling._output_counts is not None
            assert (sampling._output_counts[request.row].numpy() == counts).all()

    assert ids(drain(llm, each_step=compare)) == [wanted]
    assert llm.get_metrics().tokens_per_step > 2


def test_b8_a_stop_inside_a_run_ends_the_request_there(make: Callable[..., LLM], texts: Texts) -> None:
    """Drafts accepted after a stop are not emitted, not published, and not in the next turn."""
    prompt = tokens_of(41, 13)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=24, ignore_eos=True)
    whole = texts.of(prompt, params)
    llm = make(drafter=ScriptedDrafter(texts, 7, None, VOCAB), num_speculative_tokens=7, enable_prefix_caching=True)
    for place in (3, 5, 9, 12):  # of 8 tokens that a step emits; the prompt's step emits the first
        stop = whole[len(prompt) + place]
        end = whole.index(stop, len(prompt)) + 1
        stopped = SamplingParams(temperature=0.8, seed=1, max_tokens=24, ignore_eos=True, stop_token_ids=[stop])
        (output,) = llm.generate(asked([prompt]), stopped)
        assert (ids([output])[0], output.outputs[0].finish_reason) == (whole[:end], "stop")
        turn = [*whole[:end], 50 + place, 51]
        (again,) = llm.generate(asked([turn]), params)
        assert again.num_cached_tokens >= (end - 1) // 8 * 8
        assert ids([again]) == [texts.of(turn, params)]
    pool = llm.engine.scheduler.pool
    assert pool is not None
    assert pool.num_free == pool.capacity


@pytest.mark.parametrize("sharing", [False, True])
def test_b9_a_request_that_loses_its_place_forgets_its_drafts(
    make: Callable[..., LLM], texts: Texts, monkeypatch: pytest.MonkeyPatch, sharing: bool
) -> None:
    """Requests are preempted between a proposal and its verification, repeatedly, and resumed in other rows."""
    wanted = [texts.of(*pair) for pair in zip(PROMPTS, PARAMS, strict=True)]
    steer(monkeypatch, texts, [K, 1, 0, 2])
    llm = make(enable_prefix_caching=sharing, max_num_batched_tokens=17)
    scheduler, table, random = llm.engine.scheduler, llm.engine.table, Random(2)
    for prompt, params in zip(asked(PROMPTS), PARAMS, strict=True):
        llm.add_request(prompt, params)
    rows: dict[str, set[int]] = {}
    in_flight = 0

    def preempt() -> None:
        nonlocal in_flight
        for request in scheduler.running:
            rows.setdefault(request.request_id, set()).add(request.row)
        victims = [request for request in scheduler.running if random.random() < 0.25]
        in_flight += sum(bool(table.num_proposed[request.row]) for request in victims)
        for request in reversed(victims):
            scheduler.preempt(request)
        random.shuffle(table.free_rows)
        assert not table.num_proposed[table.free_rows].any()

    assert sorted(ids(drain(llm, each_step=preempt))) == sorted(wanted)
    assert in_flight > 5
    assert any(len(each) > 1 for each in rows.values())


def test_b11_a_request_that_joins_with_a_hit_drafts_at_once(make: Callable[..., LLM], texts: Texts) -> None:
    """The first step of such a request knows its last tokens, so a perfect drafter gives 1 + K tokens per step from
    then on.
    """
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=1 + 3 * (1 + K), ignore_eos=True)
    prompts = [tokens_of(51, 19), tokens_of(51, 16) + tokens_of(52, 1), tokens_of(51, 16) + tokens_of(53, 7)]
    wanted = [texts.of(prompt, params) for prompt in prompts]
    llm = make(drafter=ScriptedDrafter(texts, K, None, VOCAB), enable_prefix_caching=True)
    llm.add_request(*asked(prompts[:1]), params)
    for _ in range(2):
        llm.step()
    for prompt in prompts[1:]:
        llm.add_request({"prompt_token_ids": prompt}, params)
    outputs = drain(llm)
    assert sorted(ids(outputs)) == sorted(wanted)
    assert [output.num_cached_tokens for output in outputs] == [0, 16, 16]
    assert llm.get_metrics().tokens_per_step == 1 + K
