"""Replay and fold of Mamba-2."""

from __future__ import annotations

import random

import pytest
import torch

import reference_operators as reference
from bateleur.mamba import ops

NAN = float("nan")
TIGHT = {"rtol": 1e-10, "atol": 1e-10}
FORMS = [pytest.param(ops, id="ops"), pytest.param(reference, id="reference")]
SHAPES = [
    pytest.param((3, 5, 7, 1), id="odd"),
    pytest.param((4, 3, 6, 2), id="two-groups"),
    pytest.param((2, 4, 5, 2), id="group-per-head"),
    pytest.param((8, 64, 64, 1), id="wide"),
]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


class Pool:
    """All state tensors, filled with NaN."""

    def __init__(self, layer, *, slots=40, rows=5, capacity=7, drafts=2, dtype=torch.float64, state_dtype=None):
        def empty(*shape, to=dtype):
            return torch.full(shape, NAN, dtype=to)

        size = (layer.heads, layer.channels)
        step_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.layer, self.capacity, self.drafts = layer, capacity, drafts
        self.ssm = empty(slots, *size, layer.size, to=state_dtype or step_dtype)
        self.conv = empty(slots, layer.width - 1, layer.conv)
        self.request_conv = empty(rows, layer.width - 1 + drafts, layer.conv)
        self.x, self.B = empty(rows, capacity, *size), empty(rows, capacity, layer.groups, layer.size)
        self.dt = empty(rows, capacity, layer.heads, to=step_dtype)

    @property
    def rings(self):
        return {"ring_x": self.x, "ring_dt": self.dt, "ring_B": self.B}

    def fill(self, generator):
        """Fill everything except null slots and rows with random numbers."""
        for t in (self.ssm, self.conv, self.request_conv, self.x, self.B):
            t[1:] = torch.randn(t[1:].shape, generator=generator, dtype=torch.float64).to(t.dtype)
        self.dt[1:] = torch.rand(self.dt[1:].shape, generator=generator, dtype=torch.float64).to(self.dt.dtype)
        return self

    def copy(self):
        other = object.__new__(Pool)
        other.__dict__ = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in self.__dict__.items()}
        return other

    def replay(self, form, tokens, loc, longest, slot, row, start, length):
        inputs = {name: tokens[name] for name in ("x", "dt", "B", "C")}
        rows = {"slot": slot, "ring_row": row, "ring_start": start, "ring_len": length}
        batch = {"query_start_loc": torch.as_tensor(loc, dtype=torch.int32), "max_query_len": longest}
        return form.replay_update(self.ssm, **self.rings, **inputs, **self.layer.params, **batch, **rows)

    def fold(self, form, row, start, count, src, dst, offset):
        pages = {"src": src, "dst": dst, "page_offset": offset}
        rows = {"ring_row": row, "ring_start": start, "count": count}
        layers = (
            tensor[None] for tensor in (self.ssm, self.conv, self.request_conv, *self.rings.values(), self.layer.A)
        )
        form.fold_ring(*layers, **rows, **pages)

    def __eq__(self, other):
        return all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(self.all, other.all, strict=True))

    __hash__ = None

    @property
    def all(self):
        """All tensors without null slots and rows."""
        return [t[1:] for t in (self.ssm, self.conv, self.request_conv, self.x, self.dt, self.B)]


class Request:
    """A request under fold: its checkpoint after `base` tokens, the ring of those since, its columns of pages."""

    def __init__(self, stream, prompt, row):
        self.stream, self.prompt, self.row = stream, prompt, row
        self.n = self.base = self.start = self.offset = 0
        self.slots: dict[int, int] = {}

    @property
    def length(self):
        return self.n - self.base


class Engine:
    """Prompts in parts, drafts with rejections, folds: the rules of a scheduler and a planner, one row at a time.

    What is rejected is not a number, and so is whatever nobody may look at.
    """

    def __init__(self, form, layer, seed, block, capacity, drafts):
        self.form, self.random, self.block = form, random.Random(seed), block
        self.pool = Pool(layer, slots=80, capacity=capacity, drafts=drafts)
        rows = self.random.sample(range(1, 5), 3)
        self.requests = [Request(layer.stream(60, seed * 3 + i), 3 + 7 * i, row) for i, row in enumerate(rows)]
        self.fresh = iter(self.random.sample(range(1, 80), 79))
        self.published: dict[tuple[int, int], int] = {}
        self.folds = 0

    def slot(self, request, tokens):
        """Of the page that holds the state after `tokens`; a new one for a new column."""
        if tokens == 0:
            return 0
        column = (tokens - 1) // self.block
        if column not in request.slots:
            request.slots[column] = next(self.fresh)
        if tokens % self.block == 0:
            self.published[self.requests.index(request), tokens] = request.slots[column]
        return request.slots[column]

    def gather(self, parts):
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def prefill(self):
        """One step of all prompts that have tokens left, the others and a padded row having none."""
        reads, starts, rows, first, write, parts, lens = [], [0], [], [0], [], [], []
        for row, r in enumerate(self.requests):
            q = self.random.randint(0, min(9, r.prompt - r.n)) if r.n < r.prompt else 0
            reads.append(self.slot(r, r.n) if q else 0)
            for t in range(r.n + 1, r.n + q + 1):
                if t % self.block == 0 or t == r.n + q:
                    starts.append(sum(lens) + t - r.n)
                    rows.append(row)
                    write.append(self.slot(r, t))
            parts.append(r.stream.tokens(r.n, r.n + q))
            lens.append(q)
            first.append(len(rows))
        if not sum(lens):
            return
        pool, layer, i32 = self.pool, self.pool.layer, {"dtype": torch.int32}
        tokens, loc = self.gather(parts), torch.tensor([0, *lens, 0], **i32).cumsum(0, **i32)
        shared = {"query_start_loc": loc, "read": ints(*reads, 0), "chunk_write": ints(*write)}
        shared |= {"chunk_start_loc": torch.tensor(starts, **i32), "chunk_row": torch.tensor(rows, **i32)}
        request_conv = {
            "request_conv": pool.request_conv,
            "request_conv_write": ints(*(r.row for r in self.requests), 0),
        }
        conv = {"weight": layer.weight, "bias": None, "activation": "silu", "conv_state": pool.conv}
        z = self.form.causal_conv1d_varlen(tokens.pop("u"), **conv, **request_conv, **shared)
        chunks = {"row_chunk_loc": torch.tensor([*first, first[-1]], **i32)}
        sizes = {"max_chunks_per_row": len(rows), "chunk_size": self.block}
        y = self.form.ssd_scan_varlen(**tokens, **layer.params, ssm_state=pool.ssm, **shared, **chunks, **sizes)
        for r, q, at in zip(self.requests, lens, loc.tolist(), strict=False):
            self.check(r, q, y[at : at + q], z[at : at + q])
            r.n, r.base, r.offset = r.n + q, r.n + q if q else r.base, 0 if q else r.offset

    def check(self, r, kept, y, z):
        torch.testing.assert_close(y[:kept], r.stream.y[r.n : r.n + kept], **TIGHT)
        torch.testing.assert_close(z[:kept], r.stream.z[r.n : r.n + kept], **TIGHT)

    def decode(self):
        """One step of drafts, of which some are wrong; then at most one fold a row."""
        pool, drafts, wide = self.pool, self.pool.drafts, self.random.random() < 0.7
        lens = [self.random.randint(1, 1 + drafts) if wide else 1 for _ in self.requests]
        kept = [self.random.randint(1, q) for q in lens]
        parts = [r.stream.tokens(r.n, r.n + a, junk=q - a) for r, q, a in zip(self.requests, lens, kept, strict=True)]
        tokens = self.gather(parts)
        tail = 0 if wide else 1  # a padded row: without a token, or with one that lies last
        tokens = {k: torch.cat([v, v.new_full((tail, *v.shape[1:]), NAN)]) for k, v in tokens.items()}
        loc = torch.tensor([0, *lens, tail], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        row = ints(*(r.row for r in self.requests), 0)
        start = ints(*(r.start for r in self.requests), 0)
        slot = ints(*(self.slot(r, r.base) for r in self.requests), 0)
        longest = max(lens) if self.random.random() < 0.5 else max(1, *lens, 1 + drafts if wide else 1)
        conv = {"weight": pool.layer.weight, "bias": None, "activation": "silu", "conv_state": pool.request_conv}
        where = {"read": row, "offset": ints(*(r.offset for r in self.requests), 0), "write": row}
        z = self.form.causal_conv1d_update(tokens["u"], **conv, **where, query_start_loc=loc, max_query_len=longest)
        frozen = pool.copy()
        y = pool.replay(self.form, tokens, loc, longest, slot, row, start, ints(*(r.length for r in self.requests), 0))
        assert torch.equal(pool.ssm[1:].nan_to_num(7), frozen.ssm[1:].nan_to_num(7))
        assert torch.equal(pool.conv[1:].nan_to_num(7), frozen.conv[1:].nan_to_num(7))
        counts, dst, offsets = [], [], []
        for r, a, at in zip(self.requests, kept, loc.tolist(), strict=False):
            self.check(r, a, y[at:], z[at:])
            before, r.n, r.offset = r.n, r.n + a, a - 1
            q = r.n // self.block * self.block
            target = q if q > r.base else r.n if r.length + 1 + drafts > pool.capacity else r.base
            counts.append(target - r.base)
            dst.append(self.slot(r, target) if target > r.base else 0)
            offsets.append(target - before - 1)
            r.start, r.base = (r.start + counts[-1]) % pool.capacity, target
        self.folds += sum(d > 0 for d in dst)
        pool.fold(self.form, row, start, ints(*counts, 0), slot, ints(*dst, 0), ints(*offsets, 0))

    def check_pages(self):
        """Every published page, and the checkpoint of each request."""
        pages = {(self.requests[i], t): slot for (i, t), slot in self.published.items()}
        pages |= {(r, r.base): self.slot(r, r.base) for r in self.requests if r.base}
        for (r, t), slot in pages.items():
            torch.testing.assert_close(self.pool.ssm[slot], r.stream.states[t], **TIGHT)
            torch.testing.assert_close(self.pool.conv[slot], r.stream.windows[t], **TIGHT)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(12))
def test_m37_any_path_through_prompt_ring_and_fold_is_the_recurrence(make_layer, form, seed):
    """Outputs, states and conv windows; blocks of 4 to 16, 0 to 3 drafts, rings just large enough and larger."""
    drafts = seed % 4
    layer = make_layer(*[(3, 5, 7, 1), (4, 3, 6, 2)][seed % 2], 2 + seed % 3, seed=seed)
    engine = Engine(form, layer, seed, [4, 8, 16][seed % 3], 1 + 2 * drafts + seed % 5, drafts)
    while any(r.n < r.prompt for r in engine.requests):
        engine.prefill()
        engine.check_pages()
    while max(r.n for r in engine.requests) + 1 + drafts < 60:
        engine.decode()
        engine.check_pages()
    assert engine.folds > 5
    assert len(engine.published) > 5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_ring_output_and_fold_are_the_recurrence_to_1e_10(make_layer, form, shape):
    """In float64, for every number of entries, from a page and from nothing."""
    layer = make_layer(*shape, 4)
    stream = layer.stream(16, 5)
    pool = Pool(layer, slots=4, rows=2, capacity=16)
    pool.ssm[2] = stream.states[3]
    for base, slot, length, tokens in ((3, 2, 0, 1), (3, 2, 9, 4), (0, 0, 0, 5), (0, 0, 15, 1), (3, 2, 1, 2)):
        start = ints(base * 5 % 16)
        for first, end in ((0, length), (length, length + tokens)):
            if first < end:
                part = stream.tokens(base + first, base + end)
                where = (ints(slot), ints(1), start, ints(first))
                y = pool.replay(form, part, [0, end - first], end - first, *where)
                torch.testing.assert_close(y, stream.y[base + first : base + end], **TIGHT)
        pool.request_conv[1] = 0
        for count in range(1, length + tokens + 1):
            pool.fold(form, ints(1), start, ints(count), ints(slot), ints(3), ints(0))
            torch.testing.assert_close(pool.ssm[3], stream.states[base + count], **TIGHT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lens", [[1, 1, 1, 1], [1], [3, 1, 0, 2]], ids=str)
def test_forms_agree_in_every_dtype(make_layer, shape, lens, dtype, state_dtype):
    """Rings of x's dtype, inputs that are strided views, slots in order, out of order and null."""
    layer, g = make_layer(*shape, 4), torch.Generator().manual_seed(3)
    layer.params = {
        k: v.to(torch.float64 if dtype == torch.float64 else torch.float32) if isinstance(v, torch.Tensor) else v
        for k, v in layer.params.items()
    }
    layer.A = layer.params["A"]
    heads, channels, size, groups = shape
    widths = [heads * channels, groups * size, groups * size, heads]
    wide = torch.randn(sum(lens), sum(widths), generator=g, dtype=torch.float64).to(dtype)
    x, B, C, dt = wide.split(widths, 1)
    tokens = {"x": x.unflatten(1, (heads, channels)), "dt": dt}
    tokens |= {"B": B.unflatten(1, (groups, size)), "C": C.unflatten(1, (groups, size))}
    loc = torch.tensor([0, *lens]).cumsum(0)
    rtol = {torch.bfloat16: 3e-2, torch.float16: 5e-3}
    rtol = max(rtol.get(dtype, 2e-4), rtol.get(state_dtype, 2e-4))
    for slots in ([1, 2, 3, 4], [4, 2, 7, 3], [0, 3, 0, 5]):
        got = Pool(layer, slots=9, rows=7, capacity=6, dtype=dtype, state_dtype=state_dtype).fill(g)
        want, n = got.copy(), len(lens)
        rows = (ints(*[6, 1, 3, 2][:n]), ints(*[5, 0, 3, 2][:n]))
        where = (ints(*slots[:n]), *rows, ints(*[2, 3, 1, 0][:n]))
        y = got.replay(ops, tokens, loc, max(lens), *where)
        y_ref = want.replay(reference, tokens, loc, max(lens), *where)
        assert y.dtype == dtype
        torch.testing.assert_close(y, y_ref, rtol=rtol, atol=rtol * 4)
        for dst in (slots, [5, 6, 7, 8], [1, 0, 6, 0]):
            pages = (ints(*slots[:n]), ints(*dst[:n]), ints(*[2, 0, 1, 0][:n]))
            got.fold(ops, *rows, ints(*[3, 2, 1, 2][:n]), *pages)
            want.fold(reference, *rows, ints(*[3, 2, 1, 2][:n]), *pages)
            for a, b in zip(got.all, want.all, strict=True):
                torch.testing.assert_close(a, b, rtol=rtol, atol=rtol, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lens", [[1, 1], [2, 3]], ids=str)
def test_a_ring_begins_anywhere(make_layer, form, lens):
    """The same entries from every start, and from one that counts on beyond the ring: same outputs, same states."""
    layer, g = make_layer(3, 5, 7, 1, 4), torch.Generator().manual_seed(1)
    capacity, results = 5, []
    first = Pool(layer, slots=6, capacity=capacity).fill(g)
    tokens = layer.stream(sum(lens), 2).tokens(0, sum(lens))
    for start in (*range(capacity), 1003):
        pool = first.copy()
        for ring, old in ((pool.x, first.x), (pool.dt, first.dt), (pool.B, first.B)):
            ring[1:3] = old[1:3].roll(start, 1)
        rows = (ints(1, 2), ints(start, start))
        y = pool.replay(form, tokens, [0, lens[0], sum(lens)], max(lens), ints(1, 4), *rows, ints(2, 1))
        pool.fold(form, *rows, ints(3, 2), ints(1, 4), ints(5, 4), ints(1, 0))
        results.append((y, pool.ssm[1:], pool.x[1:3].roll(-start, 1)))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], **TIGHT)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lens", [[1], [3]], ids=str)
def test_a_step_appends_and_changes_nothing_else(make_layer, form, lens):
    """The next step overwrites rejected entries."""
    layer, g = make_layer(3, 5, 7, 1, 4), torch.Generator().manual_seed(1)
    pool = Pool(layer, slots=4, capacity=6).fill(g)
    want, stream = pool.copy(), layer.stream(8, 2)
    for first in (0, 1):  # two steps, of the first of which one token is accepted
        part = stream.tokens(first, first + lens[0])
        pool.replay(form, part, [0, lens[0]], lens[0], ints(2), ints(3), ints(4), ints(1 + first))
        step = torch.nn.functional.softplus(part["dt"] + layer.dt_bias).clamp(0.01, 2.5)
        for i in range(lens[0]):
            at = (4 + 1 + first + i) % 6
            want.x[3, at], want.dt[3, at], want.B[3, at] = part["x"][i], step[i], part["B"][i]
        torch.testing.assert_close(pool.all, want.all, **TIGHT, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lens", [[1, 1, 0, 0], [2, 1, 0, 0]], ids=str)
def test_m29_nothing_null_or_stale_is_looked_at(make_layer, form, lens):
    """NaN in null slots and rows, invalid ring entries, unused slots and padding tokens."""
    layer, stream = make_layer(4, 3, 6, 2, 4), make_layer(4, 3, 6, 2, 4).stream(6, 1)
    pool = Pool(layer, slots=6, capacity=5)
    pool.ssm[3] = stream.states[2]
    part = stream.tokens(2, 4)
    pool.replay(form, part, [0, 2], 2, ints(3), ints(2), ints(4), ints(0))
    parts = [stream.tokens(0, lens[0]), stream.tokens(4, 4 + lens[1], junk=4 - sum(lens))]
    tokens = {k: torch.cat([a, parts[1][k]]) for k, a in parts[0].items()}
    loc = torch.tensor([0, *lens]).cumsum(0)
    where = (ints(0, 3, 0, 0), ints(1, 2, 0, 0), ints(3, 4, 0, 0), ints(0, 2, 0, 0))
    y = pool.replay(form, tokens, loc, max(lens), *where)
    torch.testing.assert_close(y[: lens[0]], stream.y[: lens[0]], **TIGHT)
    torch.testing.assert_close(y[lens[0] : lens[0] + 1], stream.y[4:5], **TIGHT)
    pool.request_conv[1], pool.request_conv[2, 1:4] = 1.0, 2.0
    pool.fold(form, *where[1:3], ints(1, 3, 0, 0), where[0], ints(4, 5, 0, 0), ints(2, 1, -9, 99))
    torch.testing.assert_close(pool.ssm[4:], torch.stack([stream.states[1], stream.states[5]]), **TIGHT)
    assert not pool.conv[4:].isnan().any()
    assert all(pool.ssm[slot].isnan().all() for slot in (1, 2))
    assert all(pool.x[row].isnan().all() for row in (3, 4))


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_do_not_fold_may_hold_anything(make_layer, form):
    layer, g = make_layer(3, 5, 7, 1, 4), torch.Generator().manual_seed(1)
    pool = Pool(layer, slots=6, capacity=5).fill(g)
    before = pool.copy()
    pool.fold(form, ints(1, 2), ints(3, 0), ints(4, 0), ints(2, 1), ints(0, 0), ints(1, -3))
    assert pool == before
    pool.fold(form, ints(1, 2), ints(3, 0), ints(0, 2), ints(2, 1), ints(0, 5), ints(-7, 0))
    assert torch.equal(pool.ssm[1:5], before.ssm[1:5])
    assert not torch.equal(pool.ssm[5], before.ssm[5])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("src", "dst"),
    [([1, 2], [1, 2]), ([1, 2], [3, 4]), ([1, 2], [2, 3]), ([2, 1], [1, 2]), ([3, 3], [3, 4]), ([0, 2], [2, 5])],
    ids=str,
)
def test_folds_read_everything_before_they_write(make_layer, form, src, dst):
    """In place, elsewhere, onto what another row reads, and from a page that two rows share."""
    layer, g = make_layer(3, 5, 7, 1, 4), torch.Generator().manual_seed(1)
    pool = Pool(layer, slots=6, capacity=5).fill(g)
    alone = [pool.copy() for _ in src]
    rows, start, count = ints(4, 1), ints(2, 0), ints(5, 2)
    for i, one in enumerate(alone):
        here = slice(i, i + 1)
        one.fold(form, rows[here], start[here], count[here], ints(src[i]), ints(5), ints(i))
    before = pool.copy()
    pool.fold(form, rows, start, count, ints(*src), ints(*dst), ints(0, 1))
    for i, one in enumerate(alone):
        torch.testing.assert_close(pool.ssm[dst[i]], one.ssm[5], **TIGHT)
        torch.testing.assert_close(pool.conv[dst[i]], one.conv[5], **TIGHT)
    for slot in set(range(1, 6)) - set(dst):
        assert torch.equal(pool.ssm[slot], before.ssm[slot])
        assert torch.equal(pool.conv[slot], before.conv[slot])


@pytest.mark.parametrize("kind", ["ssm", "conv"])
def test_pages_of_a_wider_tensor(make_layer, kind):
    """Strided slots, as in a pool where window and state alternate."""
    layer, g = make_layer(4, 5, 6, 2, 4), torch.Generator().manual_seed(1)
    got = Pool(layer, slots=6, capacity=5).fill(g)
    want = got.copy()
    state = getattr(got, kind)
    apart = torch.full((6, state[0].numel() + 3), NAN, dtype=torch.float64)
    apart[:, 1:-2] = state.flatten(1)
    setattr(got, kind, apart[:, 1:-2].view(state.shape))
    tokens = layer.stream(3, 2).tokens(0, 3)
    where = (ints(1, 2, 3), ints(1, 2, 3), ints(4, 0, 1), ints(2, 1, 4))
    y, y_ref = (p.replay(f, tokens, range(4), 1, *where) for p, f in ((got, ops), (want, reference)))
    torch.testing.assert_close(y, y_ref, **TIGHT)
    for dst in (ints(1, 2, 3), ints(5, 0, 2)):
        got.fold(ops, *where[1:3], ints(3, 2, 5), where[0], dst, ints(0, 1, 2))
        want.fold(reference, *where[1:3], ints(3, 2, 5), where[0], dst, ints(0, 1, 2))
        torch.testing.assert_close(got.all, want.all, **TIGHT)
    assert apart[1:, 0].isnan().all()
    assert apart[1:, -2:].isnan().all()


def test_plans_in_fixed_buffers_are_read_anew(make_layer):
    """The same tensors with other contents, as a captured step has them."""
    layer, g = make_layer(3, 5, 7, 1, 4), torch.Generator().manual_seed(1)
    got, capacity = Pool(layer, slots=6, capacity=5).fill(g), 5
    want = got.copy()
    where = [ints(1), ints(2), ints(0), ints(0)]
    fold = [where[1], where[2], ints(1), where[0], ints(0), ints(0)]
    for t in range(9):
        tokens = layer.stream(1, t).tokens(0, 1)
        y, y_ref = (p.replay(f, tokens, [0, 1], 1, *where) for p, f in ((got, ops), (want, reference)))
        torch.testing.assert_close(y, y_ref, **TIGHT)
        where[3] += 1
        if int(where[3]) == capacity:
            fold[2].copy_(where[3] - 1)
            fold[4].fill_(1 + t % 5)
            got.fold(ops, *fold)
            want.fold(reference, *fold)
            where[2] += fold[2]
            where[3] -= fold[2]
            where[0].copy_(fold[4])
        torch.testing.assert_close(got.all, want.all, **TIGHT)


def test_decays_of_the_ring_do_not_overflow(make_layer):
    """Steps of 2.5 with A = -400: what a query does not see must not become infinite on the way."""
    layer = make_layer(3, 5, 7, 1, 4)
    layer.params["A"] = layer.A = torch.full((3,), -400.0)
    layer.params = {k: v.float() if isinstance(v, torch.Tensor) else v for k, v in layer.params.items()}
    pool = Pool(layer, slots=3, capacity=9, dtype=torch.float32).fill(torch.Generator().manual_seed(0))
    tokens = {k: v.float() for k, v in layer.stream(4, 1).tokens(0, 4).items()}
    y = pool.replay(ops, tokens, [0, 4], 4, ints(1), ints(1), ints(7), ints(5))
    assert y.isfinite().all()
    pool.fold(ops, ints(1), ints(7), ints(9), ints(1), ints(2), ints(0))
    assert pool.ssm[2].isfinite().all()


def test_no_tokens_and_no_rows(make_layer):
    layer = make_layer(3, 5, 7, 1, 4)
    pool = Pool(layer, slots=3, capacity=9)
    nothing, before = layer.stream(1, 1).tokens(0, 0), pool.copy()
    assert pool.replay(ops, nothing, [0, 0], 1, *[ints(0)] * 4).shape == (0, 3, 5)
    assert pool.replay(ops, nothing, [0], 1, *[ints()] * 4).shape == (0, 3, 5)
    pool.fold(ops, *[ints()] * 6)
    assert pool == before
