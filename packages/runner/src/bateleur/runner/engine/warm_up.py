"""What follows a forward pass, run once for each size of a graph: so that no step has to load a kernel for it."""

from __future__ import annotations

import torch

from bateleur.cudagraph import BatchExecutionDescriptor, Phase
from bateleur.runner.model_runner.graph_dispatcher import StepGraphs
from bateleur.runner.model_runner.step_producer import StepProducer
from bateleur.runner.sampling.rejection_sampler import RejectionSampler


def warm_up(graphs: StepGraphs, producer: StepProducer, verifier: RejectionSampler) -> None:
    """Verify and commit a dummy step of every size that decodes on a graph; nothing remains of it.

    A capture runs the forward pass, the planners of its metadata and the drafter. What comes behind has tiles that
    depend on the number of rows and of drafts as well. For an engine without requests.
    """
    sizes: dict[tuple[int, int], BatchExecutionDescriptor] = {}
    for key in () if graphs.manager is None else graphs.manager.ready:
        if key.num_reqs is not None:
            sizes.setdefault((key.num_reqs, key.uniform_query_len or 1), key)
    with torch.inference_mode():
        for (num_reqs, query_len), key in sizes.items():
            context = producer.stage(key, Phase.WARMUP).state
            producer.model_state.commit(context, verifier.rehearse(context.batch, num_reqs, query_len))
