"""The Triton forms of the delta rules on a GPU: sizes of real models, and captured graphs."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor

import reference_operators as reference
from bateleur.mamba.ops import FORMS
from bateleur.metadata.dispatch import load

pytestmark = pytest.mark.gpu

DRAFTS, CAPACITY, ROWS, CHUNK, WIDTH = 5, 16, 6, 64, 4
# key heads, value heads, channels of keys and values, a decay for each key channel
MODELS = {"qwen3.5-9b": (16, 32, 128, False), "kimi-linear": (32, 32, 128, True)}
NAMES = ["delta_state_update", "delta_replay_update", "delta_fold_ring", "delta_scan_varlen"]
FEW, MANY = [6, 1, 0, 3, 1, 6], [1, 150, 0, 65, 2, 128]
IN_PLACE = ("state", "conv_state", "ring_k", "ring_u", "ring_g")


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")


def make(model: str, name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of an operator; row r uses slot and ring r + 1."""
    groups, heads, dim, per_channel = MODELS[model]
    lens = MANY if name == "delta_scan_varlen" else FEW
    rng, tokens, rows = torch.Generator().manual_seed(0), sum(lens), torch.arange(1, ROWS + 1)
    decays = (heads, dim) if per_channel else (heads,)

    def rand(*shape: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=rng).to(to)

    f32 = torch.float32
    q, k, v = rand(tokens, (2 * groups + heads) * dim).unflatten(1, (-1, dim)).split([groups, groups, heads], 1)
    A = -rand(heads, to=f32).abs() / 4
    every = {"q": q, "k": k, "v": v, "a": rand(tokens, *decays), "b": rand(tokens, heads), "beta_scale": 1.0}
    every |= {"A": A, "dt_bias": rand(*decays, to=f32), "state": rand(60, heads, dim, dim, to=f32)}
    every |= {"query_start_loc": torch.tensor([0, *lens]).cumsum(0).int(), "max_query_len": 1 + DRAFTS}
    write = 8 + torch.arange(ROWS * (1 + DRAFTS)).view(ROWS, -1)
    every |= {"read": rows, "slot": rows, "ring_row": rows, "write": write}
    every |= {"ring_k": rand(ROWS + 1, CAPACITY, groups, dim), "ring_u": rand(ROWS + 1, CAPACITY, heads, dim, to=f32)}
    every |= {"ring_g": -rand(ROWS + 1, CAPACITY, *decays, to=f32).abs() / 4}
    entries = torch.tensor([10, 3, 0, 13, 0, 7])
    every |= {"ring_start": torch.arange(ROWS) * 3, "ring_len": entries, "count": entries, "src": rows}
    every |= {"dst": torch.tensor([1, 9, 0, 4, 10, 0]), "page_offset": rows % DRAFTS}
    every |= {"request_conv": rand(ROWS + 1, WIDTH - 1 + DRAFTS, 96), "conv_state": rand(60, WIDTH - 1, 96)}
    every |= chunks(lens)
    if name == "delta_fold_ring":
        every = {key: torch.stack([value, value / 2]) if isinstance(value, Tensor) and value.is_floating_point()
                 else value for key, value in every.items()}  # fmt: skip
    return {key: every[key] for key in signature(FORMS[name].torch).parameters}


def chunks(lens: list[int]) -> dict[str, Any]:
    """Every chunk keeps its state, the last of a row in the slot that the row reads."""
    starts, chunk_row, ends = [0], [], [0]
    for row, length in enumerate(lens):
        begin = sum(lens[:row])
        starts += [begin + min(at + CHUNK, length) for at in range(0, length, CHUNK)]
        chunk_row += [row] * -(-length // CHUNK)
        ends.append(len(chunk_row))
    write = [chunk_row[i] + 1 if i + 1 in ends else 20 + i for i in range(len(chunk_row))]
    indices = {"chunk_start_loc": starts, "chunk_row": chunk_row, "row_chunk_loc": ends}
    tensors = {key: torch.tensor(value, dtype=torch.int32) for key, value in indices.items()}
    return tensors | {"chunk_write": torch.tensor(write), "max_chunks_per_row": 3, "chunk_size": CHUNK}


def moved(args: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: value.to(device, copy=True) if isinstance(value, Tensor) else value for key, value in args.items()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-4)])
@pytest.mark.parametrize("model", MODELS)
def test_forms_equal_the_reference(
    device: torch.device, model: str, dtype: torch.dtype, tolerance: float, name: str
) -> None:
    """Errors are relative to the largest entry. States have a smaller tolerance than outputs."""
    args = make(model, name, dtype)
    want, got = moved(args, torch.device("cpu")), moved(args, device)
    want["o"], got["o"] = getattr(reference, name)(**want), load(FORMS[name].triton or "")(**got)
    for key in ("o", *IN_PLACE):
        if isinstance(want.get(key), Tensor):
            bound = (tolerance if key == "o" else 1e-4) * float(want[key].abs().max())
            torch.testing.assert_close(got[key].cpu(), want[key], rtol=0, atol=bound, msg=f"{key}: {{}}".format)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", MODELS)
def test_a_captured_operator_equals_the_eager_one_bit_for_bit(device: torch.device, model: str, name: str) -> None:
    args = make(model, name, torch.bfloat16)
    eager, static = moved(args, device), moved(args, device)
    form = load(FORMS[name].triton or "")
    o = form(**eager)
    form(**moved(args, device))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = form(**static)
    for key, value in moved(args, device).items():
        if isinstance(value, Tensor):
            static[key].copy_(value)
    graph.replay()
    assert o is None or torch.equal(captured, o)
    for key in IN_PLACE:
        assert key not in args or torch.equal(static[key], eager[key])
