"""How a fleet serves conversations by who gets which request: what `benchmarks/fleet.py` simulated, as a table."""

from __future__ import annotations

from performance.pictures import PICTURES
from performance.results import result, source, table

HEAD = """\
## Routing of requests, simulated

![{title}](pictures/fleet.svg)

{says} Conversations share system prompts of unequal popularity, and each turn's prompt begins with the earlier turns.
For {seconds:g} seconds, {sessions:g} conversations per replica begin each second. A replica has memory for {tokens:,}
tokens of keys and values, and {pages} state pages. Step times are those of {costs}; on a GPU they differ, and so does
the load at which queues form. ({source})

"Hits" is the share of prompt tokens found in the cache. "First token" is the time from the arrival of a request to its
first token. "Busiest" is the busy time of the busiest replica, divided by the mean of all.

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
