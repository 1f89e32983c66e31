"""`bateleur info`, `explain-acceptance` and `bench`: print a report as a table or as one JSON object."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bateleur.runner.assets import shipped_model
from bateleur.runner.bench.config import LatencyConfig, ServeBenchConfig, ThroughputConfig
from bateleur.runner.cli.console import name_in_errors, print_status, progress_messages, write_text
from bateleur.runner.cli.options import ENGINE_OPTIONS, check_num_threads, given_options


def info(args: argparse.Namespace) -> int:
    """Print parameters and memory of a checkpoint, or with --graphs which steps run on a CUDA graph."""
    print_status("loading torch")
    from bateleur.runner.diagnose.checkpoint_facts import checkpoint_table, describe_checkpoint
    from bateleur.runner.diagnose.graph_coverage import describe_graphs

    model, options = args.model or shipped_model(), given_options(args, ENGINE_OPTIONS)
    if args.graphs:
        coverage = describe_graphs(model, **options)
        return _print(coverage.as_dict(), coverage.table(), args)
    facts = describe_checkpoint(model, **options)
    return _print(facts, checkpoint_table(facts), args)


def explain_acceptance(args: argparse.Namespace) -> int:
    """Print why drafts of a head are rejected. Without a model, or with "auto", the shipped model is used."""
    print_status("loading torch")
    from bateleur.runner.diagnose.explain_acceptance import explain

    model = None if str(args.model) == "auto" else args.model
    options = given_options(args, {*ENGINE_OPTIONS, "max_tokens"} - {"draft"})
    with progress_messages("running the engine with the head, and the head alone; this takes minutes"):
        explanation = explain(model, args.draft, prompts=args.prompt, **options)
    return _print(explanation.as_dict(), explanation.table(), args)


def _print(facts: dict[str, Any], table: str, args: argparse.Namespace) -> int:
    write_text((json.dumps(facts) if args.json else table) + "\n")
    return 0


def bench(args: argparse.Namespace) -> int:
    """Run a benchmark and return the exit code: 1 if tokens differ or an engine does not answer."""
    try:
        result, table = (_serve if args.measure == "serve" else _offline)(args)
    except RuntimeError as error:
        from bateleur.runner.errors import Unmeasured  # imported late: it imports torch

        if not isinstance(error, Unmeasured):
            raise
        print_status(str(error))
        return 1
    text = json.dumps(result, indent=1)
    write_text(text + "\n" if args.json else table)  # before the file, which may not be writable
    output: Path | None = getattr(args, "output_json", None)
    if output is not None:
        with name_in_errors(output):
            Path(output).write_text(text + "\n")
    return int(any("fault" in row for row in result["results"]))


def _offline(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    kind: type[LatencyConfig | ThroughputConfig] = LatencyConfig if args.measure == "latency" else ThroughputConfig
    config, num_threads = kind(**given_options(args, kind)), check_num_threads(args)
    print_status("loading torch")
    from bateleur.runner.bench.offline import BenchTarget, bench_latency, bench_throughput, offline_table

    model, options = args.model or shipped_model(), given_options(args, ENGINE_OPTIONS)
    target = BenchTarget(model, options, num_threads, print_status)
    if isinstance(config, LatencyConfig):
        result = bench_latency(target, config, _command())
    else:
        result = bench_throughput(target, config, _command())
    return result, offline_table(result)


def _serve(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    config = ServeBenchConfig(**given_options(args, ServeBenchConfig))
    from bateleur.runner.bench.serve import bench_serve, serve_table

    model, options = args.model or shipped_model(), given_options(args, ENGINE_OPTIONS)
    result = bench_serve(model, config, options, print_status, _command())
    return result, serve_table(result)


def _command() -> str:
    return " ".join(["bateleur", *sys.argv[1:]])
