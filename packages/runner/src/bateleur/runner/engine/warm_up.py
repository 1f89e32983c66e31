"""What steps launch behind their forward pass, launched before the first of them, so that none loads a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from bateleur.cudagraph import Phase, StagedBatch
from bateleur.eagle import EagleSpeculator
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.model_runner.step_graphs import StepGraphs
from bateleur.runner.model_runner.step_producer import StepProducer
from bateleur.runner.models import HybridDecoder, StepContext
from bateleur.runner.sampling.rejection_sampler import RejectionSampler


def warm_up(
    model: HybridDecoder,
    graphs: StepGraphs,
    producer: StepProducer,
    verifier: RejectionSampler,
    limits: EngineLimits,
    drafter: EagleSpeculator | None,
) -> None:
    """Verify and commit a dummy step of every size that decodes on a graph, and of some that no graph holds.

    A capture runs the forward pass, the planners of its metadata and the drafter; what no graph holds runs all of these
    here. What comes behind has tiles that depend on the number of rows and of drafts as well. Nothing remains of it.
    """
    with torch.inference_mode():
        model.warm_up(limits.max_num_batched_tokens)
        for num_reqs, query_len, staged in _steps(model, graphs, producer, limits, drafter):
            num_valid = verifier.rehearse(staged.state.batch, num_reqs, query_len)
            producer.model_state.commit(staged.state, num_valid)


def run_largest(
    graphs: StepGraphs,
    producer: StepProducer,
    verifier: RejectionSampler,
    limits: EngineLimits,
    drafter: EagleSpeculator | None,
) -> None:
    """Run the steps that allocate most: prompts with `max_num_batched_tokens` tokens, then the decode of every row with
    all its drafts, up to verification. No request or cache is changed.
    """
    with torch.inference_mode():
        prompts = producer.stage_prompts(limits.max_num_batched_tokens)
        graphs.run(prompts)
        producer.model_state.commit(prompts.state, None)
        if drafter is not None:
            drafter.warm_up(prompts.state)
        decodes = producer.stage_decodes(limits.max_num_seqs, limits.max_query_len)
        graphs.run(decodes)
        num_valid = verifier.rehearse(decodes.state.batch, limits.max_num_seqs, limits.max_query_len)
        producer.model_state.commit(decodes.state, num_valid)


def _steps(
    model: HybridDecoder,
    graphs: StepGraphs,
    producer: StepProducer,
    limits: EngineLimits,
    drafter: EagleSpeculator | None,
) -> Iterator[tuple[int, int, StagedBatch[StepContext]]]:
    """Rows, the tokens of each, and the step, which has run unless that is up to captures."""
    ready = () if graphs.manager is None else graphs.manager.ready
    sizes = {(key.num_reqs, key.uniform_query_len or 1): key for key in ready if key.num_reqs is not None}
    for (num_reqs, query_len), key in sizes.items():
        yield num_reqs, query_len, producer.stage(key, Phase.WARMUP)
    if model.device.type == "cpu":  # which has nothing to load
        return
    # Rows whose drafts are fewer, near their end or beside prompts, are in no graph.
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
