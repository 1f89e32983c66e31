"""M28: slots beyond 2^31 elements. The pools are reserved and not filled, so they take no memory to speak of."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bateleur.mamba import ops

FAR = 1 << 16
"""A slot of 2^15 elements with this number begins at element 2^31."""


class Pools:
    """One slot, near or far, of every kind of state, with the same contents; and inputs for one token."""

    def __init__(self, far: bool) -> None:
        self.g = torch.Generator().manual_seed(0)
        self.slot, self.slots = torch.tensor([FAR if far else 1]), FAR + 1 if far else 2
        self.ssm, self.conv, self.request_conv = (self.state(1, 512, 64), self.state(3, 11000), self.state(3, 11000))
        self.rings = (self.state(64, 1, 512), self.state(64, 1, dtype=torch.float32), self.state(64, 1, 64))
        self.x, self.dt, self.A = self.rand(1, 1, 512), self.rand(1, 1), -self.rand(1).float().abs()
        self.B, self.C = self.rand(2, 1, 1, 64)
        self.u, self.weight = self.rand(1, 11000), self.rand(11000, 4)

    def rand(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.g, dtype=torch.float64).half()

    def state(self, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        try:
            state = torch.empty(self.slots, *shape, dtype=dtype)
        except RuntimeError as error:
            pytest.skip(f"4 GiB of addresses are not to be had: {error}")
        state[self.slot] = self.rand(*shape).to(dtype).abs()
        return state

    def written(self) -> list[Tensor]:
        return [t[self.slot] for t in (self.ssm, self.conv, self.request_conv, *self.rings)]


LOC, ROW, ZERO = (torch.tensor(v, dtype=d) for v, d in (([0, 1], torch.int32), ([0], torch.int32), ([0], None)))


def convolutions(p: Pools) -> list[Tensor]:
    window = (LOC, 1, p.slot, ZERO, p.slot, "silu")
    chunk = (LOC, p.slot, LOC, ROW, p.slot, p.slot, "silu")
    return [
        ops.causal_conv1d_update(p.u, p.weight, None, p.conv, *window),
        ops.causal_conv1d_varlen(p.u, p.weight, None, p.conv, p.request_conv, *chunk),
    ]


def updates(p: Pools) -> list[Tensor]:
    tokens, D = (p.x, p.dt, p.A, p.B, p.C), (p.A, p.A)
    return [
        ops.ssd_scan_varlen(*tokens, *D, p.ssm, LOC, LOC, ROW, LOC, 1, 1, p.slot, p.slot, 0.0, 1.0),
        ops.selective_state_update(p.ssm, *tokens, *D, LOC, 1, p.slot, p.slot[:, None], 0.0, 1.0),
        ops.selective_state_update(p.ssm, *tokens, *D, LOC, 2, p.slot, p.slot[:, None].expand(1, 2), 0.0, 1.0),
    ]


def replay_and_fold(p: Pools) -> list[Tensor]:
    where, tokens = (p.slot, torch.tensor([62]), torch.tensor([3])), (p.x, p.dt, p.A, p.B, p.C, p.A, p.A)
    y = [ops.replay_update(p.ssm, *p.rings, *tokens, LOC, longest, p.slot, *where, 0.0, 1.0) for longest in (1, 2)]
    layers = (tensor[None] for tensor in (p.ssm, p.conv, p.request_conv, *p.rings, p.A))
    ops.fold_ring(*layers, *where, p.slot, p.slot, ZERO)
    return y


def copies(p: Pools) -> list[Tensor]:
    ops.copy_states(p.conv[None], p.ssm[None], p.slot, ZERO + 1, ZERO, p.slot)
    return []


@pytest.mark.parametrize("run", [convolutions, updates, replay_and_fold, copies])
def test_m28_beyond_2_to_the_31(run) -> None:
    far, near = Pools(far=True), Pools(far=False)
    before = [t.clone() for t in near.written()]
    torch.testing.assert_close(run(far), run(near), rtol=0, atol=0)
    torch.testing.assert_close(far.written(), near.written(), rtol=0, atol=0)
    assert any(not torch.equal(a, b) for a, b in zip(before, near.written(), strict=True))


@pytest.mark.parametrize("starts", [torch.int32, torch.int64])
@pytest.mark.parametrize("slots", [torch.int32, torch.int64])
def test_integers_of_another_width_are_never_read_as_others(starts: torch.dtype, slots: torch.dtype) -> None:
    """Compiled kernels read int32 starts and int64 slots; what comes otherwise is torch's."""
    make = torch.Generator().manual_seed(1)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make)

    windows, x, weight = some(6, 3, 20), some(3, 20), some(20, 4)
    states, u, dt, B, C, per_head = (
        some(6, 4, 8, 16),
        some(3, 4, 8),
        some(3, 4),
        some(3, 2, 16),
        some(3, 2, 16),
        some(4),
    )
    results = []
    for kinds in ((torch.int32, torch.int64), (starts, slots)):
        loc, own = torch.arange(4, dtype=kinds[0]), torch.tensor([1, 2, 3], dtype=kinds[1])
        conv, ssm = windows.clone(), states.clone()
        y = ops.causal_conv1d_update(x, weight, None, conv, loc, 1, own, torch.zeros_like(own), own, "silu")
        z = ops.selective_state_update(
            ssm, u, dt, -per_head.abs(), B, C, per_head, per_head, loc, 1, own, own[:, None], 0.0, math.inf
        )
        results.append((conv[1:], y, ssm[1:], z))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


def test_what_has_no_room_is_refused_and_never_written_behind() -> None:
    """A window too short for the tokens of a row; fewer slots than it has tokens; a number for fewer heads."""
    make = torch.Generator().manual_seed(1)
    x, u, dt, B = (torch.randn(3, *shape, generator=make) for shape in ((20,), (4, 8), (4,), (2, 16)))
    loc, own, D = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([1]), torch.ones(4)
    windows = torch.zeros(6, 5, 20)
    with pytest.raises(RuntimeError, match=r"shape|size of tensor"):
        ops.causal_conv1d_update(x, x.new_ones(20, 4), None, windows[:, :3], loc, 3, own, own * 0, own, "silu")
    assert not windows[2:].any()
    states = torch.zeros(6, 4, 8, 16)
    with pytest.raises(RuntimeError, match=r"shape|size of tensor"):
        ops.selective_state_update(
            states, u, dt, D, B, B, D, D, loc, 3, own, own.expand(1, 2).contiguous(), 0.0, math.inf
        )
    y = [
        ops.selective_state_update(
            torch.zeros(6, 4, 8, 16), u, dt, -A, B, B, D, D, loc, 3, own, own.expand(1, 3), 0.0, math.inf
        )
        for A in (D[:1], D)
    ]
    torch.testing.assert_close(y[0], y[1])
