"""No kernel is loaded inside a capture, and no kernel for decoding is first loaded in a step (class K, vLLM #55341)."""

from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.library import Library

from bateleur.cudagraph import Phase, manager
from bateleur.cudagraph.backends.base import CapturedBody
from bateleur.eagle.native.chain import NativeChain
from bateleur.metadata.backends.paged import TritonBackend
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.model_runner.model_state import ModelState
from bateleur.runner.sampling import rejection_sampler

GRAPHS = {
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "cudagraph_backend": "recorded",
    "cudagraph_capture_sizes": [1, 2, 4, 12],
    "max_num_seqs": 4,
}
Stage = tuple[str, Any, Phase]
PROMPTS = {("commit", 1, length) for length in (2, 4, 8, 16, 64)}
"""Stagings whose kernels cover all prompts."""


class Launches:
    """Launch arguments of attention kernels by the staging before them: producer, key and phase."""

    def __init__(self) -> None:
        self.by_stage: dict[Stage, list[Any]] = {}
        self.now: list[Any] = []

    def kernel(self, name: str, out: int) -> Any:
        """A replacement of a kernel, which writes zeros to its argument `out`."""
        seen = self

        class Spy:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                def launch(*args: Any, **constants: Any) -> None:
                    seen.now.append((grid, (("kernel", name), *sorted(constants.items()))))
                    args[out].zero_()

                return launch

        return Spy()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Record launches of attention kernels, with the tile sizes of a large GPU."""
    pytest.importorskip("triton", reason="triton is not installed")
    home, tiles = "bateleur.metadata.kernels", import_module("bateleur.metadata.backends._launch_config")
    attention, forms, work = (import_module(f"{home}.{name}") for name in ("attention", "cuda_ops", "work_list"))
    seen, stage = Launches(), manager.stage_batch
    for module, kernel, out in (
        (attention, "attention_kernel", 6),
        (attention, "join_kernel", 4),
        (work, "work_kernel", 0),
    ):
        monkeypatch.setattr(module, kernel, seen.kernel(kernel, out))

    def noting(producer: Any, key: Any, phase: Phase, **options: Any) -> Any:
        staged = stage(producer, key, phase, **options)
        seen.now = seen.by_stage.setdefault((type(producer).__name__, key, phase), [])
        return staged

    replay = CapturedBody.replay

    def unseen(recording: Any, state: Any) -> Any:
        """Runs a body that was captured before, to stage what follows it."""
        seen.now, now = [], seen.now
        result = replay(recording, state)
        seen.now = now
        return result

    monkeypatch.setattr(CapturedBody, "replay", unseen)
    monkeypatch.setattr(manager, "stage_batch", noting)
    monkeypatch.setattr(tiles, "device_sizes", lambda device: (132, 227 << 10))
    tiles._work_shape.cache_clear()
    monkeypatch.setattr(TritonBackend, "unsupported_reason", lambda *_, **__: None)
    library = Library("bateleur", "IMPL")
    for name, form in (("triton_paged_attention", "paged_attention"), ("attention_work", "attention_work")):
        library.impl(name, getattr(forms, form), "CPU", allow_override=True)
    yield seen
    library._destroy()
    tiles._work_shape.cache_clear()


def test_k1_a_warm_up_launches_what_its_capture_launches(
    make_llm: Callable[..., LLM], random_head: Path, launches: Launches
) -> None:
    """For the target and both kinds of draft passes, including kernels that only the longest requests need."""
    long = {"max_model_len": 1536, "draft": random_head, "num_speculative_tokens": 2}
    llm = make_llm(**GRAPHS, **long, attention_backend="triton")
    assert llm.engine.runner.graphs.manager is not None
    captured = {(name, key) for name, key, phase in launches.by_stage if phase is Phase.CAPTURE}
    others = {"SampleStepProducer", "DraftStateProducer", "ChainSteps", "ProposalSteps"}
    assert {name for name, _ in captured} == {"StepProducer"} | others
    for name, key in captured:
        warm = launches.by_stage[name, key, Phase.WARMUP]
        only_stores = key.variant == (0,)  # a draft pass that only stores keys
        attends = name != "SampleStepProducer" and not only_stores
        assert bool(warm) == attends
        assert warm == launches.by_stage[name, key, Phase.CAPTURE], f"{name} {key}"


def test_prompts_that_a_head_sees_load_no_kernel(
    make_llm: Callable[..., LLM], make_head: Callable[..., Path], launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft head with another head size than the target's: its prompt kernels are in no graph."""
    monkeypatch.setattr(NativeChain, "fits", lambda *_: False)
    before = launches.now
    graphs = GRAPHS | {"cudagraph_mode": "FULL_DECODE_ONLY", "max_num_batched_tokens": 256}
    long = {
        "max_model_len": 1536,
        "draft": make_head(head_dim=32),
        "num_speculative_tokens": 2,
        "async_scheduling": True,
        "dtype": "bfloat16",  # float32 has only small tiles
    }
    llm = make_llm(**graphs, **long, attention_backend="triton")
    warm = {options for each in (before, *launches.by_stage.values()) for _, options in each}
    launches.by_stage.clear()
    launches.now = now = []
    long_prompt = {"prompt_token_ids": [7] * 600}
    llm.generate([long_prompt, "x"], SamplingParams(max_tokens=6, ignore_eos=True))
    stepped = {options for each in (now, *launches.by_stage.values()) for _, options in each}
    by_name = Counter(dict(options)["kernel"] for options in stepped)
    assert set(by_name) == {"attention_kernel", "join_kernel", "work_kernel"}
    assert {dict(options).get("HEAD_DIM") for options in stepped} == {None, 32, 64}
    assert stepped <= warm


@pytest.mark.parametrize("policy", ["slots", "fold"])
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_what_follows_a_forward_pass_has_run_once_for_every_size(
    make_llm: Callable[..., LLM], random_head: Path, monkeypatch: pytest.MonkeyPatch, policy: str, num_drafts: int
) -> None:
    """Verification and the commit of states, with the rows and drafts of each decode graph."""
    seen: Counter[tuple[Any, ...]] = Counter()
    truncated: set[bool] = set()
    verify, sample, commit = rejection_sampler.verify, rejection_sampler.draw, ModelState.commit

    def verified(logits: Any, drafts: Any, *args: Any, **options: Any) -> Any:
        if not options["greedy"]:
            seen["verify", len(drafts.tokens), len(logits) // len(drafts.tokens)] += 1
        return verify(logits, drafts, *args, **options)

    def sampled(sampler: Any, processed: Any, *args: Any) -> Any:
        seen["verify", len(processed.logits), 1] += 1
        if processed.metadata is not None:
            truncated.add(processed.metadata.truncates(processed.logits.shape[1]))
        return sample(sampler, processed, *args)

    def committed(self: Any, context: Any, num_valid: Any, **options: Any) -> None:
        rows = context.batch.num_reqs
        seen["commit", rows, context.batch.num_tokens // rows] += 1
        commit(self, context, num_valid, **options)

    monkeypatch.setattr(rejection_sampler, "verify", verified)
    monkeypatch.setattr(rejection_sampler, "draw", sampled)
    monkeypatch.setattr(ModelState, "commit", committed)
    drafts = {"draft": random_head, "num_speculative_tokens": num_drafts} if num_drafts else {}
    llm = make_llm(**GRAPHS, **drafts, mamba_state_policy=policy)
    keys = [key for key in llm.engine.runner.graphs.dispatcher.keys if key.num_reqs is not None]
    sizes = {(key.num_reqs, key.uniform_query_len) for key in keys}
    assert {length for _, length in sizes} == {1, 1 + num_drafts}
    assert set(seen) == {(what, *size) for what in ("verify", "commit") for size in sizes} | PROMPTS
    assert truncated == {False, True}
    warm = set(seen)
    llm.generate(["def f("] * 4, SamplingParams(max_tokens=6, temperature=0.8, seed=1, ignore_eos=True))
    padded = {size for size in set(seen) - warm if size[0] == "commit" and size[2] <= 1 + num_drafts}
    assert not padded, "a step that decodes commits no other sizes"


def test_nothing_of_the_rehearsal_remains(make_llm: Callable[..., LLM], random_head: Path) -> None:
    """Neither in rows of the request table nor in the noise: RATIO draws again in every step."""
    options = {"draft": random_head, "num_speculative_tokens": 2, "speculative_rule": "ratio", "max_num_seqs": 4}
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=5, ignore_eos=True)
    texts = []
    for graphs in ({}, GRAPHS):
        llm = make_llm(**(options | graphs))
        state = llm.engine.runner.sampler
        assert state.all_greedy(np.arange(4))
        texts.append([o.outputs[0].token_ids for o in llm.generate(["import os", "x"], params)])
    assert texts[0] == texts[1]
