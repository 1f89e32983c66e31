"""How a fleet serves conversations by who gets which request: what `benchmarks/fleet.py` simulated, as a table."""

from __future__ import annotations

from performance.pictures import PICTURES
from performance.results import result, source, table

HEAD = """\
## Who gets a request, simulated

![{title}](pictures/fleet.svg)

{says} Conversations share system prompts of unequal popularity, and every turn's prompt begins with all that was said
before; {sessions:g} begin for each replica in a second, whatever the number of replicas, for {seconds:g} seconds. A
replica has {tokens:,} tokens of keys and values and {pages} pages of states. Seconds are those of {costs}: a GPU's are
others, and so is the load at which queues begin. ({source})

"Hits" are cached tokens of all that were asked for, "first token" the time from a request's arrival to its first token,
and "busiest" how long the busiest replica computed, in averages of all.

"""


def fleet_section() -> str:
    """The section: a picture, and a row for each number of replicas and way of routing."""
    record, picture = result("fleet-simulated"), PICTURES["fleet"]
    rows = [
        [
            f"{row['replicas']:,}",
            row["router"],
            f"{100 * row['hit_rate']:.1f} %",
            *(f"{row['first_token_ms'][name]:.0f} ms" for name in ("p50", "p99")),
            f"{row['busy_s']:.1f} s",
            f"{row['spread']:.2f}",
        ]
        for row in record["results"]
    ]
    head = HEAD.format(
        title=picture.title,
        says=picture.says,
        sessions=record["sessions_per_s"],
        seconds=record["seconds"],
        tokens=record["cache_tokens"],
        pages=record["state_pages"],
        costs=record["costs"],
        source=source("fleet-simulated"),
    )
    heads = ["replicas", "routing", "hits", "first token p50", "p99", "computed by each", "busiest"]
    return head + table(heads, rows)
