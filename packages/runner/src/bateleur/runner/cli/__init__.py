"""The `bateleur` command: `main` runs a subcommand and maps errors to exit codes."""

import sys
from collections.abc import Sequence

from bateleur.runner.cli import generate, reports, serve
from bateleur.runner.cli.console import announcing_compilation, discard_stdout, name_in_errors, print_status
from bateleur.runner.cli.options import build_parser

__all__ = ["main"]
_COMMANDS = {
    "batch": generate.run,
    "bench": reports.bench,
    "explain-acceptance": reports.explain_acceptance,
    "generate": generate.run,
    "info": reports.info,
    "serve": serve.run,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0: success. 1: a request failed. 2: wrong arguments, or a file that cannot be read or written. 130: Ctrl-C. 141:
    closed pipe. Any other exception is a bug and keeps its traceback.
    """
    try:
        return _run(argv)
    except BrokenPipeError:
        discard_stdout()
        return 141
    except (ValueError, OSError) as error:
        discard_stdout()
        print_status(str(error))
        return 2
    except KeyboardInterrupt as interrupt:
        print(file=sys.stderr)
        print_status("; ".join(["interrupted", *map(str, interrupt.args)]))
        return 130


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = build_parser().parse_args(argv)
        with announcing_compilation():
            return _COMMANDS[args.command](args)
    finally:
        with name_in_errors("stdout"):
            sys.stdout.flush()
