"""Token masks by position: the same tokens with and without drafts, and a reason if no token is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from bateleur.runner import LLM, RequestOutput, SamplingParams
from bateleur.runner.assets import shipped_draft
from bateleur.runner.sampling.token_rules import mask_words
from bateleur.runner.utils.device import upload
from scripted import Patterned, Texts

V = 4096
PROMPTS: Any = [
    {"prompt_token_ids": [Random(seed).randint(3, V - 1) for _ in range(length)]}
    for seed, length in enumerate((5, 21, 1, 16))
]


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def texts(make_llm: Callable[..., LLM]) -> Texts:
    """The texts of requests without drafts."""
    return Texts(make_llm(max_model_len=96, max_num_seqs=4))


@pytest.fixture(scope="module")
def drafting(make_llm: Callable[..., LLM], texts: Texts) -> LLM:
    """An engine whose drafts are right 3, 0, 1, ... times."""
    drafter = Patterned(texts, 3, [3, 0, 1, 2])
    return make_llm(max_model_len=96, max_num_seqs=4, drafter=drafter, num_speculative_tokens=3)


class Grammar:
    """Allows the tokens i mod 7 at output position i of every request, and none after `most` tokens."""

    def __init__(self, llm: LLM, patch: pytest.MonkeyPatch, most: int) -> None:
        self.verifier, self.most = llm.engine.runner.rejection_sampler, most
        self.verify = self.verifier.verify
        patch.setattr(self.verifier, "verify", self._masked)

    def _masked(self, plan: Any, batch: Any, hidden: torch.Tensor, allowed: None) -> Any:
        drawing, first, generated = plan.index.sampled, plan.index.first_S, self.verifier.num_generated(plan)
        query_lens = np.where(drawing < plan.num_decodes, plan.query_lens[drawing], 1)
        bits = np.zeros((int(query_lens.sum()), 32 * mask_words(V)), np.uint8)
        for before, start, num in zip(generated, first, query_lens, strict=True):
            for place in range(num):
                at = before + place
                if at < self.most:
                    bits[start + place, at % 7 :: 7] = 1
        words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        return self.verify(plan, batch, hidden, upload(words, batch.positions.device))


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_bits_for_every_place_are_those_of_plain_decoding(
    texts: Texts, drafting: LLM, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """If no token is left, the request ends with an error and keeps the tokens before."""
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=20, ignore_eos=True)
    Grammar(texts.plain, monkeypatch, 12)
    Grammar(drafting, monkeypatch, 12)
    plain = [texts.of(each["prompt_token_ids"], params) for each in PROMPTS]
    before = drafting.get_metrics().num_verify_rows
    outputs = drafting.generate(PROMPTS, params)
    assert [each["prompt_token_ids"] + new for each, new in zip(PROMPTS, ids(outputs), strict=True)] == plain
    assert drafting.get_metrics().num_verify_rows - before < 4 * 10, "drafts were accepted"
    for output in outputs:
        assert [token % 7 for token in output.outputs[0].token_ids] == [i % 7 for i in range(12)]
        assert output.outputs[0].finish_reason == "error"
        assert output.outputs[0].stop_reason == "no token is left that the request's own parameters allow"


# ---- parameters

TEXTS = ["def add(a, b):", "import os", "class Node:\n    def __init__(self", "for i in range("]
DRAFTERS: dict[str, dict[str, Any]] = {
    "head": {"draft": shipped_draft()},
    "ngram": {"draft": "ngram"},
    "graphs": {
        "draft": shipped_draft(),
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_backend": "recorded",
        "cudagraph_capture_sizes": [4, 8, 12, 16, 20],
    },
}


def ruled(text: str) -> list[SamplingParams]:
    """Each parameter alone and all at once; each changes the model's text after `text`."""
    common: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "seed": len(text)}
    rules: list[dict[str, Any]] = [
        {"logit_bias": {"199": -100, 14: -4.5, 522: -8, 276: 2.5, 667: 5}},
        {"allowed_token_ids": range(7, V, 3)},
        {"bad_words": ["self", "a", "\n", "import", "name", ".path", "):", "list of"]},
    ]
    rules.append({name: value for rule in rules for name, value in rule.items()} | {"min_tokens": 9})
    rules[-1]["repetition_penalty"] = 1.2
    return [SamplingParams(temperature=0.0 if i % 2 else 0.9, **common, **rule) for i, rule in enumerate(rules)]


@pytest.fixture(scope="module")
def asked(texts: Texts) -> list[tuple[str, SamplingParams]]:
    return [(text, params) for text in TEXTS for params in ruled(text)]


@pytest.fixture(scope="module")
def answers(texts: Texts, asked: list[tuple[str, SamplingParams]]) -> list[RequestOutput]:
    return texts.plain.generate(*map(list, zip(*asked, strict=True)))


def test_rules_hold(texts: Texts, asked: list[tuple[str, SamplingParams]], answers: list[RequestOutput]) -> None:
    free = [replace(params, logit_bias=None, allowed_token_ids=None, bad_words=()) for _, params in asked]
    others = texts.plain.generate([text for text, _ in asked], free)
    changed, encode = 0, texts.plain.tokenizer.encode
    for (_, params), output, other in zip(asked, answers, others, strict=True):
        said = output.outputs[0].token_ids
        changed += said != other.outputs[0].token_ids
        assert len(said) == 24
        assert params.allowed_token_ids is None or set(said) <= set(params.allowed_token_ids)
        assert params.logit_bias is None or 199 not in said
        for word in params.bad_words:
            for bad in (encode(form, add_special_tokens=False) for form in (word, f" {word}")):
                assert bad not in [said[at : at + len(bad)] for at in range(24)]
    assert changed == len(asked), "every rule matters"


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_the_same_with_drafts(
    make_llm: Callable[..., LLM], asked: list[tuple[str, SamplingParams]], answers: list[RequestOutput], drafter: str
) -> None:
    """Few rows and small steps, so that requests join and leave, and prompts run together with drafts."""
    llm = make_llm(max_num_seqs=5, max_num_batched_tokens=24, num_speculative_tokens=3, **DRAFTERS[drafter])
    outputs = llm.generate(*map(list, zip(*asked, strict=True)))
    assert ids(outputs) == ids(answers)
    assert llm.get_metrics().tokens_per_step > (1.0 if drafter == "ngram" else 1.1)


def test_tokens_are_the_same_after_preemption_and_when_a_step_breaks_off(
    make_llm: Callable[..., LLM],
    sized: Callable[..., LLM],
    texts: Texts,
    asked: list[tuple[str, SamplingParams]],
    answers: list[RequestOutput],
) -> None:
    for (_, params), answer in zip(asked, answers, strict=True):
        texts.of(answer.prompt_token_ids, params)
    drafter = Patterned(texts, 3, [3, 2, 0, 3])
    llm = sized(make_llm, 21, block_size=4, max_model_len=64, drafter=drafter, num_speculative_tokens=3, max_num_seqs=6)
    for text, params in asked:
        llm.add_request(text, params)
    found: list[RequestOutput] = []
    for number in count():
        if not llm.has_unfinished_requests:
            break
        if number % 9 == 5:
            llm.engine.registry.consistent = False
        found += llm.step()
    found.sort(key=lambda output: int(output.request_id.removeprefix("request-")))
    assert ids(found) == ids(answers)
    assert sum(output.num_preemptions for output in found) > 20


def test_where_nothing_is_left_one_request_ends_and_says_why(drafting: LLM, texts: Texts) -> None:
    """All allowed tokens are bad words, or would end the request too early. Its shared blocks stay usable."""
    word = texts.plain.tokenizer.encode("self", add_special_tokens=False)
    assert len(word) == 1
    eos = drafting.spec.eos_token_ids[0]
    params = [
        SamplingParams(temperature=0, allowed_token_ids=word, bad_words=["self"]),
        SamplingParams(temperature=0.9, allowed_token_ids=[eos], min_tokens=3),
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    ]
    outputs = [output.outputs[0] for output in drafting.generate(["def f("] * 3, params)]
    for output in outputs[:2]:
        assert (output.finish_reason, output.token_ids) == ("error", [])
        assert output.stop_reason == "no token is left that the request's own parameters allow"
    assert (outputs[2].finish_reason, len(outputs[2].token_ids)) == ("length", 9)
