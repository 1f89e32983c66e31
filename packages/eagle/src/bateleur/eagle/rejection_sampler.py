"""Lossless verification of drafts: how many are accepted, and which token follows them.

Legend for shapes: R requests, N logit rows, K draft tokens at most, V target vocabulary, Vd draft vocabulary.
"""

import torch
from torch import Tensor

from bateleur.eagle._ratio_block import block, ratio
from bateleur.eagle.draw import SampledTokens, argmax, draw
from bateleur.eagle.noise import HashedVocab
from bateleur.eagle.rules import Drafts, LogitRows, OneHot, RejectionOutput, Rows, Rule, apply_temperature
from bateleur.eagle.sample import sample
from bateleur.eagle.sampling_metadata import SamplingMetadata
from bateleur.metadata.dispatch import Implementations


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
    vocab: the V hashed token ids; by default the ids 0 .. V-1. With the vocab of a vocabulary shard, logits are those
        of the shard, and all ranks emit the same tokens.
    metadata: sampling parameters of each logit row. If given, `logits` are float32, not truncated and not divided by
        the temperature, and COUPLED never materialises the processed logits.
    greedy: all temperatures are 0, so that no noise is computed. False is always correct.

    Under COUPLED the tokens are those of `draw` row by row, bit for bit. Under every rule a request without drafts
    gets the token of `draw`. Raises `ValueError` if the shapes disagree, or if the rule does not fit the distribution.
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
        verify_by = ratio if rule is Rule.RATIO or isinstance(drafts.distribution, OneHot) else block
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
    positions: (R,) int64 index in its sequence of the drafted token; may exceed all limits, never clamped.
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
    """Verify by the rule COUPLED: sample every logit row, and accept the drafts that equal the samples."""
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
