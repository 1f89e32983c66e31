"""Graph keys of a builder, and random steps that may replay each of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bateleur.metadata.attention_metadata_builder import GraphSupport
from bateleur.metadata.common_attention_metadata import BatchShape
from bateleur.metadata.seq_len_bound import BoolArray, I32Array
from bateleur.metadata.step_inputs import BatchLimits, KVCacheGroup, StepRows


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Padded size of a captured graph. ``mixed``: any query lengths may replay it; otherwise all lengths are equal."""

    num_reqs: int
    num_tokens: int
    max_query_len: int
    mixed: bool = False

    def __str__(self) -> str:
        kind = "mixed" if self.mixed else "uniform"
        return f"{kind} key of {self.num_reqs} rows, {self.num_tokens} tokens, at most {self.max_query_len} a row"


@dataclass(frozen=True, slots=True)
class Step:
    """A random step that may replay the graph ``key``. Without a key it runs eagerly and unpadded."""

    key: GraphKey | None
    rows: StepRows

    @property
    def shape(self) -> BatchShape:
        lens, key = self.rows.query_lens, self.key
        num_reqs, num_tokens = len(lens), int(lens.sum())
        if key is None:
            return BatchShape.of(num_reqs, num_tokens, int(lens.max()))
        return BatchShape(num_reqs, num_tokens, key.num_reqs, key.num_tokens, key.max_query_len)

    def __str__(self) -> str:
        lens = self.rows.query_lens.tolist()
        return f"query lengths {lens} over {self.rows.num_computed_tokens.tolist()}, {self.key or 'no key'}"


def keys_of(support: GraphSupport, limits: BatchLimits, query_lens: Sequence[int]) -> list[GraphKey]:
    """Return graph keys (padded sizes) that ``support`` allows. ``query_lens``: lengths of uniform batches."""
    most_reqs, most_tokens = limits.max_num_reqs, limits.max_num_tokens
    lens = {GraphSupport.NEVER: (), GraphSupport.SINGLE_TOKEN: (1,)}.get(support, query_lens)
    keys = [
        GraphKey(num_reqs, num_reqs * length, length)
        for length in lens
        for num_reqs in sorted({1, min(3, most_reqs), most_reqs})
        if num_reqs * length <= most_tokens and length < limits.max_model_len
    ]
    if support is GraphSupport.ALWAYS:
        most = min(most_tokens, most_reqs * (limits.max_model_len - 1))
        keys += [GraphKey(min(n, most_reqs), n, n, mixed=True) for n in sorted({min(5, most), most})]
    return keys


class StepMaker:
    def __init__(self, limits: BatchLimits, groups: Sequence[KVCacheGroup]) -> None:
        self._limits, self._groups = limits, groups
        self._rng = np.random.default_rng(0)

    def steps_of(self, keys: Sequence[GraphKey], per_key: int) -> list[Step]:
        """Return ``per_key`` steps for each key (padded size), full or padded, and some eager steps without a key."""
        steps = [self._fitting(key, full=index == 0) for key in keys for index in range(per_key)]
        limits = self._limits
        for most in (1, 3, limits.max_num_reqs):
            num_reqs = min(most, limits.max_num_reqs)
            lens = self._ragged(num_reqs, limits.max_num_tokens, limits.max_model_len - 1)
            steps.append(self._step(None, lens, prompts=True))
        return steps

    def rows(self, query_lens: I32Array, num_computed: I32Array, is_prefilling: BoolArray) -> StepRows:
        num_reqs = len(query_lens)
        return StepRows(
            query_lens=query_lens,
            num_computed_tokens=num_computed,
            is_prefilling=is_prefilling,
            token_ids=self._rng.integers(0, 100, int(query_lens.sum())).astype(np.int32),
            block_tables=tuple(
                1 + self._rng.permutation(num_reqs * width).astype(np.int32).reshape(num_reqs, width)
                for width in (group.max_blocks for group in self._groups)
            ),
        )

    def _fitting(self, key: GraphKey, full: bool) -> Step:
        num_reqs = key.num_reqs if full else int(self._rng.integers(1, key.num_reqs + 1))
        if key.mixed:
            longest = min(key.max_query_len, self._limits.max_model_len - 1)
            lens = self._ragged(num_reqs, key.num_tokens, longest)
        else:
            lens = np.full(num_reqs, key.max_query_len, np.int32)
        return self._step(key, lens, prompts=key.mixed)

    def _ragged(self, num_reqs: int, num_tokens: int, longest: int) -> I32Array:
        """Return ascending query lengths (num_reqs,) in [1, ``longest``], some long, ``num_tokens`` at most in sum."""
        lens = np.ones(num_reqs, np.int32)
        spare = int(self._rng.integers(0, max(0, num_tokens - num_reqs) + 1))
        last = lens[-3:]
        last += self._rng.multinomial(spare, self._rng.dirichlet(np.ones(len(last)))).astype(np.int32)
        return np.sort(lens.clip(max=longest))

    def _step(self, key: GraphKey | None, lens: I32Array, prompts: bool) -> Step:
        num_reqs, rng = len(lens), self._rng
        computed = rng.integers(1, self._limits.max_model_len - lens + 1).astype(np.int32)
        prefilling: BoolArray = lens == 1  # the end of a prompt over existing context is a decode like any other
        prefilling &= rng.random(num_reqs) < 0.3
        if prompts:
            fresh = (rng.random(num_reqs) < 0.4) & (np.arange(num_reqs) >= num_reqs // 2)
            computed[fresh] = 0
            prefilling |= fresh | (lens > 1)
        order = np.argsort((lens > 1) | (computed == 0), kind="stable")  # rows that run as decodes come first
        return Step(key, self.rows(lens[order], computed[order], prefilling[order]))
