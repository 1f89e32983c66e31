"""Lossless verification of drafts: how many are accepted, and which token follows them.

The acceptance rule COUPLED compares drafts with samples of the target. RATIO and BLOCK test them against their own
distribution, and sample from the residual; no tensor has more entries than the given logits.

Legend for shapes: R requests, N logit rows, K draft tokens at most, C = K + 1, V and Vd vocabulary of target and draft.
Logit row k of a request verifies its draft k.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bateleur.eagle.noise import HashedVocab, Keys, Role, uniform
from bateleur.eagle.rules import (
    DraftDistribution,
    Drafts,
    LogitRows,
    Logits,
    OneHot,
    RejectionOutput,
    Rows,
    Rule,
    apply_temperature,
)
from bateleur.eagle.sample import SampledTokens, argmax, draw, sample
from bateleur.eagle.sampling_metadata import SamplingMetadata
from bateleur.eagle.vocab_shard import LogNormalizer, VocabShard, exact_sum
from bateleur.metadata.dispatch import Implementations

_LEAST = 1e-30
"""Below any probability of a drawn token. Divisors are clamped to it so that float32 does not overflow."""


def verify(
    logits: Tensor,
    drafts: Drafts,
    rows: Rows,
    *,
    rule: Rule = Rule.COUPLED,
    vocab: HashedVocab | None = None,
    greedy: bool = False,
    metadata: SamplingMetadata | None = None,
) -> RejectionOutput:
    """Verify the drafts of every request; emit the accepted ones and one more token. Everything stays on the device.

    logits: (N, V) floating, logits of the target, processed (penalties, grammar, truncation) and divided by the
        temperature in rows that sample (temperature above 0), as for `draw`. Not written to.
    vocab: token ids of the V columns, hashed to key their noise; by default 0 .. V-1. With the ids of a vocabulary
        shard, logits are those of the shard, and all ranks emit the same tokens.
    metadata: sampling parameters of each logit row. If given, `logits` are float32, not truncated and not divided by
        the temperature, and the rule COUPLED never materialises the processed logits.
    greedy: all temperatures are 0, so that no noise is computed. False is always correct.

    Under COUPLED the tokens are those of `draw` row by row, bit for bit. Under every rule a request without drafts
    gets the token of `draw`. Raises `ValueError` if shapes disagree, or if `rule` can't verify `drafts.distribution`.
    """
    rule.require(drafts.distribution)
    num_reqs, num_drafts = drafts.tokens.shape
    if logits.dim() != 2 or num_reqs != len(rows):
        raise ValueError(
            f"logits must be (N, V) and drafts as many as the {len(rows)} rows, "
            f"got logits {tuple(logits.shape)} and tokens {tuple(drafts.tokens.shape)}"
        )
    if metadata is not None and len(metadata) != len(logits):
        raise ValueError(f"metadata has {len(metadata)} rows: must have {len(logits)}, as many as logits")
    if not num_reqs or not logits.shape[0]:
        none_R = drafts.tokens.new_zeros(num_reqs)
        return RejectionOutput(drafts.tokens.new_full((num_reqs, num_drafts + 1), -1), none_R, none_R.bool())
    shard = None if vocab is None else vocab.shard
    if rule is not Rule.COUPLED:
        if metadata is not None and (metadata.penalties is not None or not greedy):
            logits = metadata.apply(logits, shard)
        verify_by = _ratio if rule is Rule.RATIO or isinstance(drafts.distribution, OneHot) else _block
        return verify_by(logits.float(), drafts, rows, vocab)
    form = COUPLED.torch if logits.dtype is torch.float64 or shard is not None else COUPLED.on(logits)
    return form(logits, drafts, rows, vocab, greedy=greedy, metadata=metadata)


def draw_draft(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    rule: Rule = Rule.COUPLED,
    draft_index: int | Tensor = 0,
    vocab: HashedVocab | None = None,
) -> SampledTokens:
    """Sample one draft token per row with the noise that `rule` needs; the argmax if the temperature is 0.

    logits: (R, Vd) floating, before the temperature; the same tensor is given to `Logits` if the rule needs it.
    positions: (R,) int64 index in its sequence of the drafted token, not clamped to the model length.
    draft_index: int or (R,) int64, index of the draft in its step, from 0.
    vocab: `HashedVocab.of(ids, device)` of the target ids of a reduced draft vocabulary, so that drafts share the
        target's noise. The result is then an index into `ids`.
    """
    scaled_RD = apply_temperature(logits.float(), temperature)
    return draw(scaled_RD, temperature, rule.keys(seeds, positions, draft_index), rule.draft_role, vocab=vocab)


def _coupled(
    logits: Tensor,
    drafts: Drafts,
    rows: Rows,
    vocab: HashedVocab | None,
    *,
    greedy: bool = False,
    metadata: SamplingMetadata | None = None,
) -> RejectionOutput:
    """Verify by the acceptance rule COUPLED, see `verify`: sample every logit row, accept drafts equal to samples."""
    logit_rows = LogitRows.of(logits.shape[0], drafts, rows)
    if greedy and (metadata is None or metadata.penalties is None):
        drawn = argmax(logits, None if vocab is None else vocab.shard)
    else:
        owner_N, keys = logit_rows.owners(logits.shape[0])
        if metadata is None:
            drawn = draw(logits, rows.temperature[owner_N], keys, vocab=vocab)
        else:
            drawn = sample(logits, metadata, keys, vocab=vocab)
    # A bad row draws -1, which equals no draft: the accepted run ends there and the row emits nothing.
    token_RC = drawn.token_ids.masked_fill(drawn.bad, -1)[logit_rows.index]
    accepted_R = logit_rows.run(token_RC[:, :-1] == logit_rows.tokens)
    reached_RC = logit_rows.row_numbers <= accepted_R.masked_fill(~logit_rows.occupied, -1).unsqueeze(1)
    tokens_RC = torch.where(reached_RC, token_RC, -1)
    num_emitted_R = (tokens_RC >= 0).sum(1)
    return RejectionOutput(tokens_RC, num_emitted_R, (num_emitted_R <= accepted_R) & logit_rows.occupied)


COUPLED = Implementations(_coupled, triton="bateleur.eagle.kernels.rejection_sampler:coupled")


class _Case(NamedTuple):
    """Inputs of the verification of one step. scale: log-sum-exp of the N logit rows. drafted: log-sum-exp of the R * K
    rows of draft logits. greedy: (R,) bool. best: first maxima of the N rows. p, q, u: (R, K) target probability,
    draft probability and uniform number of each draft.
    """

    logits: Tensor
    shard: VocabShard | None
    scale: LogNormalizer
    drafted: LogNormalizer | None
    logit_rows: LogitRows
    distribution: DraftDistribution
    greedy: Tensor
    best: SampledTokens
    p: Tensor
    q: Tensor
    u: Tensor


def _ratio(logits: Tensor, drafts: Drafts, rows: Rows, vocab: HashedVocab | None) -> RejectionOutput:
    """Verify by the acceptance rule RATIO: accept while u q < p, with target probability p, draft q, uniform u."""
    case = _case(logits, drafts, rows, Rule.RATIO, vocab)
    accepted_R = case.logit_rows.run(_matches(case).where(case.greedy.unsqueeze(1), case.u * case.q < case.p))
    return _emit(case, accepted_R, case.u.new_ones(1), vocab)


def _block(logits: Tensor, drafts: Drafts, rows: Rows, vocab: HashedVocab | None) -> RejectionOutput:
    """Verify by the acceptance rule BLOCK: accept up to the last draft whose test holds (Sun et al. 2024, algorithm 2).

    weight_k = min(1, weight_{k-1} p/q) is the probability that at least k drafts are accepted, with target and draft
    probability p and q of draft k. The last draft passes its test with probability weight_k, an earlier one with
    e / (e + 1 - weight_k). e is the sum of (weight_k p - q)+ over the vocabulary at the next position.
    """
    case = _case(logits, drafts, rows, Rule.BLOCK, vocab)
    logit_rows, num_drafts = case.logit_rows, case.p.shape[1]
    weight_RC, test_RK = torch.ones_like(pad(case.p, (1, 0))), torch.empty_like(case.p)
    for k in range(num_drafts):
        weight_RC[:, k + 1] = (weight_RC[:, k] * case.p[:, k] / case.q[:, k].clamp_min(_LEAST)).clamp_max(1)
        test_RK[:, k] = weight_R = weight_RC[:, k + 1]
        if k + 1 < num_drafts:
            draft_R = torch.full_like(logit_rows.index[:, 0], k + 1)
            excess_RV = _excess(case, logit_rows.index[:, k + 1], draft_R, weight_R)
            excess_R = exact_sum(excess_RV, shard=case.shard).float().squeeze(1)
            # 0 / 0 means weight 1 before equal distributions. It is never reached: the next test holds for sure.
            inner_R = excess_R / (excess_R + 1 - weight_R)
            test_RK[:, k] = torch.where(logit_rows.drafted[:, k + 1], inner_R, weight_R)
    count_K = torch.arange(1, num_drafts + 1, device=logits.device)
    passed_RK = (case.u <= test_RK) & logit_rows.drafted
    last_R = pad(count_K * passed_RK, (1, 0)).amax(1)
    accepted_R = torch.where(case.greedy, logit_rows.run(_matches(case)), last_R)
    return _emit(case, accepted_R, weight_RC.gather(1, accepted_R.unsqueeze(1)).squeeze(1), vocab)


def _case(logits: Tensor, drafts: Drafts, rows: Rows, rule: Rule, vocab: HashedVocab | None) -> _Case:
    """Collect the inputs of the tests. Drops the drafts after a missing draft or a NaN in target or draft logits."""
    logit_rows, distribution = LogitRows.of(logits.shape[0], drafts, rows), drafts.distribution
    shard = None if vocab is None else vocab.shard
    best, scale = argmax(logits, shard), LogNormalizer.of(logits, shard)
    num_drafts, vocab_size = drafts.tokens.shape[1], logits.shape[1] if shard is None else shard.vocab_size
    index_RK = logit_rows.index[:, :-1]
    p_RK = _probability(logits, scale, index_RK, drafts.tokens, shard)
    q_RK, sound_RK = torch.ones_like(p_RK), ~best.bad[index_RK]
    drafted = None
    if isinstance(distribution, Logits) and num_drafts:
        q_RK, finite_RK, drafted = _declared(distribution, drafts.tokens, rows.temperature, vocab_size)
        # A draft distribution is NaN independently of the draft, so dropping the draft keeps the result exact.
        sound_RK &= finite_RK | (rows.temperature == 0).unsqueeze(1)
    else:
        distribution = OneHot()
    drafted_RK = (logit_rows.drafted & sound_RK).to(torch.int64).cumprod(1).bool()
    place_RK = torch.arange(num_drafts, device=logits.device).expand(len(rows), -1)
    position_RK = rows.first_position.unsqueeze(1) + place_RK
    keys = rule.keys(rows.seeds.repeat_interleave(num_drafts), position_RK.flatten(), place_RK.flatten())
    u_RK = uniform(keys, Role.ACCEPT).view(p_RK.shape)
    logit_rows, greedy_R = replace(logit_rows, drafted=drafted_RK), rows.temperature == 0
    return _Case(logits, shard, scale, drafted, logit_rows, distribution, greedy_R, best, p_RK, q_RK, u_RK)


def _probability(logits: Tensor, scale: LogNormalizer, row: Tensor, token: Tensor, shard: VocabShard | None) -> Tensor:
    """Return the probabilities of `token` (any shape) in the logit rows `row` (same shape); 0 for invalid ids."""
    if shard is None:
        index, here = token.clamp(0, logits.shape[1] - 1), (token >= 0) & (token < logits.shape[1])
    else:
        index, here = shard.local_indices(token)
    found = scale.at(row).log_probs(logits[row, index].unsqueeze(-1)).exp_().squeeze(-1).where(here, 0.0)
    # One rank has it, and the others nothing: no sum is rounded.
    return found if shard is None else shard.collectives.sum_(found)


def _declared(
    distribution: Logits, tokens_RK: Tensor, temperature: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor, LogNormalizer]:
    """Return the probability q of every draft, whether its row's maximum is finite, and the row's log-sum-exp."""
    scaled_ND = apply_temperature(distribution.logits.float(), temperature).flatten(0, 1)
    scale, draft_id_RK = LogNormalizer.of(scaled_ND, distribution.shard), tokens_RK
    row_RK = torch.arange(tokens_RK.numel(), device=tokens_RK.device).view(tokens_RK.shape)
    if distribution.ids is not None:
        draft_id_of = torch.full((vocab_size + 1,), -1, device=tokens_RK.device)
        index_D = torch.arange(scaled_ND.shape[1], device=tokens_RK.device)
        draft_id_of.scatter_(0, distribution.ids.clamp(max=vocab_size), index_D)
        draft_id_RK = draft_id_of[tokens_RK.clamp(0, vocab_size - 1)]
    q_RK = _probability(scaled_ND, scale, row_RK, draft_id_RK, distribution.shard)
    return q_RK, scale.best.isfinite().view(tokens_RK.shape), scale


def _matches(case: _Case) -> Tensor:
    """Return whether each draft is the first maximum of its logit row, (R, K), which is the test of greedy requests."""
    return case.best.token_ids[case.logit_rows.index[:, :-1]] == case.logit_rows.tokens


def _excess(case: _Case, row_R: Tensor, draft_R: Tensor, weight_R: Tensor) -> Tensor:
    """Return the residual (weight p - q)+, (R, V): p of logit rows `row_R`, q of drafts with index `draft_R`."""
    assert isinstance(case.distribution, Logits)
    assert case.drafted is not None
    ids, of_shard, shard = case.distribution.ids, case.distribution.shard, case.shard
    excess_RV = case.scale.at(row_R).log_probs(case.logits[row_R]).exp_().mul_(weight_R.unsqueeze(1))
    at_R = torch.arange(len(draft_R), device=draft_R.device) * case.p.shape[1] + draft_R
    drafted_RD = case.distribution.logits.flatten(0, 1)[at_R].float()
    scaled_RD = apply_temperature(drafted_RD, case.logit_rows.rows.temperature)
    q_RD = case.drafted.at(at_R).log_probs(scaled_RD).exp_()
    width, first = excess_RV.shape[1], 0 if shard is None or of_shard is not None else shard.first
    if ids is None:
        q_RD = q_RD[:, first : first + width]
        excess_RV[:, : q_RD.shape[1]] -= q_RD
    else:
        index_D = ids - first
        index_D = index_D.where((index_D >= 0) & (index_D < width), width)
        excess_RV = pad(excess_RV, (0, 1)).index_add_(1, index_D, q_RD, alpha=-1)[:, :-1]
    return excess_RV.clamp_min_(0)


def _emit(case: _Case, accepted_R: Tensor, weight_R: Tensor, vocab: HashedVocab | None) -> RejectionOutput:
    """Emit `accepted_R` drafts, then a sample of the residual `_excess` if one was rejected, else of the target.

    weight_R: factor of the target's probability in the residual; one number, or one per request.
    """
    logit_rows, rows, end_R1 = case.logit_rows, case.logit_rows.rows, accepted_R.unsqueeze(1)
    drafts_RC = pad(logit_rows.tokens, (0, 1), value=-1)
    rejected_R1 = pad(logit_rows.drafted, (0, 1), value=False).gather(1, end_R1) & ~case.greedy.unsqueeze(1)
    row_R = logit_rows.index.gather(1, end_R1).squeeze(1)
    final_RV = case.logits[row_R]
    if isinstance(case.distribution, Logits):
        draft_R = accepted_R.clamp(max=case.p.shape[1] - 1)
        excess_RV = _excess(case, row_R, draft_R, weight_R)
        # Equal distributions leave only rounding as residual, and bad rows leave NaN: then draw from the row itself.
        rejected_R1 &= exact_sum(excess_RV.clone(), shard=case.shard) > 0
        final_RV = torch.where(rejected_R1, excess_RV.log_(), final_RV)
    else:
        first = 0 if case.shard is None else case.shard.first
        id_V = torch.arange(first, first + final_RV.shape[1], device=final_RV.device)
        final_RV = final_RV.masked_fill_(rejected_R1 & (id_V == drafts_RC.gather(1, end_R1)), -torch.inf)
    keys = Keys(rows.seeds, rows.first_position + accepted_R)
    last = draw(final_RV, rows.temperature, keys, vocab=vocab)
    # A request whose sample is bad (see `SampledTokens`) or that has no rows gets only the drafts.
    last_R = last.token_ids.masked_fill(last.bad | ~logit_rows.occupied, -1)
    tokens_RC = torch.where(logit_rows.row_numbers < end_R1, drafts_RC, -1).scatter_(1, end_R1, last_R.unsqueeze(1))
    return RejectionOutput(tokens_RC, accepted_R + (last_R >= 0), last.bad & logit_rows.occupied)
