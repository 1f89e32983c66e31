"""Documentation page of the field table: ``python tools/fields_page.py > docs/fields.md``."""

from __future__ import annotations

from bateleur.metadata import FIELDS, Field, LeadingDim, Pad

_SHAPES = {
    LeadingDim.REQS: "(R,)",
    LeadingDim.REQS_PLUS_1: "(R + 1,)",
    LeadingDim.TOKENS: "(T,)",
    LeadingDim.REQS_BY_BLOCKS: "(R, max_blocks)",
}

_PADS = {
    Pad.REPEAT_LAST: "the token count (the last real entry)",
    Pad.BUILDER: "`seq_len_fill` of the builders, 0 or 1",
}

_HEAD = """\
# Fields of a batch

Written by `python tools/fields_page.py > docs/fields.md` from `bateleur.metadata.FIELDS`; do not edit.

R rows (requests) and T tokens, padding included. Device fields are on the device of the kernels, at fixed addresses.
Host fields are in host memory. After each `InputBuffers.stage` and `dummy`, all entries after the real ones have the
padding value.

| field | shape | dtype | memory | padding | meaning | used by |
|---|---|---|---|---|---|---|
"""

_TAIL = """
`seq_lens_cpu_upper_bound` and `seq_lens_cpu_exact` are `batch.seq_len_bound.upper` and `batch.seq_len_bound.exact`.
`block_tables` and `slot_mappings` hold one tensor for each KV-cache group.
"""


def fields_page() -> str:
    """Return the page in Markdown: one line for each field, in declaration order."""
    return _HEAD + "".join(_line(field) for field in FIELDS.values()) + _TAIL


def _line(field: Field) -> str:
    dtype = str(field.dtype).removeprefix("torch.")
    home = "host, numpy" if field.bound_attr else "host" if field.on_host else "device"
    shape = _SHAPES[field.leading_dim] + (" per group" if field.per_group else "")
    pad = _PADS[field.pad] if isinstance(field.pad, Pad) else str(field.pad)
    cells = (f"`{field.name}`", shape, dtype, home, pad, field.doc, field.used_by)
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    print(fields_page(), end="")
