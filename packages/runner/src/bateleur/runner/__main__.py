"""Runs the `bateleur` command as `python -m bateleur.runner`."""

import sys

from bateleur.runner.cli import main

if __name__ == "__main__":
    sys.exit(main())
