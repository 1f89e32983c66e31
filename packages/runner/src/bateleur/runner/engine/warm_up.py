"""Warm-up of the kernels that steps launch after their forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from bateleur.cudagraph import Phase, StagedBatch
from bateleur.eagle import EagleSpeculator
from bateleur.metadata import CommonAttentionMetadata
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.model_runner.graph_dispatcher import GraphDispatcher
from bateleur.runner.model_runner.step_producer import StepProducer
from bateleur.runner.models import HybridDecoder, StepContext
from bateleur.runner.sampling.rejection_sampler import RejectionSampler
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.scheduling.step_batch import StepBatch


def warm_up(
    model: HybridDecoder,
    graphs: GraphDispatcher,
    producer: StepProducer,
    sampler: RejectionSampler,
    limits: EngineLimits,
    drafter: EagleSpeculator | None,
) -> None:
    """Sample, and commit Mamba states, in a dummy decode step of every graph size and of some sizes without a graph.

    For sizes in graphs, captures have already run the forward pass, the planners and the drafter. For sizes without a
    graph these run here, too.
    """
    with torch.inference_mode():
        model.warm_up(limits.max_num_batched_tokens)
        for num_reqs, query_len, staged in _steps(model, graphs, producer, limits, drafter):
            num_valid = _sample(sampler, staged.state.batch, num_reqs, query_len)
            producer.model_state.commit(staged.state, num_valid)


def run_largest(
    graphs: GraphDispatcher,
    producer: StepProducer,
    sampler: RejectionSampler,
    limits: EngineLimits,
    drafter: EagleSpeculator | None,
) -> None:
    """Run the steps that allocate most memory. No request or cache is changed.

    These are prompts with `max_num_batched_tokens` tokens, then the decode of every request with all its drafts, up to
    verification.
    """
    with torch.inference_mode():
        prompts = producer.stage_prompts(limits.max_num_batched_tokens)
        graphs.run(prompts)
        producer.model_state.commit(prompts.state, None)
        if drafter is not None:
            drafter.warm_up(prompts.state)
        decodes = producer.stage_decodes(limits.max_num_seqs, limits.max_query_len)
        graphs.run(decodes)
        num_valid = _sample(sampler, decodes.state.batch, limits.max_num_seqs, limits.max_query_len)
        producer.model_state.commit(decodes.state, num_valid)


def _steps(
    model: HybridDecoder,
    graphs: GraphDispatcher,
    producer: StepProducer,
    limits: EngineLimits,
    drafter: EagleSpeculator | None,
) -> Iterator[tuple[int, int, StagedBatch[StepContext]]]:
    """Yield number of requests, query length and staged step of each size. Steps without a graph have already run."""
    ready = () if graphs.manager is None else graphs.manager.ready
    sizes = {(key.num_reqs, key.uniform_query_len or 1): key for key in ready if key.num_reqs is not None}
    for (num_reqs, query_len), key in sizes.items():
        yield num_reqs, query_len, producer.stage(key, Phase.WARMUP)
    if model.device.type == "cpu":  # no kernels to load
        return
    # Rows with fewer drafts, near their end or next to prompts, are in no graph.
    eager = {(1, length) for length in range(1, limits.max_query_len + 1)} - sizes.keys()
    if not sizes:
        powers = [1 << i for i in range(limits.max_num_seqs.bit_length())]
        eager |= {*product(powers, (1, limits.max_query_len))}
    for num_reqs, query_len in sorted(eager):
        staged = producer.stage_decodes(num_reqs, query_len)
        graphs.run(staged)
        if drafter is not None:
            drafter.warm_up(staged.state)
        yield num_reqs, query_len, staged


def _sample(
    sampler: RejectionSampler, metadata: CommonAttentionMetadata, num_reqs: int, query_len: int
) -> Tensor | None:
    """Verify dummy rows with `query_len` tokens each, with each kind of sampling parameters; returns
    `SampledStep.num_valid`.
    """
    rows, query_lens, model = np.arange(num_reqs), np.full(num_reqs, query_len, np.int32), sampler.model
    shape = (num_reqs * query_len, model.spec.hidden_size)
    hidden_TD = torch.zeros(shape, dtype=model.dtype, device=model.device)
    # Kernels of greedy rows differ from those of sampled ones, and so do kernels for truncation and penalties.
    for temperature, top_p, penalty in ((0.0, 1.0, 1.0), *product((1.0,), (0.9, 1.0), (1.1, 1.0))):
        params = SamplingParams(temperature=temperature, top_p=top_p)
        for row in range(num_reqs):
            ruled = params if row else replace(params, repetition_penalty=penalty)
            sampler.sampler.admit(row, ruled, 0, ())
        batch = StepBatch([], rows, query_lens, num_reqs, np.ones(num_reqs, np.bool_), model.device)
        sampler.stage(batch)
        num_valid = sampler.verify(batch, metadata, hidden_TD).num_valid
    for row in range(num_reqs):
        sampler.sampler.release(row)
    sampler.sampler.forget_counts()
    sampler.rows.next_ids.zero_()
    sampler.rows.clear()
    return num_valid
