"""The batch of a step, and all values derived from it."""

# Shape letters: R rows of a step, T tokens, D decoding rows, S rows that sample a token, L rows of logits.

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bateleur.cudagraph import DispatchDecision, UnpaddedBatch
from bateleur.eagle import SamplingMetadata
from bateleur.metadata import BatchShape, StepRows, decode_like, uniform_query_len
from bateleur.runner.requests.request import Request, RequestTable
from bateleur.runner.utils.arrays import Bools, Int32s, Int64s
from bateleur.runner.utils.device import upload


class SamplingInputs(NamedTuple):
    """Sampling parameters of the S requests of a batch that sample a token.
    num_drafts: (S,) number of drafts that each request verifies, on the host. plain: whether no request has token
    rules, penalties or log probabilities. kind: kind of captured sampler that they need, see `rejection_sampler.KINDS`.
    seeds, temperature: (S,) int64 and float32 on the device. metadata: sampling metadata of the L rows of logits; None
    if all requests are greedy, or not plain.
    """

    num_drafts: Int32s
    plain: bool
    kind: str
    seeds: Tensor
    temperature: Tensor
    metadata: SamplingMetadata | None


@dataclass(eq=False)
class StepBatch:
    """The requests of one step, decodes first, then prefills.
    The scheduler returns the same object while its requests and draft lengths stay the same. Values that parts of a
    step derive from it are stored here and last as long as the batch. Its arrays are never written to.

    rows: (R,) rows of the request table. query_lens: (R,) tokens computed for each request.
    num_decodes: D, leading requests after their prompt. They compute their last token and its drafts, which are on the
    device.
    samples: (R,) whether the request computes its last known token, and so samples the next one.
    num_computed: (R,) computed tokens of each request before this step; an upper bound where `is_exact` is False. The
    scheduler sets both for each step. is_exact: None if all are exact.
    dispatch: graph of the step, or the reason for none, and the padded sizes. Set by the model runner.
    sampling: set by the rejection sampler.
    staged_rows: rows of the last step, if the next one can reuse them. Set by the model runner.
    """

    requests: list[Request]
    rows: Int64s
    query_lens: Int32s
    num_decodes: int
    samples: Bools
    device: torch.device
    num_computed: Int32s = field(init=False)
    is_exact: Bools | None = field(default=None, init=False)
    dispatch: tuple[DispatchDecision, BatchShape] | None = field(default=None, init=False)
    sampling: SamplingInputs | None = field(default=None, init=False)
    staged_rows: StepRows | None = field(default=None, init=False)

    @cached_property
    def num_tokens(self) -> int:
        """Number of all tokens of the step (T)."""
        return int(self.query_lens.sum())

    @cached_property
    def num_decode_tokens(self) -> int:
        """Number of tokens of the decoding requests."""
        return int(self.query_lens[: self.num_decodes].sum())

    @cached_property
    def all_decode(self) -> bool:
        """Whether all requests decode, so that none is in its prompt."""
        return self.num_decodes == len(self.rows)

    @cached_property
    def all_sample(self) -> bool:
        """Whether all requests sample a token."""
        return bool(self.samples.all())

    @cached_property
    def sampled(self) -> tuple[list[Request], Int64s]:
        """The S requests that sample a token, and their rows (S,) of the request table."""
        if self.all_sample:
            return self.requests, self.rows
        return [self.requests[i] for i in self.samples.nonzero()[0].tolist()], self.rows[self.samples]

    @cached_property
    def with_grammar(self) -> list[Request]:
        """Requests of the batch that follow a grammar."""
        return [request for request in self.requests if request.matcher is not None]

    @cached_property
    def adapter_slots(self) -> Int32s:
        """(T,) slot of the LoRA adapter of each token, 0 for none."""
        slots = np.array([request.adapter_slot for request in self.requests], np.int32)
        return slots.repeat(self.query_lens)

    @cached_property
    def index(self) -> "LogitsIndex":
        """Maps the rows of logits of the batch to its requests."""
        return LogitsIndex(self)

    def graph_request(self) -> UnpaddedBatch:
        """The sizes by which the dispatcher chooses a CUDA graph."""
        num_reqs, num_tokens, longest = len(self.rows), self.num_tokens, int(self.query_lens.max())
        if self.all_decode:
            common = longest if num_reqs * longest == num_tokens else None
            return UnpaddedBatch(num_reqs, num_tokens, common, longest, decode_only=True)
        state = (self.query_lens, np.arange(num_reqs) >= self.num_decodes, self.num_computed)
        return UnpaddedBatch(num_reqs, num_tokens, uniform_query_len(*state), longest, bool(decode_like(*state).all()))

    def step_rows(
        self, table: RequestTable, sampled_ids: Tensor | None, num_computed_device: Tensor | None
    ) -> StepRows:
        """Return the requests of the step as rows for `InputBuffers`. sampled_ids: input ids of decoding requests, on
        the device. num_computed_device: (R,) exact numbers of computed tokens, if `is_exact` is not None.
        """
        return StepRows(
            query_lens=self.query_lens,
            num_computed_tokens=self.num_computed,
            is_prefilling=np.arange(len(self.rows)) >= self.num_decodes,
            token_ids=self._prompt_tokens(table),
            num_computed_is_exact=self.is_exact,
            num_computed_tokens_device=num_computed_device,
            sampled_token_ids=sampled_ids,
            block_table_rows=self.rows,
        )

    def _prompt_tokens(self, table: RequestTable) -> Int32s:
        tokens_T = np.zeros(self.num_tokens, dtype=np.int32)  # those of decoding requests are filled in on the device
        if not self.all_decode:
            lens, first = self.query_lens[self.num_decodes :], self.num_decode_tokens
            starts = np.cumsum(lens) - lens
            columns = np.arange(len(tokens_T) - first)
            columns += np.repeat(self.num_computed[self.num_decodes :] - starts, lens)
            tokens_T[first:] = table.token_ids[np.repeat(self.rows[self.num_decodes :], lens), columns]
        return tokens_T


class LogitsIndex:
    """Maps rows of logits of a batch to the requests that they belong to.

    A request that samples has one row of logits for its last token and one for each draft slot, which is the position
    of a draft or of padding. Tensors are uploaded when they are first read.

    sampled: (S,) indices in the batch of requests that sample. first_S: (S,) first row of logits of each. num_slots_S:
    (S,) draft slots of each. num_logits: L, number of rows of logits. owner_L: (L,) index of the sampling request that
    each row of logits belongs to. num_before_L: (L,) draft slots of the same request before each row of logits.
    """

    def __init__(self, batch: StepBatch) -> None:
        self._batch, self._upload = batch, partial(upload, device=batch.device)
        self.sampled: Int64s = batch.samples.nonzero()[0]
        lens_S = batch.query_lens[self.sampled].astype(np.int64)
        lens_S[self.sampled >= batch.num_decodes] = 1
        self.num_slots_S, self.num_logits = lens_S - 1, int(lens_S.sum())
        self.first_S: Int64s = lens_S.cumsum() - lens_S
        self.owner_L = np.arange(len(lens_S)).repeat(lens_S)
        self.num_before_L: Int64s = np.arange(self.num_logits) - self.first_S[self.owner_L]
        self._first_token_S: Int64s = batch.query_lens.cumsum()[self.sampled] - lens_S

    @cached_property
    def owners(self) -> Tensor:
        """`owner_L` on the device."""
        return self._upload(self.owner_L)

    @cached_property
    def num_before(self) -> Tensor:
        """`num_before_L` on the device."""
        return self._upload(self.num_before_L)

    @cached_property
    def rows(self) -> Tensor:
        """Row of the request table of each request, (R,) int64 on the device."""
        return self._upload(self._batch.rows.copy())

    @cached_property
    def query_lens(self) -> Tensor:
        """Tokens of each request in this step, (R,) int64 on the device."""
        return self._upload(self._batch.query_lens.astype(np.int64))

    @cached_property
    def first_token(self) -> Tensor:
        """Index of the token that gives each sampling request's first row of logits, (S,) int64 on the device."""
        return self._upload(self._first_token_S)

    @cached_property
    def hidden(self) -> Tensor | None:
        """Index of the hidden state of each of L rows of logits, (L,) int64 on the device; None if it is 0 .. L - 1."""
        if self._batch.all_decode:
            return None
        return self._upload(self._first_token_S[self.owner_L] + self.num_before_L)

    @cached_property
    def starts(self) -> Tensor:
        """First row of logits of each of S sampling requests, then the number of rows: (S + 1,) int32 on the device."""
        return self._upload(np.append(self.first_S, self.num_logits).astype(np.int32))
