"""What was measured, in tables and pictures."""

from __future__ import annotations

from performance.pictures import MEASURED
from performance.results import result, source, table


def measured_section() -> str:
    """The section: each picture, and beside it where its figures come from."""
    parts = ["## Measured\n"]
    for name, picture in MEASURED.items():
        sources = "\n".join(f"  * {source(each)}" for each in picture.sources)
        parts.append(f"### {picture.title}\n\n![{picture.title}](pictures/{name}.svg)\n\n{picture.says}\n\n{sources}\n")
    return "\n".join(parts) + "\n" + _start()


def _start() -> str:
    record = result("start-cpu")
    rows = [
        [row["case"], f"{row['cpu_s']:.2f}", f"{row['wall_s']:.2f}", f"{row['ratio_cpu']:.2f}"]
        for row in record["results"]
    ]
    heads = ["process", "CPU seconds", "wall seconds", "of `import torch`"]
    return f"### Start-up\n\nMedians of processes that take turns ({source('start-cpu')}).\n\n" + table(heads, rows)
