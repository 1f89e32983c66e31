"""Makers of rows, buffers and caches. Odd sizes on purpose: nothing may lean on a power of two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bateleur.metadata import BatchLimits, BatchShape, InputBuffers, KVCacheGroup, StepRows, field_values


def _make_rows(
    query_lens: Sequence[int],
    num_computed: Sequence[int],
    groups: Sequence[KVCacheGroup],
    *,
    is_prefilling: Sequence[bool] | None = None,
    seed: int = 0,
) -> StepRows:
    """Rows with distinct blocks for every entry of the table: the tails are stale ids of other requests."""
    rng = np.random.default_rng(seed)
    num_reqs = len(query_lens)
    tables = []
    for group in groups:
        ids = 1 + rng.permutation(num_reqs * group.max_blocks).astype(np.int32)
        tables.append(ids.reshape(num_reqs, group.max_blocks))
    prefilling = [q > 1 or c == 0 for q, c in zip(query_lens, num_computed, strict=True)]
    return StepRows(
        query_lens=np.array(query_lens, np.int32),
        num_computed_tokens=np.array(num_computed, np.int32),
        is_prefilling=np.array(prefilling if is_prefilling is None else is_prefilling, np.bool_),
        token_ids=rng.integers(1, 999, sum(query_lens)).astype(np.int32),
        block_tables=tuple(tables),
    )


def _whole(batch: Any, limits: BatchLimits) -> dict[str, list[np.ndarray[Any, Any]]]:
    """Every buffer of a batch over its *whole* length, reached through the views: what a stray read would see."""
    from bateleur.metadata import FIELDS

    found: dict[str, list[np.ndarray[Any, Any]]] = {}
    for name, value in field_values(batch).items():
        arrays = value if isinstance(value, tuple) else (value,)
        extent = FIELDS[name].leading_dim.size(limits.max_num_reqs, limits.max_num_tokens)
        for array in arrays:
            if isinstance(array, torch.Tensor):
                full = array.as_strided((extent, *array.shape[1:]), array.stride()).numpy()
            else:
                full = array.base
            assert len(full) == extent
            found.setdefault(name, []).append(full.copy())
    return found


def _make_cache(num_blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype) -> Any:
    """(k_cache, v_cache), all NaN but for slot 0 of the null block."""
    caches = []
    for _ in range(2):
        cache = torch.full((num_blocks, block_size, heads, dim), float("nan"), dtype=dtype)
        cache[0, 0] = 0
        caches.append(cache)
    return tuple(caches)


class Deferred:
    """A device on CPU whose work runs late: copies and kernels wait in one queue, in order, until ``sync``."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], Any]] = []
        self.copies: list[torch.Tensor] = []  # what was sent, or moved on the device

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.shape == source.shape
        self.copies.append(source)
        self.queue.append(lambda: target.copy_(source))

    def launch(self, kernel: Callable[[], Any]) -> None:
        self.queue.append(kernel)

    def sync(self) -> None:
        for work in self.queue:
            work()
        self.queue.clear()


@pytest.fixture
def deferred() -> Deferred:
    return Deferred()


@pytest.fixture(scope="session")
def make() -> SimpleNamespace:
    makers: dict[str, Callable[..., Any]] = {"rows": _make_rows, "whole": _whole, "cache": _make_cache}
    return SimpleNamespace(**makers)


@pytest.fixture
def groups() -> tuple[KVCacheGroup, ...]:
    return KVCacheGroup(5, 17), KVCacheGroup(16, 6), KVCacheGroup(80, 1, has_slots=False)


@pytest.fixture
def buffers(groups: tuple[KVCacheGroup, ...]) -> InputBuffers:
    return InputBuffers(BatchLimits(max_num_reqs=7, max_num_tokens=50, max_model_len=80), groups, "cpu")


@pytest.fixture
def mixed(buffers: InputBuffers, make: Any) -> Any:
    """Two decodes, a chunk over existing context, a fresh prompt; 4 of 6 rows and 22 of 31 tokens are real."""
    rows = make.rows([1, 1, 7, 13], [9, 30, 20, 0], buffers.groups)
    return buffers.stage(rows, BatchShape(4, 22, 6, 31, 22))
