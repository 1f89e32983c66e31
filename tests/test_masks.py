"""What may be drawn, place by place: the same tokens with drafts and without, and an end that says why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from bateleur.runner import LLM, RequestOutput, SamplingParams
from bateleur.runner.device import upload
from bateleur.runner.sampling.masks import mask_words
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
    """What requests say without drafts."""
    return Texts(make_llm(max_model_len=96, max_num_seqs=4))


@pytest.fixture(scope="module")
def drafting(make_llm: Callable[..., LLM], texts: Texts) -> LLM:
    """An engine whose drafts are right 3, 0, 1, ... times."""
    drafter = Patterned(texts, 3, [3, 0, 1, 2])
    return make_llm(max_model_len=96, max_num_seqs=4, drafter=drafter, num_speculative_tokens=3)


class Grammar:
    """At output place i of every request tokens i mod 7 of 7 are allowed, and behind `most` tokens none."""

    def __init__(self, llm: LLM, patch: pytest.MonkeyPatch, most: int) -> None:
        self.verifier, self.most = llm.engine._verifier, most
        self.verify = self.verifier.verify
        patch.setattr(self.verifier, "verify", self._masked)

    def _masked(self, plan: Any, batch: Any, hidden: torch.Tensor) -> Any:
        table, (drawing, first) = self.verifier.table, self.verifier.logit_rows(plan)
        query_lens = np.where(drawing < plan.num_decodes, plan.query_lens[drawing], 1)
        bits = np.zeros((int(query_lens.sum()), 32 * mask_words(V)), np.uint8)
        for row, start, count in zip(plan.rows[drawing], first, query_lens, strict=True):
            for place in range(count):
                at = table.num_tokens[row] - table.prompt_len[row] + place
                if at < self.most:
                    bits[start + place, at % 7 :: 7] = 1
        words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        return self.verify(plan, batch, hidden, upload(words, batch.positions.device))


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_bits_for_every_place_are_those_of_plain_decoding(
    texts: Texts, drafting: LLM, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """And where none is left, the request ends and says so, with the tokens before that."""
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
