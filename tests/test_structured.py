"""Text that follows a grammar: the same with drafts as without, whatever is drafted and however requests run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
from torch import Tensor

from bateleur.eagle import DraftContext, Drafter
from bateleur.runner import LLM, RequestOutput, SamplingParams
from eagle_doubles.drafters import RandomDrafter, ScriptedDrafter

VOCAB = 4096
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["class", "module", "function"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
SUM = 'start: term ("+" term)*\nterm: NUMBER | "(" start ")"\nNUMBER: /[0-9]{1,3}/\n'
ASKED: list[tuple[str, dict[str, Any]]] = [
    ('{"name": "x", "size":', {"structured_outputs": {"json": PERSON}, "temperature": 0, "max_tokens": 48}),
    ("class Node:", {"structured_outputs": {"json": PERSON}, "seed": 3, "max_tokens": 40, "top_p": 0.9}),
    ("x = ", {"structured_outputs": {"regex": r"[a-z]{2,6}(, [a-z]{2,6}){3}"}, "seed": 4, "top_k": 30}),
    ("import ", {"structured_outputs": {"choice": ["os", "os.path", "json"]}, "temperature": 0, "logprobs": 2}),
    ("y = 1 +", {"structured_outputs": {"grammar": SUM}, "seed": 5, "max_tokens": 12, "presence_penalty": 1.0}),
    ("def f(x):", {"seed": 6, "max_tokens": 20}),
    ("z =", {"structured_outputs": {"regex": "a{1,9}b"}, "seed": 7, "min_tokens": 9, "max_tokens": 30}),
    ("w =", {"structured_outputs": {"regex": "(ab){2}"}, "seed": 8, "ignore_eos": True, "max_tokens": 30}),
    ("v =", {"structured_outputs": {"regex": "[0-9]+"}, "seed": 9, "stop": ["77"], "repetition_penalty": 1.1}),
]
PROMPTS = [prompt for prompt, _ in ASKED]
PARAMS = [SamplingParams(**params) for _, params in ASKED]


def told(outputs: Sequence[RequestOutput]) -> list[Any]:
    """What must be the same, of log probabilities the ranks."""
    return [
        (
            done.token_ids,
            done.text,
            done.finish_reason,
            done.stop_reason,
            done.logprobs and [{token: each.rank for token, each in at.items()} for at in done.logprobs],
        )
        for done in (output.outputs[0] for output in outputs)
    ]


@pytest.fixture(scope="module")
def plain(make_llm: Callable[..., LLM]) -> list[RequestOutput]:
    """Without drafts, one request at a time."""
    return make_llm(max_num_seqs=1, mamba_state_policy="slots").generate(PROMPTS, PARAMS)


class Script:
    """What plain decoding says behind these tokens; `wrong`: right drafts in which every so many are others."""

    def __init__(self, outputs: Sequence[RequestOutput]) -> None:
        self.texts = [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in outputs]

    def __call__(self, tokens: Sequence[int]) -> list[int]:
        found = (text[len(tokens) :] for text in self.texts if text[: len(tokens)] == list(tokens))
        return next(found, [])


class Partly(ScriptedDrafter):
    """Right up to a place that changes with every proposal."""

    def __init__(self, script: Script, k: int) -> None:
        super().__init__(script, k, None, VOCAB)
        self.random = Random(5)

    def propose(self, context: DraftContext) -> Tensor:
        self._right = self.random.randint(0, self.num_speculative_tokens)
        return super().propose(context)


DRAFTERS: dict[str, Callable[[Script], Drafter]] = {
    "right": lambda script: ScriptedDrafter(script, 4, None, VOCAB),
    "wrong": lambda script: ScriptedDrafter(script, 4, 0, VOCAB),
    "partly": lambda script: Partly(script, 4),
    "random": lambda script: RandomDrafter(4, VOCAB),
}


def test_text_follows_what_was_asked(plain: list[RequestOutput]) -> None:
    whole = {i: each.outputs[0] for i, each in enumerate(plain)}
    assert [each.finish_reason for each in whole.values()] == [
        *("stop", "stop", "stop", "stop", "length", "length", "stop", "stop", "length")
    ]
    for i in (0, 1):
        found = json.loads(whole[i].text)
        assert found.keys() == PERSON["properties"].keys()
        assert 0 <= found["size"] <= 99
    for i, pattern in ((2, r"[a-z]{2,6}(, [a-z]{2,6}){3}"), (6, "a{1,9}b"), (7, "(ab){2}")):
        assert re.fullmatch(pattern, whole[i].text)
    assert whole[3].text in ("os", "os.path", "json")
    assert set(whole[4].text) <= set("0123456789()+")
    assert whole[3].token_ids[-1] == 0
    assert whole[7].token_ids[-1] != 0, "the end of the grammar is the end, where that of the sequence is ignored"
