"""The Triton attention kernels against the reference.

They run in Triton's interpreter on a CPU, and on CUDA if there is a device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.metadata.backends import _launch_config, _torch_ops
from bateleur.metadata.backends._torch_ops import quantize
from bateleur.metadata.backends.reference import paged_attention_reference, write_kv_reference

pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NAN = float("nan")
FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
# Triton's interpreter multiplies the bits of bfloat16 matrices as integers.
LOW = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
HALF: dict[str, Any] = {"dtype": torch.float16}  # larger tiles than float32, hence less to interpret
# query lengths and computed tokens; the leading rows of one token are decodes
BATCHES = {
    "decode": ([1, 1, 1], [0, 99, 37]),
    "drafts": ([4, 1, 3, 4], [70, 0, 11, 0]),
    "prefill": ([13, 2, 41], [0, 0, 0]),
    "chunked": ([25, 47, 3], [44, 11, 60]),
    "mixed": ([1, 1, 1, 37, 1, 19], [9, 40, 0, 50, 12, 0]),
}


@pytest.fixture(params=["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Device of the kernels. New memory holds NaN or a large number, to detect reads before a write."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        made = empty(*size, **options)
        return made.fill_(NAN if made.is_floating_point() else 1 << 29)

    monkeypatch.setattr(torch, "empty", poisoned)
    return torch.device(request.param)


@pytest.fixture
def kernels() -> Any:
    """The module under test, imported late: Triton selects its interpreter at import."""
    from bateleur.metadata.kernels import cuda_ops

    return cuda_ops


@pytest.fixture
def few_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small limits, because the interpreter is slow: splits from 128 keys on, about 5, and long rows from 5 tokens."""
    monkeypatch.setattr(_launch_config, "min_split_keys", lambda *_: 128)
    monkeypatch.setattr(_launch_config, "split_limit", lambda *_: 5)
    monkeypatch.setattr(_launch_config, "MAX_SHORT_QUERY_LEN", 4)
    _launch_config._work_shape.cache_clear()
    yield
    _launch_config._work_shape.cache_clear()


@dataclass(frozen=True)
class World:
    """Inputs of one attention call, with NaN in all memory that must not be read."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    scale: float
    window: int

    def args(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)

    def expected(self) -> Tensor:
        tensors = [tensor.cpu() for tensor in self.args()[:6]]
        return paged_attention_reference(*tensors, self.scale, self.window).to(self.q.device)


def make_world(
    query_lens: Sequence[int],
    computed: Sequence[int],
    *,
    device: torch.device,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    block_size: int = 16,
    window: int = 0,
    dtype: torch.dtype = torch.float32,
    padding: tuple[int, int] = (2, 3),
    fill: int = 0,
    bound: int = 128,
    seed: int = 0,
) -> World:
    """Rows with ``padding`` more rows and tokens; freed and unowned blocks, table tails and padding all hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    num_rows, num_tokens = len(query_lens), sum(query_lens)
    lengths = [a + b for a, b in zip(query_lens, computed, strict=True)]
    width = -(-bound // block_size)
    table = 1 + torch.from_numpy(rng.permutation(num_rows * width)).view(num_rows, width).int()
    caches = []
    for _ in range(2):
        cache = torch.full((num_rows * width + 1, block_size, heads[1], head_dim), NAN, dtype=dtype)
        for row, (length, queries) in enumerate(zip(lengths, query_lens, strict=True)):
            at = torch.arange(max(0, length - queries - window + 1) if window else 0, length)
            new = torch.randn(len(at), heads[1], head_dim, generator=generator).to(dtype)
            cache[table[row, at // block_size].long(), at % block_size] = new
        caches.append(cache)
    # A projection holds queries, keys and values side by side: queries are a view with strides.
    q = torch.full((num_tokens + padding[1], heads[0] + 2 * heads[1], head_dim), NAN, dtype=dtype)
    q[:num_tokens] = torch.randn(num_tokens, *q.shape[1:], generator=generator).to(dtype)
    starts = np.concatenate(([0], np.cumsum(query_lens), [num_tokens] * padding[0]))
    several = [row for row, length in enumerate(query_lens) if length != 1]
    return World(
        q.to(device)[:, : heads[0]],
        caches[0].to(device),
        caches[1].to(device),
        torch.cat((table, table.new_zeros(padding[0], width))).to(device),
        torch.tensor([*lengths, *[fill] * padding[0]], dtype=torch.int32, device=device),
        torch.from_numpy(starts).int().to(device),
        min(several, default=num_rows),
        max(query_lens),
        max(lengths),
        head_dim**-0.5,
        window,
    )


def check(kernels: Any, world: World, out: Tensor | None = None) -> None:
    out = kernels.paged_attention(*world.args()) if out is None else out
    tolerance = TOLERANCE[world.q.dtype]
    torch.testing.assert_close(out, world.expected(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "window"),
    [((3, 1), 16, 5, 0), ((2, 2), 64, 16, 6), ((10, 2), 80, 4, 0), ((8, 1), 128, 32, 23), ((6, 1), 48, 12, 1)],
)
@pytest.mark.parametrize("name", BATCHES)
def test_kernels_equal_the_reference(
    kernels: Any, device: torch.device, few_keys: None, name: str, heads: tuple[int, int], head_dim: int,
    block_size: int, window: int,
) -> None:  # fmt: skip
    options: dict[str, Any] = {"heads": heads, "head_dim": head_dim, "block_size": block_size, "window": window}
    check(kernels, make_world(*BATCHES[name], device=device, **options))


@pytest.mark.skipif(not INTERPRETED, reason="compiled kernels keep the constant of their version of Triton")
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("block_size", [4, 8, 16, 64, 128])
@pytest.mark.parametrize("name", ["drafts", "mixed"])
def test_ids_of_blocks_may_be_loaded_in_any_way(
    kernels: Any, device: torch.device, few_keys: None, monkeypatch: pytest.MonkeyPatch, name: str, block_size: int,
    at_once: bool,
) -> None:  # fmt: skip
    """Block ids are loaded for all pages at once, one by one, or per key; or an iteration is within a page."""
    from bateleur.metadata.kernels import attention

    monkeypatch.setattr(attention, "_PAGES_AT_ONCE", tl.constexpr(at_once))
    for window in (0, 23):
        options: dict[str, Any] = {"head_dim": 64, "block_size": block_size, "window": window, **HALF}
        check(kernels, make_world(*BATCHES[name], device=device, **options))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(("heads", "head_dim"), [((14, 2), 64), ((2, 2), 96), ((5, 1), 256)])
@pytest.mark.parametrize("name", ["drafts", "mixed"])
def test_kernels_in_low_precision(
    kernels: Any, device: torch.device, few_keys: None, name: str, heads: tuple[int, int], head_dim: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    check(kernels, make_world(*BATCHES[name], device=device, heads=heads, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize(
    ("query_lens", "computed", "window"),
    [
        ([1, 1, 1], [700, 60, 300], 0),
        ([3, 1, 2], [300, 60, 200], 0),
        ([1, 1, 1], [300, 60, 200], 0),
        ([3, 1, 2], [700, 60, 500], 290),
    ],
)
def test_the_bound_changes_no_bit_of_a_split_row(
    kernels: Any, device: torch.device, few_keys: None, query_lens: list[int], computed: list[int], window: int
) -> None:
    """One split, several, and the most. A captured bound launches more programs, with equal results."""
    options: dict[str, Any] = {"heads": (2, 1), "head_dim": 128, "window": window, "bound": 2048, **HALF}
    world = make_world(query_lens, computed, device=device, **options)
    out = kernels.paged_attention(*world.args())
    check(kernels, world, out)
    for bound in (720, 2048):
        assert torch.equal(kernels.paged_attention(*replace(world, max_seq_len=bound).args()), out)


def test_drafts_of_wide_groups_are_split(kernels: Any, device: torch.device, few_keys: None) -> None:
    """16 query heads per key head and 5 tokens: 80 lines of one tile, with joined splits."""
    world = make_world([5, 5, 1], [300, 3, 0], device=device, heads=(16, 1), bound=512, **HALF)
    out = kernels.paged_attention(*world.args())
    check(kernels, world, out)
    assert torch.equal(kernels.paged_attention(*world.args()), out), "another order of sums"


@pytest.mark.parametrize("window", [0, 150])
def test_a_token_among_drafts_has_the_bits_of_the_token_alone(
    kernels: Any, device: torch.device, few_keys: None, window: int
) -> None:
    """Across a bound of splits, which lie at the same keys for both. Six lines: numpy's products of the seventh and
    later rows of a matrix round in another way.
    """
    computed, options = 255, {"heads": (4, 2), "head_dim": 64, "window": window, "bound": 512, **HALF}
    drafts = make_world([3], [computed], device=device, padding=(0, 0), **options)
    out = kernels.paged_attention(*drafts.args())
    check(kernels, drafts, out)
    for token in range(3):
        alone = replace(
            drafts,
            q=drafts.q[token : token + 1],
            seq_lens=drafts.seq_lens - 2 + token,
            query_start_loc=drafts.query_start_loc.clamp(max=1),
            max_query_len=1,
        )
        assert torch.equal(kernels.paged_attention(*alone.args()), out[token : token + 1]), token


@dataclass(frozen=True)
class Lengths:
    """Rows of a work list with padding, and the query heads per key head."""

    queries: NDArray[np.int64]
    keys: NDArray[np.int64]
    group: int
    window: int
    max_query_len: int
    num_tokens: int

    def args(self, device: torch.device) -> tuple[Any, ...]:
        """Return the arguments of `attention_work`."""
        cache = torch.empty(1, 16, 2, 64, dtype=torch.float16, device=device)  # tiles of 32 keys at most
        starts = torch.from_numpy(np.concatenate(([0], self.queries.cumsum()))).int().to(device)
        keys = torch.from_numpy(self.keys).int().to(device)
        return cache, keys, starts, 2 * self.group, self.num_tokens, self.max_query_len, self.window

    def shape(self, device: torch.device) -> _launch_config.WorkShape:
        cache, keys, _, *rest = self.args(device)
        return _launch_config.work_shape(rest[0], cache, len(keys), *rest[1:])


def lengths_of(seed: int, most: int, num_rows: int, window: int) -> Lengths:
    rng = np.random.default_rng(seed)
    queries = np.minimum(rng.choice([0, 1, 1, 3, most], num_rows), most)
    keys = queries + rng.choice([0, 90, 700], num_rows) * (queries > 0)
    if num_rows > 256:  # split rows at both ends of the list
        queries[[0, -1]], keys[[0, -1]] = 1, [2_000_000, 3_000_000]
    padding = np.zeros(int(rng.integers(0, 4)), np.int64)
    queries, keys = np.concatenate((queries, padding)), np.concatenate((keys, padding))
    tokens = int(queries.sum() + rng.integers(0, 9))
    return Lengths(queries, keys, int(rng.integers(1, 20)), window, most, tokens)


LENGTHS = {
    "decodes": (0, 1, 300, 0),
    "drafts": (1, 4, 7, 0),
    "drafts in a window": (2, 4, 9, 70),
    "prompts": (3, 40, 12, 0),
    "prompts in a window": (4, 60, 5, 33),
    "many rows": (5, 9, 600, 0),
    "no row": (6, 9, 0, 0),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_the_work_list_is_that_of_loops(kernels: Any, device: torch.device, few_keys: None, name: str) -> None:
    """Every split of every tile occurs once, last row first, then padding and joins."""
    lengths = lengths_of(*LENGTHS[name])
    shape, args = lengths.shape(device), lengths.args(device)
    expected = torch.tensor(listed(lengths, shape), dtype=torch.int32)
    assert torch.equal(kernels.attention_work(*args).cpu(), expected)
    assert _torch_ops.attention_work(*args).shape == expected.shape


def listed(lengths: Lengths, shape: _launch_config.WorkShape) -> list[list[int]]:
    """Return the expected work list, computed entry by entry."""
    starts = np.concatenate(([0], lengths.queries.cumsum())).tolist()
    rows = list(zip(starts, lengths.queries.tolist(), lengths.keys.tolist(), strict=False))
    items, joins = [], []
    for launch in shape.launches:
        tiles = [
            -(-queries * shape.group // launch.block_m)
            if queries >= launch.least and not 0 < launch.most < queries
            else 0
            for _, queries, _ in rows
        ]
        oldest = [max(keys - queries - lengths.window + 1, 0) if lengths.window else 0 for _, queries, keys in rows]
        base = [first // shape.block_n * shape.block_n for first in oldest]
        size = launch.min_keys
        work = sum(count * (keys - first) for count, (*_, keys), first in zip(tiles, rows, base, strict=True))
        while size * shape.splits < work:
            size *= 2
        own, joined, parts = [], [], 0
        for row, (token, queries, keys) in reversed(list(enumerate(rows))):
            splits = max(-(-(keys - base[row]) // size), 1)
            for tile in range(tiles[row])[::-1]:
                last_query = min(queries, -(-(tile + 1) * launch.block_m // shape.group))
                begin = tile * launch.block_m
                if splits > 1:
                    lines = min(queries * shape.group - begin, launch.block_m)
                    at = launch.first_line + parts * shape.num_kv_heads * launch.block_m
                    joined.append([token, begin, lines, splits, at, launch.block_m, 0, 0])
                for split in range(splits):
                    first = base[row] + split * size
                    end = min(first + size, keys - queries + last_query)
                    part = parts if splits > 1 else -1
                    parts += splits > 1
                    own.append([row, token, queries, keys, tile, max(first, oldest[row]), end, part])
        assert len(own) < launch.num_items
        assert parts < 2 * shape.splits
        assert len(joined) < shape.splits
        token, padding = starts[-1] if launch.least == 1 else lengths.num_tokens, launch.num_items - len(own)
        items += own + [[-1, token, padding, 0, index, 0, 0, -1] for index in range(padding)]
        joins += joined + [[0] * 8] * (shape.splits - len(joined))
    return items + joins


def test_a_list_of_the_step_serves_all_its_layers(kernels: Any, device: torch.device, few_keys: None) -> None:
    """A shared list equals that of each layer. A list of another step or other heads is refused."""
    world = make_world([1, 1, 30, 9], [299, 180, 70, 150], device=device, bound=300, **HALF)
    q, k_cache, _, _, seq_lens, starts = world.args()[:6]
    bounds = len(q), world.max_query_len, 0
    work = kernels.attention_work(k_cache, seq_lens, starts, q.shape[1], *bounds)
    out = kernels.paged_attention(*world.args(), work)
    check(kernels, world, out)
    assert torch.equal(kernels.paged_attention(*world.args()), out)
    with pytest.raises(ValueError, match=r"work: has shape \(\d+, 8\) and .*; must be \(\d+, 8\) of int32"):
        kernels.paged_attention(*world.args(), work[:-1])
    with pytest.raises(ValueError, match=r"dtype torch\.int64"):
        kernels.paged_attention(*world.args(), work.long())


@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [24, 64, 128, 256])
def test_a_join_adds_parts_in_their_order(device: torch.device, block_m: int, head_dim: int) -> None:
    """Tiles with 2 to 40 splits, one without keys, and lines without keys in any split."""
    from bateleur.metadata.kernels import attention

    generator, kv_heads, group, rng = torch.Generator().manual_seed(0), 2, 3, np.random.default_rng(block_m)
    options = _launch_config.join_options(block_m, head_dim)
    splits, lines = [2, 40, 5], [block_m, 1, int(rng.integers(2, block_m))]
    parts = torch.randn(sum(splits), kv_heads, block_m, head_dim, generator=generator)
    lse = 20 * torch.randn(sum(splits), kv_heads, block_m, generator=generator)
    lse[1], parts[1] = -np.inf, 0
    lse[:2, :, block_m - 1], parts[:2, :, block_m - 1] = -np.inf, 0
    entries, expected, token = [[0] * 8], torch.full((200, kv_heads * group, head_dim), NAN), 0
    for index, (count, real) in enumerate(zip(splits, lines, strict=True)):
        first = sum(splits[:index])
        entries.append([token, index, real, count, first * kv_heads * block_m, block_m, 0, 0])
        own = lse[first : first + count].double()
        weight = (own - own.amax(0).clamp(min=-1e9)).mul(np.log(2)).exp()[..., None]
        joined = (parts[first : first + count] * weight).sum(0) / weight.sum(0).clamp(min=1e-30)
        for m in range(real):
            for head in range(kv_heads):
                at = index + m
                expected[token + at // group, head * group + at % group] = joined[head, m]
        token += -(-(index + real) // group)
    out = torch.full_like(expected, NAN, device=device)
    work = torch.tensor([[7] * 8, *entries], dtype=torch.int32, device=device)
    pieces = -(-block_m // options["BLOCK_L"])
    parts[:, :, lines[0] :], lse[:, :, lines[0] :] = NAN, NAN
    attention.join_kernel[(len(entries), pieces, kv_heads)](
        parts.to(device), lse.to(device), work, out, out, 1, GROUP=group, HEAD_DIM=head_dim, SINKS=False, **options
    )
    torch.testing.assert_close(out.cpu(), expected, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("window", [0, 13])
@pytest.mark.parametrize("name", BATCHES)
def test_sinks_take_weight_from_the_keys_of_every_query(
    kernels: Any, device: torch.device, few_keys: None, name: str, window: int
) -> None:
    """In one split or several; the last head's sink outweighs every key."""
    world = make_world(*BATCHES[name], device=device, window=window, **HALF)
    sinks = torch.tensor([-3.0, 0.0, 2.0, 30.0])
    tensors = [tensor.cpu() for tensor in world.args()[:6]]
    expected = paged_attention_reference(*tensors, world.scale, window, sinks)
    out = kernels.paged_attention(*world.args(), None, sinks.to(device)).cpu()
    torch.testing.assert_close(out, expected, rtol=3e-3, atol=3e-3)
    assert (out[:, 3].abs() < 1e-6).all()


@pytest.mark.parametrize("name", BATCHES)
def test_a4_real_rows_are_bit_equal_under_padding(
    kernels: Any, device: torch.device, few_keys: None, name: str
) -> None:
    plain = make_world(*BATCHES[name], device=device, padding=(0, 0), **HALF)
    padded = make_world(*BATCHES[name], device=device, padding=(5, 9), fill=1, **HALF)
    expected, out = (kernels.paged_attention(*world.args()) for world in (plain, padded))
    assert torch.equal(out[: len(expected)], expected)
    assert (out[len(expected) :] == 0).all()


@pytest.mark.parametrize("name", BATCHES)
def test_a_mixed_graph_promises_nothing_but_its_size(
    kernels: Any, device: torch.device, few_keys: None, name: str
) -> None:
    """No splits, and any row may have all tokens: single tokens use large tiles too."""
    world = make_world(*BATCHES[name], device=device, **HALF)
    check(kernels, replace(world, num_decodes=0, max_query_len=world.q.shape[0], max_seq_len=128))
    check(kernels, replace(world, num_decodes=0, max_query_len=99))


def test_a5_large_before_small_leaves_nothing_behind(kernels: Any, device: torch.device, few_keys: None) -> None:
    """Memory of a large batch is reused by the next one; NaN marks unwritten entries."""
    for batch in ("mixed", "decode"):
        large = make_world([1, 1, 1, 60], [299, 180, 70, 50], device=device, bound=300, seed=1, **HALF)
        kernels.paged_attention(*large.args())
        check(kernels, make_world(*BATCHES[batch], device=device, **HALF))


def test_rows_without_keys_and_batches_without_rows_give_zero(kernels: Any, device: torch.device) -> None:
    for fill in (0, 1):
        world = make_world([1], [0], device=device, padding=(0, 4))
        empty = torch.zeros(6, dtype=torch.int32, device=device)
        table, lengths = world.block_table.new_zeros(5, 8), torch.full_like(empty[:5], fill)
        for promise in (1, 99):
            padded = replace(
                world, block_table=table, seq_lens=lengths, query_start_loc=empty, num_decodes=0, max_query_len=promise
            )
            assert (kernels.paged_attention(*padded.args()) == 0).all()
    keyless = replace(world, seq_lens=torch.zeros_like(world.seq_lens))
    for promise in (1, 99):
        assert (kernels.paged_attention(*replace(keyless, max_query_len=promise).args()) == 0).all()


def test_recycled_tails_and_freed_window_blocks_leak_nowhere(kernels: Any, device: torch.device) -> None:
    """Block ids after a row's length or before its window are invalid and must not be read."""
    for window in (0, 20):
        world = make_world(*BATCHES["mixed"], device=device, window=window, block_size=4)
        table, column = (world.block_table.clone(), torch.arange(world.block_table.shape[1], device=device)[None])
        dead = column * 4 >= world.seq_lens[:, None]
        if window:
            dead |= (column + 1) * 4 <= (world.seq_lens - world.query_start_loc.diff() - window + 1)[:, None]
        table[dead] = 2**31 - 1
        check(kernels, replace(world, block_table=table))


@pytest.mark.parametrize("seed", range(8 if INTERPRETED else 60))
def test_random_batches(kernels: Any, device: torch.device, few_keys: None, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_rows, kv_heads = int(rng.integers(1, 6)), int(rng.integers(1, 3))
    longest = int(rng.choice([1, 5, 40]))
    query_lens = np.sort(rng.integers(1, longest + 1, num_rows)).tolist()
    world = make_world(
        query_lens,
        rng.integers(0, 160, num_rows).tolist(),
        device=device,
        dtype=LOW[seed % len(LOW)] if seed % 4 else torch.float32,
        heads=(kv_heads * int(rng.integers(1, 9)), kv_heads),
        head_dim=int(rng.choice([16, 24, 64, 80])),
        block_size=int(rng.integers(4, 33)),
        window=int(rng.choice([0, 1, 17, 150])),
        padding=(int(rng.integers(0, 4)), int(rng.integers(0, 50))),
        fill=int(rng.integers(0, 2)),
        bound=256,
        seed=seed,
    )
    check(kernels, replace(world, max_query_len=world.max_query_len + int(rng.integers(0, 5))))


@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
@pytest.mark.parametrize("window", [0, 23])
@pytest.mark.parametrize("name", ["drafts", "mixed"])
def test_kernels_read_fp8_caches_with_a_scale_for_each_head(
    kernels: Any, device: torch.device, few_keys: None, name: str, window: int, dtype: torch.dtype
) -> None:
    """Unowned entries hold the code of NaN. A scaled cache also has splits, which are joined."""
    options: dict[str, Any] = {"head_dim": 64, "window": window, "dtype": dtype, "bound": 512}
    world = make_world(*BATCHES[name], device=device, **options)
    kv_scales = torch.tensor([[0.03, 1.7], [0.6, 0.25]], device=device)
    caches = [quantize(cache, FP8, scale) for cache, scale in zip(world.args()[1:3], kv_scales, strict=True)]
    for scales in (kv_scales, None):
        stored = replace(world, k_cache=caches[0], v_cache=caches[1])
        out = kernels.paged_attention(*stored.args(), None, None, scales)
        tensors = [tensor.cpu() for tensor in stored.args()[:6]]
        given = None if scales is None else scales.cpu()
        expected = paged_attention_reference(*tensors, world.scale, window, None, given)
        tolerance = TOLERANCE[dtype] * float(expected.abs().max().clamp(min=1))
        torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kv_dtype", [FP8, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_rounds_to_the_dtype_of_the_cache_as_the_reference(
    kernels: Any, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """All codes, halves between them, subnormals, saturation and NaN; scales that are no powers of two."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    special = torch.tensor([448.0, 464, 465, 1e9, torch.inf, -torch.inf, NAN, 0.0, -0.0, 2**-10, 3 * 2**-10, 0.0155])
    x = torch.cat((codes, (codes[:-1] + codes[1:]) / 2, special, torch.randn(245, generator=torch.Generator())))
    k = x.to(dtype).view(-1, 3, 16)
    v, slots = k.flip(0), torch.arange(len(k)) + 5
    for scales in (None, torch.tensor([[0.03, 1.7, 1.0], [2.0, 0.5, 0.3]])):
        caches = torch.zeros(2, 5, 5, 3, 16, dtype=kv_dtype)
        expected = caches.clone()
        write_kv_reference(k, v, *expected, slots, scales)
        mine = [side.to(device) for side in caches]
        given = None if scales is None else scales.to(device)
        q = torch.zeros(len(k), 3, 16, dtype=dtype, device=device)
        kernels.rotate_and_write_kv(
            q, k.to(device), v.to(device), *mine, slots.to(device), None, None, None, None, 0.0, given
        )
        for side, other in zip(mine, expected, strict=True):
            assert torch.equal(side.cpu().float().nan_to_num(1e5), other.float().nan_to_num(1e5))


@pytest.mark.parametrize("rotary_dim", [None, 2, 24, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "norm"),
    [((3, 1), ""), ((9, 3), ""), ((16, 16), ""), ((3, 1), "head"), ((9, 3), "head"), ((9, 3), "whole")],
    ids=str,
)
def test_write_normalises_and_rotates_queries_in_place_and_stores_by_slot(
    kernels: Any, device: torch.device, heads: tuple[int, int], norm: str, dtype: torch.dtype, rotary_dim: int | None
) -> None:
    """Skipped tokens hold NaN; what no slot names keeps its NaN; keys and values stay as they are.

    Gates lie before queries. With norms a value is off by the order of their sums, and in bfloat16 by a place.
    """
    generator = torch.Generator().manual_seed(0)
    num_heads, num_kv_heads = heads
    sizes = [2, num_heads, num_kv_heads, num_kv_heads]
    projection = torch.randn(9, sum(sizes), 80, generator=generator).to(dtype)
    projection[7:] = NAN
    slots = torch.tensor([5, 14, 6, -1, 24, 33, 7, -1, -1])
    cos = sin = None
    if rotary_dim:
        table = torch.randn(9, 1, 2 * rotary_dim, generator=generator).to(dtype)
        cos, sin = table[..., :rotary_dim], table[..., rotary_dim:]
    _, q, k, v = projection.split(sizes, 1)
    weights: tuple[Any, ...] = ()
    if norm:
        lanes = [80 * n if norm == "whole" else 80 for n in heads]
        weights = (*(torch.rand(size, generator=generator) for size in lanes), 1e-6)
    caches = torch.full((2, 7, 5, num_kv_heads, 80), NAN, dtype=dtype)
    caches[:, 0, 0] = 0
    expected = caches.clone()
    turned_q, turned_k = (
        _turn(_normed(x, *each, norm == "whole") if norm else x, cos, sin)
        for x, each in ((q, weights[::2]), (k, weights[1:]))
    )
    write_kv_reference(turned_k, v, *expected, slots)

    there = projection.to(device)
    mine = [side.to(device) for side in caches]
    tables = [each if each is None else each.to(device) for each in (cos, sin, *weights[:2])]
    _, q, k, v = there.split(sizes, 1)
    kernels.rotate_and_write_kv(q, k, v, *mine, slots.to(device), *tables, *weights[2:])
    changes = rotary_dim or norm
    tolerance = {"rtol": 0, "atol": 0} if not changes or dtype == torch.float32 else {"rtol": 1.6e-2, "atol": 2e-2}
    if changes and dtype == torch.float32:
        tolerance = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(q.cpu(), turned_q, equal_nan=True, **tolerance)
    for side, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(side.cpu(), other, equal_nan=True, **tolerance)
    for part in (slice(2), slice(2 + num_heads, None)):
        torch.testing.assert_close(there[:, part].cpu(), projection[:, part], equal_nan=True, rtol=0, atol=0)


def _normed(x: Tensor, weight: Tensor, eps: float, whole: bool) -> Tensor:
    """RMS norm in float64, rounded once."""
    wide = x.double()
    scale = (wide.square().mean((1, 2) if whole else 2, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight.double().view(-1, 80)).to(x.dtype)


def _turn(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Rotate lane i of the leading R with lane i + R/2, one lane at a time."""
    out = x.clone()
    if cos is not None and sin is not None:
        rotary_dim = cos.shape[-1]
        for lane in range(rotary_dim):
            other = (lane + rotary_dim // 2) % rotary_dim
            out[..., lane] = x[..., lane] * cos[..., lane] + x[..., other] * sin[..., lane]
    return out


def test_kernels_refuse_what_they_would_misread(kernels: Any, device: torch.device) -> None:
    world = make_world([1, 5], [3, 0], device=device)
    for changes, message in (
        ({"max_seq_len": 129}, "max_seq_len: 129 is above the 128 tokens"),
        ({"num_decodes": 9}, "num_decodes: 9 must be within 4 rows"),
        ({"q": world.q[:, :3]}, "q: 3 heads are no multiple of the cache's 2"),
        ({"q": world.q[..., ::2]}, "q: strides .* must have a token's heads adjacent"),
        ({"v_cache": world.v_cache[:, :, :1].expand(-1, -1, 2, -1)}, "v_cache: strides .* must be those of k_cache"),
        ({"scale": 0.0}, "scale: 0.0 is not positive"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.paged_attention(*replace(world, **changes).args())
    k, caches = world.q[:, :2], (world.k_cache, world.v_cache)
    slots = torch.full((len(k),), -1, device=device)
    cos = torch.ones(len(k), 1, 16, device=device)
    for args, message in (
        ((world.q, k, k, *caches, slots[:-1], None, None), "slot_mapping: has 8 slots for 9 queries"),
        ((world.q, k, k[:, :1], *caches, slots, None, None), "slot_mapping: .* values"),
        ((world.q, k, k, *caches, slots, cos, None), "sin: must come with cos"),
        ((world.q, k, k, *caches, slots, cos, cos[..., ::2]), "sin: must come with cos"),
        (
            (world.q, k, k, *caches, slots, None, None, cos[0, 0, :7], cos[0, 0], 0.1),
            "q_norm, k_norm: have 7 and 16 weights",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.rotate_and_write_kv(*args)


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test starts")
def test_all_of_this_in_the_interpreter(in_interpreter: Callable[[str], int]) -> None:
    assert in_interpreter(__file__)
