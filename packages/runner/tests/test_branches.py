"""Branches that are computed in one call: what their operators give, to the bit, and what these refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from bateleur.cudagraph import Execution
from bateleur.mamba import Mamba2, MambaMetadata, ReplayPlan, Rings, SlotPlan, StatePolicy
from bateleur.metadata import PagedAttentionMetadata
from bateleur.metadata.backends.native import NativeBackend
from bateleur.metadata.backends.torch_paged import TorchBackend
from bateleur.runner.models import StepContext, native
from bateleur.runner.models.attention import Attention
from bateleur.runner.models.context import LayerStep
from bateleur.runner.models.mamba import Mamba
from bateleur.runner.models.mlp import Mlp
from bateleur.runner.models.native.passes import InC, RecurrentRows
from bateleur.runner.models.norm import RMSNorm
from bateleur.runner.models.rope import RopeTable
from bateleur.runner.models.spec import AttentionLayer, MambaLayer, MlpLayer, RopeSpec

pytestmark = pytest.mark.skipif(not native.available(), reason="no compiler")
HIDDEN = 24
NONE: Any = None


def filled(branch: Any, seed: int = 0) -> Any:
    """The branch with random weights, packed."""
    make = torch.Generator().manual_seed(seed)
    for name, weight in branch.weights().items():
        sign = -1 if name == "A" else 1
        weight.copy_(torch.randn(weight.shape, generator=make) * 0.3)
        if name in ("A", "norm"):
            weight.abs_().mul_(sign)
    for projection in branch.projections.values():
        projection.pack()
    return branch


def mamba(
    shape: tuple[int, int, int, int],
    drafts: int,
    norm: Any = "gate first",
    *,
    bias: bool = True,
    policy: StatePolicy = StatePolicy.SLOTS,
) -> Mamba:
    heads, channels, size, groups = shape
    state = Mamba2(
        num_heads=heads,
        head_dim=channels,
        state_size=size,
        num_groups=groups,
        num_speculative_tokens=drafts,
        conv_dtype=torch.float32,
        dt_min=0.01,
        dt_max=2.0,
        policy=policy,
    )
    layer = MambaLayer(state=state, chunk_size=8, conv_bias=bias, proj_bias=bias, norm_eps=1e-5, norm=norm)
    params = tuple(torch.empty(heads) for _ in range(3))
    return cast(Mamba, filled(Mamba(layer, torch.empty(0, HIDDEN), 0, params)))


class Rows:
    """Rows of some tokens each, in slots of their own, and what a pass over them is told."""

    def __init__(self, branch: Mamba, lens: list[int], accepted: list[int]) -> None:
        spec, count = branch.spec.state, len(lens)
        width = 1 + spec.num_speculative_tokens
        own = 1 + torch.arange(count * width).view(count, width)
        has = torch.tensor([min(1, n) for n in lens])
        last = (torch.tensor(accepted) - 1) * has
        read = own.gather(1, last[:, None])[:, 0] * has
        zero = torch.zeros(count, dtype=torch.int64)
        self.plan = SlotPlan(read, own * has[:, None], own[:, 0] * has, last, own[:, 0] * has, zero)
        starts = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
        slots, make = 1 + count * width, torch.Generator().manual_seed(1)
        windows = torch.randn(slots, *spec.conv_shape, generator=make)
        states = torch.randn(slots, *spec.state_shape, generator=make)
        windows[0] = states[0] = torch.nan
        self.states = [(windows, states)]
        self.meta = MambaMetadata(count, sum(lens), 0, self.plan, starts, NONE, 8, width)
        self.x = torch.randn(sum(lens) + 2, HIDDEN, generator=make)  # two of them padding

    def run(self, branch: Mamba, *, in_one_call: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs of the rows, and windows and states behind them; those before are left as they are."""
        before = tuple(each.clone() for each in self.states[0])
        context = StepContext(NONE, NONE, None, self.meta, (), self.states, [None])
        in_c = InC.of(self.x, context.mamba_rows) if in_one_call else None
        assert in_one_call == (in_c is not None and in_c.recurrent is not None)
        y = branch.forward(self.x, LayerStep(Execution(None, context), (), in_c=in_c))
        windows, states = (each.clone() for each in self.states[0])
        for each, old in zip(self.states[0], before, strict=True):
            each.copy_(old)
        return y[: self.meta.num_decode_tokens], windows[1:], states[1:]


@pytest.mark.parametrize("shape", [(8, 16, 16, 1), (2, 5, 7, 1), (4, 20, 40, 2), (2, 1, 1, 2)], ids=str)
@pytest.mark.parametrize("norm", ["gate first", "norm first"])
@pytest.mark.parametrize(
    ("drafts", "lens", "accepted"),
    [(0, [1], [1]), (0, [1, 1, 0], [1, 1, 1]), (4, [5, 1, 3, 0], [5, 1, 2, 1]), (4, [1, 1], [3, 1])],
)
def test_a_mamba_branch_is_what_its_operators_give(
    shape: tuple[int, int, int, int], norm: str, drafts: int, lens: list[int], accepted: list[int]
) -> None:
    branch = mamba(shape, drafts, norm, bias=norm == "gate first")
    rows = Rows(branch, lens, accepted)
    want = rows.run(branch, in_one_call=False)
    assert branch._call is None
    found = rows.run(branch, in_one_call=True)
    assert branch._call is not None
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert not want[0].isnan().any(), "slot 0 is read as zeros"


def test_other_states_are_other_memory() -> None:
    """A model may be run over caches that were not there when it was run first."""
    branch = mamba((8, 16, 16, 1), 0)
    for lens in ([1], [1, 1, 1]):
        rows = Rows(branch, lens, [1] * len(lens))
        found, want = (rows.run(branch, in_one_call=each) for each in (True, False))
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


CAPACITY = 11


class Ringed:
    """Rows of some tokens each over checkpoints and rings that hold some, and what a pass over them is told."""

    def __init__(self, branch: Mamba, lens: list[int], held: list[int]) -> None:
        spec, count, make = branch.spec.state, len(lens), torch.Generator().manual_seed(3)
        has = torch.tensor([min(1, n) for n in lens])
        start, own = torch.tensor([9, 0, 25, 3][:count]) * has, torch.arange(1, 1 + count) * has
        offset = torch.arange(count).clamp(max=spec.num_speculative_tokens) * has
        self.plan = ReplayPlan(start.sign() * own, own, start, torch.tensor(held) * has, offset)
        starts = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
        self.states = torch.randn(1 + count, *spec.state_shape, generator=make)
        live = torch.randn(1 + count, *spec.live_shape, generator=make)
        entries = [torch.rand(1 + count, CAPACITY, *each.shape, generator=make) for each in spec.ring_entry]
        for each in (self.states, live, *entries):
            each[0] = torch.nan
        self.rings = Rings(live, tuple(entries))
        pages = torch.full((1 + count, *spec.conv_shape), torch.nan)
        width = 1 + spec.num_speculative_tokens
        self.meta = MambaMetadata(count, sum(lens), 0, self.plan, starts, NONE, 8, width, own)
        self.kept = [(pages, self.states)]
        self.x = torch.randn(sum(lens) + 2, HIDDEN, generator=make)

    def run(self, branch: Mamba, *, in_one_call: bool) -> list[Tensor]:
        """Outputs of the rows, windows and rings behind them, and states; those before are left as they are."""
        before = [each.clone() for each in self.rings.tensors()]
        context = StepContext(NONE, NONE, None, self.meta, (), self.kept, [self.rings])
        in_c = InC.of(self.x, context.mamba_rows) if in_one_call else None
        assert in_one_call == (in_c is not None and in_c.recurrent is not None)
        try:
            y = branch.forward(self.x, LayerStep(Execution(None, context), (), in_c=in_c))
            behind = [each[1:].clone() for each in self.rings.tensors()]
            return [y[: self.meta.num_decode_tokens], *behind, self.states[1:].clone()]
        finally:
            for each, old in zip(self.rings.tensors(), before, strict=True):
                each.copy_(old)


@pytest.mark.parametrize("shape", [(8, 16, 16, 1), (2, 5, 7, 1), (4, 20, 40, 2)], ids=str)
@pytest.mark.parametrize(
    ("drafts", "lens", "held"),
    [(0, [1], [7]), (0, [1, 1, 0], [10, 0, 3]), (4, [5, 1, 3, 0], [6, 9, 0, 2]), (4, [1, 1], [0, 5])],
)
def test_a_mamba_branch_over_rings_is_what_its_operators_give(
    shape: tuple[int, int, int, int], drafts: int, lens: list[int], held: list[int]
) -> None:
    branch = mamba(shape, drafts, policy=StatePolicy.FOLD)
    rows = Ringed(branch, lens, held)
    want = rows.run(branch, in_one_call=False)
    assert branch._call is None
    found = rows.run(branch, in_one_call=True)
    assert branch._call is not None
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert not any(each.isnan().any() for each in want), "slot 0 and ring 0 are not read"
    other = Ringed(branch, lens, held)
    other.rings.entries[0][1:] += 1
    assert not torch.equal(other.run(branch, in_one_call=True)[0], want[0]) or not any(held)


@pytest.mark.parametrize(("name", "value"), [("slot", 3), ("ring_start", -1), ("ring_len", CAPACITY)])
def test_a_ring_that_is_not_there_or_is_full_is_refused_as_by_operators(name: str, value: int) -> None:
    branch = mamba((8, 16, 16, 1), 0, policy=StatePolicy.FOLD)
    rows = Ringed(branch, [1, 1], [3, 3])
    rows.run(branch, in_one_call=True)
    getattr(rows.plan, name)[1] = value
    before = [each[1:].clone() for each in rows.rings.tensors()]
    in_c = InC.of(rows.x, StepContext(NONE, NONE, None, rows.meta, (), rows.kept, [rows.rings]).mamba_rows)
    assert branch._call is not None
    assert in_c is not None
    assert in_c.recurrent is not None
    assert branch._call(rows.x, in_c.recurrent) is None
    assert all(torch.equal(each[1:], old) for each, old in zip(rows.rings.tensors(), before, strict=True))
    with pytest.raises(IndexError, match="row 1 names one"):
        rows.run(branch, in_one_call=True)


def test_what_layers_are_pointed_to_is_kept_with_its_metadata_for_a_few() -> None:
    branch, kept = mamba((8, 16, 16, 1), 0), RecurrentRows()
    rows, others = Rows(branch, [1, 1], [1, 1]), Rows(branch, [1, 1], [1, 1])

    def told(meta: MambaMetadata) -> object:
        mixer_rows = StepContext(NONE, NONE, None, meta, (), rows.states, [None]).mamba_rows
        in_c = InC.of(rows.x, mixer_rows, kept=kept)
        assert in_c is not None
        return in_c.recurrent

    first, second = told(rows.meta), told(others.meta)
    assert first is told(rows.meta)
    assert first is not second
    assert told(replace(rows.meta, pieces=rows.meta)) is None
    wide = replace(rows.meta, query_start_loc=rows.meta.query_start_loc.long())
    assert told(wide) is None
    assert told(wide) is None
    for _ in range(20):
        assert told(replace(rows.meta)) is not first
    assert len(kept._made) <= 16
    assert told(rows.meta) is not first, "it was forgotten, and is made anew"


@pytest.mark.parametrize("name", ["ssm_read", "ssm_write", "conv_write"])
def test_a_slot_that_is_not_there_is_refused_as_by_operators(name: str) -> None:
    branch = mamba((8, 16, 16, 1), 0)
    rows = Rows(branch, [1, 1], [1, 1])
    rows.run(branch, in_one_call=True)
    getattr(rows.plan, name)[1] = 3
    before = [each[1:].clone() for each in rows.states[0]]
    context = StepContext(NONE, NONE, None, rows.meta, (), rows.states, [None])
    in_c = InC.of(rows.x, context.mamba_rows)
    assert branch._call is not None
    assert in_c is not None
    assert in_c.recurrent is not None
    assert branch._call(rows.x, in_c.recurrent) is None
    assert all(torch.equal(each[1:], old) for each, old in zip(rows.states[0], before, strict=True))
    with pytest.raises(IndexError, match="row 1 names a slot"):
        rows.run(branch, in_one_call=True)


def test_rows_that_read_what_others_write_take_the_operators() -> None:
    """These read all before they write."""
    branch = mamba((8, 16, 16, 1), 0)
    rows = Rows(branch, [1, 1], [1, 1])
    for name in ("ssm_read", "conv_read"):
        getattr(rows.plan, name).copy_(torch.tensor([1, 1]))
    found, want = (rows.run(branch, in_one_call=each) for each in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


class Paged:
    """Rows with keys and values in blocks, tokens that store nothing, and what a pass over them is told."""

    def __init__(self, lens: list[int], past: list[int], kv_heads: int, size: int) -> None:
        make, blocks, width = torch.Generator().manual_seed(2), 3 * len(lens), 3
        self.caches = [tuple(torch.randn(1 + blocks, 4, kv_heads, size, generator=make) for _ in "kv")]
        table = 1 + torch.randperm(blocks, generator=make).view(len(lens), width)
        positions = [p + i for n, p in zip(lens, past, strict=True) for i in range(n)]
        owners = [row for row, n in enumerate(lens) for _ in range(n)]
        slots = [int(table[row, at // 4]) * 4 + at % 4 for row, at in zip(owners, positions, strict=True)]
        total = [n + p for n, p in zip(lens, past, strict=True)]
        self.x = torch.randn(len(slots) + 1, 2 * HIDDEN, generator=make)[:, :HIDDEN]
        self.positions = torch.tensor([*positions, 0])
        self.meta = PagedAttentionMetadata(
            query_start_loc=torch.tensor([0, *lens]).cumsum(0).to(torch.int32),
            seq_lens=torch.tensor(total, dtype=torch.int32),
            block_table=table.to(torch.int32),
            slot_mapping=torch.tensor([*slots, -1]),
            num_decodes=0,
            max_query_len=max(lens),
            max_seq_len=max(total),
        )

    def run(self, branch: Attention, table: RopeTable | None, *, in_one_call: bool) -> tuple[Tensor, ...]:
        """Outputs, and keys and values behind them; those before are left as they are."""
        before = [each.clone() for each in self.caches[0]]
        context = StepContext(NONE, NativeBackend(), self.meta, None, cast(Any, self.caches), (), ())
        rotary = () if table is None else (table.at(self.positions),)
        in_c = InC.of(self.x, None, self.meta, context.backend) if in_one_call else None
        try:
            y = branch.forward(self.x, LayerStep(Execution(None, context), rotary, in_c=in_c))
            return y, *(each.clone() for each in self.caches[0])
        finally:
            for each, old in zip(self.caches[0], before, strict=True):
                each.copy_(old)


def attention(heads: int, kv_heads: int, size: int, rope: RopeSpec | None = None, **more: Any) -> Attention:
    layer = AttentionLayer(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=size, scale=0.3, rope=rope, **more
    )
    return cast(Attention, filled(Attention(layer, torch.empty(0, HIDDEN), 0, 0 if rope else -1)))


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 16), (3, 1, 10), (2, 2, 64)])
@pytest.mark.parametrize("turns", [0, 1, 2])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lens", [[1, 1], [1, 5, 3], [2]])
def test_an_attention_branch_is_what_its_operators_give(
    heads: int, kv_heads: int, size: int, turns: int, window: int | None, lens: list[int]
) -> None:
    rope = RopeSpec(tuple(0.9**i for i in range(size // 4 * turns))) if turns else None
    table = None if rope is None else RopeTable(rope, torch.float32, torch.device("cpu"))
    if table is not None:
        table.reserve(12)
    branch = attention(heads, kv_heads, size, rope, sliding_window=window, qkv_bias=True, o_bias=bool(turns))
    rows = Paged(lens, [6, 0, 2][: len(lens)], kv_heads, size)
    want = rows.run(branch, table, in_one_call=False)
    assert branch._call is None
    found = rows.run(branch, table, in_one_call=True)
    assert branch._call is not None
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_attention_refuses_as_its_operators_do() -> None:
    """A slot outside the cache, a block outside of it, a bound above what a table holds."""
    branch = attention(4, 2, 16)
    for name, value, refusal in (
        ("slot_mapping", 4 * 7, "slot_mapping: slot 28 is outside"),
        ("block_table", 7, "block_table: row 0"),
    ):
        rows = Paged([1, 3], [6, 0], 2, 16)
        getattr(rows.meta, name).view(-1)[0] = value
        for in_one_call in (True, False):
            with pytest.raises(IndexError, match=refusal):
                rows.run(branch, None, in_one_call=in_one_call)
    rows.meta = replace(rows.meta, max_seq_len=13)
    with pytest.raises(ValueError, match="max_seq_len: 13 is above the 12"):
        rows.run(branch, None, in_one_call=True)


def test_attention_over_other_caches_or_by_another_backend() -> None:
    branch = attention(4, 2, 16)
    for lens in ([1, 1], [3]):
        rows = Paged(lens, [6, 0][: len(lens)], 2, 16)
        found, want = (rows.run(branch, None, in_one_call=each) for each in (True, False))
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    told = InC.of(rows.x, None, rows.meta, TorchBackend())
    assert told is not None
    assert told.paged is None


def test_a_norm_is_what_its_operator_gives() -> None:
    for size in (1, 24, 77):
        norm = RMSNorm(size, 1e-5, torch.empty(0))
        norm.weight.copy_(torch.rand(size) + 0.5)
        h, y = torch.randn(5, 2 * size)[:, :size], torch.randn(5, 3 * size)[:, :size]
        kept = h.clone()
        want = native.add_norm(kept, (y,), (0.7,), norm.weight, 1e-5, torch.float32)
        assert torch.equal(norm.of_sum(h, [(y, 0.7)], torch.float32), want)
        assert norm._call is not None
        assert torch.equal(h, kept)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize("size", [1, 24, 77])
@pytest.mark.parametrize("bias", [False, True])
def test_a_feed_forward_branch_is_what_its_operators_give(
    size: int, activation: Any, gated: bool, bias: bool
) -> None:
    branch = filled(Mlp(MlpLayer(size, activation, gated, bias), torch.empty(0, HIDDEN)))
    for tokens in (9, 1, 3):
        x = torch.randn(tokens, 2 * HIDDEN)[:, :HIDDEN]
        want = branch.forward(x, LayerStep(NONE, ()))
        assert torch.equal(branch.forward(x, LayerStep(NONE, (), in_c=InC.of(x))), want)
    assert branch._call is not None


def test_who_records_operators_gets_operators() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    x = torch.zeros(1)
    with Record():
        assert InC.of(x) is None
    assert InC.of(x) is not None
    assert InC.of(x.to("meta")) is None
