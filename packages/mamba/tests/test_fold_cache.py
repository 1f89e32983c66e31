"""`FoldCache`: random schedules give the same outputs as each request alone."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bateleur.mamba import CacheLayout, CopyPlan, FoldCache, Mamba2, MambaCacheMode, Mixer, StatePolicy, StatePool

NONE, ALIGN, ALL = MambaCacheMode
FOLD = StatePolicy.FOLD
LEN = 40


def mixer_of(drafts: int, seed: int, width: int = 3, bias: bool = False) -> Mixer:
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    f64 = torch.float64
    common = {"conv_width": width, "num_speculative_tokens": drafts, "policy": FOLD}
    spec = Mamba2(2, 3, 4, 1, 0.01, 2.5, conv_dtype=f64, ssm_dtype=f64, **common)
    taps = rand(spec.conv_dim, spec.conv_width)
    offset = rand(spec.conv_dim) if bias else None
    return Mixer(spec, taps, offset, (-rand(2).abs(), rand(2), rand(2)))


class Inputs:
    """Inputs of two layers for several requests, and the outputs of each request alone."""

    def __init__(self, mixers: list[Mixer], requests: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        spec, f64 = mixers[0].spec, torch.float64
        self.mixers = mixers
        self.xbc = torch.randn(requests, LEN, spec.conv_dim, generator=g, dtype=f64)
        self.dt = torch.randn(requests, LEN, spec.num_heads, generator=g, dtype=f64)

    def alone(self) -> list[Tensor]:
        """Each (requests, LEN, H, P): one prompt a request, from zeros."""
        size = len(self.xbc)
        layout = CacheLayout(NONE, LEN, self.mixers[0].spec.num_speculative_tokens, LEN, FOLD)
        cache = FoldCache(layout, self.mixers, num_slots=1 + size, num_rows=1 + size, chunk_size=7)
        rows = list(range(1, 1 + size))
        table = torch.tensor(rows, dtype=torch.int32)[:, None]
        step = cache.step(table, rows, torch.zeros(size, dtype=torch.int64), [LEN] * size)
        flat = self.xbc.flatten(0, 1), self.dt.flatten(0, 1)
        return [step.mix(i, *flat).view(size, LEN, 2, 3) for i in range(len(self.mixers))]


def play(inputs: Inputs, layout: CacheLayout, chunk: int, seed: int) -> list[Tensor]:
    """Run all requests to their ends in random batches with random drafts."""
    rng, size, width = random.Random(seed), len(inputs.xbc), 1 + layout.num_speculative_tokens
    columns = layout.columns()
    cache = FoldCache(layout, inputs.mixers, num_slots=1 + size * columns, num_rows=1 + size, chunk_size=chunk)
    table = torch.arange(1, 1 + size * columns, dtype=torch.int32).view(size, columns)
    computed = torch.zeros(size, dtype=torch.int64)
    prompts = [rng.randint(1, LEN - 1) for _ in range(size)]
    outputs = [torch.full((size, LEN, 2, 3), float("nan"), dtype=torch.float64) for _ in inputs.mixers]
    while bool((computed < LEN).any()):
        ready = [i for i in rng.sample(range(size), size) if computed[i] < LEN and rng.random() < 0.8]
        decodes = [i for i in ready if computed[i] >= prompts[i] and rng.random() < 0.8]
        parts = [i for i in ready if i not in decodes]  # of prompts, and of turns that follow decodes
        who, lens, kept = decodes + parts, [], []
        for i in who:
            end = LEN if computed[i] >= prompts[i] else prompts[i]
            most = min(width, LEN - int(computed[i])) if i in decodes else end - int(computed[i])
            lens.append(rng.randint(1, most))
            kept.append(rng.randint(1, lens[-1]) if i in decodes else lens[-1])
        if not who:
            continue
        at = [(i, int(computed[i]) + j, j < k) for i, q, k in zip(who, lens, kept, strict=True) for j in range(q)]
        row, token, right = (torch.tensor(column) for column in zip(*at, strict=True))
        step = cache.step(table[who], [1 + i for i in who], computed[who], lens, len(decodes))
        for index, y in enumerate(outputs):
            xbc, dt = inputs.xbc[row, token].clone(), inputs.dt[row, token].clone()
            xbc[~right] = dt[~right] = float("nan")
            y[row[right], token[right]] = step.mix(index, xbc, dt)[right]
        computed[who] = step.commit(kept)
    return outputs


@pytest.mark.parametrize("seed", range(8))
def test_any_schedule_is_each_request_alone(seed):
    drafts = (0, 1, 2, 3)[seed % 4]
    mixers = [mixer_of(drafts, 0), mixer_of(drafts, 1, bias=True)]
    inputs = Inputs(mixers, 3, seed)
    mode, block, chunk = ((NONE, LEN, 7), (ALIGN, 8, 4), (ALL, 5, 2), (ALL, 16, 7))[seed // 2]
    layout = CacheLayout(mode, block, drafts, LEN, FOLD, 1 + 2 * drafts + seed % 3)
    for got, want in zip(play(inputs, layout, chunk, seed), inputs.alone(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_a_prompt_may_go_on_after_decodes():
    """A prefill of 10 tokens, two decodes that stay in the ring, and a prefill of 8 tokens."""
    inputs = Inputs([mixer_of(2, 0)], 1, 0)
    cache = FoldCache(CacheLayout(ALL, 16, 2, LEN, FOLD), inputs.mixers, num_slots=6, num_rows=2, chunk_size=4)
    table, n, parts = torch.arange(1, 6, dtype=torch.int32)[None], torch.zeros(1, dtype=torch.int64), []
    for tokens, decodes in ((10, 0), (1, 1), (1, 1), (8, 0), (1, 1)):
        span = slice(int(n), int(n) + tokens)
        step = cache.step(table, [1], n, [tokens], decodes)
        parts.append(step.mix(0, inputs.xbc[0, span], inputs.dt[0, span]))
        n = step.commit([tokens])
    torch.testing.assert_close(torch.cat(parts), inputs.alone()[0][0, :21], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("hit", [0, 16])
def test_the_first_step_of_a_request_may_be_a_decode(hit, tokens):
    """After a prefix-cache hit, and in a row that another request had."""
    inputs = Inputs([mixer_of(2, 0, width) for width in (3, 4)], 2, 0)
    cache = FoldCache(CacheLayout(ALL, 8, 2, LEN, FOLD), inputs.mixers, num_slots=16, num_rows=3, chunk_size=4)
    table, want = torch.arange(1, 16, dtype=torch.int32).view(3, 5), inputs.alone()

    def outputs(at: int, row: int, request: int, first: int, count: int, decodes: int) -> list[Tensor]:
        span, n = slice(first, first + count), torch.tensor([first])
        step = cache.step(table[at : at + 1], [row], n, [count], decodes)
        parts = [step.mix(i, inputs.xbc[request, span], inputs.dt[request, span]) for i in range(2)]
        step.commit([count])
        return parts

    outputs(0, 1, 0, 0, 16, 0)
    outputs(1, 2, 1, 0, 5, 0)
    table[2, : hit // 8] = table[0, : hit // 8]
    cache.admit([2], hit)
    for first in (hit, hit + tokens):
        for got, alone in zip(outputs(2, 2, 0, first, tokens, 1), want, strict=True):
            torch.testing.assert_close(got, alone[0, first : first + tokens], rtol=1e-9, atol=1e-9)


def test_a_prompt_after_decodes_needs_the_page_of_its_block():
    """A prefill after decodes needs a slot to fold the ring to; after an error the ring is unchanged."""
    inputs = Inputs([mixer_of(2, 0)], 1, 0)
    cache = FoldCache(CacheLayout(ALL, 8, 2, LEN, FOLD), inputs.mixers, num_slots=6, num_rows=2, chunk_size=4)
    table, n = torch.tensor([[1, 0, 2, 0, 0]], dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    for tokens, decodes in ((7, 0), (3, 1)):
        step = cache.step(table, [1], n, [tokens], decodes)
        step.mix(0, inputs.xbc[0, int(n) : int(n) + tokens], inputs.dt[0, int(n) : int(n) + tokens])
        n = step.commit([tokens])
    message = (
        "table has no slot in column 1 of prefill row 0, which continues after 10 tokens; the tokens in its ring are "
        "folded into the state in that slot"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        cache.step(table, [1], n, [8])
    table[0, 1] = 3
    y = cache.step(table, [1], n, [8]).mix(0, inputs.xbc[0, 10:18], inputs.dt[0, 10:18])
    torch.testing.assert_close(y, inputs.alone()[0][0, 10:18], rtol=1e-9, atol=1e-9)


def test_rings_are_what_a_spec_counts():
    spec = Mamba2(4, 8, 16, 2, num_speculative_tokens=3, policy=FOLD)
    wide = Mamba2(4, 8, 16, 2, conv_dtype=torch.float64, policy=FOLD)
    pool = StatePool([spec, wide, spec], 7, "cpu", num_rows=5, ring_capacity=9)
    of_rows = [5 * (each.ring_bytes(9) + each.request_conv_bytes) for each in pool.specs]
    assert pool.nbytes == sum(of_rows) + 7 * (2 * spec.page_bytes + wide.page_bytes)
    for index, of_row in enumerate(of_rows):
        assert sum(tensor.nbytes for tensor in pool.rings(index).tensors()) == of_row
    request_conv, (x, dt, B) = pool.rings(2)
    assert (request_conv.shape, x.shape) == ((5, 6, 96), (5, 9, 4, 8))
    assert (dt.shape, B.shape) == ((5, 9, 4), (5, 9, 2, 16))
    assert (request_conv.dtype, x.dtype, dt.dtype, B.dtype) == (*[torch.bfloat16] * 2, torch.float32, torch.bfloat16)
    assert pool.rings(0).request_conv.data_ptr() != request_conv.data_ptr() == pool.rings(2).request_conv.data_ptr()
    assert pool.rings(1).request_conv.dtype == torch.float64


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((1, 9), "num_rows is 1; it must be at least 2"), ((2, 4), "ring_capacity is 4; it must be at least 5")],
)
def test_bad_rings_are_refused(sizes, message):
    specs = [Mamba2(4, 8, 16, 2, num_speculative_tokens=drafts, policy=FOLD) for drafts in (0, 2)]
    with pytest.raises(ValueError, match=message):
        StatePool(specs, 3, "cpu", num_rows=sizes[0], ring_capacity=sizes[1])


class Calls(TorchDispatchMode):
    """Records the operators of this package in call order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "bateleur":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_step_ends_in_one_operator_for_all_layers_of_a_shape():
    """Each operator is a kernel launch outside of graphs."""
    mixers, layout = [mixer_of(2, 0, width) for width in (3, 4, 3, 3)], CacheLayout(ALL, 8, 2, LEN, FOLD)
    cache = FoldCache(layout, mixers, num_slots=6, num_rows=2, chunk_size=4)
    assert cache.pages.groups == ([0, 2, 3], [1])
    table, n = torch.arange(1, 6, dtype=torch.int32)[None], torch.zeros(1, dtype=torch.int64)
    for tokens, decodes in ((6, 0), (3, 1)):  # the second one folds up to the boundary
        step = cache.step(table, [1], n, [tokens], decodes)
        with Calls() as calls:
            n = step.commit([tokens])
        assert calls.names == ["fold_ring"] * 2
    slots = StatePool([Mamba2(2, 3, 4, 1, num_speculative_tokens=1)] * 5, 4, "cpu")
    with Calls() as calls:
        slots.copy(CopyPlan.allocate(2, "cpu"))
    assert calls.names == ["copy_states"]


def test_m19_bad_steps_are_refused():
    mixers, layout = [mixer_of(2, 0)], CacheLayout(ALL, 8, 2, LEN, FOLD)
    with pytest.raises(ValueError, match="chunk_size is 0; it must be at least 1"):
        FoldCache(layout, mixers, num_slots=4, num_rows=2, chunk_size=0)
    with pytest.raises(ValueError, match=r"layout\.policy is StatePolicy\.SLOTS"):
        FoldCache(CacheLayout(ALL, 8, 2, LEN), mixers, num_slots=4, num_rows=2, chunk_size=4)
    cache = FoldCache(layout, mixers, num_slots=4, num_rows=3, chunk_size=4)
    table, n = torch.zeros((2, 5), dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    for lens, decodes, message in (
        ([1], 0, "rows, query_lens and table have 2, 1 and 2"),
        ([1, 1], 3, "num_decodes = 3"),
        # vllm #30618: a part of a prompt with drafts behind it, longer than a step with drafts may be.
        ([4, 1], 1, r"query_lens is \[4, 1\]; .* = 3"),
        ([1, 0], 0, "each must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.step(table, [1, 2], n, lens, decodes)
    for computed, message in (
        (8, "8 in prefill row 0; its request has 0 tokens in its saved state, and at most 0"),
        (30, "30 .* at most 6"),
    ):
        with pytest.raises(ValueError, match=f"computed is {message}"):
            cache.step(table, [1, 2], n + computed, [1, 1])
    step = cache.step(table, [1, 2], n, [1, 1])
    step.commit([1, 1])
    with pytest.raises(ValueError, match="the step was committed before"):
        step.commit([1, 1])
    rule = "all must be different, and in .1, 2.; row 0 is null"
    for rows in ([0, 1], [1, 1], [2, 3], [-1, 1]):
        for call in (lambda rows=rows: cache.step(table, rows, n, [1, 1]), lambda rows=rows: cache.admit(rows)):
            with pytest.raises(ValueError, match=rule):
                call()
    with pytest.raises(ValueError, match=r"computed \+ query_lens is 41 in some row; .* max_model_len = 40"):
        cache.step(table.repeat(1, 2), [1, 2], n + LEN, [1, 1], 2)
