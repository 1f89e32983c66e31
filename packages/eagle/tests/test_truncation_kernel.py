"""Truncation in Triton keeps exactly the tokens that the sort of the torch form keeps.

Triton decides whether to interpret when a kernel is defined, so the CPU tests of this file run in a process of
their own, which the last test starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bateleur.eagle import Penalties
from bateleur.eagle.sampling_metadata import thresholds_by_sort
from bateleur.eagle.vocab_shard import order_of

triton = pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl  # noqa: E402

from bateleur.eagle.kernels import bracket as brackets  # noqa: E402
from bateleur.eagle.kernels import truncation as kernels  # noqa: E402
from eagle_doubles.laws import HOSTILE, INF, NAN, SAMPLINGS, Row, left_by, likely, metadata_of, normal  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
interpreted = pytest.mark.skipif(not INTERPRETED, reason="looks into Triton's interpreter")


@pytest.fixture(params=["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where kernels run."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device(request.param)


def kept(form: Callable[..., tuple[Tensor, Tensor]], logits: Tensor, values: Tensor, *of: Any) -> Tensor:
    """(N, V) bool, the tokens that a form of `cut` keeps."""
    return left_by(logits.float(), *form(logits, values, *of), values[:, 0])


def same(logits: Tensor, values: Tensor) -> None:
    """The kernels keep what a sort keeps."""
    want = kept(thresholds_by_sort, logits.float(), values)
    assert torch.equal(kept(kernels.truncation_thresholds, logits, values), want)


@contextmanager
def constants(**values: Any) -> Iterator[None]:
    """Replace constants of the kernels, by name."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(kernels if hasattr(kernels, name) else brackets, name, value)
        yield


SMALL = {"_TILE": 64, "_SAMPLES": 64, "_BLOCK": 32}
"""Several tiles, and brackets of a sample, from 65 tokens on."""


class Reads:
    """Counts what programs read of rows, in the interpreter: logits in passes over rows, and sources of searches."""

    def __init__(self) -> None:
        self.logits = 0
        self.listed: list[bool] = []

    @contextmanager
    def counted(self) -> Iterator[Reads]:
        """Count from here on."""
        logits_of, apply_temperature, read_keys = (kernels.logits_of, kernels.apply_temperature, kernels.read_keys)

        def count(read: Any) -> Any:
            def counting(row: Any, lane: Any, *of: Any) -> Any:
                self.logits += lane.numel.value if hasattr(lane.numel, "value") else lane.numel
                return read(row, lane, *of)

            return counting

        def reading(source: Any, *of: Any) -> Any:
            self.listed.append(bool(source[0]))
            return read_keys(source, *of)

        with constants(read_keys=reading), pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "logits_of", count(logits_of))
            patch.setattr(kernels, "apply_temperature", count(apply_temperature))
            patch.setattr(brackets, "apply_temperature", count(apply_temperature))
            yield self


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("size", [45, 200, 700])
def test_keeps_what_a_sort_keeps(kind: str, size: int, device: torch.device) -> None:
    laws = SAMPLINGS if size < 100 else SAMPLINGS[size % 3 :: 3]
    logits = HOSTILE[kind](normal(len(laws), size, 3.0, size)).to(device)
    with constants(**SMALL):
        same(logits, metadata_of(*laws, device=device).values)


LEVELS = st.sampled_from(
    [-INF, NAN, INF, -3.4028235e38, -1e4, -2.5, -1.0, -0.0, 0.0, 1.0, 1.0000001, 2.0, 50.0, 3.4028235e38]
)
LEVELS_OF_A_ROW = st.sampled_from([-INF, -2.5, -1.0, 0.0, 1.0, 1.0000001, 2.0, 3.0])
FINITE = LEVELS.filter(lambda x: x == x and x != INF)
LOGITS = st.one_of(
    st.lists(FINITE, min_size=1, max_size=120),
    st.lists(LEVELS, min_size=1, max_size=120),
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=120),
    st.builds(lambda value, num: [value] * num, FINITE, st.integers(1, 300)),
    st.builds(lambda x, num, seed: normal(1, num, x, seed)[0].tolist(), st.sampled_from([0.1, 3.0, 9.0]),
              st.integers(60, 300), st.integers(0, 99)),
)  # fmt: skip
ROWS = st.tuples(
    st.sampled_from([0.0, 1e-30, 1e-3, 0.7, 1.0, 3.0, 1e30]),
    st.sampled_from([0.0, 0.0, 1e-30, 0.1, 0.5, 1.0]),
    st.sampled_from([0, 0, 1, 2, 5, 23, 24, 25, 60, 299, 10**6]),
    st.sampled_from([1e-38, 0.1, 0.5, 0.9, 0.999, 1 - 2**-24, 1.0]),
)


@interpreted
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(LOGITS, ROWS, st.sampled_from([16, 32, 64]), st.sampled_from([0.0, 0.7, 4.0]), st.sampled_from([4, 64, 512]))
def test_brackets_and_sizes_do_not_matter(
    values: list[float], row: Row, samples: int, errors: float, capacity: int
) -> None:
    """Also if brackets miss the threshold, and if the list is too short: then the row itself is searched."""
    sizes = {"_TILE": 32, "_SAMPLES": samples, "_BLOCK": 16, "capacity_of": lambda size: capacity}
    with constants(**sizes, _ERRORS=tl.constexpr(errors), _FEW=tl.constexpr(int(errors * errors))):
        same(torch.tensor([values]), metadata_of(row).values)


class OtherBrackets:
    """`bracket_kernel`, but with other brackets in the place of those that hold the whole row."""

    def __init__(self, kernel: Any, keys: Tensor, ends: tuple[int, int, int, int]) -> None:
        """ends: places among the keys; two equal ones stand for an empty bracket."""
        self.kernel, self.keys, self.ends = kernel, keys.sort().values, ends

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.kernel[grid](*args, **options)
            (row,) = args[4]
            floor, ceiling = row[:2].tolist()
            inside = [floor, *self.keys[(self.keys >= floor) & (self.keys <= ceiling)].tolist(), ceiling]
            for i in (0, 2):
                low, high = sorted(inside[place % len(inside)] for place in self.ends[i : i + 2])
                row[i], row[i + 1] = low, low - 1 if self.ends[i] == self.ends[i + 1] else high

        return launch


PLACES = st.one_of(st.just(0), st.integers(0, 30))
CUTTING = st.tuples(
    st.sampled_from([0.7, 1.0]), st.sampled_from([0.0, 0.0, 0.1]), st.sampled_from([0, 1, 2, 5, 20]),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
)  # fmt: skip


@interpreted
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(LEVELS_OF_A_ROW, min_size=2, max_size=30), CUTTING, st.tuples(PLACES, PLACES, PLACES, PLACES))
def test_any_brackets_lead_to_the_same_threshold(
    values: list[float], row: Row, ends: tuple[int, int, int, int]
) -> None:
    metadata, logits = metadata_of(row), torch.tensor([values])
    scaled = logits / metadata.values[:, :1].where(metadata.values[:, :1] > 0, 1.0)
    keys = (order_of(scaled)[0] << 24) + (2**24 - 1) - torch.arange(len(values))
    other = OtherBrackets(kernels.bracket_kernel, keys, ends)
    with constants(_TILE=16, _BLOCK=16, bracket_kernel=other):
        same(logits, metadata.values)


@interpreted
@pytest.mark.parametrize("short", [False, True], ids=["missed", "too many"])
def test_a_row_whose_brackets_are_wrong_is_read_again(short: bool) -> None:
    """Brackets of no width miss their threshold, and a list of 4 holds no bracket."""
    laws = [(1, 0, 20, 1), (1, 0, 0, 0.8), (0.7, 0, 200, 0.9), (1, 0.01, 0, 0.5), (1, 0, 500, 1)]
    wrong = {"capacity_of": lambda size: 4} if short else {"_FEW": tl.constexpr(0), "_ERRORS": tl.constexpr(0.0)}
    with constants(**SMALL, **wrong), Reads().counted() as reads:
        same(normal(len(laws), 700, 2.0), metadata_of(*laws).values)
    assert not all(reads.listed)
    assert short or any(reads.listed)


WIDE: dict[str, Callable[[int, int], Tensor]] = {
    "flat": normal,
    "as of a model": likely,
    "bfloat16": lambda num, size: normal(num, size, 2.5).bfloat16(),
    "all equal": torch.zeros,
    "two levels": lambda num, size: (normal(num, size) > 1).float() * 11,
    "few are finite": lambda num, size: normal(num, size).masked_fill(torch.arange(size) % 5000 > 9, -INF),
}


@interpreted
@pytest.mark.parametrize(
    ("kind", "size"), [("flat", 248_320), ("as of a model", 248_320), *((kind, 32_768) for kind in WIDE)]
)
def test_wide_rows_are_read_twice_and_their_candidates_are_few(kind: str, size: int) -> None:
    """At the real sizes. No threshold is outside of its bracket, and no list is too short."""
    laws: list[Row] = [
        (0.7, 0, 20, 0.95), (1, 0, 0, 0.95), (1, 0, 0, 1 - 2**-24), (1, 1e-3, 7 * size // 16, 1),
        (1, 0, size // 20, 0.9),
    ]  # fmt: skip
    logits, metadata = WIDE[kind](len(laws), size), metadata_of(*laws)
    tables: list[Tensor] = []
    empty = torch.empty

    def noted(*shape: Any, **options: Any) -> Tensor:
        tables.append(empty(*shape, **options))
        return tables[-1]

    with Reads().counted() as reads, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", noted)
        same(logits, metadata.values)
    (found,) = (each for each in tables if each.dim() == 2 and each.shape[1] == brackets.COLUMNS.value)
    num_N = found[:, brackets.NUM_CANDIDATES.value]
    assert all(reads.listed)
    assert int(num_N[0]) <= 1500
    assert int(num_N.max()) <= kernels.capacity_of(size)
    tiles = -(-size // kernels._TILE) * kernels._TILE
    assert reads.logits <= len(laws) * (2 * tiles + kernels._SAMPLES)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", WIDE)
def test_wide_rows_of_a_batch_and_in_a_graph(kind: str) -> None:
    """Of many rows at once; the graph is replayed for other logits and other laws than it was captured with."""
    laws = [SAMPLINGS[i % len(SAMPLINGS)] for i in range(150)]
    logits, values = WIDE[kind](len(laws), 248_320).cuda(), metadata_of(*laws, device="cuda").values
    same(logits, values)
    given, metadata = torch.zeros_like(logits), torch.zeros_like(values)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernels.truncation_thresholds(given, metadata)
    given.copy_(logits)
    metadata.copy_(values)
    graph.replay()
    assert all(
        torch.equal(mine, other)
        for mine, other in zip(found, kernels.truncation_thresholds(logits, values), strict=True)
    )


@interpreted
def test_rows_that_keep_all_cost_a_look_at_their_law() -> None:
    laws: list[Row] = [(0, 0, 0, 1), (0, 0.1, 3, 0.5), (1, 0, 0, 1), (0.3, 0, 700, 1)]
    with constants(**SMALL), Reads().counted() as reads:
        least, last = kernels.truncation_thresholds(normal(len(laws), 700), metadata_of(*laws).values)
        assert (least.tolist(), last.tolist()) == ([-INF] * 4, [700] * 4)
        assert (reads.logits, reads.listed) == (0, [])
        same(normal(1, 700), metadata_of((1, 0.1, 0, 1)).values)  # min_p: the largest logit tells all
        assert (reads.logits, reads.listed) == (704, [])


def test_a_row_does_not_depend_on_its_batch_or_on_tiles(device: torch.device) -> None:
    laws = [each for each in SAMPLINGS if each[0] > 0][::3]
    logits, values = normal(len(laws), 700, 2.0).to(device), metadata_of(*laws, device=device).values
    with constants(**SMALL):
        want = torch.stack(kernels.truncation_thresholds(logits, values), 1)
        for i in range(len(laws)):
            alone = kernels.truncation_thresholds(logits[i : i + 1], values[i : i + 1])
            assert torch.equal(torch.stack(alone, 1), want[i : i + 1])
    for sizes in ({"_TILE": 16}, {"_SAMPLES": 128, "_BLOCK": 64}):
        with constants(**SMALL | sizes):
            got = torch.stack(kernels.truncation_thresholds(logits.flip(0), values.flip(0)), 1)
        assert torch.equal(got.flip(0), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_logits_of_any_dtype_in_rows_that_lie_apart(dtype: torch.dtype, device: torch.device) -> None:
    wide = torch.cat([normal(len(SAMPLINGS), 300, 3.0), torch.full((len(SAMPLINGS), 37), 1e4)], 1).to(device, dtype)
    with constants(**SMALL):
        same(wide[:, :300], metadata_of(*SAMPLINGS, device=device).values)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_penalties_come_first(num_drafts: int, device: torch.device) -> None:
    num, size, generator = len(SAMPLINGS), 300, torch.Generator().manual_seed(num_drafts)
    penalties = Penalties(
        torch.tensor([[1.3, 0.7, -0.4], [1, 0, 0], [0.8, -0.2, 1.1]], device=device)[torch.arange(num) % 3],
        (torch.arange(num) % 2).to(device),
        torch.randint(-3, 4, (2, size), generator=generator).clamp_min_(0).int().to(device),
        (torch.rand(2, size, generator=generator) < 0.3).to(device),
        torch.randint(-1, 6, (num, num_drafts), generator=generator).to(device) if num_drafts else None,
    )
    logits, values = normal(num, size, 2.0).to(device), metadata_of(*SAMPLINGS, device=device).values
    penalised = penalties.apply(logits)
    want = left_by(penalised, *thresholds_by_sort(penalised, values), values[:, 0])
    with constants(**SMALL):
        got = left_by(penalised, *kernels.truncation_thresholds(logits, values, penalties), values[:, 0])
    assert torch.equal(got, want)
    assert not torch.equal(want, kept(thresholds_by_sort, logits, values))


def test_rows_that_are_no_law_are_left_as_they_are(device: torch.device) -> None:
    with constants(**SMALL):
        logits = torch.randn(3, 150, device=device)
        logits[0, 107], logits[1], logits[2, 9] = NAN, -INF, INF
        least, last = kernels.truncation_thresholds(logits, metadata_of(*[(1, 0.1, 4, 0.5)] * 3, device=device).values)
    assert least.tolist() == [-INF] * 3
    assert last.tolist() == [150] * 3


def test_too_many_tokens_are_refused() -> None:
    logits = torch.zeros(1, 1).expand(1, 2**23 + 1)
    with pytest.raises(ValueError, match=r"^logits: 8388609 tokens in a row; at most 8388608 are supported$"):
        kernels.truncation_thresholds(logits, metadata_of((1, 0, 1, 1)).values)


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test starts")
def test_all_of_this_in_the_interpreter(in_interpreter: Callable[[str], int]) -> None:
    assert in_interpreter(__file__) == 60
