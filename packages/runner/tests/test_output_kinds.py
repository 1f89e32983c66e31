"""What reports hold: all so far, what is new, or the end alone; and which tokens were drafts."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from bateleur.runner import LLM, RequestOutput, RequestOutputKind, SamplingParams
from bateleur.runner.text.detokenizer import IncrementalDetokenizer

PROMPT = "import os\nimport sys\n\n\ndef main("
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "logprobs": 1}
DELTA = SamplingParams(**GREEDY, output_kind=RequestOutputKind.DELTA)


@pytest.fixture(scope="module")
def drafting() -> LLM:
    return LLM(device="cpu", max_model_len=128, max_num_seqs=4, draft="auto", num_speculative_tokens=3)


@pytest.fixture(scope="module")
def whole(drafting: LLM) -> RequestOutput:
    return drafting.generate(PROMPT, DELTA)[0]


def joined(outputs: list[RequestOutput]) -> RequestOutput:
    first, *later = outputs
    for output in later:
        first.add(output)
    return first


def test_deltas_join_to_the_whole(drafting: LLM, whole: RequestOutput) -> None:
    assert whole.outputs[0].cumulative_logprob is not None
    outputs = list(drafting.stream(PROMPT, DELTA))
    assert len(outputs) > 3
    assert {len(each.outputs[0].token_ids) for each in outputs} >= {1, 3}
    assert [each.finished for each in outputs] == [False] * (len(outputs) - 1) + [True]
    last, all_of = joined(outputs).outputs[0], whole.outputs[0]
    for name in ("text", "token_ids", "logprobs", "drafted", "index", "finish_reason", "stop_reason"):
        assert getattr(last, name) == getattr(all_of, name), name
    assert last.cumulative_logprob == pytest.approx(all_of.cumulative_logprob)


def test_a_delta_that_is_not_taken_is_part_of_the_next(drafting: LLM, whole: RequestOutput) -> None:
    name = drafting.add_request(PROMPT, DELTA, stream=True)
    (first,) = drafting.step()
    for _ in range(2):
        drafting.engine.step()
    (second,) = drafting.step()
    assert len(second.outputs[0].token_ids) >= 3
    for rest in iter(drafting.step, []):
        second.add(rest[0])
    first.add(second)
    assert first.outputs[0].cumulative_logprob == pytest.approx(whole.outputs[0].cumulative_logprob)
    first.outputs[0].cumulative_logprob = whole.outputs[0].cumulative_logprob
    assert first == replace(whole, request_id=name)


def test_a_delta_costs_what_is_new(drafting: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in a report grows with what was told before."""
    joins: list[IncrementalDetokenizer] = []

    def joined_text(detokenizer: IncrementalDetokenizer) -> str:
        joins.append(detokenizer)
        return detokenizer.text_from(0)

    monkeypatch.setattr(IncrementalDetokenizer, "text", property(joined_text))
    drafting.add_request(PROMPT, DELTA, stream=True)
    drafting.step()
    (group,) = drafting.engine.requests.values()
    while drafting.has_unfinished_requests:
        (output,) = drafting.step()
        assert len(output.outputs[0].token_ids) <= 4
        assert output.prompt_token_ids is group.prompt_token_ids
        assert len(joins) == output.finished, "only the end of a request joins its whole text"


def test_final_only_is_one_report_and_cumulative_grows(drafting: LLM, whole: RequestOutput) -> None:
    final = SamplingParams(**GREEDY, output_kind=RequestOutputKind.FINAL_ONLY)
    (only,) = drafting.stream(PROMPT, final)
    grown = list(drafting.stream(PROMPT, SamplingParams(**GREEDY)))
    lengths = [len(each.outputs[0].token_ids) for each in grown]
    assert lengths == sorted(set(lengths))
    for last in (only, grown[-1], joined(grown)):
        assert last.outputs == whole.outputs
    drafting.add_request(PROMPT, DELTA)
    reports = []
    while drafting.has_unfinished_requests:
        reports += drafting.step()
    assert [each.outputs for each in reports] == [whole.outputs], "without stream the end alone is reported"


def test_confirmed_drafts_are_told_from_tokens_of_the_target(drafting: LLM, whole: RequestOutput) -> None:
    before = drafting.get_metrics().num_verify_rows
    (output,) = drafting.generate(PROMPT, DELTA)
    steps = drafting.get_metrics().num_verify_rows - before + 1  # the prompt's last part draws a token as well
    drafted = output.outputs[0].drafted
    assert drafted == whole.outputs[0].drafted
    assert not drafted[0]
    assert drafted.count(False) in (steps, steps - 1), "one token of each step is the target's; the last may be cut"
    assert any(drafted)


def test_an_abort_returns_what_was_not_told(drafting: LLM, whole: RequestOutput) -> None:
    name = drafting.add_request(PROMPT, DELTA, stream=True)
    (told,) = drafting.step()
    drafting.engine.step()
    rest = drafting.abort(name)
    assert rest.outputs[0].finish_reason == "abort"
    told.add(rest)
    tokens = told.outputs[0].token_ids
    assert 1 < len(tokens) < 24
    assert tokens == whole.outputs[0].token_ids[: len(tokens)]
    assert not drafting.has_unfinished_requests


def test_a_kind_is_a_member_or_its_name(llm: LLM) -> None:
    assert SamplingParams(output_kind="DELTA").output_kind is RequestOutputKind.DELTA  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="output_kind is 'delta'; it must be one of CUMULATIVE, DELTA, FINAL_ONLY"):
        SamplingParams(output_kind="delta")  # type: ignore[arg-type]


def test_threads_that_ask_at_once_get_names_and_seeds_of_their_own(llm: LLM) -> None:
    with ThreadPoolExecutor(8) as pool:
        groups = list(pool.map(lambda _: llm._input_processor.request(PROMPT, SamplingParams()), range(200)))
    assert len({group.request_id for group in groups}) == 200
    assert len({group.members[0].seed for group in groups}) == 200


@pytest.mark.parametrize(("bad", "flags"), [(0, [True, False]), (1, [True, True])])
def test_behind_bad_logits_the_last_token_was_a_draft(drafting: LLM, bad: int, flags: list[bool]) -> None:
    """Else it is the target's own."""
    (request,) = drafting.prepare(PROMPT, SamplingParams(**GREEDY), request_id="x").members
    assert drafting.engine._outputs._append(request, [7, 8], bad) == 2
    assert request.drafted == flags
    assert request.finish_reason == ("error" if bad else None)
