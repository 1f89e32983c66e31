"""A pytest plugin: test failures, counts and slow tests as results of a step. It stops when time is over."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict

import pytest

from .record import DEADLINE, Record

MARGIN_SECONDS = 12.0
"""A session ends so long before its limit."""
SLOW_SECONDS = 60.0
"""A GPU test must end within this, compilation included."""
SLOWEST = 5


class Limit:
    """Ends a session, or a worker's part of one, when its time is over."""

    def __init__(self) -> None:
        self._end = float(os.environ.get(DEADLINE, "inf")) - MARGIN_SECONDS

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Run no test after this one if no time is left. With pytest-xdist each worker has a loop of its own."""
        if time.time() > self._end:
            item.session.shouldstop = "no time is left"


class Report:
    """Counts the tests of a session; of its workers' process, if there are workers."""

    def __init__(self) -> None:
        self._record = Record.to_runner()
        self._end = float(os.environ.get(DEADLINE, "inf")) - MARGIN_SECONDS
        self._counts: Counter[str] = Counter()
        self._times: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a phase of a test, and record it if it failed."""
        if report.when == "call" or report.outcome != "passed":
            self._counts[report.outcome] += 1
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            self._counts[f"skipped: {report.longrepr[2].removeprefix('Skipped: ')}"[:120]] += 1
        self._times[report.nodeid] += report.duration
        if report.outcome == "failed":
            self._record.check(report.nodeid, False, reason(str(report.longrepr)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file that could not be collected."""
        if report.failed:
            self._record.check(f"collect {report.nodeid}", False, reason(str(report.longrepr)))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Record the counts, and tests that took too long."""
        reasons = {name: count for name, count in self._counts.items() if name.startswith("skipped: ")}
        for name, count in reasons.items():
            self._record.skip(f"{count} tests", name.removeprefix("skipped: "))
        if time.time() > self._end:
            self._record.skip("the other tests", "no time was left")
            # An interrupted session is not a failure; failed tests are results of their own.
            session.exitstatus = pytest.ExitCode.OK
        counts = {name: count for name, count in self._counts.items() if name not in reasons}
        longest = sorted(self._times.items(), key=lambda item: -item[1])[:SLOWEST]
        slowest = {name.rpartition("::")[2]: round(seconds) for name, seconds in longest if seconds >= 1}
        self._record.figure("tests", key=True, **counts, slowest_s=slowest)
        for name, seconds in self._times.items():
            if seconds > SLOW_SECONDS:
                why = f"took {seconds:.0f} s; a GPU test must end within {SLOW_SECONDS:.0f} s: split it"
                self._record.check(f"time of {name}", False, why)


def reason(text: str) -> str:
    """Return the line of a traceback that says what is wrong: the first one of the last exception."""
    lines = [line for line in text.splitlines() if line.strip()]
    wrong = [number for number, line in enumerate(lines) if line.startswith("E ")]
    if not wrong:
        return (lines[-1] if lines else "no traceback")[:400]
    first = wrong[-1]
    while first - 1 in wrong:
        first -= 1
    return lines[first].removeprefix("E ").strip()[:400]


def pytest_configure(config: pytest.Config) -> None:
    """Report in the process that gathers results; watch the time in each one that runs tests."""
    config.pluginmanager.register(Limit(), "bateleur_gpu_limit")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(), "bateleur_gpu_report")
