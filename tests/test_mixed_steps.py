"""A prompt among decodes: they stay in graphs and on split keys (TensorRT-LLM #16976)."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bateleur.cudagraph import CudaGraphMode, Why
from bateleur.metadata.backends.triton_paged import TritonBackend
from bateleur.runner import LLM, SamplingParams

LENGTHS = (7, 30, 3)


def talk(llm: LLM) -> list[list[int]]:
    """Requests that come while others decode, the second with a prompt of several parts."""
    names, found = [], {}
    for length in LENGTHS:
        prompt = [(7 * i + 13 * length) % 90 + 3 for i in range(length)]
        params = SamplingParams(temperature=0.8, seed=length, max_tokens=12, ignore_eos=True)
        names.append(llm.add_request({"prompt_token_ids": prompt}, params))
        for _ in range(3):
            found |= {output.request_id: output.outputs[0].token_ids for output in llm.step()}
    while llm.has_unfinished_requests:
        found |= {output.request_id: output.outputs[0].token_ids for output in llm.step()}
    return [found[name] for name in names]


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE"])
def test_pieces_hold_attention_and_mixed_steps_say_the_tokens_of_eager_ones(
    make_llm: Callable[..., LLM], tiny_hybrid: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """A replay goes from graph to graph without a look at attention: what runs between them is recurrent."""
    settings: dict[str, Any] = {"model": tiny_hybrid, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    expected = talk(make_llm(**settings))
    monkeypatch.setattr(TritonBackend, "unsupported", lambda *_, **__: None)
    graphs = {
        "cudagraph_mode": mode,
        "cudagraph_backend": "recorded",
        "cudagraph_capture_sizes": [1, 4, 8, 16],
    }
    llm = make_llm(**settings, **graphs, attention_backend="triton", cudagraph_checks="PARANOID")
    calls = Counter[str]()
    attend = TritonBackend.attend

    def counted(self: TritonBackend, *args: Any, **options: Any) -> Any:
        calls["attend"] += 1
        return attend(self, *args, **options)

    monkeypatch.setattr(TritonBackend, "attend", counted)
    assert talk(llm) == expected
    by_why = llm.engine.graphs.decisions.by_why
    assert by_why[Why.PIECEWISE] >= 4
    assert set(by_why) <= {Why.PIECEWISE, Why.DECODE}
    assert not calls, "a replay calls attention between two pieces"
    assert llm.engine.graphs.manager is not None
    pieces = {
        row.num_graphs
        for row in llm.engine.graphs.manager.report.captured
        if row.key.mode is CudaGraphMode.PIECEWISE
    }
    assert pieces == {1 + len(llm.engine.model.spec.recurrent)}


def test_decodes_and_prompts_are_launches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call of attention: one token a row and a row of 300, with all heads of a key head in a tile."""
    pytest.importorskip("triton", reason="triton is not installed")
    import torch

    from bateleur.metadata.kernels import attention

    seen: list[tuple[tuple[int, int], int, int, int]] = []

    class Spy:
        def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
            return lambda *_, **o: seen.append((grid, o["LEAST"], o["MOST"], o["BLOCK_M"]))

    monkeypatch.setattr(attention, "attention_kernel", Spy())
    monkeypatch.setattr(attention, "_device", lambda device: (132, 227 << 10))
    rows, tokens = 64, 63 + 300
    q, cache = torch.empty(tokens, 32, 128, dtype=torch.bfloat16), torch.empty(2, 16, 8, 128)
    ints = torch.zeros(rows + 1, dtype=torch.int32)
    batch = attention.Batch(q, cache, cache, ints[:rows, None], ints[:rows], ints)
    attention.attend(batch, torch.empty_like(q), ints, 300, 4096, 1.0, 0)
    splits = attention.split_limit(8, 132)
    short, long = attention.SHORT, attention.SHORT + 1
    assert seen == [
        ((rows + splits + 1, 8), 1, short, 64),
        ((tokens * 4 // 128 + tokens // long + splits + 1, 8), long, 0, 128),
    ]
