"""Grammars of the requests of a step: which of their drafts are tested, and which tokens may be drawn at each place."""

# Shape letters: R rows of a step, L rows of logits, K drafts at most, V vocabulary, W words of 32 bits, a bit a token.

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bateleur.eagle import Rule
from bateleur.runner.requests.request import Request
from bateleur.runner.sampling.masks import mask_words
from bateleur.runner.sampling.rejection_sampler import RejectionSampler
from bateleur.runner.scheduling.scheduler import StepPlan
from bateleur.runner.structured.matcher import Matcher, fill
from bateleur.runner.utils.device import Fetch, pinned

if TYPE_CHECKING:
    from llguidance import LLExecutor


class GrammarMasks:
    """The host's part of grammars. Steps without a request that has one pay nothing and wait for nothing.

    Drafts of the others are on their way to the host while it works on the tokens before them, and are waited for
    when the next step is planned. Masks are made while the device computes the step.
    """

    def __init__(self, verifier: RejectionSampler, *, graphed: bool) -> None:
        """`graphed`: places without a draft cost nothing, since rows are padded to one length."""
        self._verifier, self._table, self._graphed = verifier, verifier.table, graphed
        # COUPLED tests a draft against the target's own draw, so one that can't be drawn says nothing. The other rules
        # owe its place what is left when it is rejected, so the first that is forbidden stays, and is.
        self._rejected = 0 if verifier.rule is Rule.COUPLED else 1
        self._proposed: list[tuple[list[Request], Fetch]] = []
        self._received: dict[Request, list[int]] = {}
        """Drafts that have not been tested, as they came."""
        self._drafts: dict[Request, list[int]] = {}
        """Those of the next step that grammars allow."""
        self._found: tuple[StepPlan, list[Request]] | None = None
        self._executor: LLExecutor | None = None

    def fetch(self, plan: StepPlan) -> None:
        """Send the drafts that were just proposed to the host."""
        if requests := self._requests(plan):
            rows = np.fromiter((request.row for request in requests), np.int64, len(requests))
            self._proposed.append((requests, Fetch([self._verifier.proposed(rows)])))

    def cut(self) -> None:
        """Of the drafts for the next step, leave those that grammars allow."""
        if not (self._proposed or self._received):
            self._drafts = {}
            return
        self._receive()
        table = self._table
        for request, known in self._look(list(self._received)):
            row, allowed = request.row, self._drafts[request]
            table.num_drafts[row] = min(len(known), len(allowed) + self._rejected)
            if not self._graphed:
                table.num_places[row] = table.num_drafts[row]

    def look(self, plan: StepPlan) -> None:
        """The same for a step that was launched before the tokens in front of its drafts were known: what grammars
        forbid is tested, and rejected at its place.
        """
        self._receive()
        self._look(self._requests(plan))

    def _receive(self) -> None:
        """Wait for all drafts that were proposed. Those of a row that waits a step stay for the next."""
        proposed, self._proposed = self._proposed, []
        for requests, fetched in proposed:
            (drafts_RK,) = fetched.wait()
            self._received |= zip(requests, drafts_RK.tolist(), strict=True)

    def _look(self, requests: list[Request]) -> list[tuple[Request, list[int]]]:
        """Find what grammars allow of the drafts of these requests, which are tested next; with all that are."""
        table, self._drafts = self._table, {}
        looked: list[tuple[Request, list[int]]] = []
        # One that has ended or is computed again, or whose prompt goes on, gets drafts again.
        received = {request: drafts for request, drafts in self._received.items() if request.row >= 0}
        for request in requests:
            drafts, row = received.pop(request, None), request.row
            if drafts is None or table.num_computed[row] < table.prefill_len[row]:
                continue
            known = drafts[: table.num_drafts[row]]
            self._drafts[request] = known[: _matcher(request).allowed_prefix(known)]
            looked.append((request, known))
        self._received = received
        return looked

    def allowed(self, plan: StepPlan) -> Tensor | None:
        """(L, W) int32 on the device, for `RejectionSampler.verify`; None for a step without a grammar.

        Under a place that is never reached every token is allowed.
        """
        if not self._requests(plan):
            return None
        drawing, first = self._verifier.logit_rows(plan)
        wanted = []
        for spot, place in zip(drawing.tolist(), first.tolist(), strict=True):
            request = plan.requests[spot]
            if request.matcher is not None and request.finish_reason is None:
                drafts = self._drafts.get(request, []) if spot < plan.num_decodes else []
                assert len(drafts) < plan.query_lens[spot], "the library writes a mask behind each of them"
                wanted.append((request.matcher, place, drafts))
        if not wanted:
            return None
        device, num_logits = self._verifier.device, self._verifier.num_logits(plan)
        masks_LW = pinned((num_logits, wanted[0][0].num_words), torch.int32, device).fill_(-1)
        fill(self._pool(), wanted, masks_LW.numpy())
        # Without an end-of-sequence token a grammar has one behind the last, for which it may take a word more.
        return masks_LW.to(device, non_blocking=True)[:, : mask_words(self._verifier.sampling.vocab_size)]

    def follow(self, plan: StepPlan) -> bool:
        """Whether what may be drawn next depends on the tokens of a step."""
        return bool(self._requests(plan))

    def _requests(self, plan: StepPlan) -> list[Request]:
        """Those of a plan that have a grammar."""
        if self._found is None or self._found[0] is not plan:
            self._found = (plan, [request for request in plan.requests if request.matcher is not None])
        return self._found[1]

    def _pool(self) -> LLExecutor:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor()
        return self._executor


def _matcher(request: Request) -> Matcher:
    assert request.matcher is not None
    return request.matcher
