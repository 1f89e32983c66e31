"""Checks that requests in mixed batches, with state slots from the planners, get the same outputs as alone."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import silu

from bateleur.mamba.conformance.aliases import check_aliases
from bateleur.mamba.conformance.problem import RecurrenceCase, Tokens
from bateleur.mamba.fold_cache import FoldCache, step_metadata
from bateleur.mamba.mixer import Mixer, MixerBatch
from bateleur.mamba.planners import plan_copy, plan_step
from bateleur.mamba.prefill_chunks import PrefillChunker
from bateleur.mamba.recurrence import TensorSpec
from bateleur.mamba.request_states import RequestStates
from bateleur.mamba.spec import CacheLayout, MambaCacheMode, PromptScan, StatePolicy
from bateleur.mamba.state_pool import StatePool

_REQUESTS, _LEN, _BLOCK, _CHUNK, _HIT = 3, 18, 5, 3, 2
"""Request `_HIT` starts with the first block of request 0, from its slot."""
_PROMPTS = (7, 12, 6)


def check_schedule(problem: RecurrenceCase) -> None:
    """Run random requests in mixed batches (chunked prefills, rejected drafts); compare with each request run alone."""
    spec, device = problem.spec, problem.device
    act = {"least": spec.compute_dtype}
    sizes = (spec.conv_dim, spec.conv_width)
    weight = problem.draw(TensorSpec("weight", sizes, spec.conv_dtype), **act) * spec.conv_width**-0.5
    bias = problem.draw(TensorSpec("bias", sizes[:1], spec.conv_dtype), **act)
    mixer = Mixer(spec, weight, bias, problem.params())
    inputs = [problem.tokens(_LEN) for _ in range(_REQUESTS)]
    shared = slice(0, _BLOCK)
    for ours, theirs in zip(inputs[_HIT].tensors, inputs[0].tensors, strict=True):
        ours[shared] = theirs[shared]
    wanted = [_alone(problem, mixer, tokens) for tokens in inputs]
    layout = CacheLayout(
        MambaCacheMode.ALL, max(_BLOCK, 1 + spec.num_speculative_tokens), spec.num_speculative_tokens, 2 * _LEN,
        spec.policy, problem.ring_capacity,
    )  # fmt: skip
    num_slots, kind = 1 + _REQUESTS * layout.columns(), FoldCache if spec.policy is StatePolicy.FOLD else _SlotCache
    options = {"num_slots": num_slots, "num_rows": 1 + _REQUESTS, "chunk_size": _CHUNK}
    cache = kind(layout, [mixer], **options, prompt_scan=problem.prompt_scan)
    for tensor in cache.pages.layer(0):
        if tensor is not None:
            tensor.fill_(torch.nan)
    table = torch.arange(1, num_slots, dtype=torch.int32, device=device).view(_REQUESTS, -1)
    _play(problem, cache, table, inputs, wanted)


def _alone(problem: RecurrenceCase, mixer: Mixer, tokens: Tokens) -> list[Tensor]:
    """Return the outputs of one request that runs alone, token by token."""
    keep = mixer.spec.conv_width - 1
    line = torch.cat([torch.zeros(keep, mixer.spec.conv_dim), tokens.channels.cpu()]).double()
    assert mixer.conv_bias is not None
    channels = (line.unfold(0, 1 + keep, 1) * mixer.conv_weight.cpu()).sum(-1) + mixer.conv_bias.cpu()
    if mixer.spec.conv_activation == "silu":
        channels = silu(channels)
    convolved, state = Tokens(channels, tokens.gates), problem.start(problem.states(1), 0)
    return problem.run(mixer.params, convolved, range(len(channels)), state)[0]


def _play(
    problem: RecurrenceCase,
    cache: FoldCache | _SlotCache,
    table: Tensor,
    inputs: list[Tokens],
    wanted: list[list[Tensor]],
) -> None:
    layout = cache.layout
    rng, width, computed = Random(2), 1 + layout.num_speculative_tokens, [0] * _REQUESTS
    waits = True  # request `_HIT` waits until the slot that it starts from is full
    while min(computed) < _LEN:
        if waits and computed[0] > layout.block_size:
            waits, computed[_HIT] = False, layout.block_size * (layout.block_size == _BLOCK)
            if computed[_HIT]:
                table[_HIT, 0] = table[0, 0]
            cache.admit([1 + _HIT], [computed[_HIT]])
        ready = [r for r in range(_REQUESTS) if computed[r] < _LEN and not (waits and r == _HIT)]
        ready = [r for r in ready if rng.random() < 0.8] or ready[:1]
        decodes = [r for r in ready if computed[r] >= _PROMPTS[r]]
        who = decodes + [r for r in ready if r not in decodes]
        most = [min(width, _LEN - computed[r]) if r in decodes else _PROMPTS[r] - computed[r] for r in who]
        lens = [rng.randint(1, n) for n in most]
        kept = [rng.randint(1, n) if r in decodes else n for r, n in zip(who, lens, strict=True)]
        at = torch.tensor([computed[r] for r in who], device=table.device)
        step = cache.step(table[who], [1 + r for r in who], at, lens, len(decodes))
        y, first = step.mix(0, *_batch(problem, inputs, who, computed, lens, kept).tensors), 0
        for r, n, k in zip(who, lens, kept, strict=True):
            what = f"tokens {computed[r]} to {computed[r] + k} of request {r}, under {layout.policy.value}"
            problem.outputs(y[first : first + k], wanted[r][computed[r] : computed[r] + k], what)
            first += n
        for r, after in zip(who, step.commit(kept).tolist(), strict=True):
            computed[r] = after


def _batch(
    problem: RecurrenceCase, inputs: list[Tokens], who: list[int], computed: list[int], lens: list[int], kept: list[int]
) -> Tokens:
    """Return the tokens of a step, `lens` of each request in `who`: first the next `kept` tokens of its `inputs`, which
    follow `computed` tokens, then random drafts to be rejected.
    """
    flat, at = [torch.cat(parts) for parts in zip(*(each.tensors for each in inputs), strict=True)], []
    for r, n, k in zip(who, lens, kept, strict=True):
        at += [_LEN * r + computed[r] + i if i < k else -1 for i in range(n)]
    index = torch.tensor(at)
    tokens = Tokens(flat[0], tuple(flat[1:])).of(index.clamp(0))
    wrong = problem.tokens(len(at))
    for ours, theirs in zip(tokens.tensors, wrong.tensors, strict=True):
        ours[index < 0] = theirs[index < 0]
    return tokens


class _SlotCache:
    """Counterpart of `FoldCache` for one layer and the state policy SLOTS (a state slot for each token of a step)."""

    def __init__(
        self, layout: CacheLayout, mixers: Sequence[Mixer], *, num_slots: int, num_rows: int, chunk_size: int,
        prompt_scan: PromptScan,
    ) -> None:  # fmt: skip
        self.layout, (self.mixer,) = layout, mixers
        self.device = self.mixer.conv_weight.device
        self.chunker = PrefillChunker(layout, chunk_size, prompt_scan)
        self.pages = StatePool([self.mixer.spec], num_slots, self.device)
        self.states = RequestStates(num_rows, self.device)
        self.admit = self.states.admit

    def step(self, table: Tensor, rows: list[int], computed: Tensor, lens: list[int], first: int) -> SimpleNamespace:
        """Plan a step of `first` decodes, then prefills, as `FoldCache.step`; return functions `mix` and `commit`."""
        request_row, counts = torch.tensor(rows, device=self.device), torch.tensor(lens, device=self.device)
        carried = self.states.gather(request_row)
        plan = plan_step(self.layout, table, computed, counts, carried.accepted, prev_col=carried.prev_col)
        meta = step_metadata(self.chunker, plan, table, request_row, computed, lens, first)
        if first < len(rows):
            check_aliases(meta.prefill_chunks, plan.ssm_read[first:])
        if first:
            check_aliases(meta.decodes())

        def mix(_index: int, channels: Tensor, *gates: Tensor) -> Tensor:
            return self.mixer.mix(channels, gates, MixerBatch.of(meta), self.pages.layer(0), None)

        def commit(accepted: Sequence[int]) -> Tensor:
            drafts = (counts - 1).index_fill_(0, torch.arange(first, len(rows), device=self.device), 0)
            stay = torch.tensor(list(accepted), device=self.device)
            done = plan_copy(self.layout, table, computed, counts, drafts, stay, plan)
            check_aliases(done)
            self.pages.copy(done)
            self.states.scatter(request_row, done.accepted, prev_col=done.prev_col)
            return computed + stay

        return SimpleNamespace(mix=mix, commit=commit)
