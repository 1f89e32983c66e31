"""What ranks and replicas cost, as a page of documentation: ``python tools/scaling_page.py > docs/scaling.md``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
from performance.fleet import fleet_section
from performance.handover import handover_section
from performance.ranks import ranks_section

_HEAD = """\
# Beyond one device

Written by `python tools/scaling_page.py > docs/scaling.md`; do not edit. **Arithmetic** is what stands under "by
arithmetic", on the sizes that are published and on data sheets. **Simulated** is what stands under "simulated": the
project's own scheduler and prefix caches, whose steps take as long as a table of measured steps says. Nothing here has
been measured on a GPU or on more than one machine.

"""


def scaling_page() -> str:
    """The page, in Markdown."""
    return _HEAD + "\n".join([ranks_section(), handover_section(), fleet_section()])


if __name__ == "__main__":
    print(scaling_page(), end="")
