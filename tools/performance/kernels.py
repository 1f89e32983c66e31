"""What the kernels of a step take of a Hopper GPU, as a table: compiled, and by arithmetic."""

from __future__ import annotations

from performance.results import result, source, table

KERNELS = """\
## Kernels

The kernels of attention and of layers (those of recurrences are left out), compiled for sm_90 as a launch would choose
them ({source}). Registers, spilled bytes and shared memory are ptxas's; bytes are what must move at least, in bfloat16;
how many blocks of threads a multiprocessor holds at once follows from these, and so does what limits them. "For" is
how many of torch's operators a launch does the work of. Nothing here is a time.

"""


def kernel_section() -> str:
    """The section, a row for each launch that does something."""
    rows = [
        [
            each["kernel"],
            each["case"],
            str(each["operators"]),
            f"{each['programs']:,}",
            f"{each['bytes'] / 1e6:,.2f}",
            f"{each['registers']}, {each['spilled']}",
            f"{each['shared_bytes']:,}",
            f"{each['blocks_per_sm']} ({each['limit']})",
        ]
        for each in result("kernels-sm90")["rows"]
        if each["programs"]
    ]
    heads = [
        "kernel",
        "case",
        "for",
        "programs",
        "MB",
        "registers, spilled",
        "shared bytes",
        "blocks held (limit)",
    ]
    return KERNELS.format(source=source("kernels-sm90")) + table(heads, rows)
