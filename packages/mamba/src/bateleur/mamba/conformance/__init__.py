"""Checks that a recurrence fulfils the contract of `bateleur.mamba.Recurrence`.

Its operators are compared with a function that processes one token.
"""

from bateleur.mamba.conformance.aliases import check_aliases
from bateleur.mamba.conformance.check import RecurrenceReport, check_recurrence
from bateleur.metadata.conformance.errors import ConformanceError

__all__ = ["ConformanceError", "RecurrenceReport", "check_aliases", "check_recurrence"]
