"""`bateleur explain-acceptance`."""

from __future__ import annotations

import argparse
import json

from bateleur.runner.cli.console import say, waiting_for, write_text
from bateleur.runner.cli.options import ENGINE, given

_PASSED_ON = {*ENGINE, "max_tokens"} - {"draft"}


def run(args: argparse.Namespace) -> int:
    """Print how the drafts of a head fare, and why. The model "auto", or none, is the shipped one."""
    say("loading torch")
    from bateleur.runner.diagnose.explain_acceptance import explain

    model = None if str(args.model) == "auto" else args.model
    with waiting_for("running the engine with the head, and the head alone, which takes minutes"):
        found = explain(model, args.draft, prompts=args.prompt, **given(args, _PASSED_ON))
    write_text((json.dumps(found.as_dict()) if args.json else found.table()) + "\n")
    return 0
