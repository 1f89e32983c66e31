"""The Triton form of COUPLED gives the same ids as the torch form.

Triton decides whether to interpret when a kernel is defined, so the CPU tests of this file run in a process of
their own, which the last test starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bateleur.eagle import HashedVocab, Keys, Penalties, Role, SamplingMetadata, draw, gumbel, uniform
from bateleur.eagle.rejection_sampler import COUPLED, verify
from bateleur.eagle.rules import Coupled, Drafts, RejectionOutput, Rows
from bateleur.eagle.sample import DRAW, SAMPLE, SampledTokens

triton = pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl  # noqa: E402

from bateleur.eagle.kernels import rejection_sampler as kernels  # noqa: E402
from bateleur.eagle.kernels import truncation  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where kernels run."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device(request.param)


def problem(size: int, device: torch.device, num_drafts: int = 3, seed: int = 0) -> tuple[Tensor, Drafts, Rows]:
    """Ragged requests, greedy ones among them, half of whose drafts are right; two requests have a bad row."""
    lens = [1 + (5 * i + seed) % (num_drafts + 1) for i in range(9)]
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(sum(lens) + 2, size, generator=generator) * 2
    starts = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
    temperature = torch.tensor([1.0, 0.0, 0.7] * 3)
    logits[starts[4], size // 2] = NAN
    logits[starts[7], :] = -INF
    logits[-2:] = NAN  # padding
    seeds = torch.randint(-(2**62), 2**62, (9,), generator=generator)
    rows = Rows(starts, seeds, torch.randint(0, 2**31, (9,), generator=generator), temperature)
    tokens = torch.full((9, num_drafts), -1)
    for _ in range(num_drafts):
        found = COUPLED.torch(logits, Drafts(tokens, Coupled()), rows, None).tokens[:, :num_drafts]
        tokens = torch.where(tokens < 0, found, tokens)
    wrong = torch.rand(tokens.shape, generator=generator)
    tokens = torch.where(wrong < 0.8, tokens, torch.where(wrong < 0.9, -1, 0))
    tokens[7] = 0  # looks like the placeholder of a bad row
    moved = Rows(*(getattr(rows, n).to(device) for n in ("query_start_loc", "seeds", "first_position", "temperature")))
    return logits.to(device), Drafts(tokens.to(device), Coupled()), moved


def same(mine: RejectionOutput, other: RejectionOutput) -> None:
    for name, left, right in zip(RejectionOutput._fields, mine, other, strict=True):
        assert left.dtype == right.dtype, name
        assert torch.equal(left.cpu(), right.cpu()), name


@pytest.mark.parametrize(("size", "num_drafts"), [(5, 3), (64, 0), (1000, 4), (2100, 1)])
def test_same_ids_as_the_torch_form(size: int, num_drafts: int, device: torch.device) -> None:
    logits, drafts, rows = problem(size, device, num_drafts, seed=size + num_drafts)
    want = COUPLED.torch(*problem(size, torch.device("cpu"), num_drafts, seed=size + num_drafts), None)
    assert want.bad.any()
    assert num_drafts == 0 or want.num_emitted.max() > 1
    same(kernels.coupled(logits, drafts, rows, HashedVocab.of(size, device)), want)


@pytest.mark.parametrize(("block", "programs"), [(16, 1), (64, 10_000), (64, 40)])
def test_tiles_and_shares_do_not_matter(
    block: int, programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, drafts, rows = problem(250, device)
    want = COUPLED.torch(logits, drafts, rows, None)
    monkeypatch.setattr(kernels, "_BLOCK", block)
    monkeypatch.setattr(kernels, "_PROGRAMS", programs)
    same(kernels.coupled(logits, drafts, rows, None), want)


def test_ties_go_to_the_lowest_id(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_BLOCK", 16)
    size = 100
    rows = Rows(
        torch.arange(5, dtype=torch.int32, device=device), torch.arange(4, device=device),
        torch.arange(4, device=device), torch.zeros(4, device=device),
    )  # fmt: skip
    drafts = Drafts(torch.empty(4, 0, dtype=torch.int64, device=device), Coupled())
    logits = torch.zeros(4, size, device=device)
    logits[1, 37:] = 3.0
    logits[2, 99] = 1.0
    logits[3, [5, 90]] = INF
    for programs in (1, 10_000):
        monkeypatch.setattr(kernels, "_PROGRAMS", programs)
        output = kernels.coupled(logits, drafts, rows, None)
        assert output.tokens.flatten().tolist() == [0, 37, 99, 5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits(dtype: torch.dtype, device: torch.device) -> None:
    logits, drafts, rows = problem(300, device)
    logits = logits.to(dtype)
    same(kernels.coupled(logits, drafts, rows, None), COUPLED.torch(logits.float(), drafts, rows, None))


def test_rows_may_be_apart_and_lanes_may_not(device: torch.device) -> None:
    logits, drafts, rows = problem(300, device)
    wide = torch.cat([logits, torch.full_like(logits, 1e9)], 1)[:, :300]
    same(kernels.coupled(wide, drafts, rows, None), COUPLED.torch(logits, drafts, rows, None))
    with pytest.raises(ValueError, match=r"logits: strides \(1, \d+\) must be dense in the last dimension"):
        kernels.coupled(logits.T.contiguous().T, drafts, rows, None)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("reduced", [False, True])
def test_draws_have_the_noise_of_their_role_and_place(role: Role, reduced: bool, device: torch.device) -> None:
    """As `draw` by torch on a CPU, of a whole and of a reduced vocabulary."""
    num_rows, size = 7, 300
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(num_rows, size, generator=generator)
    logits[2, 5] = NAN
    temperature = torch.tensor([0.0, 1.0]).repeat(4)[:num_rows]
    ids = torch.arange(size) * 3 if reduced else size

    def drawn(where: torch.device, form: Callable[..., SampledTokens]) -> SampledTokens:
        row = torch.arange(num_rows, device=where)
        keys = Keys(row * 11, row + 5, (row % 3).to(where))
        vocab = HashedVocab.of(ids.to(where) if isinstance(ids, torch.Tensor) else ids, where)
        return form(logits.to(where), temperature.to(where), keys, role, vocab)

    mine, want = drawn(device, kernels.draw), drawn(torch.device("cpu"), DRAW.torch)
    assert mine.token_ids.tolist() == want.token_ids.tolist()
    assert mine.bad.tolist() == want.bad.tolist() == [row == 2 for row in range(num_rows)]


def test_a_law_at_every_place(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temperature and truncation within the launches, and a draw of rows without drafts by the same."""
    for name, value in (("_TILE", 128), ("_SAMPLES", 64), ("_BLOCK", 64)):
        monkeypatch.setattr(truncation, name, value)
    logits, drafts, rows = problem(300, device)
    starts = rows.query_start_loc.tolist()
    table = torch.tensor([[1.0, -INF, 0, 1], [0, -INF, 0, 1], [0.7, -3, 0, 0.9], [1.3, -INF, 12, 0.8]])
    kind_N = torch.zeros(len(logits), dtype=torch.int64)
    for i in range(9):
        kind_N[starts[i] : starts[i + 1]] = (0, 1, 2, 3, 1, 2, 3, 1, 3)[i]
    values = table[kind_N]
    metadata = SamplingMetadata(values.numpy(), values.to(device))
    rows = replace(rows, temperature=metadata.temperature[rows.query_start_loc[:-1].long()])
    want = COUPLED.torch(metadata.apply(logits), drafts, rows, None)
    same(kernels.coupled(logits, drafts, rows, None, metadata=metadata), want)
    keys, vocab = Keys(torch.arange(len(logits), device=device), kind_N.to(device)), HashedVocab.of(300, device)
    mine, other = (form(logits, metadata, keys, Role.TARGET, vocab) for form in (kernels.sample, SAMPLE.torch))
    assert torch.equal(mine.token_ids, other.token_ids)
    assert torch.equal(mine.bad, other.bad)
    assert other.bad.any()


def penalties_of(num_drafts: int, owners: Tensor, size: int, device: torch.device) -> Penalties:
    """Of a table of three requests, the second of which has none."""
    generator = torch.Generator().manual_seed(size)
    values = torch.tensor([[1.3, 0.7, -0.4], [1, 0, 0], [0.8, -0.2, 1.1]])[owners]
    counts = torch.randint(-3, 4, (3, size), generator=generator).clamp_min_(0).int()
    prompts = torch.rand(3, size, generator=generator) < 0.3
    before = torch.randint(-1, 6, (len(owners), num_drafts), generator=generator) if num_drafts else None
    moved = [each.to(device) for each in (values, owners, counts, prompts)]
    return Penalties(*moved, None if before is None else before.to(device))


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("truncated", [False, True])
def test_penalties_are_of_the_same_launches(
    num_drafts: int, truncated: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids of penalised logits, with metadata that truncates and one that does not."""
    for name, value in (("_TILE", 128), ("_SAMPLES", 64), ("_BLOCK", 64)):
        monkeypatch.setattr(truncation, name, value)
    logits, drafts, rows = problem(300, device, num_drafts, seed=3)
    table = torch.tensor([[1.0, -INF, 0, 1], [0, -INF, 0, 1], [0.7, -INF, 0, 1]])
    if truncated:
        table[:, 1:] = torch.tensor([-4.0, 40, 0.9])
    owners = torch.arange(len(logits)) % 3
    starts = rows.query_start_loc.long()
    for first, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        owners[first:end] = first % 3
    values = table[owners]
    metadata = SamplingMetadata(values.numpy(), values.to(device), penalties_of(num_drafts, owners, 300, device))
    rows = replace(rows, temperature=metadata.temperature[starts[:-1]])
    want = COUPLED.torch(metadata.apply(logits), drafts, rows, None)
    assert not torch.equal(
        want.tokens, COUPLED.torch(replace(metadata, penalties=None).apply(logits), drafts, rows, None).tokens
    )
    same(kernels.coupled(logits, drafts, rows, None, metadata=metadata), want)
    same(COUPLED.torch(logits, drafts, rows, None, metadata=metadata), want)
    keys, vocab = Keys(torch.arange(len(logits), device=device), owners.to(device)), HashedVocab.of(300, device)
    for mine, other in zip(
        *(form(logits, metadata, keys, Role.TARGET, vocab) for form in (kernels.sample, SAMPLE.torch)), strict=True
    ):
        assert torch.equal(mine, other)


TRUNCATION = ["stats_kernel", "bracket_kernel", "collect_kernel", "threshold_kernel"]


class Launches(TorchDispatchMode):
    """Counts operators that a GPU would launch something for, and kernels."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        names = [(truncation, name) for name in TRUNCATION] + [(kernels, "draw_kernel"), (kernels, "emit_kernel")]
        for module, name in names:
            patch.setattr(module, name, Counted(getattr(module, name), self.names))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default) and not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Counted:
    """A kernel that says when it is launched, and does nothing."""

    def __init__(self, kernel: Any, names: list[str]) -> None:
        self.kernel, self.names = kernel, names

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_, **__: self.names.append(self.kernel.__name__)


def test_launches_of_a_draw(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """A step without drafts, on tensors as the sampler has them."""
    size, num = 300, 4
    keys = Keys(torch.arange(num, device=device), torch.arange(num, device=device))
    vocab, logits = HashedVocab.of(size, device), torch.randn(num, size, device=device)
    penalties = penalties_of(0, torch.arange(num) % 3, size, device)
    counted = Launches(monkeypatch)

    def launches(row: tuple[float, float, float, float], penalties: Penalties | None = None) -> list[str]:
        values = torch.tensor([row] * num)
        metadata = SamplingMetadata(values.numpy(), values.to(device), penalties)
        counted.names.clear()
        with counted:
            kernels.sample(logits, metadata, keys, Role.TARGET, vocab)
        return list(counted.names)

    plain, truncated = (0.8, -INF, 0, 1), (0.8, -3, 50, 0.9)
    assert launches(plain) == launches(plain, penalties) == ["draw_kernel", "emit_kernel"]
    assert launches(truncated) == launches(truncated, penalties) == [*TRUNCATION, "draw_kernel", "emit_kernel"]
    assert launches((0, -INF, 0, 1), penalties) == ["draw_kernel", "emit_kernel"]


@triton.jit
def noise_kernel(words_ptr, seeds_ptr, positions_ptr, u_ptr, gumbel_ptr, bound_ptr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    row, lane = tl.program_id(0), tl.arange(0, LANES)
    low, high = kernels.row_words(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    u = kernels.uniform(tl.load(words_ptr + lane), low, high)
    tl.store(u_ptr + row * LANES + lane, u)
    tl.store(gumbel_ptr + row * LANES + lane, kernels.gumbel(u))
    tl.store(bound_ptr + row * LANES + lane, kernels.gumbel_bound(u))


def test_noise_is_the_law_and_the_bound_is_above_it(device: torch.device) -> None:
    size, generator = 4096, torch.Generator().manual_seed(3)
    seeds = torch.randint(-(2**62), 2**62, (6,), generator=generator).to(device)
    position = torch.tensor([0, 1, 2**31, 2**32 - 1, 77, 5], device=device)
    keys, words = Keys(seeds, position), HashedVocab.of(size, device).hashes.clone()
    u, noise, bound = (torch.empty(6, size, device=device) for _ in range(3))
    noise_kernel[(6,)](words, seeds, position, u, noise, bound, LANES=size, enable_fp_fusion=False)
    assert torch.equal(u, uniform(keys, Role.TARGET, size))
    want = gumbel(keys, Role.TARGET, size)
    if INTERPRETED:
        assert float((noise - want).abs().max()) < 3e-6
    else:
        assert torch.equal(noise, want)
    assert bool((bound > want).all())
    high = want > 1.0  # where winners are, the bound is close: few tiles are taken for nothing
    assert float((bound - want)[high].max()) < 0.3


def bound_of(u: Tensor) -> Tensor:
    """`gumbel_bound` in torch."""
    return (0x3F800000 - u.view(torch.int32)).float() * 8.262958e-08 + 1e-3


def test_the_bound_holds_at_the_ends_of_the_scale() -> None:
    u = torch.cat([
        2.0 ** -torch.arange(0.0, 33.0), 1 - 2.0**-24 - 2.0**-24 * torch.arange(0.0, 1000.0),
        2.0**-32 * torch.arange(1.0, 1000.0), torch.logspace(-9.6, -1e-4, 20_000),
    ]).clamp(2.0**-32, 1 - 2.0**-24)  # fmt: skip
    exact = -(-(-u.double()).log1p()).log()
    assert bool((bound_of(u) > exact + 5e-4).all())


@pytest.mark.gpu
def test_verify_takes_the_fused_form_on_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    logits, drafts, rows = problem(131_072, torch.device("cuda"), 4)
    output = verify(logits, drafts, rows)
    same(output, COUPLED.torch(logits, drafts, rows, None))
    owner = draw(logits[:1], rows.temperature[:1], Keys(rows.seeds[:1], rows.first_position[:1]))
    assert output.tokens[0, 0] == owner.token_ids[0]


@pytest.mark.parametrize("size", [4096, 32_000, 151_936, 248_320])
@pytest.mark.parametrize("rows_per_request", [1, 5])
def test_rows_of_any_number_share_the_kernels_of_powers_of_two(size: int, rows_per_request: int) -> None:
    """Which an engine launches before its first step, so that none is compiled in one."""

    def compiled_for(num_reqs: int, kind: int) -> tuple[object, ...]:
        options, share = kernels.tile_options(size, num_reqs * rows_per_request, kind)
        assert share % 16 == 0, "what Triton looks at of a number"
        return *options.items(), *kernels.emit_options(rows_per_request, size).items()

    for kind in (0, 1, 2):
        warm = {compiled_for(1 << i, kind) for i in range(9)}
        assert {compiled_for(n, kind) for n in range(1, 257)} <= warm
    if not INTERPRETED:
        (shares,) = (each for each in kernels.emit_kernel.params if each.name == "shares")
        assert shares.do_not_specialize


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test starts")
def test_all_of_this_in_the_interpreter(in_interpreter: Callable[[str], int]) -> None:
    assert in_interpreter(__file__)
