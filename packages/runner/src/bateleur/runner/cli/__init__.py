"""The `bateleur` command."""

from bateleur.runner.cli.main import main

__all__ = ["main"]
