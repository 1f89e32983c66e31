"""What the pictures show: numbers out of `benchmarks/results`, before anything is drawn."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from performance.results import result


@dataclass(frozen=True)
class Panel:
    """One pair of axes: a series is a name and a value for each place on the axis below."""

    title: str
    below: str
    left: str
    places: tuple[str, ...]
    series: dict[str, tuple[float, ...]]
    bars: bool = False
    log: bool = False
    line_at: float | None = None
    """A horizontal line to compare with."""
    dashes: tuple[str, ...] = ("-",)
    """Of lines, in turn; those of a colour follow each other."""


@dataclass(frozen=True)
class Picture:
    """Panels side by side. `says` is what is to be seen, `sources` the names of the results they are made of."""

    title: str
    says: str
    sources: tuple[str, ...]
    panels: Callable[[], tuple[Panel, ...]]

    def data(self) -> list[dict[str, Any]]:
        """All that is drawn, as plain data."""
        return [asdict(panel) for panel in self.panels()]


def _rows(rows: list[dict[str, Any]], **equal: Any) -> list[dict[str, Any]]:
    return [row for row in rows if all(row.get(name) == value for name, value in equal.items())]


def _column(rows: list[dict[str, Any]], name: str) -> tuple[float, ...]:
    return tuple(round(float(row[name]), 4) for row in rows)


def _throughput() -> tuple[Panel, ...]:
    ours = _rows(result("throughput-cpu")["throughput"], workload="decode")
    rival = result("rival-cpu")["results"]
    engines = ("bateleur", "transformers")
    return (
        Panel(
            "the shipped model beside transformers",
            "requests in the batch",
            "tokens/s",
            tuple(str(row["batch"]) for row in ours),
            {name: _column(ours, f"{name}_tokens_per_s") for name in engines},
            bars=True,
        ),
        Panel(
            "a NemotronH of 27 M parameters beside vLLM",
            "requests in the batch",
            "tokens/s",
            tuple(str(row["batch"]) for row in rival),
            {name: tuple(round(row["tokens_per_s"][name], 1) for row in rival) for name in rival[0]["tokens_per_s"]},
            bars=True,
        ),
    )


def _host() -> tuple[Panel, ...]:
    steps = [row for row in result("host-cpu")["steps"] if re.fullmatch(r"\d+ decodes?", row["case"])]
    columns = [name for name, value in steps[0].items() if name.endswith("_us") and isinstance(value, float)]
    engine = {name: each["steps"] for name, each in result("host-cpu")["engine"].items()}
    return (
        Panel(
            "staging and building a decode step",
            "running requests",
            "us a step",
            tuple(row["case"].split()[0] for row in steps),
            {name.removesuffix("_us"): _column(steps, name) for name in columns},
        ),
        Panel(
            "all that the engine's host does in a step",
            "running requests",
            "us a request",
            tuple(str(row["batch"]) for row in next(iter(engine.values()))),
            {name: _column(rows, "per_request") for name, rows in engine.items()},
            log=True,
        ),
    )


def _states() -> tuple[Panel, ...]:
    counted = result("recurrences-cpu")["counted"]
    models = list(dict.fromkeys(row["model"] for row in counted))
    chosen = [name for name in ("Nemotron-3-Nano-30B", "Qwen3.5-9B", "Kimi-Linear-48B") if name in models]

    def panel(title: str, left: str, of: Callable[[dict[str, Any], str], float]) -> Panel:
        drafts = tuple(str(row["drafts"]) for row in _rows(counted, model=chosen[0]))
        series = {
            f"{name}, {policy}": tuple(round(of(row, policy), 3) for row in _rows(counted, model=name))
            for name in chosen
            for policy in ("slots", "fold")
        }
        return Panel(title, "drafts a step", left, drafts, series, dashes=("--", "-"))

    return (
        panel("held by a running request", "MiB", lambda row, policy: row["request"][f"{policy}_none_MiB"]),
        panel("moved by a row and layer in a step", "MB", lambda row, policy: row[f"{policy}_step_MB"]),
    )


def _acceptance() -> tuple[Panel, ...]:
    record = result("speculative-cpu")
    rows = record["results"]
    heats = sorted({row["temperature"] for row in rows})
    batches = tuple(str(row["batch"]) for row in _rows(rows, temperature=heats[0]))

    def panel(title: str, left: str, name: str, line_at: float | None) -> Panel:
        series = {f"temperature {heat:g}": _column(_rows(rows, temperature=heat), name) for heat in heats}
        return Panel(title, "requests in the batch", left, batches, series, bars=True, line_at=line_at)

    drafts = record["num_speculative_tokens"]
    return (
        panel(f"tokens out of a verified row, {drafts} drafts", "tokens", "tokens_per_step", 1.0),
        panel("speed beside plain decoding, on a CPU, as many as pay", "ratio", "ratio_measured", 1.0),
    )


def _growth() -> tuple[Panel, ...]:
    record = result("growth-cpu")
    cached, waiting = record["cached"], record["waiting"]
    return (
        Panel(
            f"a lookup of {record['lookup_tokens']:,} cached tokens, and an eviction",
            "cached blocks",
            "us",
            tuple(f"{row['cached_blocks']:,}" for row in cached),
            {"lookup": _column(cached, "lookup_us"), "eviction": _column(cached, "evict_us")},
            log=True,
        ),
        Panel(
            "scheduling a step of 8 requests",
            "requests that wait",
            "us",
            tuple(f"{row['waiting']:,}" for row in waiting),
            {"schedule": _column(waiting, "schedule_us")},
            log=True,
        ),
    )


def _fleet() -> tuple[Panel, ...]:
    rows = result("fleet-simulated")["results"]
    routers = list(dict.fromkeys(row["router"] for row in rows))
    places = tuple(f"{row['replicas']:,}" for row in _rows(rows, router=routers[0]))

    def panel(title: str, left: str, of: Callable[[dict[str, Any]], float]) -> Panel:
        series = {name: tuple(round(of(row), 4) for row in _rows(rows, router=name)) for name in routers}
        return Panel(title, "replicas", left, places, series)

    return (
        panel("cached tokens of those asked for", "share", lambda row: float(row["hit_rate"])),
        panel("first token, 99th percentile", "ms", lambda row: float(row["first_token_ms"]["p99"])),
        panel("the busiest replica", "times the mean", lambda row: float(row["spread"])),
    )


MEASURED = {
    "throughput": Picture(
        "Tokens per second",
        "Greedy decoding in float32 on two cores of a CPU, rounds in turn; all give the same tokens.",
        ("throughput-cpu", "rival-cpu"),
        _throughput,
    ),
    "host": Picture(
        "Host work of a step",
        "Microseconds of one core. What a step costs by itself is shared by its requests; nothing waits for a device.",
        ("host-cpu",),
        _host,
    ),
    "states": Picture(
        "Bytes of recurrent states",
        "Counted, not timed: a state for every draft (slots) beside one state and a ring of inputs (fold).",
        ("recurrences-cpu",),
        _states,
    ),
    "acceptance": Picture(
        "Drafts of the shipped head",
        "What a verified row emits, and whether that pays on a CPU, where a row more costs time.",
        ("speculative-cpu",),
        _acceptance,
    ),
    "growth": Picture(
        "Growth",
        "The host's work does not grow with what others left in the cache, nor with those that wait.",
        ("growth-cpu",),
        _growth,
    ),
}
"""By the name of the file."""
PICTURES = {
    **MEASURED,
    "fleet": Picture(
        "A fleet of replicas",
        "Simulated: the project's scheduler and prefix caches, and steps that take as long as measured ones.",
        ("fleet-simulated",),
        _fleet,
    ),
}
