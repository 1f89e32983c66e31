"""What a request left in its blocks must not reach the next one, whatever the kernel does with masked keys."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from bateleur.eagle import EagleSpeculator
from bateleur.metadata.backends.paged import TorchBackend
from bateleur.metadata.backends.reference import write_kv_reference
from bateleur.metadata.conformance import ConformanceError, check_backend
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.cache.block_pool import BlockPool

PROMPTS = [{"prompt_token_ids": list(range(first, first + length))} for first, length in ((5, 3), (40, 13), (90, 21))]


class ByWeight(TorchBackend):
    """Looks at whole blocks, and gives what a query must not see the weight 0: 0 * NaN is NaN."""

    needs_finite_cache = True
    supports_sinks = False

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: tuple[Tensor, Tensor],
        meta: Any,
        scale: float,
        sliding_window: int | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        norm: tuple[Tensor, Tensor, float] | None = None,
        work: Tensor | None = None,
        sinks: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        assert work is None
        assert sinks is None
        assert kv_scales is None
        assert rotary is None
        assert norm is None
        write_kv_reference(k, v, *kv, meta.slot_mapping)
        out, (k_cache, v_cache) = torch.zeros_like(q), kv
        starts, lengths = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
        size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
        for row, length in enumerate(lengths):
            start, end = starts[row : row + 2]
            blocks = meta.block_table[row, : -(-length // size)].long()
            keys, values = (cache[blocks].flatten(0, 1).repeat_interleave(group, 1) for cache in (k_cache, v_cache))
            scores = torch.einsum("qhd,khd->hqk", q[start:end], keys) * scale
            position = torch.arange(length - (end - start), length)
            hidden = torch.arange(len(keys)) > position[:, None]
            if sliding_window:
                hidden |= torch.arange(len(keys)) <= position[:, None] - sliding_window
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[start:end] = torch.einsum("hqk,khd->qhd", weights, values)
        return out


class Careless(ByWeight):
    """The same without saying so."""

    needs_finite_cache = False


@pytest.fixture
def make_with(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    def make(backend: TorchBackend, **overrides: Any) -> LLM:
        with monkeypatch.context() as patch:
            patch.setattr("bateleur.runner.config.resolve.get_backend", lambda *args, **kwargs: backend)
            return make_llm(max_num_seqs=2, **overrides)

    return make


def spoil(llm: LLM) -> None:
    """Fill what a request may own with NaN; the null block belongs to nobody."""
    drafting = llm.engine.runner.proposer
    drafter = None if drafting is None else drafting.drafter
    pairs = [*llm.engine.caches.kv, *(drafter.kv if isinstance(drafter, EagleSpeculator) else ())]
    for pair in pairs:
        for cache in pair:
            cache[1:] = torch.nan


def texts(llm: LLM) -> list[tuple[list[int], str | None]]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return [(o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("caching", [False, True])
def test_fresh_attention_blocks_are_zeroed(make_with: Callable[..., LLM], llm: LLM, drafts: int, caching: bool) -> None:
    """vLLM #35219, #43990: NaN that an earlier holder left in a block, times a weight of 0."""
    draft = {"draft": "auto", "num_speculative_tokens": drafts} if drafts else {}
    spoiled = make_with(ByWeight(), enable_prefix_caching=caching, **draft)
    spoil(spoiled)
    assert texts(spoiled) == texts(llm)
    spoil_free(spoiled)
    assert texts(spoiled) == texts(llm)  # cached prefixes are kept, other blocks are zeroed again


def spoil_free(llm: LLM) -> None:
    """As `spoil`, for what no key leads to: what was published stays as it is."""
    pool = llm.engine.scheduler.pool
    assert pool is not None
    for pair in llm.engine.caches.kv:
        for cache in pair:
            cache[torch.tensor(pool._free)] = torch.nan


def test_the_kernel_needs_it(make_with: Callable[..., LLM]) -> None:
    spoiled = make_with(Careless())
    spoil(spoiled)
    assert "error" in {reason for _, reason in texts(spoiled)}


def test_backends_that_mask_zero_nothing(llm: LLM) -> None:
    pool = llm.engine.scheduler.pool
    assert pool is not None
    assert pool.fresh is None


def test_conformance_asks_for_what_the_backend_promises() -> None:
    check_backend(ByWeight(), head_dims=(16,), sliding_windows=(None,))
    with pytest.raises(ConformanceError, match="rows are off the reference"):
        check_backend(Careless(), head_dims=(16,), sliding_windows=(None,))


def test_a_pool_records_what_it_hands_out_where_asked() -> None:
    pool = BlockPool(6)
    pool.allocate(1)
    assert pool.fresh is None
    pool.fresh = []
    first = pool.allocate(2)
    pool.free(first)
    assert pool.fresh == first
    assert pool.allocate(3) == pool.fresh[2:]
