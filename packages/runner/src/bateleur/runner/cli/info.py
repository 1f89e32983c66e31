"""`bateleur info`."""

from __future__ import annotations

import argparse
import dataclasses
import json

from bateleur.runner.assets import shipped_model
from bateleur.runner.diagnose.costs import describe
from bateleur.runner.diagnose.graph_coverage import describe_graphs


def run(args: argparse.Namespace) -> int:
    """Print what the checkpoint is and costs, or which steps would run on a graph."""
    model = args.model or shipped_model()
    if args.graphs:
        graphs = describe_graphs(
            model,
            cudagraph_mode=args.cudagraph_mode,
            cudagraph_backend=args.cudagraph_backend,
            cudagraph_capture_sizes=args.cudagraph_capture_sizes,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_model_len=args.max_model_len,
        )
        print(json.dumps(graphs.as_dict()) if args.json else graphs.table())
        return 0
    facts = describe(
        model,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        block_size=args.block_size,
        mamba_block_size=args.mamba_block_size,
    )
    print(json.dumps(dataclasses.asdict(facts)) if args.json else facts.table())
    return 0
