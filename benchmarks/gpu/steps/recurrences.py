"""Recurrent operators against the same calls in float64, at the sizes of published models.

A call in float64 runs torch's operators on any device; in other dtypes it runs Triton kernels on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from mamba import MODELS, TINY
from torch import Tensor

from bateleur.mamba import (
    CacheLayout,
    FoldBatch,
    MambaCacheMode,
    MambaMetadata,
    PrefillChunks,
    PromptScan,
    Recurrence,
    ReplayPlan,
    SlotPlan,
    StatePolicy,
    causal_conv1d_update,
    causal_conv1d_varlen,
)
from bateleur.mamba.prefill_chunks import PrefillChunker

from ..job import CompileWatch, Job

DRAFTS, CAPACITY, CHUNK, BLOCK = 5, 16, 64, 256
FEW, MANY, QUICK_MANY = [6, 1, 0, 3, 1, 6], [1, 300, 0, 129, 2, 256], [1, 90, 0, 65, 2, 7]
"""Tokens of rows: of decodes with drafts, and of prompts."""
HELD = [10, 3, 0, 13, 0, 7]
"""Ring entries of rows."""
DST = [1, 9, 0, 4, 10, 0]
"""Slots that a fold writes; 0 folds nothing."""
OUTPUT_BOUNDS = {torch.bfloat16: 8e-3, torch.float32: 3e-5}
STATE_BOUND = 1e-4
"""Relative error of states, which are float32 whatever the activations are."""
LOOSE = {"scan": 4.0, "replay": 2.0}
"""Factors on both: products of whole chunks round more often."""
Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Rows:
    """Ragged rows of one layer: tokens, parameters, states and rings. Row r has slot, ring and window r + 1."""

    spec: Recurrence
    lens: list[int]
    channels: Tensor
    """(T, conv_dim)"""
    gates: tuple[Tensor, ...]
    params: tuple[Tensor, ...]
    weight: Tensor
    """(conv_dim, taps)"""
    state: Tensor
    """(slots, *state_shape)"""
    conv: Tensor
    """(slots, taps - 1, conv_dim)"""
    request_conv: Tensor
    """(1 + R, taps - 1 + drafts, conv_dim)"""
    ring: tuple[Tensor, ...]
    """(1 + R, capacity, *shape) of each entry."""

    @classmethod
    def random(cls, spec: Recurrence, lens: list[int], device: torch.device) -> Rows:
        """The same numbers on every device."""
        generator, total = torch.Generator().manual_seed(0), sum(lens)

        def rand(*shape: int, dtype: torch.dtype = spec.conv_dtype, sign: int = 0) -> Tensor:
            drawn = torch.randn(shape, generator=generator)
            return (drawn.abs_().mul_(sign * 0.25) if sign else drawn).to(device, dtype)

        taps, rows = spec.conv_width, len(lens)
        slots = 1 + rows + max(rows * (1 + DRAFTS), rows * -(-max(lens) // BLOCK))
        return cls(
            spec,
            lens,
            channels=rand(total, spec.conv_dim),
            gates=tuple(rand(total, *gate.shape) for gate in spec.gates),
            params=tuple(rand(*each.shape, dtype=each.dtype, sign=each.sign) for each in spec.parameters),
            weight=rand(spec.conv_dim, taps),
            state=rand(slots, *spec.state_shape, dtype=spec.ssm_dtype),
            conv=rand(slots, taps - 1, spec.conv_dim),
            request_conv=rand(1 + rows, taps - 1 + DRAFTS, spec.conv_dim),
            ring=tuple(
                rand(1 + rows, CAPACITY, *each.shape, dtype=each.dtype, sign=each.sign) for each in spec.ring_entry
            ),
        )

    def copy(self, dtype: torch.dtype | None = None) -> Rows:
        """The same rows in memory of their own, in `dtype` if it is given."""

        def moved(x: Tensor) -> Tensor:
            return x.to(dtype or x.dtype, copy=True)

        def all_moved(several: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(map(moved, several))

        return replace(
            self,
            spec=self.spec if dtype is None else replace(self.spec, conv_dtype=dtype, ssm_dtype=dtype),
            channels=moved(self.channels),
            gates=all_moved(self.gates),
            params=all_moved(self.params),
            weight=moved(self.weight),
            state=moved(self.state),
            conv=moved(self.conv),
            request_conv=moved(self.request_conv),
            ring=all_moved(self.ring),
        )

    # --- the calls, each with everything that it writes -----------------------------------------------------

    def update(self) -> Outputs:
        """Decode rows under SLOTS."""
        row, count = self._row, len(self.lens)
        write = 1 + count + torch.arange(count * (1 + DRAFTS)).view(count, -1)
        write = write.where(torch.arange(1 + DRAFTS) < torch.tensor(self.lens)[:, None], 0).to(row.device)
        y = self.spec.update(
            self.params, self.channels, self.gates, self.state, self._step(SlotPlan(row, write, row, row, row, row))
        )
        return {"output": y, "state": self.state[1:]}

    def replay(self) -> Outputs:
        """Decode rows under FOLD."""
        plan = ReplayPlan(self._row, self._row, 3 * self._row, self._held, self._row)
        step = self._step(plan)
        y = self.spec.replay(self.params, self.channels, self.gates, self.state, self.ring, step)
        rings = {f"ring {each.name}": ring[1:] for each, ring in zip(self.spec.ring_entry, self.ring, strict=True)}
        return {"output": y, "state": self.state[1:], **rings}

    def fold(self) -> Outputs:
        """Checkpoints that take up their rings; rows without a slot to write do not."""
        row, dst = self._row, torch.tensor(DST, device=self.state.device)
        at = FoldBatch(row, 3 * row, self._held, row, dst, row % DRAFTS)
        params, conv, state, request_conv, ring = (
            tuple(each[None] for each in self.params),
            self.conv[None],
            self.state[None],
            self.request_conv[None],
            tuple(each[None] for each in self.ring),
        )
        self.spec.fold(params, conv, state, request_conv, ring, at)
        return {"state": self.state[1:], "conv": self.conv[1:]}

    def scan(self) -> Outputs:
        """Prompts; each leaves states at the ends of blocks, and at its own end."""
        return {"output": self.scan_call()(), "state": self.state[1:]}

    def scan_call(self, block: int = BLOCK, form: PromptScan = PromptScan.OWN) -> Callable[[], Tensor]:
        """Return the call of a scan, with everything on the device that it reads."""
        layer = self.params, self.channels, self.gates, self.state
        return partial(self.spec.scan, *layer, self._prompts(block, form), CHUNK, self._row)

    def convolve(self) -> Outputs:
        """The convolution of decode rows."""
        y = causal_conv1d_update(
            self.channels, self.weight, None, self.request_conv, self._starts, 1 + DRAFTS, self._row,
            self._row % DRAFTS, self._row, "silu",
        )  # fmt: skip
        before = self.spec.conv_width - 2  # the other entries of a window are unspecified
        written = [self.request_conv[1 + row, : before + n] for row, n in enumerate(self.lens) if n]
        return {"output": y, "window": torch.cat(written)}

    def convolve_prompts(self) -> Outputs:
        """The convolution of prompts."""
        prompts, row = self._prompts(), self._row
        y = causal_conv1d_varlen(
            self.channels, self.weight, None, self.conv, self.request_conv, self._starts, row,
            prompts.chunk_start_loc, prompts.chunk_row, prompts.chunk_write, row, "silu",
        )  # fmt: skip
        return {"output": y, "page": self.conv[1:], "window": self.request_conv[1:]}

    # --- what the calls have in common ----------------------------------------------------------------------

    @property
    def _row(self) -> Tensor:
        return torch.arange(1, 1 + len(self.lens), device=self.state.device)

    @property
    def _held(self) -> Tensor:
        return torch.tensor(HELD, device=self.state.device)

    @property
    def _starts(self) -> Tensor:
        return torch.tensor([0, *self.lens], device=self.state.device).cumsum(0).int()

    def _step(self, plan: SlotPlan | ReplayPlan) -> MambaMetadata:
        none = PrefillChunks.empty(self.state.device)
        return MambaMetadata(len(self.lens), sum(self.lens), 0, plan, self._starts, none, CHUNK, 1 + DRAFTS, self._row)

    def _prompts(self, block: int = BLOCK, form: PromptScan = PromptScan.OWN) -> PrefillChunks:
        rows, columns = len(self.lens), -(-max(self.lens) // block)
        layout = CacheLayout(MambaCacheMode.ALL, block, 0, block * columns)
        starts = np.cumsum([0, *self.lens], dtype=np.int32)
        table = 1 + rows + torch.arange(rows * columns, dtype=torch.int32, device=self.state.device).view(rows, -1)
        return PrefillChunker(layout, CHUNK, form).split(starts, np.zeros(rows, np.int32), table)


CALLS: dict[str, tuple[Callable[[Rows], Outputs], StatePolicy, bool]] = {
    "update": (Rows.update, StatePolicy.SLOTS, False),
    "replay": (Rows.replay, StatePolicy.FOLD, False),
    "fold": (Rows.fold, StatePolicy.FOLD, False),
    "scan": (Rows.scan, StatePolicy.SLOTS, True),
    "convolution": (Rows.convolve, StatePolicy.FOLD, False),
    "convolution of prompts": (Rows.convolve_prompts, StatePolicy.FOLD, True),
}
"""The call, the policy under which it is made, and whether its rows are prompts."""


def run(job: Job) -> None:
    """Compare every operator with bfloat16 and with float32 activations."""
    watch = CompileWatch()
    model = MODELS[job.case]
    if job.quick:
        model = next(tiny for tiny in TINY.values() if tiny.kind is model.kind)
    for dtype in OUTPUT_BOUNDS:
        for name, (call, policy, prompts) in CALLS.items():
            what = f"{name} {str(dtype)[6:]}"
            if job.has_time(what, 12):
                lens = (QUICK_MANY if job.quick else MANY) if prompts else FEW
                with job.part(what):
                    rows = Rows.random(model.spec(DRAFTS, policy, dtype), lens, job.device)
                    compare(job, what, rows, call, LOOSE.get(name, 1.0))
    watch.record(job)


def compare(job: Job, name: str, rows: Rows, call: Callable[[Rows], Outputs], loose: float) -> None:
    """Compare a call with the same in float64, and a second call with the first."""
    first, second, want = (call(each) for each in (rows.copy(), rows.copy(), rows.copy(torch.float64)))
    for key, got in first.items():
        exact = got.dtype == torch.float32 and key != "output"
        bound = STATE_BOUND if exact else OUTPUT_BOUNDS[rows.spec.conv_dtype]
        job.compare(f"{name}: {key}", got, want[key], bound * loose)
        job.same(f"{name}: {key} twice", second[key], got, "two calls must agree bit for bit; else there is a race")
