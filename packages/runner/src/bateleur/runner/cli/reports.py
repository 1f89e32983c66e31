"""`bateleur info` and `bateleur explain-acceptance`: what was found out, as a table or one JSON object."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from bateleur.runner.assets import shipped_model
from bateleur.runner.cli.console import say, waiting_for, write_text
from bateleur.runner.cli.options import ENGINE, given


def info(args: argparse.Namespace) -> int:
    """Print what the checkpoint is and costs, or which steps would run on a graph."""
    say("loading torch")
    from bateleur.runner.diagnose.costs import describe
    from bateleur.runner.diagnose.graph_coverage import describe_graphs

    model, options = args.model or shipped_model(), given(args, ENGINE)
    if args.graphs:
        graphs = describe_graphs(model, **options)
        write_text((json.dumps(graphs.as_dict()) if args.json else graphs.table()) + "\n")
    else:
        facts = describe(model, **options)
        write_text((json.dumps(asdict(facts)) if args.json else facts.table()) + "\n")
    return 0


def explain_acceptance(args: argparse.Namespace) -> int:
    """Print how the drafts of a head fare, and why. The model "auto", or none, is the shipped one."""
    say("loading torch")
    from bateleur.runner.diagnose.explain_acceptance import explain

    model = None if str(args.model) == "auto" else args.model
    options = given(args, {*ENGINE, "max_tokens"} - {"draft"})
    with waiting_for("running the engine with the head, and the head alone, which takes minutes"):
        found = explain(model, args.draft, prompts=args.prompt, **options)
    write_text((json.dumps(found.as_dict()) if args.json else found.table()) + "\n")
    return 0
