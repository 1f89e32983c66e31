"""Delta-rule operators compared with the functions with which transformers computes the same recurrences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from bateleur.mamba import delta_replay_update, delta_scan_varlen, delta_state_update

BY_HEAD = pytest.param((2, 4, 16, 8), False, qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule)
BY_CHANNEL = pytest.param((3, 3, 8, 8), True, kimi.chunk_kimi_delta_attention, kimi.recurrent_kimi_delta_attention)
TOKENS = 75


def theirs(function: Callable[..., Any], tokens: dict[str, Tensor], A: Tensor, bias: Tensor, state: Tensor) -> Any:
    """Outputs of one sequence, and the final state in our layout, (H, Dv, Dk)."""
    A = A if bias.dim() == 1 else A[:, None]
    gates = {"g": A * F.softplus(tokens["a"] + bias), "beta": tokens["b"].sigmoid()}
    q, k, v = (tokens[name][None] for name in "qkv")
    o, final = function(
        q, k, v, **{name: gate[None] for name, gate in gates.items()}, initial_state=state.mT[None],
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return o[0], final[0].mT


@pytest.mark.parametrize(("sizes", "by_channel", "chunked", "recurrent"), [BY_HEAD, BY_CHANNEL])
def test_scan_update_and_replay_give_what_transformers_does(
    sizes: tuple[int, int, int, int], by_channel: bool, chunked: Callable[..., Any], recurrent: Callable[..., Any]
) -> None:
    """A prompt, and tokens after it one by one, under SLOTS and under FOLD."""
    torch.manual_seed(0)
    groups, heads, size, lanes = sizes
    gate = (heads, size) if by_channel else (heads,)
    shapes = {"q": (groups, size), "k": (groups, size), "v": (heads, lanes), "a": gate, "b": (heads,)}
    tokens = {name: torch.randn(TOKENS + 3, *shape) for name, shape in shapes.items()}
    A, bias, state = -torch.rand(heads) * 4, torch.randn(gate), torch.zeros(3, heads, lanes, size)
    state[1] = torch.randn(heads, lanes, size)
    prompt = {name: x[:TOKENS] for name, x in tokens.items()}
    want, final = theirs(chunked, prompt, A, bias, state[1])
    loc, row, one = (torch.tensor(x, dtype=torch.int32) for x in ([0, TOKENS], [0], [0, 1]))
    slot = torch.tensor([1])
    o = delta_scan_varlen(*prompt.values(), A, bias, state, loc, loc, row, one, 1, 128, slot, slot, 1.0)
    torch.testing.assert_close(o, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state[1], final, rtol=1e-4, atol=1e-5)

    rings = [torch.zeros(2, 4, *shapes[name]) for name in ("k", "v", "a")]
    frozen = state.clone()
    for t in range(3):
        token = {name: x[TOKENS + t : TOKENS + t + 1] for name, x in tokens.items()}
        want, final = theirs(recurrent, token, A, bias, final)
        inputs = (*token.values(), A, bias, one, 1, slot)
        o = delta_state_update(state, *inputs, slot[:, None], 1.0)
        torch.testing.assert_close(o, want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state[1], final, rtol=1e-4, atol=1e-5)
        replayed = delta_replay_update(frozen, *rings, *inputs, slot, torch.tensor([2]), torch.tensor([t]), 1.0)
        torch.testing.assert_close(replayed, want, rtol=1e-4, atol=1e-5)
