"""Draws, truncation, penalties and verification against the whole law on the CPU: every token must be the same."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bateleur.eagle import (
    Drafts,
    HashedVocab,
    Keys,
    OneHot,
    Penalties,
    Rows,
    SamplingMetadata,
    argmax,
    draw,
    sample,
    verify,
)

from ..job import CompileWatch, Job

NO_MIN_P = -math.inf
LAWS = {
    "greedy": (0.0, NO_MIN_P, 0, 1.0),
    "T 0.8": (0.8, NO_MIN_P, 0, 1.0),
    "min_p 0.02": (0.7, math.log(0.02), 0, 1.0),
    "top_k 50": (1.0, NO_MIN_P, 50, 1.0),
    "top_p 0.9": (0.8, NO_MIN_P, 0, 0.9),
    "top_k 20, top_p 0.95": (0.8, NO_MIN_P, 20, 0.95),
    "all": (0.7, math.log(0.02), 40, 0.95),
}
"""Temperature, log(min_p), top_k, top_p."""
VOCABULARIES, QUICK_VOCABULARIES = (131_072, 248_320), (1_000, 33_000)
CPU = torch.device("cpu")


def law_of(values: tuple[float, float, int, float], rows: int, device: torch.device, **more: Any) -> SamplingMetadata:
    """The same law for each of `rows` rows."""
    host = np.tile(np.array(values, np.float32), (rows, 1))
    return SamplingMetadata(host, torch.from_numpy(host).to(device), **more)


def logits_of(rows: int, size: int) -> Tensor:
    """(rows, size) float32 on the CPU, normal with standard deviation 3: some thousand tokens in a nucleus of 0.9."""
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(rows + size)) * 3


def keys_of(rows: int, device: torch.device) -> Keys:
    """Names of `rows` draws."""
    row = torch.arange(rows, device=device)
    return Keys(row, row * 7 + 5)


def penalties_of(rows: int, size: int, device: torch.device) -> Penalties:
    """Penalties for tokens of which one in eight was generated, and one in four is in the prompt."""
    token, owner = torch.arange(size).expand(rows, size), torch.arange(rows)[:, None]
    counts = ((token + owner) % 8 == 0).int() * 2
    prompts = (token + owner) % 4 == 1
    values = torch.tensor([1.2, 0.3, 0.2]).repeat(rows, 1)
    return Penalties(
        values.to(device), torch.arange(rows, device=device), counts.contiguous().to(device), prompts.to(device)
    )


def run(job: Job) -> None:
    """Compare all laws at two vocabularies, then verification of drafts."""
    watch = CompileWatch()
    for size in QUICK_VOCABULARIES if job.quick else VOCABULARIES:
        for rows in (1, 5) if job.quick else (1, 64):
            logits = logits_of(rows, size)
            for name, values in LAWS.items():
                for penalised in (False, True) if name == "all" else (False,):
                    what = f"{name}{', penalties' if penalised else ''}: {rows} x {size}"
                    if job.has_time(what, 10):
                        with job.part(what):
                            compare(job, what, logits, values, penalised)
        with job.part(f"verify: {size}"):
            compare_verdicts(job, size)
    watch.record(job)


def compare(job: Job, name: str, logits: Tensor, values: tuple[float, float, int, float], penalised: bool) -> None:
    """Compare a draw on the device with a draw from the whole law on the CPU."""
    rows, size = logits.shape

    def law_on(device: torch.device) -> SamplingMetadata:
        more = {"penalties": penalties_of(rows, size, device)} if penalised else {}
        return law_of(values, rows, device, **more)

    vocab = HashedVocab.of(size, job.device)
    got = sample(logits.to(job.device), law_on(job.device), keys_of(rows, job.device), vocab=vocab)
    law = law_on(CPU)
    whole = law.apply(logits)
    want = argmax(whole) if law.greedy else draw(whole, law.temperature, keys_of(rows, CPU))
    job.same(name, got.token_ids.cpu(), want.token_ids, "tokens must be those of the whole law on the CPU")


def compare_verdicts(job: Job, size: int) -> None:
    """Compare verdicts of ragged rows, drafts of which the first ones are the target's own draws."""
    rows, most = (6, 3) if job.quick else (64, 4)
    lens = [1 + row % (most + 1) for row in range(rows)]
    logits = logits_of(sum(lens), size)
    tokens = torch.full((rows, most), -1)

    def verdict(device: torch.device, drafts: Tensor) -> tuple[Tensor, ...]:
        where = Rows(
            torch.tensor([0, *np.cumsum(lens).tolist()], dtype=torch.int32, device=device),
            torch.arange(rows, device=device),
            torch.arange(rows, device=device) * 11,
            torch.tensor([0.0, 0.8], device=device).repeat(rows // 2),
        )
        return verify(logits.to(device), Drafts(drafts.to(device), OneHot()), where)

    for _ in range(most):  # each turn reveals the target's next draw
        drawn = verdict(CPU, tokens)[0][:, :most]
        tokens = tokens.where(tokens >= 0, drawn)
    tokens[::3, most - 1] = 3  # a wrong one
    got, want = (verdict(device, tokens) for device in (job.device, CPU))
    for field, mine, theirs in zip(("tokens", "num_emitted", "bad"), got, want, strict=True):
        job.same(f"verify: {size}: {field}", mine.cpu(), theirs, "verdicts must be the CPU's")
    accepted = bool((want[1] > 1).any())
    job.record.check(f"verify: {size}: some drafts are accepted", accepted, "the check is empty")
