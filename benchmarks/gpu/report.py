"""The summary of a run: one page of text, failures first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

MOST_CHARACTERS = 11_000
FAILURE_CHARACTERS = 5_000
"""Of the page, at most so many are failures."""
SKIPPED_CHARACTERS = 1_500
TIME_CHARACTERS = 1_500
FIGURE_CHARACTERS = 150
FAILURES_OF_A_STEP = 4
Line = dict[str, Any]


def failed_steps(lines: Sequence[Line]) -> list[str]:
    """Return the names of the steps with a failed result, in the order of the run."""
    return [*dict.fromkeys(line["step"] for line in lines if line.get("status") == "failed")]


def summary(lines: Sequence[Line], planned: Sequence[str]) -> str:
    """Return the page for the results of each step's last attempt.

    planned: names of all steps that were asked for; those without an end are listed.
    """
    failed, held, skipped = (
        [line for line in lines if line.get("status") == status] for status in ("failed", "ok", "skipped")
    )
    ends = {line["step"]: line for line in lines if line.get("event") == "end"}
    ended = [name for name, line in ends.items() if not line["unfinished"]]
    missing = [name for name in planned if name not in ended]
    head = [
        f"{len(failed_steps(lines))} steps failed; {len(ended)} ended, {len(missing)} are not done; "
        f"{len(failed)} checks failed, {len(held)} hold, {len(skipped)} skipped"
    ]
    took = _wrapped([f"{name} {line['took']:.0f} s" for name, line in ends.items()])
    parts = [
        *head,
        *_section("FAILED", [*_failures(failed)], FAILURE_CHARACTERS, "more failures"),
        *_section("SKIPPED OR NOT DONE", [*_skipped(skipped, ends, missing)], SKIPPED_CHARACTERS, "more reasons"),
    ]
    tail = _section("TIME", took, TIME_CHARACTERS, "more steps")
    key = [_figure(line) for line in lines if line.get("key") and line["status"] != "failed"]
    other = [_figure(line) for line in lines if line.get("status") == "figure" and not line.get("key")]
    room = MOST_CHARACTERS - sum(len(line) + 1 for line in [*parts, *tail]) - 100
    figures = _section("FIGURES", [*key, *_checks(held), *other], room, "more figures: results.jsonl")
    return "\n".join([*parts, *figures, *tail])


def _section(title: str, rows: Sequence[str], room: int, rest: str) -> list[str]:
    return ["", title, *cut(rows, room, rest)] if rows else []


def _failures(lines: Iterable[Line]) -> Iterable[str]:
    """The first failures of each step."""
    of = _by_step(lines)
    for step, failures in of.items():
        for line in failures[:FAILURES_OF_A_STEP]:
            yield f"{step}: {line['name']}: {line.get('why', '')}"[:400]
        if len(failures) > FAILURES_OF_A_STEP:
            yield f"{step}: {len(failures) - FAILURES_OF_A_STEP} more failures"


def _by_step(lines: Iterable[Line]) -> dict[str, list[Line]]:
    of: defaultdict[str, list[Line]] = defaultdict(list)
    for line in lines:
        of[line["step"]].append(line)
    return of


def _skipped(lines: Iterable[Line], ends: dict[str, Line], missing: Sequence[str]) -> Iterable[str]:
    """Each reason with what was skipped for it."""
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for line in lines:
        what = line["step"] if line["name"] == line["step"] else f"{line['step']}: {line['name']}"
        reasons[line.get("why", "no reason")].append(what)
    for name in missing:
        reasons[ends[name]["how"] if name in ends else "not begun: no time was left"].append(name)
    for reason, names in reasons.items():
        yield f"{reason}: {', '.join(dict.fromkeys(names))}"[:500]


def _checks(lines: Iterable[Line]) -> Iterable[str]:
    """For each step, how many checks hold, and the error that is the closest to its bound."""
    for step, held in _by_step(lines).items():
        compared = [line for line in held if line.get("facts", {}).get("bound")]
        worst = max(compared, key=lambda line: line["facts"]["error"] / line["facts"]["bound"], default=None)
        text = f"{step}: {len(held)} checks hold"
        if worst is not None:
            share = worst["facts"]["error"] / worst["facts"]["bound"]
            text += f"; the largest error is {share:.2f} of its bound: {worst['name']}"
        yield text[:FIGURE_CHARACTERS]


def _figure(line: Line) -> str:
    facts = ", ".join(f"{name} {_short(value)}" for name, value in line.get("facts", {}).items())
    return f"{line['step']}: {line['name']}: {facts}"[:FIGURE_CHARACTERS]


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} {_short(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_short, value)) + "]"
    return str(value)


def _wrapped(words: Iterable[str], width: int = 110) -> list[str]:
    rows = [""]
    for word in words:
        if len(rows[-1]) + len(word) + 2 > width:
            rows.append("")
        rows[-1] += (", " if rows[-1] else "") + word
    return rows


def cut(rows: Sequence[str], room: int, rest: str) -> list[str]:
    """Return the first rows that fit into `room` characters, and how many do not."""
    shown: list[str] = []
    for count, row in enumerate(rows):
        room -= len(row) + 1
        if room < 0:
            return [*shown, f"... {len(rows) - count} {rest}"]
        shown.append(row)
    return shown
