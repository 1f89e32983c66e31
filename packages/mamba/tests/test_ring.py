"""The operators under FOLD give the same results as a state."""

from __future__ import annotations

import pytest
import torch

import reference_operators as reference
from bateleur.mamba import ops

CAPACITY = 7


@pytest.mark.parametrize("form", [ops, reference], ids=["torch", "reference"])
@pytest.mark.parametrize("drafts", [0, 2])
def test_m37_replay_and_fold_are_the_recurrence(make, form, drafts):
    """Steps of 1 to 1 + K tokens, of which a suffix is rejected; folds in place, to another slot, and none: M33 too."""
    g = torch.Generator().manual_seed(drafts)
    p = make([1, 1], drafts=drafts, read=[1, 0], heads=4, groups=2)
    heads, channels = p.ssm["x"].shape[1:]
    groups, size = p.ssm["B"].shape[1:]
    parameters = {name: p.ssm[name] for name in ("A", "D", "dt_bias", "dt_min", "dt_max")}
    ring = {
        "ring_x": torch.full((3, CAPACITY, heads, channels), float("nan"), dtype=torch.float64),
        "ring_dt": torch.full((3, CAPACITY, heads), float("nan"), dtype=torch.float64),
        "ring_B": torch.full((3, CAPACITY, groups, size), float("nan"), dtype=torch.float64),
    }
    state, window = p.ssm["ssm_state"], p.conv["conv_state"].shape[1]
    request_conv = torch.randn(3, window, p.conv["conv_state"].shape[2], generator=g, dtype=torch.float64)
    pages = torch.full((24, 3, request_conv.shape[2]), float("nan"), dtype=torch.float64)
    truth = {1: state[1].clone(), 2: torch.zeros_like(state[1])}
    slot, base, length = {1: 1, 2: 0}, {1: 3, 2: 0}, {1: 0, 2: 0}
    for step in range(14):
        lens = [1 + (step + row) % (1 + drafts) for row in (1, 2)]
        kept = [1 + (3 * step + row) % n for row, n in zip((1, 2), lens, strict=True)]
        inputs = make(lens, drafts=drafts, heads=4, groups=2, seed=step + 10).ssm
        step_inputs = {name: inputs[name] for name in ("x", "dt", "B", "C")}
        starts = torch.tensor([0, lens[0], sum(lens)], dtype=torch.int32)
        rows = torch.tensor([1, 2])
        y = form.replay_update(
            ssm_state=state,
            **ring,
            **step_inputs,
            **parameters,
            query_start_loc=starts,
            max_query_len=1 + drafts,
            slot=torch.tensor([slot[1], slot[2]]),
            ring_row=rows,
            ring_start=torch.tensor([base[1], base[2]]),
            ring_len=torch.tensor([length[1], length[2]]),
        )
        for row in (1, 2):
            first = int(starts[row - 1])
            whole = torch.stack([truth[row]] * 2).clone()
            one = {name: value[first : first + lens[row - 1]] for name, value in step_inputs.items()}
            states = torch.zeros(2 + lens[row - 1], *whole.shape[1:], dtype=torch.float64)
            states[1] = truth[row]
            expected = reference.selective_state_update(
                ssm_state=states,
                **one,
                **parameters,
                query_start_loc=torch.tensor([0, lens[row - 1]], dtype=torch.int32),
                max_query_len=lens[row - 1],
                read=torch.tensor([1]),
                write=torch.arange(2, 2 + lens[row - 1])[None],
            )
            torch.testing.assert_close(y[first : first + lens[row - 1]], expected, rtol=1e-10, atol=1e-10)
            truth[row] = states[1 + kept[row - 1]]
            length[row] += kept[row - 1]
        folds = {row: length[row] > CAPACITY - 1 - drafts or step % 5 == row for row in (1, 2)}
        count = {row: max(1, length[row] - step % 2) if folds[row] else 0 for row in (1, 2)}
        new = {row: slot[row] if slot[row] and step % 2 else 2 + 2 * (step % 10) + row for row in (1, 2)}
        target = {row: new[row] if folds[row] else 0 for row in (1, 2)}
        form.fold_ring(
            ssm_state=state[None],
            conv_state=pages[None],
            request_conv=request_conv[None],
            **{name: values[None] for name, values in ring.items()},
            A=parameters["A"][None],
            ring_row=rows,
            ring_start=torch.tensor([base[1], base[2]]),
            count=torch.tensor([count[1], count[2]]),
            src=torch.tensor([slot[1], slot[2]]),
            dst=torch.tensor([target[1], target[2]]),
            page_offset=torch.tensor([0, min(1, window - 3)]),
        )
        for row in (1, 2):
            if folds[row]:
                slot[row], base[row], length[row] = (target[row], base[row] + count[row], length[row] - count[row])
                offset = 0 if row == 1 else min(1, window - 3)
                assert torch.equal(pages[target[row]], request_conv[row, offset : offset + 3])
                if not length[row]:
                    torch.testing.assert_close(state[slot[row]], truth[row], rtol=1e-10, atol=1e-10)
