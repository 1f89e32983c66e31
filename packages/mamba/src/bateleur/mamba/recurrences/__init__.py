"""The recurrences that come with the package, a file of specification each."""

from bateleur.mamba.recurrences.mamba2 import Mamba2

__all__ = ["Mamba2"]
