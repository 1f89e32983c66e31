"""The shipped model in float32: its tokens on the GPU by every setting are the CPU's, and graphs replay eager steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from bateleur.runner import LLM, SamplingParams

from ..job import CompileWatch, Job
from ..models import check_captures

PROMPTS = ["def fibonacci(n):", "import os\n", "x", "class Stack:\n    def __init__(self", "# " + "a comment " * 20]
COMMON: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "block_size": 8}
CHUNKS = {"max_num_batched_tokens": 48}
PREFIXES = {"enable_prefix_caching": True, "mamba_block_size": 16}
PARANOID = {"cudagraph_checks": "PARANOID"}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {
        "eager": {"cudagraph_mode": "NONE", **CHUNKS},
        "graphs": {},
        "graphs, chunks": CHUNKS,
        "slots": {"mamba_state_policy": "slots", **CHUNKS},
        "fold": {"mamba_state_policy": "fold", **CHUNKS},
        "prefix caching": {**PREFIXES, **CHUNKS},
        "not async": {"async_scheduling": False, **CHUNKS},
        "paranoid": {**PARANOID, **CHUNKS},
    },
    "drafts": {
        "drafts, eager": {"draft": "auto", "cudagraph_mode": "NONE", **CHUNKS},
        "drafts": {"draft": "auto"},
        "drafts, slots": {"draft": "auto", "mamba_state_policy": "slots", **CHUNKS},
        "drafts, prefix caching": {"draft": "auto", **PREFIXES, **CHUNKS},
        "drafts, not async": {"draft": "auto", "async_scheduling": False, **CHUNKS},
        "lookup": {"draft": "ngram", **CHUNKS},
        "drafts, paranoid": {"draft": "auto", **PARANOID, **CHUNKS},
    },
}
VERIFIED = ("graphs", "prefix caching", "drafts")
"""Settings whose graphs are compared with eager steps."""
QUICK = ("eager", "graphs", "fold", "prefix caching", "drafts", "lookup")
Tokens = list[list[int]]


def params(quick: bool) -> list[SamplingParams]:
    """Greedy, a nucleus, and the other truncations."""
    length: dict[str, Any] = {"max_tokens": 8 if quick else 32, "ignore_eos": True}
    return [
        SamplingParams(temperature=0, **length),
        SamplingParams(temperature=0.8, top_p=0.9, seed=5, **length),
        SamplingParams(temperature=1.0, top_k=20, min_p=0.02, seed=9, repetition_penalty=1.1, **length),
    ]


def run(job: Job) -> None:
    """Compare all settings of the case."""
    began = time.perf_counter()
    laws = params(job.quick)
    with LLM(device="cpu", **COMMON) as llm:
        wanted = [tokens_of(llm, law) for law in laws]
    job.record.figure("on the CPU", seconds=time.perf_counter() - began)
    watch = CompileWatch()
    for name, setting in SETTINGS[job.case].items():
        if (not job.quick or name in QUICK) and job.has_time(name, 15):
            with job.part(name):
                compare(job, name, setting, laws, wanted, watch)


def tokens_of(llm: LLM, law: SamplingParams) -> Tokens:
    """Token ids of all prompts."""
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, law)]


def differences(found: Tokens, wanted: Tokens) -> list[str]:
    """Return which prompts got other tokens, and the first of these."""
    texts = []
    for prompt, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        if mine != theirs:
            at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), -1)
            texts.append(f"prompt {prompt} from token {at}")
    return texts


def compare(
    job: Job,
    name: str,
    setting: dict[str, Any],
    laws: Sequence[SamplingParams],
    wanted: list[Tokens],
    watch: CompileWatch,
) -> None:
    """Generate everything twice, so that the second time finds prefixes, and count kernels compiled in steps."""
    options = COMMON | setting
    if not job.cuda and setting.get("cudagraph_mode") != "NONE":
        options |= {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_backend": "recorded"}
        options |= {"cudagraph_capture_sizes": [4, 8, 48]}
    began, opened = time.perf_counter(), len(watch)
    with LLM(device=job.device, **options) as llm:
        seconds, in_steps = time.perf_counter() - began, len(watch)
        check_captures(job, name, llm)
        wrong = [
            f"T {law.temperature}, turn {turn}, {difference}"
            for law, want in zip(laws, wanted, strict=True)
            for turn in range(2)
            for difference in differences(tokens_of(llm, law), want)
        ]
        late, metrics = watch.facts(in_steps), llm.get_metrics()
        kernels = {key: value for key, value in watch.facts(opened).items() if key in ("compiled", "compile_s")}
        job.record.check(
            f"tokens: {name}",
            not wrong,
            f"{len(wrong)} texts differ from the CPU's: {'; '.join(wrong[:4])}",
            start_s=seconds,
            tokens_per_step=metrics.tokens_per_step,
            cached_tokens=metrics.num_cached_tokens,
            **kernels,
        )
        count = late["compiled"] + late["from_cache"]
        why = f"{count} kernels are loaded inside steps: {late['most']}"
        job.record.check(f"kernels in steps: {name}", count == 0, why)
        if name in VERIFIED and job.has_time(f"verify_graphs: {name}", 20):
            verify(job, name, llm)
    if job.cuda:
        torch.cuda.empty_cache()


def verify(job: Job, name: str, llm: LLM) -> None:
    """Compare every captured graph with an eager run on random steps."""
    report = llm.engine.verify_graphs(fuzz=1 if job.quick else 2)
    bad = "; ".join(f"{each.part} {each.key}: {each.failure}" for each in report.failing)
    worst = max(each.max_difference for each in report.comparisons)
    graphs = len(report.comparisons)
    job.record.check(f"verify_graphs: {name}", report.ok, bad, graphs=graphs, largest_difference=worst)
