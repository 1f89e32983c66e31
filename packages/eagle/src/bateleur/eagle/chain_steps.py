"""Staging of the draft passes after the first one (the chain): one token per request, from buffers on the device."""

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bateleur.cudagraph import BatchExecutionDescriptor, Phase, StagedBatch
from bateleur.eagle.buffers import DraftBuffers, DraftCache
from bateleur.eagle.geometry import stage_first, stage_next
from bateleur.eagle.passes import DraftState
from bateleur.metadata import (
    NULL_BLOCK,
    AttentionMetadataBuilder,
    BatchLimits,
    BatchShape,
    BuildPhase,
    CommonAttentionMetadata,
    InputBuffers,
    SeqLenBound,
    StepRows,
)


class ChainSteps:
    """Builds the metadata of draft passes after the first one (the chain), for real requests and for dummies.

    It is a `bateleur.cudagraph.Producer` with `fuzz` (random contents) and `poison` (invalid contents).

    builder: metadata builder of the draft layers.
    max_seq_len: upper bound of `seq_lens` of any request, `max_model_len`.
    """

    def __init__(
        self, inputs: DraftBuffers, cache: DraftCache, builder: AttentionMetadataBuilder[Any], max_seq_len: int
    ) -> None:
        if builder.seq_len_fill != 0:
            raise ValueError(
                f"builder: {type(builder).__name__} asks for seq_len_fill {builder.seq_len_fill}; padded rows of a "
                "draft have no keys"
            )
        rows = inputs.limits.max_num_reqs
        self.generation = 0
        self._inputs, self._cache, self._builder = inputs, cache, builder
        self.max_seq_len = max_seq_len
        self._dummies = InputBuffers(BatchLimits(rows, rows, max_seq_len), (cache.blocks,), inputs.device)
        self._starts = np.arange(rows + 1, dtype=np.int32)
        # Addresses are fixed, so views are cached by number of rows.
        self._views_of = lru_cache(None)(partial(_leading, inputs, torch.zeros(rows, dtype=torch.bool)))

    def build(
        self,
        step: CommonAttentionMetadata,
        padded_rows: int,
        last: int,
        phase: Phase = Phase.RUN,
        *,
        greedy: bool = False,
    ) -> DraftState:
        """Build metadata of the draft pass that is staged in the buffers, after a step of the target.

        step: batch of the target's step. padded_rows: number of requests of the pass, padding included.
        last: number of the last pass that uses the metadata, counted from 0 for the first pass.
        phase: RUN for requests; in another phase (warm-up, capture), `max_seq_len` of the pass is `max_model_len`.
        greedy: whether no request needs noise, see `DraftState`.
        """
        num_rows, padding = step.num_actual_reqs, padded_rows - step.num_actual_reqs
        bound = bound_of_drafts(step).advanced(last, self.max_seq_len)
        if padding:
            exact = np.pad(bound.exact, (0, padding), constant_values=True)
            bound = SeqLenBound(np.pad(bound.upper, (0, padding)), exact)
        self.generation += 1
        batch = CommonAttentionMetadata(
            num_reqs=padded_rows,
            num_tokens=padded_rows,
            num_actual_reqs=num_rows,
            num_actual_tokens=num_rows,
            max_query_len=1,
            max_seq_len=self.longest(step, phase),
            query_start_loc_cpu=torch.from_numpy(np.minimum(self._starts[: padded_rows + 1], num_rows)),
            seq_len_bound=bound,
            generation=self.generation,
            **self._views_of(padded_rows),
        )
        metadata = self._builder.build(batch, 0, BuildPhase(phase.value))
        return DraftState(batch, metadata, self._builder.signature, greedy)

    def longest(self, batch: CommonAttentionMetadata, phase: Phase) -> int:
        """Return an upper bound of `seq_lens` in all draft passes after the step `batch` of the target.

        It is min(upper bound in the step + K, `max_model_len`); in a phase other than RUN, `max_model_len`.
        """
        if phase is not Phase.RUN:
            return self.max_seq_len
        return min(batch.seq_len_bound.max() + self._inputs.num_speculative_tokens, self.max_seq_len)

    def stage(self, key: BatchExecutionDescriptor, phase: Phase) -> StagedBatch[DraftState]:
        """Stage dummy requests of the full size of `key`. Their slots are -1, so passes store no keys or values."""
        shape = BatchShape.of(key.num_tokens, key.num_tokens, 1)
        return self._staged(key, self._dummies.dummy(shape, context_len=min(1, self.max_seq_len - 1)), phase)

    def fuzz(self, key: BatchExecutionDescriptor, seed: int) -> StagedBatch[DraftState]:
        """Stage random requests over random caches. Use it only in an engine without requests."""
        rng = np.random.default_rng(seed)
        group, num_blocks = self._cache.blocks, self._cache.kv[0][0].shape[0] - 1
        num_rows = int(rng.integers(1, min(key.num_tokens, num_blocks) + 1))
        columns = min(num_blocks // num_rows, group.max_blocks)
        tables = np.zeros((num_rows, group.max_blocks), np.int32)
        tables[:, :columns] = 1 + rng.permutation(num_blocks)[: num_rows * columns].reshape(num_rows, columns)
        longest = min(columns * group.block_size, self.max_seq_len)
        rows = StepRows(
            query_lens=np.ones(num_rows, np.int32),
            num_computed_tokens=rng.integers(0, max(longest - 1, 1), num_rows).astype(np.int32),
            is_prefilling=np.zeros(num_rows, np.bool_),
            token_ids=np.zeros(num_rows, np.int32),
            block_tables=(tables,),
        )
        batch = self._dummies.stage(rows, BatchShape(num_rows, num_rows, key.num_tokens, key.num_tokens, 1))
        # The batch's table ends at the staged token; a chain needs the blocks after it.
        return self._staged(key, batch, Phase.RUN, torch.from_numpy(tables), seed)

    def addresses(self) -> Mapping[str, int]:
        """Return addresses by name of the drafter's buffers and caches, and of the builder's buffers."""
        own = {f"builder.{name}": address for name, address in self._builder.addresses().items()}
        return {**self._inputs.addresses(), **own, **dict(self._cache.addresses())}

    def poison(self) -> None:
        """Fill the buffers with invalid values; the next staging overwrites all entries that are read."""
        self._inputs.poison()
        self._dummies.poison()

    def _staged(
        self,
        key: BatchExecutionDescriptor,
        batch: CommonAttentionMetadata,
        phase: Phase,
        table: Tensor | None = None,
        seed: int | None = None,
    ) -> StagedBatch[DraftState]:
        """Stage the second draft pass, as if the first one had sampled token 0 everywhere, and build its metadata.

        key: graph key, with the number of tokens of the pass, padding included.
        batch: dummy requests, in place of the target's step. table, seed: see `stage_dummy`.
        """
        x = self._inputs
        self.stage_dummy(batch, 0, table, seed)
        drawn = torch.zeros(batch.num_actual_reqs, dtype=torch.int64, device=x.device)
        stage_next(x, drawn, x.block_table, self._cache.blocks.block_size, first=True)
        return self.build(batch, key.num_tokens, 1, phase).staged(key)

    def stage_dummy(
        self, batch: CommonAttentionMetadata, group: int, table: Tensor | None = None, seed: int | None = None
    ) -> None:
        """Stage a first draft pass over dummy requests: overwrite all inputs, as for real requests.

        group: KV-cache group of `batch` for the draft's layers.
        table: block table of the requests; default: the block table of the batch.
        seed: if given, buffers and caches are random, sampled on their device in their dtype.
        """
        x = self._inputs
        table = batch.block_tables[group] if table is None else table
        next_token = torch.zeros(batch.num_actual_reqs, dtype=torch.int64, device=x.device)
        if seed is None:
            x.hidden.zero_()
            x.set_rows(next_token, next_token, table)
        else:
            generator = torch.Generator(x.device).manual_seed(seed)
            for each in (each for pair in self._cache.kv for each in pair):
                wide = torch.float32 if each.dtype.itemsize == 1 else each.dtype
                each.copy_(torch.empty_like(each, dtype=wide).normal_(generator=generator))[NULL_BLOCK] = 0
            x.hidden.normal_(generator=generator)
            next_token.random_(2, generator=generator)
            seeds = torch.empty_like(next_token).random_(1 << 40, generator=generator)
            temperature = torch.empty_like(next_token).random_(2, generator=generator).float()
            x.set_rows(seeds, temperature, table)
        stage_first(x, batch, group, next_token, torch.ones_like(next_token))


def _leading(x: DraftBuffers, is_prefilling: Tensor, rows: int) -> dict[str, Any]:
    """Return views of the first `rows` rows of buffers and `is_prefilling`, by field of `CommonAttentionMetadata`."""
    return {
        "input_ids": x.input_ids[:rows],
        "positions": x.positions[:rows],
        "query_start_loc": x.query_start_loc[: rows + 1],
        "seq_lens": x.seq_lens[:rows],
        "num_computed_tokens": x.num_computed_tokens[:rows],
        "block_tables": (x.block_table[:rows],),
        "slot_mappings": (x.slot_mapping[:rows],),
        "is_prefilling": is_prefilling[:rows],
    }


def bound_of_drafts(batch: CommonAttentionMetadata) -> SeqLenBound:
    """Return the host's bounds of the request lengths once the rejected tokens of the target's step are dropped.

    A request with drafts has only an upper bound, because only the device knows the number of rejected drafts.
    """
    rows, bound = batch.num_actual_reqs, batch.seq_len_bound
    lengths = np.diff(batch.query_start_loc_cpu.numpy()[: rows + 1])
    certain = (lengths == 1) | batch.is_prefilling.numpy()[:rows]
    return SeqLenBound(bound.upper[:rows], bound.exact[:rows] & certain)
