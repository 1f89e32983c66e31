"""Results as lines for a terminal."""

from __future__ import annotations

from typing import Any

_COLUMNS = {
    "first_token_ms": ("first token", "{:.1f} ms"),
    "per_token_ms": ("per token", "{:.2f} ms"),
    "cpu_per_token_ms": ("of CPUs", "{:.2f} ms"),
    "tokens_per_s": ("tokens/s", "{:,.1f}"),
    "requests_per_s": ("requests/s", "{:.2f}"),
    "of_bound": ("of bound", "{:.0%}"),
    "ratio": ("ours is", "{:.2f}x"),
}


def offline_table(result: dict[str, Any]) -> str:
    """Of `latency` or `throughput`: which tokens came first, then how fast, then the bound."""
    step, rows = result["step"], result["results"]
    columns = [name for name in _COLUMNS if any(name in row for row in rows)]
    heads = "".join(f"{_COLUMNS[name][0]:>14}" for name in columns)
    lines = [f"{'':<14}{'same tokens':>12}{heads}"]
    for row in rows:
        same = "{} of {}".format(*row["equal_requests"])
        cells = "".join(
            f"{_COLUMNS[name][1].format(row[name]) if name in row else '':>14}" for name in columns
        )
        lines.append(f"{row['engine']:<14}{same:>12}{row.get('fault') or cells}")
    lines += [f"{name:<14}left out: {why}" for name, why in result["skipped"].items()]
    size, moved = f"{step['batch']} at {step['context']:,} tokens", f"{step['bytes'] / 1e6:,.1f} MB"
    read = f"{step['read_GB_per_s']:.1f} GB/s takes {step['bound_us']:,.0f} us"
    lines.append(f"bound: a step of {size} moves {moved}, for which a plain read at {read}")
    return "\n".join(lines) + "\n"
