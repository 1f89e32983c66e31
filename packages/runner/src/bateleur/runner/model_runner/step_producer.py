"""Stages dummy and random steps into the buffers that real steps use, for captures, warm-ups and checks."""

from collections.abc import Mapping
from itertools import chain

import numpy as np
import torch

from bateleur.cudagraph import BatchExecutionDescriptor, CudaGraphMode, Phase
from bateleur.metadata import NULL_BLOCK, BatchShape, BlockTable, BuildPhase, InputBuffers, StepRows, movable
from bateleur.runner.model_runner.model_state import ModelState, StagedStep
from bateleur.runner.models import StepContext
from bateleur.runner.utils.arrays import Int32s


class StepProducer:
    """Holds the input buffers of all steps, and stages dummy and random ones for captures and checks.
    A `bateleur.cudagraph.Producer` with `fuzz` (random contents) and `poison` (invalid contents).
    """

    def __init__(self, model_state: ModelState, kv_blocks: BlockTable) -> None:
        self.model_state, self._adapters = model_state, model_state.adapters
        tables, fill = model_state.tables(kv_blocks), model_state.seq_len_fill
        self.buffers = InputBuffers(model_state.limits, model_state.groups, model_state.device, fill, tables=tables)

    @property
    def generation(self) -> int:
        """Number of stagings so far."""
        return self.buffers.generation

    def stage(self, key: BatchExecutionDescriptor, phase: Phase) -> StagedStep:
        """Stage a dummy batch that fills graph `key`, with null blocks.
        For captures and their warm-up, the upper bound of sequence lengths is `max_model_len`, so the captured graph is
        valid for every later step.
        """
        limits = self.buffers.limits
        num_reqs = min(key.num_tokens, limits.max_num_reqs) if key.num_reqs is None else key.num_reqs
        longest = -(-key.num_tokens // num_reqs)
        # A PIECEWISE graph promises no query lengths: one row may have all tokens.
        piecewise = key.mode is CudaGraphMode.PIECEWISE
        shape = padded_shape(key, num_reqs, key.num_tokens, key.num_tokens if piecewise else longest)
        context_len = min(1, limits.max_model_len - longest)
        bound = None if phase is Phase.RUN else limits.max_model_len
        batch = self.buffers.dummy(shape, context_len=context_len, max_seq_len=bound)
        return self.model_state.prepare(batch, key, BuildPhase(phase.value))

    def stage_prompts(self, num_tokens: int) -> StagedStep:
        """Stage dummy prompts that run eagerly, about `num_tokens` tokens in as few requests as possible."""
        limits = self.buffers.limits
        num_tokens = min(num_tokens, limits.max_num_tokens)
        num_reqs = min(-(-num_tokens // limits.max_model_len), limits.max_num_reqs)
        length = min(num_tokens // num_reqs, limits.max_model_len)
        shape = BatchShape.of(num_reqs, num_reqs * length, length)
        batch = self.buffers.dummy(shape, is_prefilling=True, max_seq_len=self._longest_bound)
        return self.model_state.prepare(batch, None)

    def stage_decodes(self, num_reqs: int, query_len: int) -> StagedStep:
        """Stage dummy decodes that run eagerly, with `query_len` tokens for each request."""
        context_len = min(1, self.buffers.limits.max_model_len - query_len)
        shape = BatchShape.of(num_reqs, num_reqs * query_len, query_len)
        batch = self.buffers.dummy(shape, context_len=context_len, max_seq_len=self._longest_bound)
        return self.model_state.prepare(batch, None)

    @property
    def _longest_bound(self) -> int | None:
        """`max_seq_len` of eager dummy requests: `max_model_len`, so that they launch all kernels of real requests.
        None if the backend is slow with a bound above the lengths; their own longest length is then used.
        """
        return self.buffers.limits.max_model_len if self.model_state.backend.tolerates_loose_bounds else None

    def addresses(self) -> Mapping[str, int]:
        """Data pointers of buffers, builders and caches, by name."""
        slots = {} if self._adapters is None else {"adapter slots": self._adapters.token_slots.data_ptr()}
        return {**self.buffers.addresses(), **self.model_state.addresses(), **slots}

    def poison(self) -> None:
        """Fill all buffers with invalid values. The next staging must define every entry again."""
        self.buffers.poison()
        if self._adapters is not None:
            self._adapters.poison()

    def fuzz(self, key: BatchExecutionDescriptor, seed: int) -> StagedStep:
        """Stage a random batch that `key` can hold, over random cache contents; for an engine without requests.
        Only the cache entries that this batch reads are filled, on the device. The same `seed` gives the same contents
        on devices of one type.
        """
        rng = np.random.default_rng(seed)
        caches, device = self.model_state.caches, self.buffers.device
        rows, shape = self._random_rows(key, rng)
        generator = torch.Generator(device).manual_seed(seed)
        paged = [layers for layers in (caches.kv, caches.states) if layers]
        for layers, table in zip(paged, rows.block_tables, strict=False):
            touched = np.unique(table)
            index = torch.from_numpy(touched[touched != NULL_BLOCK].astype(np.int64)).to(device)
            for tensor in chain.from_iterable(layers):
                if tensor is None:  # the state of this layer is its window
                    continue
                wide = torch.float32 if tensor.dtype.itemsize == 1 else tensor.dtype
                noise = tensor.new_empty(len(index), *tensor.shape[1:], dtype=wide).normal_(generator=generator)
                movable(tensor).index_copy_(0, index, movable(noise.to(tensor.dtype)))
        used = slice(0, 1 + len(rows.query_lens))  # the null row, and the row of each request
        for layer, rings in enumerate(caches.rings):
            if rings is not None and caches.pool is not None:
                rings.request_conv[used].normal_(generator=generator)
                for entry, spec in zip(rings.entries, caches.pool.specs[layer].ring_entry, strict=True):
                    spec.randomize_(entry[used], generator)
        slots = None
        if self._adapters is not None:
            slots = rng.integers(0, self._adapters.num_slots + 1, rows.query_lens.sum(), np.int32)
        return self.model_state.prepare(self.buffers.stage(rows, shape), key, adapter_slots=slots)

    def written(self, context: StepContext) -> dict[str, torch.Tensor]:
        """Return the cache entries that a step may write, and a checksum of all others. Waits for the device."""
        caches, batch = self.model_state.caches, context.batch
        found, states = {}, 1 if caches.kv else 0
        for name, whole in caches.named().items():
            if name.startswith("kv"):
                whole, index = whole.flatten(0, 1), batch.slot_mappings[0].clamp(min=0)
            else:  # the group after that of the states has the ring rows
                index = batch.block_tables[states + name.startswith("rings")].unique()
            found[name] = part = movable(whole).index_select(0, index)
            found[f"{name} elsewhere"] = bits_of(whole) - bits_of(part)
        return found

    def _random_rows(self, key: BatchExecutionDescriptor, rng: np.random.Generator) -> tuple[StepRows, BatchShape]:
        limits, plan = self.buffers.limits, self.model_state.caches.plan
        most = min(limits.max_num_reqs if key.num_reqs is None else key.num_reqs, key.num_tokens)
        room, ahead = limits.max_model_len, self.buffers.groups[0].lookahead_tokens
        if plan.num_blocks:  # each row needs room for a token of context, its own, and those that a drafter stores
            least = -(-(1 + (key.uniform_query_len or 1) + ahead) // plan.block_size)
            most = min(most, (plan.num_blocks - 1) // least)
        filled = int(rng.integers(1, key.num_tokens + 1, size=2).max())  # the rest is padding
        num_reqs = int(rng.integers(1, min(most, filled) + 1))
        if plan.num_blocks:
            room = min(room, (plan.num_blocks - 1) // num_reqs * plan.block_size - ahead)
        query_lens = _random_lens(key, num_reqs, filled, room, rng)
        is_prefilling = query_lens > (key.uniform_query_len or 1)
        computed = rng.integers(np.where(is_prefilling, 0, 1), room - query_lens + 1)
        used = np.minimum(-(-(computed + query_lens + ahead) // plan.block_size), plan.max_blocks)
        ids = 1 + rng.permutation(max(plan.num_blocks - 1, 0)).astype(np.int32)
        blocks = np.zeros((num_reqs, plan.max_blocks), np.int32)
        blocks[np.arange(plan.max_blocks) < used[:, None]] = ids[: used.sum()]
        num_tokens = int(query_lens.sum())
        rows = StepRows(
            query_lens=query_lens,
            num_computed_tokens=computed.astype(np.int32),
            is_prefilling=is_prefilling,
            token_ids=rng.integers(0, self.model_state.vocab_size, num_tokens).astype(np.int32),
            block_tables=self.model_state.random_tables(blocks, computed, computed + query_lens, rng),
        )
        return rows, padded_shape(key, num_reqs, num_tokens, int(query_lens.max()))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a checksum of a tensor: the sum of its elements read as integers."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.view(whole).sum(dtype=torch.int64)


def padded_shape(
    key: BatchExecutionDescriptor | None, num_reqs: int, num_tokens: int, max_query_len: int
) -> BatchShape:
    """Return the sizes of a batch that runs in graph `key`; unpadded without a key.
    A FULL key also fixes query lengths.
    """
    if key is None:
        return BatchShape.of(num_reqs, num_tokens, max_query_len)
    return BatchShape(
        num_reqs,
        num_tokens,
        num_reqs if key.num_reqs is None else key.num_reqs,
        key.num_tokens,
        max_query_len if key.max_query_len is None else key.max_query_len,
    )


def _random_lens(
    key: BatchExecutionDescriptor, num_reqs: int, filled: int, room: int, rng: np.random.Generator
) -> Int32s:
    """Return random query lengths that fit `key`, in ascending order.
    filled: maximum sum of lengths, unless `key` fixes them. room: maximum tokens of a request with its context.
    """
    if key.uniform_query_len is not None:
        return np.full(num_reqs, key.uniform_query_len, np.int32)
    longest = min(room - 1, key.num_tokens if key.max_query_len is None else key.max_query_len)
    lens = np.ones(num_reqs, np.int32)
    spare = filled - num_reqs
    for row in range(num_reqs // 2, num_reqs):
        more = int(rng.integers(0, min(spare, longest - 1) + 1)) if longest > 1 else 0
        lens[row] += more
        spare -= more
    return np.sort(lens)
