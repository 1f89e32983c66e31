"""What steps cost, as a page of documentation: ``python tools/performance_page.py > docs/performance.md``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
from performance.claims import claims_section
from performance.kernels import kernel_section
from performance.measured import measured_section
from performance.model import launch_section, step_section

_HEAD = """\
# Costs of a step

Written by `python tools/performance_page.py > docs/performance.md` from `benchmarks/results/*.json` and from
`bateleur.runner.diagnose.step_costs`; do not edit. `python tools/pictures.py` draws the pictures.

"Measured" and "Claims" were measured on CPUs, with the command next to each table. "Launches" counts operators.
"Kernels" was compiled. Everything else is arithmetic. Nothing here was measured on a GPU: [gpu.md](gpu.md) has what
was, and how to do it. `bateleur bench latency` prints the same bound next to the measured time, for any checkpoint and
device.

"""


def performance_page() -> str:
    """The page, in Markdown."""
    sections = [measured_section(), claims_section(), step_section(), launch_section(), kernel_section()]
    return _HEAD + "\n".join(sections)


if __name__ == "__main__":
    print(performance_page(), end="")
