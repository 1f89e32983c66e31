"""Grammars of the requests of a step: which of their drafts are tested, and which tokens may be drawn at each place."""

# Shape letters: R rows of a step, L rows of logits, K drafts at most, V vocabulary, W words of 32 bits, a bit a token.

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bateleur.eagle import Rule
from bateleur.runner.device import Fetch, pinned
from bateleur.runner.requests.request import Request
from bateleur.runner.sampling.masks import mask_words
from bateleur.runner.sampling.rejection_sampler import RejectionSampler
from bateleur.runner.scheduling.scheduler import StepPlan
from bateleur.runner.structured.matcher import Matcher, fill

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
        self._proposed: tuple[list[Request], Fetch] | None = None
        self._drafts: dict[Request, list[int]] = {}
        """Those of the next step that grammars allow."""
        self._found: tuple[StepPlan, list[Request]] | None = None
        self._executor: LLExecutor | None = None

    def fetch(self, plan: StepPlan) -> None:
        """Send the drafts that were just proposed to the host."""
        self._proposed = None
        if requests := self._requests(plan):
            rows = np.fromiter((request.row for request in requests), np.int64, len(requests))
            self._proposed = (requests, Fetch([self._verifier.proposed(rows)]))

    def cut(self) -> None:
        """Of the drafts for the next step, leave those that grammars allow."""
        self._drafts = {}
        if self._proposed is None:
            return
        (requests, fetched), self._proposed = self._proposed, None
        (drafts_RK,) = fetched.wait()
        table = self._table
        for request, drafts in zip(requests, drafts_RK.tolist(), strict=True):
            row = request.row
            # It has ended or is computed again, or its prompt goes on: behind that it gets drafts again.
            if row < 0 or table.num_computed[row] < table.prefill_len[row]:
                continue
            known = drafts[: table.num_drafts[row]]
            allowed = _matcher(request).allowed_prefix(known)
            self._drafts[request] = known[:allowed]
            table.num_drafts[row] = min(len(known), allowed + self._rejected)
            if not self._graphed:
                table.num_places[row] = table.num_drafts[row]

    def allowed(self, plan: StepPlan) -> Tensor | None:
        """(L, W) int32 on the device, for `RejectionSampler.verify`; None for a step without a grammar.

        Under a place that is never reached every token is allowed.
        """
        drawing, first = self._verifier.logit_rows(plan)
        if not len(drawing) or not self._requests(plan):
            return None
        wanted = []
        for spot, place in zip(drawing.tolist(), first.tolist(), strict=True):
            request = plan.requests[spot]
            if request.matcher is not None:
                drafts = self._drafts.get(request, []) if spot < plan.num_decodes else []
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
