"""`python -m bateleur.runner` is the `bateleur` command."""

import sys

from bateleur.runner.cli import main

if __name__ == "__main__":
    sys.exit(main())
