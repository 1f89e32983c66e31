"""What steps do to rows of the request table, in C where there is a compiler: `settle.c`, and names of what they fill:
`names.c`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from bateleur.metadata.native import Kernel, kernels, missing

_FILES = {
    "settle.c": (
        ("cover_rows", "=" + "pppl" + "ll"),
        ("advance_rows", "pppll"),
        ("settle_rows", "=" + "plppplplpp"),
        ("read_rows", "=" + "pppl" + "llpl" + "ppp"),
    ),
    "names.c": (("name_rows", "=" + "plppp" + "lll" + "plp" + "lpp"),),
}


@cache
def kernel(name: str) -> Kernel | None:
    """A function of one of these files, if there is a compiler."""
    if missing() is not None:
        return None
    file = next(file for file, functions in _FILES.items() if name in dict(functions))
    return kernels(Path(__file__).parent / file, _FILES[file])[name]
