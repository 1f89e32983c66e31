"""The Triton forms on a GPU: model sizes, captured graphs, and states beyond int32 offsets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import reference_operators as reference
from bateleur.mamba.ops import FORMS
from bateleur.metadata.dispatch import load

pytestmark = pytest.mark.gpu

WIDTH, DRAFTS, CAPACITY, ROWS = 4, 5, 16, 6
# heads, channels of one, state size, groups
MODELS = {"nano-9b-v2": (128, 80, 128, 8), "3-nano-30b": (64, 64, 128, 8), "granite-350m": (48, 32, 128, 1)}
FEW, MANY = [6, 1, 0, 3, 1, 6], [1, 300, 0, 129, 2, 256]
IN_PLACE = ("ssm_state", "conv_state", "request_conv", "ring_x", "ring_dt", "ring_B")


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")


def make(model: str, lens: list[int], dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Arguments of every operator that moves states; row r reads slot and ring r + 1, chunks are of 128 tokens."""
    heads, head_dim, size, groups = MODELS[model]
    rng, tokens = torch.Generator().manual_seed(0), sum(lens)
    inner, outer = heads * head_dim, groups * size
    channels, rows = inner + 2 * outer, torch.arange(1, ROWS + 1)

    def rand(*shape: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=rng).to(to)

    xbc, few = rand(tokens, channels), torch.tensor([[min(n, DRAFTS + 1)] for n in lens])
    x, B, C = xbc.split([inner, outer, outer], 1)
    starts, steps = torch.tensor([0, *lens]).cumsum(0).int(), range(DRAFTS + 1)
    bounds, chunk_rows, ends = [0], [], [0]
    for row, n in enumerate(lens):
        cuts = [*range(128, n, 128), *([n] if n else [])]
        bounds += [int(starts[row]) + cut for cut in cuts]
        chunk_rows += [row] * len(cuts)
        ends.append(len(bounds) - 1)
    tail = torch.tensor([k + 1 in ends for k in range(len(chunk_rows))])
    chunk_row = torch.tensor(chunk_rows, dtype=torch.int32)
    chunks = {
        "chunk_start_loc": torch.tensor(bounds, dtype=torch.int32),
        "chunk_row": chunk_row,
        "chunk_write": torch.where(tail, chunk_row + 1, 20 + torch.arange(len(tail))),
    }
    conv = {"x": xbc, "weight": rand(channels, WIDTH), "bias": rand(channels), "activation": "silu"}
    conv |= {"conv_state": rand(60, WIDTH - 1 + DRAFTS, channels), "query_start_loc": starts, "read": rows}
    A, params = -rand(heads, to=torch.float32).abs(), (rand(heads, to=torch.float32) for _ in range(2))
    tokenwise = {"x": x.unflatten(1, (heads, -1)), "dt": rand(tokens, heads), "A": A, "query_start_loc": starts}
    tokenwise |= {"B": B.unflatten(1, (groups, -1)), "C": C.unflatten(1, (groups, -1))}
    tokenwise |= dict(zip(("D", "dt_bias"), params, strict=True)) | {"dt_min": 0.0, "dt_max": float("inf")}
    ssm_state = rand(60, heads, head_dim, size, to=torch.float32)
    rings = {
        "ring_x": rand(ROWS + 1, CAPACITY, heads, head_dim),
        "ring_dt": rand(ROWS + 1, CAPACITY, heads, to=torch.float32).abs(),
        "ring_B": rand(ROWS + 1, CAPACITY, groups, size),
        "ring_row": rows,
        "ring_start": torch.randint(0, CAPACITY, (ROWS,), generator=rng),
    }
    write = torch.where(torch.tensor([*steps]) < few, 8 + torch.arange(ROWS * len(steps)).view(ROWS, -1), 0)
    bound, entries = {"max_query_len": DRAFTS + 1}, torch.tensor([10, 3, 0, 13, 0, 7])
    request_conv = {"request_conv": rand(ROWS + 1, WIDTH - 1 + DRAFTS, channels), "request_conv_write": rows}
    pages = {
        "conv_state": rand(60, WIDTH - 1, channels),
        "request_conv": request_conv["request_conv"],
        "ssm_state": ssm_state,
    }
    return {
        "causal_conv1d_update": conv | bound | {"offset": rows % (DRAFTS + 1), "write": rows},
        "causal_conv1d_varlen": conv | chunks | request_conv,
        "selective_state_update": tokenwise | bound | {"ssm_state": ssm_state, "read": rows, "write": write},
        "replay_update": tokenwise | bound | rings | {"ssm_state": ssm_state, "slot": rows, "ring_len": entries},
        "fold_ring": {"count": entries, "src": rows, "dst": torch.tensor([1, 9, 0, 4, 10, 0])}
        | {key: torch.stack([each, each / 2]) if each.is_floating_point() else each
           for key, each in ({"A": A} | rings | pages).items()} | {"page_offset": rows % DRAFTS},
        "ssd_scan_varlen": tokenwise | chunks
        | {"ssm_state": ssm_state, "read": rows, "row_chunk_loc": torch.tensor(ends, dtype=torch.int32)}
        | {"max_chunks_per_row": 3, "chunk_size": 128},
    }  # fmt: skip


def moved(args: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: value.to(device, copy=True) if isinstance(value, Tensor) else value for key, value in args.items()}


@pytest.mark.parametrize("name", ["causal_conv1d_update", "causal_conv1d_varlen", "selective_state_update",
                                  "replay_update", "fold_ring", "ssd_scan_varlen"])  # fmt: skip
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-4)])
@pytest.mark.parametrize("model", MODELS)
def test_forms_equal_the_reference(
    device: torch.device, model: str, dtype: torch.dtype, tolerance: float, name: str
) -> None:
    """Errors are measured against the largest output: sums of 128 products are compared."""
    args = make(model, MANY if "varlen" in name else FEW, dtype)[name]
    want, got = moved(args, torch.device("cpu")), moved(args, device)
    want["y"], got["y"] = getattr(reference, name)(**want), load(FORMS[name].triton)(**got)
    for key in ("y", *IN_PLACE):
        if isinstance(want.get(key), Tensor):
            exact = key != "y" and name != "ssd_scan_varlen"
            bound = (1e-4 if exact and key == "ssm_state" else tolerance) * float(want[key].abs().max())
            torch.testing.assert_close(got[key].cpu(), want[key], rtol=0, atol=bound, msg=f"{key}: {{}}".format)


@pytest.mark.parametrize("name", ["causal_conv1d_update", "causal_conv1d_varlen", "selective_state_update",
                                  "replay_update", "fold_ring", "ssd_scan_varlen"])  # fmt: skip
def test_a_captured_operator_equals_the_eager_one_bit_for_bit(device: torch.device, name: str) -> None:
    args = make("3-nano-30b", MANY if "varlen" in name else FEW, torch.bfloat16)[name]
    eager, static = moved(args, device), moved(args, device)
    form = load(FORMS[name].triton)
    y = form(**eager)
    form(**moved(args, device))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = form(**static)
    for key, value in moved(args, device).items():
        if isinstance(value, Tensor):
            static[key].copy_(value)
    graph.replay()
    assert y is None or torch.equal(captured, y)
    for key in IN_PLACE:
        assert key not in args or torch.equal(static[key], eager[key])


def test_offsets_beyond_two_billion_elements(device: torch.device) -> None:
    """The last slot of a pool that int32 offsets cannot reach."""
    if torch.cuda.mem_get_info()[0] < 5 * 2**31:
        pytest.skip("needs 10 GiB of free device memory")
    args = moved(make("3-nano-30b", FEW, torch.bfloat16)["selective_state_update"], device)
    small, last = args["ssm_state"].bfloat16(), 4099
    pool = torch.empty((last + 1, *small.shape[1:]), dtype=torch.bfloat16, device=device)
    pool[last], pool[last - 1] = small[1], small[2]
    small_args = args | {"ssm_state": small, "write": args["write"].where(args["write"] < 14, 0)}
    write = torch.zeros_like(args["write"])
    write[0, 5], small_args["write"] = last - 2, write.clone()
    small_args["write"][0, 5] = 50
    read = torch.tensor([last, last - 1, 0, 0, 0, 0], device=device)
    small_args["read"] = torch.tensor([1, 2, 0, 0, 0, 0], device=device)
    form = load(FORMS["selective_state_update"].triton)
    y = form(**(args | {"ssm_state": pool, "read": read, "write": write}))
    assert torch.equal(y, form(**small_args))
    assert torch.equal(pool[last - 2], small[50])
