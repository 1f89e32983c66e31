"""A symbolic oracle for the planners: a state is the sequence of its tokens.

Requests with random prompts, parts of them, drafts, acceptance, preemptions and prefix hits run through the planners,
`PrefillChunker` and `MambaStateManager`, and through operators that do to token sequences what the real ones do to
states, for each `Kind` of state that recurrences have. Every
state, every conv window that a step starts from, and every published page is compared with what the tokens say.
`python packages/mamba/tests/oracle --runs 1000000` does it a million times. Other rules, or deliberately broken ones,
are members of a subclass of `Planner`.
"""

from oracle.lanes import Case, Kind
from oracle.planner import Planner
from oracle.run import Report, cases, run, simulate
from oracle.simulation import Simulation

__all__ = ["Case", "Kind", "Planner", "Report", "Simulation", "cases", "run", "simulate"]
