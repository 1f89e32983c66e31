"""Grammars of structured outputs in a step: which drafts are tested, and which tokens are allowed."""

# Shape letters: R rows of a step, L rows of logits, K drafts at most, V vocabulary, W words of 32 bits, a bit a token.

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bateleur.eagle import Rule
from bateleur.metadata import Fetch
from bateleur.runner.requests.request import Request
from bateleur.runner.sampling.rejection_sampler import RejectionSampler
from bateleur.runner.sampling.token_rules import mask_words
from bateleur.runner.scheduling.step_batch import StepBatch
from bateleur.runner.structured.matcher import fill
from bateleur.runner.utils.device import pinned

if TYPE_CHECKING:
    from llguidance import LLExecutor


class GrammarMasks:
    """Computes bit masks of allowed tokens on the host while the device runs the forward pass.
    Drafts of requests with a grammar are copied to the host. Planning the next step waits for them.
    """

    def __init__(self, sampler: RejectionSampler, *, graphed: bool) -> None:
        """graphed: whether CUDA graphs pad all requests to one query length. If not, `cut_drafts` also sets a request's
        number of draft slots (`RequestTable.num_draft_slots`) to its number of drafts.
        """
        self._sampler, self._table, self._graphed = sampler, sampler.table, graphed
        # COUPLED compares drafts with the target's sample, so a forbidden draft is useless. The other rules sample from
        # the residual distribution after a rejection, so the first forbidden draft is tested, and rejected.
        self._rejected = 0 if sampler.rule is Rule.COUPLED else 1
        self._proposed: list[tuple[list[Request], Fetch]] = []
        self._received: dict[Request, list[int]] = {}
        self._drafts: dict[Request, list[int]] = {}
        """Allowed drafts of the next step."""
        self.has_drafts = False
        """Whether drafts of requests with a grammar are known or on their way."""

    def fetch(self, batch: StepBatch) -> None:
        """Start copying the drafts that were just proposed to the host."""
        requests = batch.with_grammar
        rows = np.fromiter((request.row for request in requests), np.int64, len(requests))
        self._proposed.append((requests, Fetch([self._sampler.drafts_of(rows)])))
        self.has_drafts = True

    def cut_drafts(self) -> None:
        """Limit each request's drafts of the next step to those before the first that its grammar forbids. Under the
        rules RATIO and BLOCK (`Rule`), which sample from the residual distribution after a rejection, the first
        forbidden draft stays, too, and is rejected.
        """
        table = self._table
        for request, known in self.check_drafts(None):
            row, allowed = request.row, self._drafts[request]
            table.num_drafts[row] = min(len(known), len(allowed) + self._rejected)
            if not self._graphed:
                table.num_draft_slots[row] = table.num_drafts[row]

    def check_drafts(self, requests: list[Request] | None) -> list[tuple[Request, list[int]]]:
        """Set `_drafts` to the drafts that grammars allow. Returns each request that has drafts, with all its drafts.
        Waits until all proposed drafts are on the host. Forbidden drafts of a step that runs already (async scheduling)
        stay in it, and the masks reject them. requests: requests to check; None for all that have drafts. Other
        requests keep their drafts for a later call.
        """
        proposed, self._proposed = self._proposed, []
        for owners, fetched in proposed:
            (drafts_RK,) = fetched.wait()
            self._received |= zip(owners, drafts_RK.tolist(), strict=True)
        table, self._drafts = self._table, {}
        looked: list[tuple[Request, list[int]]] = []
        # A request that has ended, is recomputed or is in its prompt will get new drafts.
        received = {request: drafts for request, drafts in self._received.items() if request.row >= 0}
        for request in list(received) if requests is None else requests:
            drafts, row = received.pop(request, None), request.row
            if drafts is None or table.num_computed[row] < table.prefill_len[row]:
                continue
            assert request.matcher is not None
            known = drafts[: table.num_drafts[row]]
            self._drafts[request] = known[: request.matcher.allowed_prefix(known)]
            looked.append((request, known))
        self._received = received
        self.has_drafts = bool(received or self._drafts)
        return looked

    def allowed(self, batch: StepBatch) -> Tensor | None:
        """Return int32 (rows of logits, words): bit t % 32 of word t // 32 is set if token t is allowed. None without
        grammars. Rows of logits after a rejected draft, which are not sampled from, allow all tokens.
        """
        index = batch.index
        wanted = []
        for index_in_step, first_row in zip(index.sampled.tolist(), index.first_S.tolist(), strict=True):
            request = batch.requests[index_in_step]
            if request.matcher is not None and request.finish_reason is None:
                drafts = self._drafts.get(request, []) if index_in_step < batch.num_decodes else []
                assert len(drafts) < batch.query_lens[index_in_step], "the library writes a mask after each draft"
                wanted.append((request.matcher, first_row, drafts))
        if not wanted:
            return None
        device = self._sampler.device
        masks_LW = pinned((index.num_logits, wanted[0][0].num_words), torch.int32, device).fill_(-1)
        fill(self._executor, wanted, masks_LW.numpy())
        # Without an end-of-sequence token, the grammar adds one after the vocabulary, perhaps in one more word.
        return masks_LW.to(device, non_blocking=True)[:, : mask_words(self._sampler.sampler.vocab_size)]

    @cached_property
    def _executor(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor()
