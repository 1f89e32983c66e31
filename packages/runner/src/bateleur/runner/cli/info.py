"""`bateleur info`."""

from __future__ import annotations

import argparse
import dataclasses
import json

from bateleur.runner.assets import shipped_model
from bateleur.runner.cli.console import say, write_text
from bateleur.runner.cli.options import ENGINE, given


def run(args: argparse.Namespace) -> int:
    """Print what the checkpoint is and costs, or which steps would run on a graph."""
    say("loading torch")
    from bateleur.runner.diagnose.costs import describe
    from bateleur.runner.diagnose.graph_coverage import describe_graphs

    model, options = args.model or shipped_model(), given(args, ENGINE)
    if args.graphs:
        graphs = describe_graphs(model, **options)
        text = json.dumps(graphs.as_dict()) if args.json else graphs.table()
    else:
        facts = describe(model, **options)
        text = json.dumps(dataclasses.asdict(facts)) if args.json else facts.table()
    write_text(text + "\n")
    return 0
