"""`bateleur bench`: what is given is checked, engines take turns, and figures are printed."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bateleur.runner.assets import shipped_model
from bateleur.runner.bench.config import LatencyConfig, ServeBenchConfig, ThroughputConfig
from bateleur.runner.cli.console import naming, say, write_text
from bateleur.runner.cli.options import ENGINE, given
from bateleur.runner.utils.options import options_of

if TYPE_CHECKING:
    from bateleur.runner.bench.offline import Place


def run(args: argparse.Namespace) -> int:
    """Measure, print and write. 1 if an engine gave other tokens than it should have, or did not answer."""
    try:
        result, table = {"latency": _latency, "throughput": _throughput, "serve": _serve}[args.measure](args)
    except RuntimeError as error:
        from bateleur.runner.errors import Unmeasured  # which imports torch

        if not isinstance(error, Unmeasured):
            raise
        say(str(error))
        return 1
    text = json.dumps(result, indent=1)
    write_text(text + "\n" if args.json else table)  # first, for a file may not be writable
    output: Path | None = getattr(args, "output_json", None)
    if output is not None:
        with naming(output):
            Path(output).write_text(text + "\n")
    return int(any("fault" in row for row in result["results"]))


def _latency(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    config = LatencyConfig(**_options(args, LatencyConfig))
    place = _place(args)
    from bateleur.runner.bench.offline import latency
    from bateleur.runner.bench.tables import offline_table

    result = latency(place, config, _command())
    return result, offline_table(result)


def _throughput(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    config = ThroughputConfig(**_options(args, ThroughputConfig))
    place = _place(args)
    from bateleur.runner.bench.offline import throughput
    from bateleur.runner.bench.tables import offline_table

    result = throughput(place, config, _command())
    return result, offline_table(result)


def _serve(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    config = ServeBenchConfig(**_options(args, ServeBenchConfig))
    from bateleur.runner.bench.serve import serve_table, serving

    result = serving(args.model or shipped_model(), config, given(args, ENGINE), say, _command())
    return result, serve_table(result)


def _place(args: argparse.Namespace) -> Place:
    if getattr(args, "num_threads", 1) < 1:
        raise ValueError(f"--num-threads is {args.num_threads}; it must be at least 1")
    say("loading torch")
    from bateleur.runner.bench.offline import Place

    model = args.model or shipped_model()
    return Place(model, given(args, ENGINE), getattr(args, "num_threads", None), say)


def _options(args: argparse.Namespace, config: type) -> dict[str, Any]:
    return given(args, [each.name for each in options_of(config)])


def _command() -> str:
    return " ".join(["bateleur", *sys.argv[1:]])
