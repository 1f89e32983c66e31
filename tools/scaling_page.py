"""What ranks and replicas cost, as a page of documentation: ``python tools/scaling_page.py > docs/scaling.md``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
from performance.fleet import fleet_section
from performance.handover import handover_section
from performance.ranks import ranks_section

_HEAD = """\
# Costs of several devices

Written by `python tools/scaling_page.py > docs/scaling.md`; do not edit. Sections marked "by arithmetic" are computed
from published model sizes and data sheets. Sections marked "simulated" run the project's scheduler and prefix caches
with step times from a table of measured steps. Nothing here was measured on a GPU or on several machines.

"""


def scaling_page() -> str:
    """The page, in Markdown."""
    return _HEAD + "\n".join([ranks_section(), handover_section(), fleet_section()])


if __name__ == "__main__":
    print(scaling_page(), end="")
