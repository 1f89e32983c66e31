"""Keys that a builder's graphs may be captured for, and random steps that may replay each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bateleur.metadata.batch import BatchShape
from bateleur.metadata.bounds import BoolArray, I32Array
from bateleur.metadata.builder import GraphSupport
from bateleur.metadata.rows import BatchLimits, KVGroup, StepRows


@dataclass(frozen=True, slots=True)
class Key:
    """A padded size with the promise it makes; ``mixed`` admits prompts and any query lengths, else all are equal."""

    num_reqs: int
    num_tokens: int
    max_query_len: int
    mixed: bool = False

    @property
    def shape(self) -> BatchShape:
        """The key filled with real rows, as a capture stages it."""
        return BatchShape.of(self.num_reqs, self.num_tokens, self.max_query_len)

    def __str__(self) -> str:
        kind = "mixed" if self.mixed else "uniform"
        return f"{kind} key of {self.num_reqs} rows, {self.num_tokens} tokens, at most {self.max_query_len} a row"


@dataclass(frozen=True, slots=True)
class Step:
    """A step that fits ``key``; without a key it runs eagerly and nothing is padded."""

    key: Key | None
    rows: StepRows
    shape: BatchShape

    def __str__(self) -> str:
        lens = self.rows.query_lens.tolist()
        return f"query lengths {lens} over {self.rows.num_computed.tolist()}, {self.key or 'no key'}"


def keys_of(support: GraphSupport, limits: BatchLimits, query_lens: Sequence[int]) -> list[Key]:
    """Keys of some sizes for everything that ``support`` allows."""
    keys: list[Key] = []
    if support >= GraphSupport.SINGLE_TOKEN:
        sizes = sorted({1, min(3, limits.max_num_reqs), limits.max_num_reqs})
        for length in (1,) if support is GraphSupport.SINGLE_TOKEN else query_lens:
            fitting = [
                n for n in sizes if n * length <= limits.max_num_tokens and length < limits.max_model_len
            ]
            keys += [Key(n, n * length, length) for n in fitting]
    held = limits.max_num_reqs * (limits.max_model_len - 1)
    for total in sorted({min(5, limits.max_num_tokens, held), min(limits.max_num_tokens, held)}):
        num_reqs = min(total, limits.max_num_reqs)
        if support >= GraphSupport.ALWAYS:
            keys.append(Key(num_reqs, total, total, mixed=True))
    return keys


def steps_of(
    keys: Sequence[Key],
    limits: BatchLimits,
    groups: Sequence[KVGroup],
    rng: np.random.Generator,
    per_key: int,
) -> list[Step]:
    """Random steps for each key, full and padded, and some without a key."""
    steps = [_step_for(key, limits, groups, rng, full=index == 0) for key in keys for index in range(per_key)]
    for most in (1, 3, limits.max_num_reqs):
        lens = _ragged(min(most, limits.max_num_reqs), limits.max_num_tokens, limits.max_model_len - 1, rng)
        steps.append(_step(None, lens, True, limits, groups, rng))
    return steps


def _step_for(
    key: Key, limits: BatchLimits, groups: Sequence[KVGroup], rng: np.random.Generator, full: bool
) -> Step:
    num_reqs = key.num_reqs if full else int(rng.integers(1, key.num_reqs + 1))
    if key.mixed:
        longest = min(key.max_query_len, limits.max_model_len - 1)
        lens = _ragged(num_reqs, key.num_tokens, longest, rng)
    else:
        lens = np.full(num_reqs, key.max_query_len, np.int32)
    return _step(key, lens, key.mixed, limits, groups, rng)


def _ragged(num_reqs: int, num_tokens: int, longest: int, rng: np.random.Generator) -> I32Array:
    """Ascending query lengths, at least 1 each and ``num_tokens`` at most together, one long one among them."""
    lens = np.ones(num_reqs, np.int32)
    spare = max(0, num_tokens - num_reqs)
    for row in range(num_reqs - 1, max(-1, num_reqs - 4), -1):
        more = int(rng.integers(0, min(spare, longest - 1) + 1))
        lens[row] += more
        spare -= more
    lens.sort()
    return lens


def _step(
    key: Key | None,
    lens: I32Array,
    prompts: bool,
    limits: BatchLimits,
    groups: Sequence[KVGroup],
    rng: np.random.Generator,
) -> Step:
    num_reqs, num_tokens = len(lens), int(lens.sum())
    computed = rng.integers(1, limits.max_model_len - lens + 1).astype(np.int32)
    prefilling: BoolArray = lens == 1  # the end of a prompt over existing context is a decode like any other
    prefilling &= rng.random(num_reqs) < 0.3
    if prompts:
        fresh = (rng.random(num_reqs) < 0.4) & (np.arange(num_reqs) >= num_reqs // 2)
        computed[fresh] = 0
        prefilling |= fresh | (lens > 1)
    order = np.argsort((lens > 1) | (computed == 0), kind="stable")  # rows that run as decodes come first
    lens, computed, prefilling = lens[order], computed[order], prefilling[order]
    rows = StepRows(
        query_lens=lens,
        num_computed=computed,
        is_prefilling=prefilling,
        token_ids=rng.integers(0, 100, num_tokens).astype(np.int32),
        block_tables=tuple(_table(num_reqs, group, rng) for group in groups),
    )
    if key is None:
        return Step(None, rows, BatchShape.of(num_reqs, num_tokens, int(lens.max())))
    return Step(key, rows, BatchShape(num_reqs, num_tokens, key.num_reqs, key.num_tokens, key.max_query_len))


def _table(num_reqs: int, group: KVGroup, rng: np.random.Generator) -> I32Array:
    ids = 1 + rng.permutation(num_reqs * group.max_blocks).astype(np.int32)
    return ids.reshape(num_reqs, group.max_blocks)
