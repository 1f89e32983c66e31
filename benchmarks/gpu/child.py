"""One step in a process of its own: `python -m benchmarks.gpu.child STEP[:CASE] [--quick]`, from the project's root.

The runner starts it; started by hand it prints its results.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from importlib import import_module

from .plan import make_importable
from .record import DEADLINE, Record

MODULES = {"compile": "start", "drafts": "decode"}
"""Steps that share a module."""
ENGINES = ("tokens", "compile", "start", "decode", "prompts", "drafts")
"""Steps that run engines, as a user does: outside of inference mode."""


def main() -> None:
    """Import the step's module and run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("step")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    make_importable()
    import torch

    from .job import Job

    step, _, case = options.step.partition(":")
    cuda = torch.cuda.is_available()
    job = Job(
        step=step,
        case=case,
        quick=options.quick or not cuda,
        device=torch.device("cuda" if cuda else "cpu"),
        deadline=float(os.environ.get(DEADLINE, "inf")),
        record=Record.to_runner(),
    )
    torch.manual_seed(0)
    with nullcontext() if step in ENGINES else torch.inference_mode():
        import_module(f".steps.{MODULES.get(step, step)}", __package__).run(job)


if __name__ == "__main__":
    main()
