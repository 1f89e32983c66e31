"""Several continuations of one prompt: one report, seeds of their own, and the prompt computed once."""

from typing import Any

import pytest

from bateleur.runner import LLM, RequestOutput, RequestOutputKind, SamplingParams

PROMPT = "import os\nimport sys\n\n\ndef main("
DRAWN: dict[str, Any] = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def sharing() -> LLM:
    return LLM(
        device="cpu", max_model_len=96, max_num_seqs=3, enable_prefix_caching=True, block_size=4, mamba_block_size=8
    )


def tokens(output: RequestOutput) -> list[list[int]]:
    assert [each.index for each in output.outputs] == list(range(len(output.outputs)))
    return [each.token_ids for each in output.outputs]


def run(llm: LLM) -> list[RequestOutput]:
    reports = []
    while llm.has_unfinished_requests:
        reports += llm.step()
    return reports


def alone(llm: LLM, seed: int) -> list[int]:
    return llm.generate(PROMPT, SamplingParams(**DRAWN, seed=seed))[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    return [alone(llm, 40 + index) for index in range(5)]


def test_each_has_the_tokens_of_a_request_with_its_seed(llm: LLM, expected: list[list[int]]) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(**DRAWN, seed=40, n=5))
    assert tokens(output) == expected
    assert output.finished
    assert len(set(map(tuple, expected))) == 5
    assert output.outputs[3].text == llm.tokenizer.decode(expected[3])
    (unseeded,) = llm.generate(PROMPT, SamplingParams(**DRAWN, n=3))
    assert len(set(map(tuple, tokens(unseeded)))) == 3
    assert alone(llm, -(2**63)) == tokens(llm.generate(PROMPT, SamplingParams(**DRAWN, seed=2**63 - 1, n=2))[0])[1]


def test_one_report_when_all_have_ended(llm: LLM, expected: list[list[int]]) -> None:
    """Rows are few, so they end in different steps; nothing is said before the last."""
    before = llm.get_metrics().num_finished
    name = llm.add_request(PROMPT, SamplingParams(**DRAWN, seed=40, n=5))
    (report,) = run(llm)
    assert (report.request_id, tokens(report)) == (name, expected)
    assert llm.get_metrics().num_finished == before + 5


def test_deltas_have_the_index_of_their_continuation(llm: LLM, expected: list[list[int]]) -> None:
    delta = SamplingParams(**DRAWN, seed=40, n=5, output_kind=RequestOutputKind.DELTA)
    reports = list(llm.stream(PROMPT, delta))
    assert [each.finished for each in reports] == [False] * (len(reports) - 1) + [True]
    gathered: list[list[int]] = [[] for _ in range(5)]
    for report in reports:
        assert report.outputs
        for each in report.outputs:
            assert each.token_ids or each.finish_reason
            gathered[each.index] += each.token_ids
    assert gathered == expected
    for report in reports[1:]:
        reports[0].add(report)
    assert tokens(reports[0]) == expected
    *_, last = llm.stream(PROMPT, SamplingParams(**DRAWN, seed=40, n=5))
    assert tokens(last) == expected


def test_an_abort_ends_all(sharing: LLM) -> None:
    params = SamplingParams(**DRAWN, seed=40, n=5)
    for steps in (0, 1, 3, 11):
        name = sharing.add_request(PROMPT, params, stream=True)
        for _ in range(steps):
            sharing.step()
        report = sharing.abort(name)
        assert report.finished
        assert {each.finish_reason for each in report.outputs} <= {"abort", "length"}
        assert not sharing.has_unfinished_requests
        scheduler = sharing.engine.scheduler
        assert scheduler.num_waiting == len(scheduler.running) == 0
        assert len(scheduler.table.free_rows) == 3


def test_the_prompt_is_computed_once_where_prefixes_are_shared(sharing: LLM, expected: list[list[int]]) -> None:
    prompt, seeded = "x = 1\ny = 2\nz = 3\n" * 2 + PROMPT, SamplingParams(**DRAWN, seed=40)
    count = len(sharing.tokenizer.encode(prompt))
    before = sharing.get_metrics().num_prefill_tokens
    (output,) = sharing.generate(prompt, SamplingParams(**DRAWN, seed=40, n=5))
    computed = sharing.get_metrics().num_prefill_tokens - before
    assert count + 4 <= computed < count + 4 * 9, "of the others, only what lies behind the last boundary"
    assert output.num_cached_tokens == 0
    assert tokens(output)[0] == sharing.generate(prompt, seeded)[0].outputs[0].token_ids


def test_interrupted_ones_are_all_recomputed(sharing: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(**DRAWN, seed=40, n=5)
    wanted = tokens(sharing.generate(PROMPT, params)[0])

    def broken(*_: Any) -> None:
        raise RuntimeError("by design")

    for steps in (0, 1, 4, 12):
        sharing.add_request(PROMPT, params)
        for _ in range(steps):
            sharing.step()
        with monkeypatch.context() as patch:
            patch.setattr(sharing.engine, "_step", broken)
            with pytest.raises(RuntimeError, match="by design"):
                sharing.step()
        (report,) = run(sharing)
        assert tokens(report) == wanted


def test_preempted_ones_are_recomputed(expected: list[list[int]]) -> None:
    llm = LLM(device="cpu", max_model_len=32, max_num_seqs=3, block_size=4, kv_cache_memory_bytes=2_300_000)
    (output,) = llm.generate(PROMPT, SamplingParams(**DRAWN, seed=40, n=5))
    assert output.num_preemptions > 0
    assert tokens(output) == expected


def test_what_is_no_number_of_continuations() -> None:
    for wrong in (0, -1, 257, 1.5, "2", True, None):
        with pytest.raises(ValueError, match=r"n is .*; it must be an integer in \[1, 256\]"):
            SamplingParams(n=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="n is 2; it must be 1 with temperature 0"):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(ValueError, match="best_of is 2"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
