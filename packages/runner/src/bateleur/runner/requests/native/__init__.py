"""What steps do to rows of the request table, in C where there is a compiler: `settle.c`, and names of what they fill:
`names.c`."""

from __future__ import annotations

from bateleur.metadata.native import finder

kernel = finder(
    __file__,
    {
        "settle.c": {
            "cover_rows": "=" + "pppl" + "ll",
            "advance_rows": "pppll",
            "assign_rows": "=" + "pppll",
            "useful_rows": "pppl" + "lll",
            "settle_rows": "=" + "ppppl" + "pl",
            "read_rows": "=" + "pppl" + "ll",
        },
        "names.c": {"name_blocks": "plllppl", "name_rows": "=" + "pppl"},
    },
)
