"""A tiny target model in float64, and a minimal engine around it: paged caches, chunked prompts, verification.

The engine reads the device wherever that is convenient. Only the arguments of the drafter are as in a real engine.

Legend for shapes: T tokens, V vocabulary, W width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bateleur.cudagraph import BatchExecutionDescriptor
from bateleur.eagle.drafter import DraftContext, Drafter, TargetNeeds
from bateleur.eagle.heads.layers import DenseAttend
from bateleur.eagle.heads.spec import Attend
from bateleur.eagle.noise import Keys
from bateleur.eagle.sample import draw
from bateleur.metadata import (
    AttentionBackend,
    BatchLimits,
    BatchShape,
    CommonAttentionMetadata,
    InputBuffers,
    KVCacheGroup,
    PagedAttentionMetadata,
    StepRows,
)

DTYPE = torch.float64
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 4


class ToyLayer:
    """A layer of the toy target: x + attention(x), then x + tanh of a linear map."""

    def __init__(self, width_in: int, width: int, make: Callable[..., Tensor]) -> None:
        self.q = make(width_in, NUM_HEADS * HEAD_DIM)
        self.kv = make(width_in, 2 * NUM_KV_HEADS * HEAD_DIM)
        self.o = make(NUM_HEADS * HEAD_DIM, width)
        self.mlp = make(width, width)

    def __call__(self, index: int, x: Tensor, residual: Tensor, attend: Attend) -> Tensor:
        """Return the layer's output (T, width) for input x (T, width_in), added to `residual`. index: layer index."""
        q = (x @ self.q).view(len(x), NUM_HEADS, HEAD_DIM)
        k, v = (x @ self.kv).view(len(x), 2, NUM_KV_HEADS, HEAD_DIM).unbind(1)
        h = residual + attend(index, q, k, v).flatten(1) @ self.o
        return h + torch.tanh(h @ self.mlp)


def weights(seed: int, device: torch.device | str) -> Callable[..., Tensor]:
    """Return a function that creates a random matrix of the given shape; `seed` fixes the sequence of matrices."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=DTYPE).mul_(1.5 * shape[0] ** -0.5).to(device)

    return make


class ToyTarget:
    """A decoder of `num_layers` layers with `max_positions` position embeddings; a position beyond them fails."""

    def __init__(
        self,
        vocab_size: int = 19,
        width: int = 16,
        num_layers: int = 2,
        max_positions: int = 64,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        make = weights(seed, device)
        self.num_layers, self.width, self.vocab_size = num_layers, width, vocab_size
        self.embedding = make(vocab_size, width) * vocab_size**0.5
        self.position_embedding = make(max_positions, width) * max_positions**0.5
        self.layers = [ToyLayer(width, width, make) for _ in range(num_layers)]
        self.head = make(width, vocab_size) * 2

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, ...]:
        """Return the hidden states (T, W) at layer boundaries 0 .. num_layers, and the final one after the norm."""
        boundaries = [self.embedding.index_select(0, ids) + self.position_embedding.index_select(0, positions)]
        for index, layer in enumerate(self.layers):
            boundaries.append(layer(index, boundaries[-1], boundaries[-1], attend))
        return (*boundaries, torch.tanh(boundaries[-1]))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (T, V) float32 of final hidden states (T, W)."""
        return (hidden @ self.head).float()

    def features(self, outputs: Sequence[Tensor], needs: TargetNeeds) -> tuple[Tensor, ...]:
        """Select from the result of `forward` the hidden states that a drafter with `needs` reads."""
        taps = tuple(outputs[tap] for tap in needs.taps)
        return (*taps, outputs[-1]) if needs.hidden else taps


def paged_caches(
    num_layers: int, num_blocks: int, block_size: int, device: torch.device | str = "cpu"
) -> list[tuple[Tensor, Tensor]]:
    """Return (k_cache, v_cache) for each layer; block 0 is the null block, the others hold garbage."""
    shape = (num_blocks, block_size, NUM_KV_HEADS, HEAD_DIM)
    caches = [torch.full(shape, torch.nan, dtype=DTYPE, device=device) for _ in range(2 * num_layers)]
    for cache in caches:
        cache[0] = 0
    return list(zip(caches[::2], caches[1::2], strict=True))


@dataclass
class ToyRequest:
    """One request. row: row of the request table. computed: tokens in the KV cache. drafts: drafts of its next step."""

    row: int
    tokens: list[int]
    seed: int
    temperature: float
    prompt_len: int = field(init=False)
    computed: int = 0
    drafts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)


@dataclass(frozen=True)
class ToyState:
    """The batch and attention metadata that the target stages for a step."""

    batch: CommonAttentionMetadata
    attention: PagedAttentionMetadata | None


class ToyEngine:
    """Runs steps of a target, and calls a drafter after each.

    Every row of the request table owns `max_blocks` blocks. `limits` and `block_size` size the buffers.
    lookahead: `lookahead_tokens` of the KV-cache group.
    padded: whether steps are padded, to at least a quarter of `limits`, with NaN in outputs of padding.
    context: the drafter's context of the last step.
    key: key of the graph that a step runs on, in an engine with graphs.
    """

    key: BatchExecutionDescriptor | None = None

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
        self.groups = (KVCacheGroup(block_size, max_blocks, lookahead_tokens=lookahead),)
        self.num_blocks = 1 + limits.max_num_reqs * max_blocks
        self.kv = paged_caches(target.num_layers, self.num_blocks, block_size, device)
        order = np.random.default_rng(3).permutation(self.num_blocks - 1) + 1
        self.tables = order.reshape(limits.max_num_reqs, max_blocks).astype(np.int32)
        self.device = torch.device(device)
        self.buffers = InputBuffers(limits, self.groups, self.device)
        self.builder = backend.builder()
        self.requests: dict[int, ToyRequest] = {}
        self.drafter: Drafter | None = None
        self.context: DraftContext | None = None
        self.padded = False

    def add(self, row: int, tokens: Sequence[int], seed: int = 0, temperature: float = 0.0) -> ToyRequest:
        """Add a request in row `row` of the request table."""
        self.requests[row] = ToyRequest(row, list(tokens), seed, temperature)
        return self.requests[row]

    def step(self, work: Mapping[int, int], num_drafts: int | None = None) -> Tensor:
        """Run a step of `work[row]` tokens of each request in `work`: prompt tokens, or the last token and drafts.

        List decoding requests first: `work` has the order of the batch. Missing drafts are token 0. num_drafts: drafts
        to propose; None: K. Returns the drafter's proposal, (R, K), which is also stored as the requests' drafts.
        """
        assert self.drafter is not None
        asked = self.drafter.num_speculative_tokens if num_drafts is None else num_drafts
        chosen = [self.requests[row] for row in work]
        fed = [(x.tokens[x.computed :] + x.drafts + [0] * work[x.row])[: work[x.row]] for x in chosen]
        rows = self._rows(chosen, fed)
        batch = self.buffers.stage(rows, self._shape(rows))
        state = ToyState(batch, self.builder.build(batch, 0))
        outputs = self._run(state)
        if self.padded:
            outputs = tuple(output.clone() for output in outputs)
            for output in outputs:
                output[batch.num_actual_tokens :] = torch.nan
        context = self.context = self._verify(chosen, fed, state, outputs, asked)
        proposal = self.drafter.propose(context)
        for request, drafts in zip(chosen, proposal.tolist(), strict=True):
            request.drafts = [draft for draft in drafts if draft >= 0]
        return proposal

    def _rows(self, chosen: list[ToyRequest], fed: list[list[int]]) -> StepRows:
        return StepRows(
            query_lens=np.array([len(ids) for ids in fed], np.int32),
            num_computed_tokens=np.array([request.computed for request in chosen], np.int32),
            is_prefilling=np.array([request.computed < request.prompt_len - 1 for request in chosen]),
            token_ids=np.concatenate([np.array(ids, np.int32) for ids in fed]),
            block_tables=(self.tables[[request.row for request in chosen]],),
        )

    def _shape(self, rows: StepRows) -> BatchShape:
        lens = rows.query_lens
        num_reqs, num_tokens, longest = len(lens), int(lens.sum()), int(lens.max())
        if not self.padded:
            return BatchShape.of(num_reqs, num_tokens, longest)
        unit = self.limits.max_num_tokens // 4
        padded = -(-(num_tokens + 1) // unit) * unit
        return BatchShape(num_reqs, num_tokens, self.limits.max_num_reqs, padded, longest)

    def _run(self, state: ToyState) -> tuple[Tensor, ...]:
        attend = partial(self._attend, state)
        return self.target.forward(state.batch.input_ids, state.batch.positions, attend)

    def _attend(self, state: ToyState, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert state.attention is not None
        return self.backend.attend(q, k, v, self.kv[layer], state.attention, HEAD_DIM**-0.5)

    def _verify(
        self, chosen: list[ToyRequest], fed: list[list[int]], state: ToyState, outputs: tuple[Tensor, ...], asked: int
    ) -> DraftContext:
        """Accept drafts that equal the target's own samples, and update the requests. Returns the drafter's context.

        fed: input tokens by request. outputs: hidden states of the target. asked: number of drafts to propose.
        """
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
        of_rows = partial(torch.tensor, device=self.device)
        return DraftContext(
            batch=state.batch,
            attention=state.attention,
            features=self.target.features(outputs, self.drafter.needs),
            next_token=of_rows(next_token),
            num_valid=of_rows(num_valid),
            emitted=of_rows(emitted),
            rows=of_rows([request.row for request in chosen]),
            seeds=of_rows([request.seed for request in chosen]),
            temperature=of_rows([request.temperature for request in chosen]),
            num_drafts=asked,
            key=self.key,
        )

    def draw(self, logits: Tensor, request: ToyRequest, index: int) -> int:
        """Return the target's own token at `index` of a request's sequence, sampled from `logits`."""
        temperature = torch.tensor([request.temperature], dtype=torch.float32)
        scaled = logits.float()[None] / (request.temperature or 1.0)
        keys = Keys(torch.tensor([request.seed]), torch.tensor([index]))
        return int(draw(scaled, temperature, keys).token_ids)

    def plain(self, request: ToyRequest, count: int) -> list[int]:
        """Return the request's prompt and `count` tokens after it, decoded one by one from scratch, without drafts."""
        tokens = request.tokens[: request.prompt_len]
        for _ in range(count):
            outputs = self.target.forward(torch.tensor(tokens), torch.arange(len(tokens)), DenseAttend())
            tokens.append(self.draw(self.target.logits(outputs[-1])[-1], request, len(tokens)))
        return tokens
