"""The `bateleur` command: which part of it runs, and how it ends."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bateleur.runner.cli import bench, generate, reports, serve
from bateleur.runner.cli.console import leave_stdout, naming, say
from bateleur.runner.cli.options import build_parser

_COMMANDS = {
    "batch": generate.batch,
    "bench": bench.run,
    "explain-acceptance": reports.explain_acceptance,
    "generate": generate.run,
    "info": reports.info,
    "serve": serve.run,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0 if all went well, 1 if a request failed, 2 for a wrong call or a file that can't be read or written; 130 and 141
    after Ctrl-C and a closed pipe, as shells have it. A failure of any other kind is ours, and keeps its traceback.
    """
    try:
        return _run(argv)
    except BrokenPipeError:
        leave_stdout()
        return 141
    except (ValueError, OSError) as error:
        leave_stdout()
        say(str(error))
        return 2
    except KeyboardInterrupt as interrupt:
        print(file=sys.stderr)
        say("; ".join(["interrupted", *map(str, interrupt.args)]))
        return 130


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = build_parser().parse_args(argv)
        return _COMMANDS[args.command](args)
    finally:
        with naming("stdout"):
            sys.stdout.flush()
