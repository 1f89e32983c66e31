"""A prompt in a batch of decodes: decodes stay in graphs and on split keys (TensorRT-LLM #16976)."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from bateleur.cudagraph import CudaGraphMode, DispatchReason, StagedBatch
from bateleur.cudagraph.backends.recorded import RecordedPiece
from bateleur.eagle import EagleSpeculator
from bateleur.mamba import MambaMetadata
from bateleur.metadata.backends.paged import TritonBackend
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.model_runner.graph_dispatcher import GraphDispatcher
from bateleur.runner.models import StepContext

LENGTHS = (7, 30, 3)
SMALL: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
GRAPHS: dict[str, Any] = {
    "cudagraph_mode": "PIECEWISE",
    "cudagraph_backend": "recorded",
    "cudagraph_capture_sizes": [1, 4, 8, 16],
    "cudagraph_checks": "PARANOID",
}


def talk(llm: LLM) -> list[list[int]]:
    """Requests that arrive while others decode, the second with a chunked prompt."""
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
    """A replay runs all pieces; only recurrent layers run between them, not attention."""
    expected = talk(make_llm(**SMALL, model=tiny_hybrid))
    monkeypatch.setattr(TritonBackend, "unsupported_reason", lambda *_, **__: None)
    graphs = GRAPHS | {"cudagraph_mode": mode}
    llm = make_llm(**SMALL | graphs, model=tiny_hybrid, attention_backend="triton")
    calls = Counter[str]()
    attend = TritonBackend.attend

    def counted(self: TritonBackend, *args: Any, **options: Any) -> Any:
        calls["attend"] += 1
        return attend(self, *args, **options)

    monkeypatch.setattr(TritonBackend, "attend", counted)
    assert talk(llm) == expected
    by_reason = llm.engine.runner.graphs.decisions.by_reason
    assert by_reason[DispatchReason.PIECEWISE] >= 4
    assert set(by_reason) <= {DispatchReason.PIECEWISE, DispatchReason.DECODE}
    assert not calls, "a replay calls attention between two pieces"
    assert llm.engine.runner.graphs.manager is not None
    pieces = {
        row.num_graphs
        for row in llm.engine.runner.graphs.manager.report.captured
        if row.key.mode is CudaGraphMode.PIECEWISE
    }
    assert pieces == {1 + len(llm.engine.model.spec.recurrent)}


class Launches(TorchDispatchMode):
    """Records by step what the host starts while layers run: replays of pieces, and operators between them by name."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.steps: list[tuple[MambaMetadata, int, Counter[str]]] = []
        self._inside = True  # within calls that are not counted
        replay, run = RecordedPiece.replay, GraphDispatcher.run

        def counted(piece: RecordedPiece) -> None:
            self.pieces += 1
            inside, self._inside = self._inside, True
            replay(piece)
            self._inside = inside

        def watched(graphs: GraphDispatcher, staged: StagedBatch[StepContext]) -> Any:
            self.pieces, self.found, self._inside = 0, Counter[str](), False
            with self:
                output = run(graphs, staged)
            self._inside = True
            assert staged.state.mamba is not None
            self.steps.append((staged.state.mamba, self.pieces, self.found))
            return output

        patch.setattr(RecordedPiece, "replay", counted)
        patch.setattr(GraphDispatcher, "run", watched)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
        if not self._inside and not views:
            self.found[func._schema.name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("policy", "k"), [("slots", 0), ("fold", 0), ("slots", 3), ("fold", 3)])
def test_between_pieces_run_prompts_alone(
    make_llm: Callable[..., LLM], tiny_hybrid: Path, monkeypatch: pytest.MonkeyPatch, policy: str, k: int
) -> None:
    """Three operators per recurrent layer, and none in a step without prompts, whose decodes are in the pieces."""
    monkeypatch.setattr(TritonBackend, "unsupported_reason", lambda *_, **__: None)
    options: dict[str, Any] = {
        "mamba_state_policy": policy,
        "cudagraph_checks": "CHEAP",
    }  # other levels poison buffers, too
    options |= {"draft": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": k} if k else {}
    llm = make_llm(**SMALL | GRAPHS | options, model=tiny_hybrid, attention_backend="triton")
    launches, layers = Launches(monkeypatch), len(llm.engine.model.spec.recurrent)
    talk(llm)
    scans = {"causal_conv1d_varlen": layers, "ssd_scan_varlen": layers, "copy_": layers}
    kinds = Counter[tuple[bool, bool]]()
    for meta, pieces, eager in launches.steps:
        kinds[meta.num_decodes > 0, meta.num_prefills > 0] += 1
        assert pieces == 1 + layers
        assert eager == (scans if meta.num_prefills else {})
    assert kinds[True, True] > 1
    assert kinds[True, False] > 5
    assert kinds[False, True] > 0


@pytest.mark.parametrize("policy", ["slots", "fold"])
def test_a_draft_pass_is_one_graph_wherever_attention_ignores_bounds(
    make_llm: Callable[..., LLM], tiny_hybrid: Path, tiny_head: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """With drafts, prefix hits and async scheduling: the tokens of eager steps without these."""
    expected = talk(make_llm(**SMALL, model=tiny_hybrid))
    monkeypatch.setattr(TritonBackend, "unsupported_reason", lambda *_, **__: None)
    options = {"draft": tiny_head, "num_speculative_tokens": 3, "mamba_state_policy": policy}
    options |= {"enable_prefix_caching": True, "mamba_block_size": 8, "async_scheduling": True}
    llm = make_llm(**SMALL | GRAPHS | options, model=tiny_hybrid, attention_backend="triton")
    for _ in range(2):
        assert talk(llm) == expected
    metrics, proposer = llm.get_metrics(), llm.engine.runner.proposer
    assert metrics.num_cached_tokens
    assert proposer is not None
    assert isinstance(proposer.drafter, EagleSpeculator)
    assert proposer.drafter.prefill is not None
    assert {row.num_graphs for row in proposer.drafter.prefill.report.captured} == {1}


def test_decodes_and_prompts_are_launches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call of attention: rows of one token, and a row of 300 tokens, with all heads of a key head in a tile."""
    pytest.importorskip("triton", reason="triton is not installed")
    import torch

    from bateleur.metadata.backends import _launch_config
    from bateleur.metadata.kernels import attention, cuda_ops

    seen: list[tuple[tuple[int, ...], int]] = []

    class Spy:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, **o: seen.append((grid, o["BLOCK_M"] if "BLOCK_M" in o else o["BLOCK_L"]))

    for kernel in ("attention_kernel", "join_kernel"):
        monkeypatch.setattr(attention, kernel, Spy())
    rows, tokens, sms = 64, 63 + 300, 132
    monkeypatch.setattr(_launch_config, "device_sizes", lambda device: (sms, 227 << 10))
    _launch_config._work_shape.cache_clear()
    q, cache = (torch.empty(tokens, 32, 128, dtype=torch.bfloat16), torch.empty(2, 16, 8, 128, dtype=torch.bfloat16))
    ints = torch.zeros(rows, 256, dtype=torch.int32)
    shape = _launch_config.work_shape(32, cache, rows, tokens, 300, 0)
    work = torch.empty(shape.num_entries, 8, dtype=torch.int32)
    cuda_ops.paged_attention(q, cache, cache, ints, ints[:, 0], ints[:, 0], 0, 300, 4096, 1.0, 0, work)
    _launch_config._work_shape.cache_clear()
    splits, short, long = (
        _launch_config.split_limit(8, sms),
        _launch_config.MAX_SHORT_QUERY_LEN,
        _launch_config.MAX_SHORT_QUERY_LEN + 1,
    )
    assert [(each.least, each.most) for each in shape.launches] == [(1, short), (long, 0)]
    assert seen == [
        ((rows + splits + 1, 8), 64),
        ((tokens * 4 // 128 + tokens // long + splits + 1, 8), 128),
        ((2 * splits, 128 // 8, 8), 8),
    ]
