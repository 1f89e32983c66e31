"""Engines of eight published models with every launch compiled for sm_90: finds what an H100 would refuse."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
from triton.runtime.jit import JITFunction  # noqa: E402

import bateleur.eagle.kernels  # noqa: E402
import bateleur.mamba.ops  # noqa: E402
import bateleur.mamba.planners  # noqa: E402
import bateleur.metadata.kernels  # noqa: E402
import bateleur.runner.models.kernels  # noqa: E402
from bateleur.runner import LLM, SamplingParams  # noqa: E402
from bateleur.runner.distributed.ranks import ALONE, Ranks  # noqa: E402
from blank_checkpoint import FORMATS, write_blank  # noqa: E402
from compiled_cuda import FEW_LAYERS, CompiledCuda  # noqa: E402
from fake_cuda import HEAD, blank_head  # noqa: E402
from sm90 import Compiled, compiling, faults_of, naming  # noqa: E402

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from performance.published import MODELS  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing compiles in Triton's interpreter"),
]

EAGLE3 = replace(
    HEAD, hidden_size=4096, target_hidden_size=4096, vocab_size=128256, draft_vocab_size=32000, num_heads=32,
    num_kv_heads=8, head_dim=128, intermediate_size=14336, needs=replace(HEAD.needs, taps=(0, 1)),
    rope=replace(HEAD.rope, inv_freq=tuple(1e5 ** (-i / 64) for i in range(64))),
)  # fmt: skip
"""Sizes of the published draft head of Llama-3.1-8B. It reads the states before and after the only layer here."""
SIZES = {"cudagraph_capture_sizes": [1, 4, 16, 64, 256, 1024]}
"""Few capture sizes, because tile sizes depend on powers of two. Each size is captured once, by the cases without
drafts.
"""
DRAFTS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {"draft": "blank"},
    "Qwen3.5-9B": {"draft": "mtp"},
    "Qwen3.6-35B-A3B": {"draft": "mtp"},
    "Nemotron-3-Nano-30B-A3B": {"draft": "mtp"},
    "Granite-4.0-H-Small": {"draft": "ngram"},
    "Kimi-Linear-48B-A3B": {"draft": "ngram"},
}
OTHERS: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "attention_bias": True,
        "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "sliding_window": 128,
        "swiglu_limit": 7.0, "initial_context_length": 4096, "max_position_embeddings": 131072, "rope_theta": 150000,
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "Gemma-3-4B": {
        "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024,
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 131072,
    },
}  # fmt: skip
"""Published models of further families, with few layers: for kernels that the models of `FEW_LAYERS` do not launch."""
QUANTIZED = {"Qwen3.6-35B-A3B": ("FP8 blocks",), "Llama-3.1-8B": ("NVFP4", "INT4")}
PREFIXES = {"enable_prefix_caching": True, "kv_offload_bytes": 1 << 28}


@dataclass(frozen=True)
class Case:
    """An engine to start."""

    name: str
    model: str
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)
    ranks: Ranks = ALONE
    quantized: str | None = None
    """A format of `blank_checkpoint.FORMATS`."""


def _cases() -> Iterator[Case]:
    for model, drafts in DRAFTS.items():
        drafting = drafts | {"num_speculative_tokens": 3} | PREFIXES
        yield Case(f"{model} defaults", model)
        yield Case(f"{model} float32", model, torch.float32, SIZES)
        yield Case(f"{model} drafts, prefixes", model, options=drafting | SIZES)
        yield Case(f"{model} drafts in float32", model, torch.float32, drafting | SIZES)
        policy = {} if model.startswith("Llama") else {"mamba_state_policy": "fold"}
        if model in ("Llama-3.1-8B", "Qwen3.5-9B"):
            yield Case(f"{model} FP8 cache", model, options=drafting | SIZES | {"kv_cache_dtype": "fp8"})
        if model in ("Llama-3.1-8B", "Nemotron-3-Nano-30B-A3B"):
            yield Case(f"{model} adapters", model, options=drafting | SIZES | {"enable_lora": True})
        for kind in QUANTIZED.get(model, ()):
            yield Case(f"{model} {kind}", model, options=drafting | SIZES, quantized=kind)
        yield Case(f"{model} eager", model, options={"cudagraph_mode": "NONE"} | policy)
        yield Case(f"{model} two ranks", model, options=SIZES | policy, ranks=Ranks(1, 2, "two", (0, 1)))
    yield Case("gpt-oss-20b MXFP4", "gpt-oss-20b", options=SIZES, quantized="MXFP4")
    yield Case("Gemma-3-4B", "Gemma-3-4B", options=SIZES)


CASES = {case.name: case for case in _cases()}
ON_BOTH_STACKS = ("Nemotron-3-Nano-30B-A3B defaults", "Qwen3.6-35B-A3B FP8 blocks", "Llama-3.1-8B drafts, prefixes")
"""Engines that `.ci/run` compiles on the newest stack, too."""
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
KINDS = (
    GREEDY,
    replace(GREEDY, temperature=1.0),
    replace(GREEDY, temperature=0.7, top_k=20, top_p=0.95),
    replace(GREEDY, temperature=0.7, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.1),
    replace(GREEDY, temperature=1.0, logprobs=3, prompt_logprobs=2, min_tokens=3),
    replace(GREEDY, logit_bias={5: 1.0}, allowed_token_ids=[1, 2, 3, 5], repetition_penalty=1.3),
    replace(GREEDY, temperature=0.9, top_p=0.8, n=2, bad_words=None),
)  # fmt: skip
"""Sampling parameters of every kind that changes the launches."""
PROMPTS = ([1] * 5, [2] * 700, [3], [4] * 130)


def _open(fake: CompiledCuda, case: Case, folder: Path) -> LLM:
    mtp = case.options.get("draft") == "mtp"
    fields = OTHERS.get(case.model) or MODELS[case.model] | FEW_LAYERS[case.model]
    quantized = None if case.quantized is None else FORMATS[case.quantized]
    write_blank(folder, fields, case.dtype, mtp=mtp, quantized=quantized)
    return fake.start(folder, case.ranks, **case.options)


def _run(fake: CompiledCuda, llm: LLM, kinds: Sequence[SamplingParams] = KINDS) -> None:
    """Run every kind alone and all kinds in one batch, a chunked prompt, and prefixes that are cached."""
    for params in kinds:
        fake.run(llm, PROMPTS, [params] * len(PROMPTS))
    fake.run(llm, [[i] * (3 + i) for i in range(len(kinds))], kinds)
    fake.run(llm, [[7] * 9000, [1] * 5], [GREEDY] * 2)
    for _ in range(2):
        fake.run(llm, [[9] * 2000], [GREEDY])


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[Compiled], CompiledCuda]:
    def made(compiled: Compiled) -> CompiledCuda:
        fake = CompiledCuda(monkeypatch, compiled)
        monkeypatch.setattr("bateleur.runner.spec_decode.draft_head.load_head", blank_head(EAGLE3))
        return fake

    return made


@pytest.mark.filterwarnings("ignore:kv_cache_dtype is fp8, and the checkpoint has no k_scale:RuntimeWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ON_BOTH_STACKS else pytest.mark.published_sizes) for name in CASES]
)
def test_an_engine_launches_what_an_h100_takes(
    name: str, make: Callable[[Compiled], CompiledCuda], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """No error, no register spill, no grid out of bounds, the stated occupancy, and no compilation in a step."""
    with compiling(on_device=True) as compiled:
        fake = make(compiled)
        llm = _open(fake, CASES[name], tmp_path)
        assert fake.started, "the start launched nothing"
        _run(fake, llm)
    assert len(compiled.launches) > fake.started, "the steps launched nothing"
    assert [str(kernel) for kernel in fake.late] == [], "compiled within a step"
    assert fake.faults == []
    faults = [fault for kernel in compiled.kernels for fault in faults_of(kernel)]
    assert faults == []
    for kernel in compiled.kernels:
        what = f"{kernel.name} {kernel.occupancy[0]} a multiprocessor"
        record_property("kernel", (what, kernel.registers, kernel.spilled_bytes, kernel.shared_bytes))


def test_what_the_warm_up_leaves_out_is_compiled_late(
    make: Callable[[Compiled], CompiledCuda], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check above must be able to fail."""
    for name in ("_warm_up", "run_largest"):
        monkeypatch.setattr(f"bateleur.runner.engine.model_runner.ModelRunner.{name}", lambda *_: None)
    with compiling(on_device=True) as compiled:
        fake = make(compiled)
        llm = _open(fake, CASES["Llama-3.1-8B eager"], tmp_path)
        _run(fake, llm, KINDS[:2])
    assert "emit_kernel" in {kernel.name for kernel in fake.late}


def _kernels_of(package: ModuleType) -> set[JITFunction[Any]]:
    """The kernels that a package defines: functions under `triton.jit` whose names end with _kernel."""
    names = [each.name for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    modules = [importlib.import_module(name) for name in names if "conformance" not in name and ".native" not in name]
    return {
        each
        for module in modules
        for name, each in vars(module).items()
        if isinstance(each, JITFunction) and name.endswith("_kernel")
    }


_BY_PACKAGE = "packages/mamba/tests/test_kernel_compile.py"
NOT_IN_AN_ENGINE = {
    "bateleur.mamba.ops.triton.states.window_kernel": _BY_PACKAGE,
    "bateleur.mamba.ops.triton.states.copy_kernel": _BY_PACKAGE,
    "bateleur.mamba.planners.triton.copy_plan_kernel": _BY_PACKAGE,
}
"""Kernels that none of these engines launches, and the tests that compile them."""


@pytest.mark.published_sizes
def test_every_kernel_is_launched_by_some_engine(
    make: Callable[[Compiled], CompiledCuda], tmp_path_factory: pytest.TempPathFactory
) -> None:
    packages = (
        bateleur.metadata.kernels, bateleur.eagle.kernels, bateleur.mamba.ops, bateleur.mamba.planners,
        bateleur.runner.models.kernels,
    )  # fmt: skip
    every = {each for package in packages for each in _kernels_of(package)}
    names = (
        "Qwen3.6-35B-A3B FP8 blocks", "Llama-3.1-8B adapters", "Gemma-3-4B", "Llama-3.1-8B two ranks",
        "Nemotron-3-Nano-30B-A3B drafts, prefixes", "Kimi-Linear-48B-A3B drafts, prefixes",
        "Qwen3.5-9B float32", "Qwen3.6-35B-A3B float32", "Nemotron-3-Nano-30B-A3B float32",
    )  # fmt: skip
    with naming() as launched:
        for name in names:
            kinds = KINDS if name.startswith("Llama") else (GREEDY,)  # sampling is the same for all models
            fake = make(Compiled())
            _run(fake, _open(fake, CASES[name], tmp_path_factory.mktemp("blank")), kinds)
    missing = {f"{each.__module__}.{each.__name__}" for each in every - launched}
    assert missing == NOT_IN_AN_ENGINE.keys()
