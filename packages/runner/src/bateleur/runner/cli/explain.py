"""`bateleur explain-acceptance`."""

from __future__ import annotations

import argparse
import json

from bateleur.runner.diagnose.explain_acceptance import explain


def run(args: argparse.Namespace) -> int:
    """Print how the drafts of a head fare, and why. The model "auto", or none, is the shipped one."""
    found = explain(
        None if args.model == "auto" else args.model,
        args.draft,
        prompts=args.prompt,
        num_speculative_tokens=args.num_speculative_tokens,
        max_tokens=args.max_tokens,
        device=args.device,
        dtype=args.dtype,
    )
    print(json.dumps(found.as_dict()) if args.json else found.table())
    return 0
