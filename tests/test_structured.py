"""Structured outputs are the same with and without drafts, for any drafts and any scheduling."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bateleur.eagle import Drafter
from bateleur.runner import LLM, RequestOutput, SamplingParams
from eagle_doubles.drafters import RandomDrafter, ScriptedDrafter
from scripted import RECURRENCES, Partly, Script

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
    (
        "class Node:",
        {"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}, "seed": 3, "max_tokens": 40},
    ),
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
    """Everything that must be equal; of log probabilities only the ranks."""
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
    """Outputs without drafts, one request at a time."""
    return make_llm(max_num_seqs=1, mamba_state_policy="slots").generate(PROMPTS, PARAMS)


DRAFTERS: dict[str, Callable[[Script], Drafter]] = {
    "right": lambda script: ScriptedDrafter(script, 4, None, VOCAB),
    "wrong": lambda script: ScriptedDrafter(script, 4, 0, VOCAB),
    "partly": lambda script: Partly(script, 4, VOCAB),
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
    assert whole[7].token_ids[-1] != 0, "where the end of the sequence is ignored, that of the grammar is the end"


GRAPHS = {
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "cudagraph_backend": "recorded",
    "cudagraph_capture_sizes": [5, 10, 20, 40],
    "cudagraph_checks": "PARANOID",
}
PREFIXES = {"enable_prefix_caching": True, "mamba_block_size": 8}
ENGINES: dict[str, tuple[str, dict[str, Any], tuple[int, int] | None]] = {
    "right, on graphs": ("right", GRAPHS, None),
    "wrong, in chunks": ("wrong", {"max_num_batched_tokens": 15, "max_num_seqs": 3}, None),
    "partly, preempted, shared": ("partly", PREFIXES, (13, 8)),
    "random": ("random", {"mamba_state_policy": "slots"}, None),
}


@pytest.mark.parametrize("name", ENGINES)
def test_drafts_change_nothing(
    make_llm: Callable[..., LLM], sized: Callable[..., LLM], plain: list[RequestOutput], name: str
) -> None:
    drafter, settings, blocks = ENGINES[name]
    made = DRAFTERS[drafter](Script(plain))
    settings = settings | {"drafter": made, "num_speculative_tokens": 4}
    llm = make_llm(**settings) if blocks is None else sized(make_llm, *blocks, **settings)
    assert told(llm.generate(PROMPTS, PARAMS)) == told(plain)
    stats = llm.get_metrics()
    assert (stats.num_preemptions > 0) == (blocks is not None)
    assert (stats.acceptance.kept[0] > 0) == (drafter in ("right", "partly"))
    if drafter == "right":
        assert stats.acceptance.kept.sum() > 0.95 * stats.acceptance.tried.sum(), "nothing right is cut"
    if drafter == "random":
        others = sum(len(each.outputs[0].token_ids) for each in (plain[4], plain[5], plain[8]))
        assert stats.acceptance.tried[0] < 2 * others, "what grammars forbid is not tested"


@pytest.mark.parametrize("rule", ["coupled", "ratio", "block"])
def test_a_head_whose_drafts_are_forbidden_now_and_then(
    make_llm: Callable[..., LLM], sized: Callable[..., LLM], plain: list[RequestOutput], rule: str
) -> None:
    """Under every rule a seed decides in any batch and through preemption; under COUPLED the tokens are those without
    drafts.
    """
    settings = {"draft": "auto", "num_speculative_tokens": 3, "speculative_rule": rule}
    alone = make_llm(**settings, max_num_seqs=1).generate(PROMPTS, PARAMS)
    together = sized(make_llm, 10, 8, **settings, max_num_seqs=3, max_num_batched_tokens=13)
    assert told(together.generate(PROMPTS, PARAMS)) == told(alone)
    assert together.get_metrics().num_preemptions > 0
    assert (told(alone) == told(plain)) == (rule == "coupled")
    for i in (0, 1):
        assert json.loads(alone[i].outputs[0].text).keys() == PERSON["properties"].keys()


def test_lookups_in_json(make_llm: Callable[..., LLM]) -> None:
    """Names of the schema that occur in the prompt are found by prompt lookup."""
    row = '{"name": "first", "size": 12, "kind": "module"}\n'
    asked = SamplingParams(structured_outputs={"json": PERSON}, temperature=0, max_tokens=60)
    (expected,) = make_llm(max_num_seqs=1).generate(row * 3, asked)
    llm = make_llm(draft="ngram", num_speculative_tokens=6)
    assert told(llm.generate([row * 3] * 3, asked)) == told([expected] * 3)
    assert json.loads(expected.outputs[0].text).keys() == PERSON["properties"].keys()
    stats = llm.get_metrics()
    assert stats.acceptance.kept[0] > 0.5 * stats.acceptance.tried[0] > 0


def test_a_grammar_that_can_not_go_on_is_an_error_of_its_request_alone(make_llm: Callable[..., LLM]) -> None:
    """The parser's limits are exceeded after some tokens. Only this request ends with an error."""
    nested = {"grammar": 'start: ((("a"~1..1000)~1..1000)~1..1000)'}
    asked = [
        SamplingParams(structured_outputs=nested, seed=1, max_tokens=200),
        SamplingParams(seed=2, max_tokens=9, structured_outputs={"regex": "[a-z]{30}"}),
    ]
    llm = make_llm(draft="ngram", num_speculative_tokens=2)
    broken, other = (each.outputs[0] for each in llm.generate(["aaaa", "x"], asked))
    assert broken.finish_reason == "error"
    assert "items" in str(broken.stop_reason)
    assert set(broken.text) <= {"a"}
    assert other.finish_reason == "length"


def test_a_model_without_an_end_of_32_tokens_a_word(tiny: Callable[..., Path]) -> None:
    """Grammars have one token more than the model, and one mask word more; `allowed_token_ids` has not."""
    family, sizes = RECURRENCES["gated_delta"]
    llm = LLM(tiny(family, **sizes, vocab_size=96), device="cpu", draft="ngram", num_speculative_tokens=2)
    assert not llm.spec.eos_token_ids
    some = [ord(each) - 33 for each in "abc"]
    asked = SamplingParams(structured_outputs={"regex": "[b-z]{8}"}, allowed_token_ids=some, seed=1)
    (output,) = llm.generate("bcbcbc", asked)
    assert re.fullmatch("[bc]{8}", output.outputs[0].text)
    assert output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("draft", [{}, {"draft": "ngram", "num_speculative_tokens": 3}])
def test_a_complete_text_is_no_error_if_no_end_token_is_allowed(
    make_llm: Callable[..., LLM], draft: dict[str, Any]
) -> None:
    llm = make_llm(**draft)
    digits = [llm.tokenizer.encode(each, add_special_tokens=False)[0] for each in "0123456789"]
    for allowed, sizes in ((digits, {5}), ([*digits, 0], {3, 4, 5})):
        asked = SamplingParams(structured_outputs={"regex": "[0-9]{3,5}"}, allowed_token_ids=allowed, seed=1)
        (output,) = llm.generate("1212", asked)
        assert output.outputs[0].finish_reason == "stop"
        assert re.fullmatch("[0-9]+", output.outputs[0].text)
        assert len(output.outputs[0].text) in sizes


def test_a_draft_before_an_error_counts_as_accepted(make_llm: Callable[..., LLM]) -> None:
    (letter,) = make_llm().tokenizer.encode("a", add_special_tokens=False)
    drafter = RandomDrafter(2, VOCAB)
    drafter.propose = lambda context: torch.full((len(context.rows), 2), letter)  # type: ignore[method-assign]
    llm = make_llm(drafter=drafter, num_speculative_tokens=2)
    asked = SamplingParams(structured_outputs={"regex": "aab"}, allowed_token_ids=[letter])
    (output,) = llm.generate("x", asked)
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].drafted == [False, True]
    acceptance = llm.get_metrics().acceptance
    assert acceptance is not None
    assert acceptance.num_accepted == 1


def test_logits_that_are_not_numbers_are_that_under_a_grammar(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    logits = llm.engine.model.logits
    monkeypatch.setattr(llm.engine.model, "logits", lambda hidden: logits(hidden) * float("nan"))
    (output,) = llm.generate("x", SamplingParams(structured_outputs={"regex": "[a-z]+"}))
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].stop_reason == "the model's logits are not numbers (NaN)"


def test_what_is_refused_leaves_the_others(llm: LLM) -> None:
    good = llm.add_request("x", SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match=r"structured_outputs\.regex is '\(a'; .*unclosed group"):
        llm.add_request("x", SamplingParams(structured_outputs={"regex": "(a"}))
    with pytest.raises(ValueError, match=r"prompts\[1\]: structured_outputs\.json is"):
        llm.generate(["x", "y"], [SamplingParams(), SamplingParams(structured_outputs={"json": {"$ref": "#"}})])
    done = []
    while llm.has_unfinished_requests:
        done += llm.step()
    assert [output.request_id for output in done] == [good]


def test_steps_without_a_grammar_fetch_nothing(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a grammar, drafts are not copied to the host and masks not to the device; with one, drafts are copied
    once per step.
    """
    llm = make_llm(draft="ngram", num_speculative_tokens=2)
    fetched: list[tuple[int, ...]] = []
    proposed = llm.engine.runner.rejection_sampler.drafts_of
    monkeypatch.setattr(
        llm.engine.runner.rejection_sampler, "drafts_of", lambda rows: fetched.append(rows.shape) or proposed(rows)
    )
    llm.generate(["x = 1", "y = 2"], SamplingParams(max_tokens=6, seed=1))
    assert not fetched
    params = [SamplingParams(max_tokens=6, seed=1, ignore_eos=True)] * 2
    params.append(SamplingParams(max_tokens=3, seed=1, structured_outputs={"regex": "[a-z]{40}"}))
    llm.generate(["x = 1", "y = 2", "z"], params)
    assert set(fetched) == {(1,)}
    assert len(fetched) <= 3


def test_continuations_have_a_grammar_each(make_llm: Callable[..., LLM]) -> None:
    """Three continuations of one prompt equal three requests."""
    asked = {"structured_outputs": {"regex": "([a-z]{3} ){3}"}, "max_tokens": 20}
    apart = make_llm().generate(["x ="] * 3, [SamplingParams(seed=5 + i, **asked) for i in range(3)])
    (output,) = make_llm(draft="ngram", num_speculative_tokens=3).generate("x =", SamplingParams(n=3, seed=5, **asked))
    assert [each.text for each in output.outputs] == [each.outputs[0].text for each in apart]
    assert all(re.fullmatch("([a-z]{3} ){3}", each.text) for each in output.outputs)


@pytest.mark.parametrize("rule", ["coupled", "ratio", "block"])
def test_of_forbidden_drafts_sampling_rules_reject_the_first(make_llm: Callable[..., LLM], rule: str) -> None:
    """The residual distribution after a rejection differs from the distribution without the forbidden draft."""
    settings = {"drafter": RandomDrafter(4, VOCAB), "num_speculative_tokens": 4, "speculative_rule": rule}
    llm = make_llm(**settings)
    llm.generate("x", SamplingParams(structured_outputs={"regex": "[0-9]{40}"}, seed=1, max_tokens=12))
    tried = llm.get_metrics().acceptance.tried.tolist()
    assert tried[1:] == [0, 0, 0]
    assert tried[0] == (0 if rule == "coupled" else 10)
