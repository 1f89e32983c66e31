"""An engine of one screen around a toy target, for tests of drafters: paged caches, chunks, verification, graphs.

It reads the device wherever that is convenient, so only what it hands to the drafter is like a real engine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bateleur.cudagraph import (
    Ask,
    BatchExecutionDescriptor,
    CapturePlan,
    Checks,
    CudaGraphManager,
    Execution,
    GraphBackend,
    Phase,
    Staged,
)
from bateleur.eagle.drafter import DraftContext
from bateleur.eagle.draw import draw
from bateleur.eagle.noise import Keys
from bateleur.eagle.speculator import EagleSpeculator
from bateleur.eagle.testing.toy_head import DTYPE, HEAD_DIM, NUM_KV_HEADS, DenseAttend, ToyTarget
from bateleur.metadata import (
    AttentionBackend,
    BatchLimits,
    BatchShape,
    BuildPhase,
    CommonAttentionMetadata,
    InputBuffers,
    KVGroup,
    PagedAttentionMetadata,
    StepRows,
)


@dataclass
class ToyRequest:
    """One request: its row, all its tokens, those whose keys the target holds, and the drafts for its next step."""

    row: int
    tokens: list[int]
    seed: int
    temperature: float
    prompt_len: int = field(init=False)
    computed: int = 0
    drafts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """The tokens given are the prompt."""
        self.prompt_len = len(self.tokens)


@dataclass(frozen=True)
class ToyState:
    """What the target stages for a step."""

    batch: CommonAttentionMetadata
    attention: PagedAttentionMetadata | None


def paged_caches(
    num_layers: int, num_blocks: int, block_size: int, device: torch.device | str = "cpu"
) -> list[tuple[Tensor, Tensor]]:
    """(k_cache, v_cache) for each layer; block 0 is the null block, the others hold garbage."""
    shape = (num_blocks, block_size, NUM_KV_HEADS, HEAD_DIM)
    made = []
    for _ in range(num_layers):
        k_cache, v_cache = (torch.full(shape, torch.nan, dtype=DTYPE, device=device) for _ in range(2))
        k_cache[0] = v_cache[0] = 0
        made.append((k_cache, v_cache))
    return made


class ToyEngine:
    """Runs steps of a target, and asks a drafter after each.

    Every row of the table owns `max_blocks` blocks for life. `limits`, `block_size` and `lookahead` fix the buffers.
    """

    def __init__(
        self,
        target: ToyTarget,
        backend: AttentionBackend,
        limits: BatchLimits,
        lookahead: int,
        block_size: int = 4,
        device: torch.device | str = "cpu",
    ) -> None:
        self.target, self.backend, self.limits, self.block_size = target, backend, limits, block_size
        max_blocks = -(-limits.max_model_len // block_size)
        self.groups = (KVGroup(block_size, max_blocks, lookahead_tokens=lookahead),)
        self.num_blocks = 1 + limits.max_num_reqs * max_blocks
        self.kv = paged_caches(target.num_layers, self.num_blocks, block_size, device)
        order = np.random.default_rng(3).permutation(self.num_blocks - 1) + 1
        self.tables = order.reshape(limits.max_num_reqs, max_blocks).astype(np.int32)
        self.device = torch.device(device)
        self.buffers = InputBuffers(limits, self.groups, self.device)
        self.builder = backend.builder()
        self.requests: dict[int, ToyRequest] = {}
        self.drafter: EagleSpeculator | None = None
        self.manager: CudaGraphManager[ToyState, tuple[Tensor, ...]] | None = None
        self.context: DraftContext | None = None
        self.spoil_padding = False
        self.num_graph_steps = 0

    # --- a producer for the target's graphs -----------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Stagings so far."""
        return self.buffers.generation

    def stage(self, key: BatchExecutionDescriptor, phase: Phase) -> Staged[ToyState]:
        """A dummy step of `key`."""
        inner = BuildPhase(phase.value)
        num_reqs = key.num_reqs or min(key.num_tokens, self.limits.max_num_reqs)
        longest = -(-key.num_tokens // num_reqs)
        shape = BatchShape(num_reqs, key.num_tokens, num_reqs, key.num_tokens, key.max_query_len or longest)
        bound = None if inner is BuildPhase.RUN else self.limits.max_model_len
        return self._staged(key, self.buffers.dummy(shape, context_len=1, max_seq_len=bound), inner)

    def addresses(self) -> Mapping[str, int]:
        """Buffers."""
        return self.buffers.addresses()

    def poison(self) -> None:
        """Spoil the buffers."""
        self.buffers.poison()

    def fuzz(self, key: BatchExecutionDescriptor, seed: int) -> Staged[ToyState]:
        """Random rows that fit `key`, over random caches."""
        rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        length = key.uniform_query_len
        most = key.num_reqs or min(key.num_tokens, self.limits.max_num_reqs)
        num_reqs = int(rng.integers(1, most + 1))
        lens = np.full(num_reqs, length or 1, np.int32)
        if length is None:
            lens[-1] += rng.integers(0, min(key.num_tokens, self.limits.max_model_len - 1) - num_reqs + 1)
        rows = StepRows(
            query_lens=lens,
            num_computed=rng.integers(1, self.limits.max_model_len - lens + 1).astype(np.int32),
            is_prefilling=lens > (length or 1),
            token_ids=rng.integers(0, self.target.vocab_size, lens.sum()).astype(np.int32),
            block_tables=(self.tables[rng.permutation(len(self.tables))[:num_reqs]],),
        )
        for cache in (cache for pair in self.kv for cache in pair):
            cache[1:] = torch.randn(cache[1:].shape, generator=generator, dtype=DTYPE)
        padded = key.num_reqs or num_reqs
        shape = BatchShape(
            num_reqs, int(lens.sum()), padded, key.num_tokens, key.max_query_len or int(lens.max())
        )
        return self._staged(key, self.buffers.stage(rows, shape), BuildPhase.RUN)

    def capture(self, plan: CapturePlan, backend: GraphBackend, checks: Checks = Checks.PARANOID) -> Any:
        """Capture the target; returns its states."""
        self.manager = CudaGraphManager(plan, backend, checks=checks)
        return self.manager.capture(self, self._body)

    def _staged(
        self, key: BatchExecutionDescriptor | None, batch: CommonAttentionMetadata, phase: BuildPhase
    ) -> Staged[ToyState]:
        attention = self.builder.build(batch, 0, phase)
        full = key is not None and key.num_reqs is not None
        signature = self.builder.signature(attention) if full else None
        return Staged(key, ToyState(batch, attention), self.generation, signature)

    def _body(self, execution: Execution[ToyState]) -> tuple[Tensor, ...]:
        batch = execution.state.batch

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            def run(state: ToyState, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                assert state.attention is not None
                return self.backend.attend(q, k, v, self.kv[layer], state.attention, HEAD_DIM**-0.5)

            return execution.eager(run, q, k, v)

        return self.target.forward(batch.input_ids, batch.positions, attend)

    # --- a step ---------------------------------------------------------------------------------------------

    def add(self, row: int, tokens: Sequence[int], seed: int = 0, temperature: float = 0.0) -> ToyRequest:
        """A request in a row of the table."""
        self.requests[row] = ToyRequest(row, list(tokens), seed, temperature)
        return self.requests[row]

    def step(self, work: Mapping[int, int], num_drafts: int | None = None) -> Tensor:
        """Compute `work[row]` tokens of each row, decoding rows first: of the prompt, or the last token and drafts.

        Fewer known drafts than asked for are filled up with token 0. `num_drafts` is what the drafter is asked for.
        Returns its proposal, (R, K); the requests hold it as well.
        """
        assert self.drafter is not None
        asked = self.drafter.num_speculative_tokens if num_drafts is None else num_drafts
        chosen = [self.requests[row] for row in work]
        fed = [self._feed(request, work[request.row]) for request in chosen]
        staged, decision_key = self._stage_rows(chosen, fed)
        outputs = self._run(staged)
        self.context = context = self._verify(chosen, fed, staged.state, outputs, asked, decision_key)
        proposal = self.drafter.propose(replace(context, generation=staged.generation))
        for request, drafts in zip(chosen, proposal.tolist(), strict=True):
            request.drafts = [draft for draft in drafts if draft >= 0]
        return proposal

    def _feed(self, request: ToyRequest, count: int) -> list[int]:
        known = request.tokens[request.computed :][:count]
        drafts = request.drafts + [0] * count
        return known + drafts[: count - len(known)]

    def _stage_rows(
        self, chosen: list[ToyRequest], fed: list[list[int]]
    ) -> tuple[Staged[ToyState], BatchExecutionDescriptor | None]:
        lens = np.array([len(ids) for ids in fed], np.int32)
        computed = np.array([request.computed for request in chosen], np.int32)
        prefilling = np.array([request.computed < request.prompt_len - 1 for request in chosen])
        rows = StepRows(
            query_lens=lens,
            num_computed=computed,
            is_prefilling=prefilling,
            token_ids=np.concatenate([np.array(ids, np.int32) for ids in fed]),
            block_tables=(self.tables[[request.row for request in chosen]],),
        )
        num_reqs, num_tokens, longest = len(chosen), int(lens.sum()), int(lens.max())
        key = None
        if self.manager is not None:
            uniform = longest if (lens == longest).all() else None
            ask = Ask(num_reqs, num_tokens, uniform, longest, not prefilling.any())
            key = self.manager.plan.decide(ask, self.manager.ready).descriptor
        shape = BatchShape.of(num_reqs, num_tokens, longest)
        if key is not None:
            reqs, promised = key.num_reqs or num_reqs, key.max_query_len or longest
            shape = BatchShape(num_reqs, num_tokens, reqs, key.num_tokens, promised)
        return self._staged(key, self.buffers.stage(rows, shape), BuildPhase.RUN), key

    def _run(self, staged: Staged[ToyState]) -> tuple[Tensor, ...]:
        if staged.key is None:
            outputs = self._body(Execution(None, staged.state))
        else:
            assert self.manager is not None
            self.num_graph_steps += 1
            outputs = self.manager.replay(staged.key, staged)
        if self.spoil_padding:
            outputs = tuple(output.clone() for output in outputs)
            for output in outputs:
                output[staged.state.batch.num_actual_tokens :] = torch.nan
        return outputs

    def _verify(
        self,
        chosen: list[ToyRequest],
        fed: list[list[int]],
        state: ToyState,
        outputs: tuple[Tensor, ...],
        asked: int,
        key: BatchExecutionDescriptor | None,
    ) -> DraftContext:
        """Accept what the target draws itself, and commit."""
        assert self.drafter is not None
        k, logits, start = self.drafter.num_speculative_tokens, self.target.logits(outputs[-1]).cpu(), 0
        next_token, num_valid, emitted = [], [], []
        for request, ids in zip(chosen, fed, strict=True):
            known = min(len(request.tokens) - request.computed, len(ids))
            valid, new = known, []
            if request.computed + known == len(request.tokens):
                new = [self.draw(logits[start + known - 1], request, request.computed + known)]
                while valid < len(ids) and ids[valid] == new[-1]:
                    valid += 1
                    new.append(self.draw(logits[start + valid - 1], request, request.computed + valid))
            request.tokens += new
            request.computed += valid
            next_token.append(request.tokens[request.computed])
            num_valid.append(valid)
            emitted.append((new + [-1] * (k + 1))[: k + 1])
            start += len(ids)
        device = self.device
        return DraftContext(
            batch=state.batch,
            attention=state.attention,
            features=self.target.features(outputs, self.drafter.needs),
            next_token=torch.tensor(next_token, device=device),
            num_valid=torch.tensor(num_valid, device=device),
            emitted=torch.tensor(emitted, device=device),
            rows=torch.tensor([request.row for request in chosen], device=device),
            seeds=torch.tensor([request.seed for request in chosen], device=device),
            temperature=torch.tensor([request.temperature for request in chosen], device=device),
            num_drafts=asked,
            key=key,
        )

    def draw(self, logits: Tensor, request: ToyRequest, index: int) -> int:
        """The target's own token of `index` in a request's sequence."""
        temperature = torch.tensor([request.temperature], dtype=torch.float32)
        scaled = logits.float()[None] / (request.temperature or 1.0)
        keys = Keys(torch.tensor([request.seed]), torch.tensor([index]))
        return int(draw(scaled, temperature, keys).token_ids)

    # --- oracles --------------------------------------------------------------------------------------------

    def plain(self, request: ToyRequest, count: int) -> list[int]:
        """The request's prompt and `count` tokens behind it, decoded one by one from scratch, without drafts."""
        tokens = request.tokens[: request.prompt_len]
        for _ in range(count):
            outputs = self.target.forward(torch.tensor(tokens), torch.arange(len(tokens)), DenseAttend())
            tokens.append(self.draw(self.target.logits(outputs[-1])[-1], request, len(tokens)))
        return tokens

    def from_scratch(self, request: ToyRequest, num_drafts: int) -> tuple[list[int], DenseAttend]:
        """Drafts behind what the target has computed, and the head's keys and values: no cache, no batch, no chain."""
        assert self.drafter is not None
        head: Any = self.drafter.head
        n = request.computed
        tokens = torch.tensor(request.tokens[: n + 1])
        outputs = self.target.forward(tokens[:n], torch.arange(n), DenseAttend())
        hidden = head.fuse(self.target.features(outputs, self.drafter.needs))
        ids, drafts = tokens[1:], []
        held = DenseAttend()
        head.forward(ids, hidden, torch.arange(n), held)
        for _ in range(num_drafts):
            h, recycled = head.forward(ids, hidden, torch.arange(len(ids)), DenseAttend())
            token = self.draw_draft(head, h[-1:], request, len(ids) + 1)
            drafts.append(token)
            ids = torch.cat((ids, torch.tensor([token])))
            hidden = torch.cat((hidden, recycled[-1:]))
        return drafts, held

    def draw_draft(self, head: Any, h: Tensor, request: ToyRequest, index: int) -> int:
        """The head's token of `index`, by brute force: the target's noise, restricted to the draft vocabulary."""
        logits = torch.full((self.target.vocab_size,), -torch.inf)
        ids = slice(None) if head.target_ids is None else head.target_ids
        logits[ids] = head.logits(h)[0].float()
        return self.draw(logits, request, index)

    def draft_cache(self, request: ToyRequest, layer: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values (count, Hkv, D) that the drafter holds of the request's leading positions."""
        assert self.drafter is not None
        position = torch.arange(count)
        blocks = torch.from_numpy(self.tables[request.row])[position // self.block_size].long()
        k, v = self.drafter.kv[layer]
        return k[blocks, position % self.block_size], v[blocks, position % self.block_size]
