"""`bateleur info` and `bateleur explain-acceptance`: print a report as a table or as one JSON object."""

from __future__ import annotations

import argparse
import json

from bateleur.runner.assets import shipped_model
from bateleur.runner.cli.console import print_status, progress_messages, write_text
from bateleur.runner.cli.options import ENGINE_OPTIONS, given_options


def info(args: argparse.Namespace) -> int:
    """Print parameters and memory of a checkpoint, or with --graphs which steps run on a CUDA graph."""
    print_status("loading torch")
    from bateleur.runner.diagnose.checkpoint_facts import describe_checkpoint
    from bateleur.runner.diagnose.graph_coverage import describe_graphs

    describe_model = describe_graphs if args.graphs else describe_checkpoint
    facts = describe_model(args.model or shipped_model(), **given_options(args, ENGINE_OPTIONS))
    write_text((json.dumps(facts.as_dict()) if args.json else facts.table()) + "\n")
    return 0


def explain_acceptance(args: argparse.Namespace) -> int:
    """Print why drafts of a head are rejected. Without a model, or with "auto", the shipped model is used."""
    print_status("loading torch")
    from bateleur.runner.diagnose.explain_acceptance import explain

    model = None if str(args.model) == "auto" else args.model
    options = given_options(args, {*ENGINE_OPTIONS, "max_tokens"} - {"draft"})
    with progress_messages("running the engine with the head, and the head alone; this takes minutes"):
        explanation = explain(model, args.draft, prompts=args.prompt, **options)
    write_text((json.dumps(explanation.as_dict()) if args.json else explanation.table()) + "\n")
    return 0
