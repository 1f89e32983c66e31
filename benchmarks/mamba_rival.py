"""Update, replay and scan of a recurrence on the CPU compared with transformers' functions.

All in float32 on the same number of threads, in interleaved rounds. transformers computes the gates of delta rules
outside of its functions, so its time excludes them and ours includes them. transformers' decode step is its recurrent
function; for several tokens of Mamba-2, whose function takes one token, it is called once per token. It keeps only the
state after the last token, like a replay; our update keeps one state per token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from bateleur.mamba import (
    CacheLayout,
    GatedDelta,
    KimiDelta,
    Mamba2,
    MambaCacheMode,
    MambaMetadata,
    Recurrence,
    ReplayPlan,
    SlotPlan,
    StatePolicy,
)
from bateleur.mamba.prefill_chunks import PrefillChunker, PrefillChunks

SLOTS, FOLD = StatePolicy
RING, HELD = 16, 6
"""Entries of a ring, and the number of entries in the middle of the fold cycle."""
CHUNK = 128
DECODES = tuple((rows, tokens) for tokens in (1, 4) for rows in (1, 8))
PROMPTS = ((1, 512), (1, 1024), (8, 128))
Call = Callable[[], object]


class Rows:
    """A batch of `rows` rows of `tokens` tokens: channels and gates after their projections, states and rings."""

    def __init__(self, spec: Recurrence, rows: int, tokens: int) -> None:
        self.spec, self.rows, self.tokens = spec, rows, tokens
        generator = torch.Generator().manual_seed(0)

        def rand(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.channels = rand(rows * tokens, spec.conv_dim)
        self.gates = tuple(rand(rows * tokens, *gate.shape) for gate in spec.gates)
        self.params = tuple(each.random(each.shape, generator).float() for each in spec.parameters)
        self.state = rand(1 + rows * tokens, *spec.state_shape)
        self.ring = tuple(each.random((1 + rows, RING, *each.shape), generator).float() for each in spec.ring_entry)
        self.loc = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32)
        self.row = torch.arange(1, 1 + rows)

    def update(self) -> Call:
        write = 1 + self.tokens * (self.row - 1)[:, None] + torch.arange(self.tokens)
        plan = SlotPlan(write[:, 0].contiguous(), write, self.row, self.row, self.row, self.row)
        return partial(self.spec.update, self.params, self.channels, self.gates, self.state, self._step(plan))

    def replay(self) -> Call:
        plan = ReplayPlan(self.row, self.row, 3 * self.row, torch.full_like(self.row, HELD), self.row)
        step = self._step(plan)
        return partial(self.spec.replay, self.params, self.channels, self.gates, self.state, self.ring, step)

    def _step(self, plan: SlotPlan | ReplayPlan) -> MambaMetadata:
        none = PrefillChunks.empty("cpu")
        return MambaMetadata(self.rows, len(self.channels), 0, plan, self.loc, none, CHUNK, self.tokens, self.row)

    def scan(self) -> Call:
        layout = CacheLayout(MambaCacheMode.NONE, self.tokens, 0, self.tokens)
        before = torch.zeros(self.rows, dtype=torch.int32).numpy()
        cut = PrefillChunker(layout, CHUNK).split(self.loc.numpy(), before, self.row[:, None].int())
        args = (self.params, self.channels, self.gates, self.state, cut, CHUNK, self.row)
        return partial(self.spec.scan, *args)

    def batched(self, x: Tensor) -> Tensor:
        """Reshape to (rows, tokens, ...)."""
        return x.reshape(self.rows, self.tokens, *x.shape[1:]).contiguous()


def theirs(batch: Rows, prompt: bool) -> Call:
    """transformers' call for the same step."""
    if isinstance(batch.spec, Mamba2):
        return _mamba2(batch, batch.spec, prompt)
    assert isinstance(batch.spec, GatedDelta | KimiDelta)
    (A, bias), (a, b) = batch.params, batch.gates
    g = A.view(-1, *[1] * (a.dim() - 2)) * F.softplus(a + bias)
    q, k, v = (batch.batched(x) for x in batch.spec.split(batch.channels))
    by_head = isinstance(batch.spec, GatedDelta)
    chunked = qwen.torch_chunk_gated_delta_rule if by_head else kimi.chunk_kimi_delta_attention
    recurrent = qwen.torch_recurrent_gated_delta_rule if by_head else kimi.recurrent_kimi_delta_attention
    return partial(
        chunked if prompt else recurrent,
        *(q, k, v),
        g=batch.batched(g),
        beta=batch.batched(b.sigmoid()),
        initial_state=batch.state[batch.row].mT.contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )


def _mamba2(batch: Rows, spec: Mamba2, prompt: bool) -> Call:
    A, D, bias = batch.params
    x, B, C = (batch.batched(each) for each in spec.split(batch.channels))
    dt, state = batch.batched(batch.gates[0]), batch.state[batch.row].clone()
    if prompt:
        return partial(
            mamba2.mamba2_chunk_scan, x, dt, A, B, C, CHUNK, D=D, dt_bias=bias, initial_states=state,
            dt_softplus=True, return_final_states=True,
        )  # fmt: skip
    wide = (A[:, None, None].expand(spec.state_shape), D[:, None].expand(spec.output_shape))
    steps = [
        (x[:, t], dt[:, t, :, None].expand(x[:, t].shape), wide[0], B[:, t], C[:, t], wide[1])
        for t in range(batch.tokens)
    ]
    of_heads = bias[:, None].expand(spec.output_shape)

    def call() -> None:
        for step in steps:
            mamba2.mamba2_selective_state_update(state, *step, dt_bias=of_heads, dt_softplus=True)

    return call


def race(name: str, spec: Callable[[int, StatePolicy], Recurrence], quick: bool) -> list[dict[str, Any]]:
    """Microseconds of ours and theirs, for decode steps and prompts."""
    found = []
    for rows, tokens in ((1, 1), (2, 2)) if quick else DECODES:
        slots, fold = (Rows(spec(tokens - 1, policy), rows, tokens) for policy in (SLOTS, FOLD))
        calls = {"update": slots.update(), "replay": fold.replay(), "transformers": theirs(slots, prompt=False)}
        found.append({"model": name, "batch": rows, "tokens": tokens, "us": timed(calls, 3 if quick else 50)})
    for rows, tokens in ((2, 40),) if quick else PROMPTS:
        batch = Rows(spec(0, SLOTS), rows, tokens)
        calls = {"scan": batch.scan(), "transformers": theirs(batch, prompt=True)}
        found.append({"model": name, "batch": rows, "tokens": tokens, "us": timed(calls, 3)})
    return found


def timed(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Microseconds of each call: median of the fastest half of interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - began) * 1e6)
    return {name: statistics.median(sorted(values)[: -(-rounds // 2)]) for name, values in times.items()}


def print_race(rows: list[dict[str, Any]]) -> None:
    """Print a line for each step: microseconds, and speedups over transformers."""
    print(f"{'us on the CPU':<24}{'batch':>6}{'tokens':>7}{'transformers':>14}  ours (times as fast)")
    for row in rows:
        rival = row["us"]["transformers"]
        ours = ", ".join(f"{k} {us:.0f} ({rival / us:.1f})" for k, us in row["us"].items() if k != "transformers")
        print(f"{row['model']:<24}{row['batch']:>6}{row['tokens']:>7}{rival:14.0f}  {ours}")
