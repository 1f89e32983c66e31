"""The rejection sampler as a graph holds it: for steps whose rows all decode, with as many places each."""

# Shape letters: N rows of a padded step, T tokens, J = 1 + K tokens of a row at most, D hidden size, V vocabulary.

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bateleur.eagle import DraftDistribution, Drafts, OneHot, Rows, SamplingMetadata, verify
from bateleur.metadata import CommonAttentionMetadata
from bateleur.runner.sampling.end_rows import EndRows
from bateleur.runner.sampling.rejection_sampler import RejectionSampler
from bateleur.runner.sampling.verified import Verified
from bateleur.runner.scheduling.scheduler import StepPlan

GREEDY, DRAWS, CUTS = "greedy", "draws", "cuts"
"""What the host knows of the laws of a step: that every row takes its argmax, that none of those that draw truncates,
or nothing."""
KINDS = (CUTS, DRAWS, GREEDY)


class CapturedSampler:
    """Verifies rows that only draw, with what an eager `verifier` holds for them; what differs from step to step is in
    `rows`.
    """

    def __init__(self, verifier: RejectionSampler, rows: EndRows) -> None:
        self.verifier, self.rows = verifier, rows

    def stage(self, plan: StepPlan) -> None:
        """Say in the rows whose step comes next: that of `plan`, whose rows all decode."""
        verifier = self.verifier
        seeds, metadata = verifier.sampling.draws_of(plan.rows)
        num_drafts = np.minimum(verifier.table.num_drafts[plan.rows], plan.query_lens - 1)
        self.rows.stage(plan.rows, seeds, num_drafts, metadata)

    def kind_of(self, plan: StepPlan) -> str:
        """Of the laws of a plan's rows. They are the host's, so it is the same on all ranks."""
        sampling = self.verifier.sampling
        if sampling.all_greedy(plan.rows):
            return GREEDY
        return CUTS if sampling.truncates(plan.rows) else DRAWS

    def record(self, batch: CommonAttentionMetadata, hidden_TD: Tensor, kind: str) -> Tensor:
        """Verify the rows of a batch. kind: of their laws.

        Returns (N, 2 + J + K) int64 of the padded N rows, see `Verified.packed`; the rest is left in the rows and with
        the next tokens.
        """
        verifier, rows, num_reqs = self.verifier, self.rows, batch.num_reqs
        length, own_N = batch.num_tokens // num_reqs, rows.table_rows[:num_reqs]
        logits_TV = verifier.model.logits(hidden_TD)
        places_K = verifier.places[: verifier.num_places]
        drafts_NK = verifier.next.drafts_of(own_N).where(places_K < rows.num_drafts[:num_reqs, None], -1)
        values_N4, metadata = rows.sampling_values[:num_reqs], None
        distribution: DraftDistribution = OneHot()  # greedy rows are the same under each
        if kind != GREEDY:
            values_T4 = values_N4.unsqueeze(1).expand(-1, length, -1).reshape(-1, values_N4.shape[1])
            metadata = SamplingMetadata.unknown(values_T4, truncates=kind == CUTS)
            distribution = verifier.distribution(own_N.clamp(max=len(verifier.next.ids) - 2))
        first_N = batch.num_computed_tokens[:num_reqs].long() + 1
        drawn_with = Rows(batch.query_start_loc, rows.seeds[:num_reqs], first_N, values_N4[:, 0])
        emitted = verify(
            logits_TV,
            Drafts(drafts_NK, distribution),
            drawn_with,
            rule=verifier.rule,
            lanes=verifier.sampling.lanes,
            greedy=kind == GREEDY,
            metadata=metadata,
        )
        verifier.next.emitted(own_N, emitted.tokens, emitted.num_emitted)
        rows.leave(emitted.tokens, emitted.num_emitted)
        counts = (emitted.num_emitted.unsqueeze(1), emitted.bad.long().unsqueeze(1))
        return torch.cat((*counts, emitted.tokens, drafts_NK), 1)

    def verified(self, plan: StepPlan, packed: Tensor) -> Verified:
        """What `record` returned for the rows of `plan`; they keep it, whatever the graph does next."""
        verifier, packed_S = self.verifier, packed[: len(plan.rows)]
        kept_S = packed_S.clone() if verifier.on_host else packed_S
        return Verified.of_packed(kept_S, 1 + verifier.num_places, verifier.index_of(plan))

    def fuzz(
        self, batch: CommonAttentionMetadata, hidden_TD: Tensor, rng: np.random.Generator, kind: str
    ) -> None:
        """Stage random rows for a random batch and its hidden states, in an engine without requests: with drafts of
        which about half are what greedy rows draw.
        """
        verifier, count, device = self.verifier, batch.num_actual_reqs, self.verifier.device
        length, vocab_size, ids = (
            batch.num_tokens // batch.num_reqs,
            verifier.sampling.vocab_size,
            verifier.next.ids,
        )
        ids.copy_(torch.from_numpy(rng.integers(0, vocab_size, tuple(ids.shape))))
        likely = verifier.model.logits(hidden_TD).argmax(-1).view(-1, length)[:count, :-1]
        coins = torch.from_numpy(rng.integers(0, 2, tuple(likely.shape), dtype=np.bool_)).to(device)
        ids[:count, 1:length] = likely.where(coins, ids[:count, 1:length])
        metadata = np.tile(np.array([0, -np.inf, vocab_size, 1], np.float32), (count, 1))
        if kind != GREEDY:
            choices = ((0, 0.2, 0.8, 1.5), (-np.inf, -3.0), (vocab_size, 7), (1.0, 0.9))
            some = [
                rng.choice(each if kind == CUTS or not i else each[:1], count)
                for i, each in enumerate(choices)
            ]
            metadata = np.stack(some, 1).astype(np.float32)
        seeds, num_drafts = rng.integers(1 << 62, size=count), rng.integers(0, length, count)
        self.rows.stage(np.arange(count), seeds, num_drafts, metadata)
