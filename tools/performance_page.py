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
# What steps cost

Written by `python tools/performance_page.py > docs/performance.md` from `benchmarks/results/*.json` and from
`bateleur.runner.diagnose.step_costs`; do not edit. The pictures are those of `python tools/pictures.py`.

**Measured** is what stands under "Measured" and "Claims": on CPUs, in runs whose command stands beside each table.
**Counted** are the operators under "Launches"; under "Kernels" registers and shared memory were compiled.
**Arithmetic** is all else there, and all that stands under "A decode step by arithmetic". Nothing here has been
measured on a GPU: [gpu.md](gpu.md) says how to, and `bateleur bench latency` prints the same bound beside the time of
any checkpoint on any device, with the bandwidth of a plain read.

"""


def performance_page() -> str:
    """The page, in Markdown."""
    sections = [measured_section(), claims_section(), step_section(), launch_section(), kernel_section()]
    return _HEAD + "\n".join(sections)


if __name__ == "__main__":
    print(performance_page(), end="")
