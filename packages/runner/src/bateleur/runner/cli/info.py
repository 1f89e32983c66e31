"""`bateleur info`."""

from __future__ import annotations

import argparse
import dataclasses
import json

from bateleur.runner.info import describe
from bateleur.runner.llm import shipped_model


def run(args: argparse.Namespace) -> int:
    """Print what the checkpoint is and costs."""
    facts = describe(args.model or shipped_model(), dtype=args.dtype)
    print(json.dumps(dataclasses.asdict(facts)) if args.json else facts.table())
    return 0
