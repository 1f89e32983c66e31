"""A long run gives the same result with any number of processes."""

from __future__ import annotations

import multiprocessing
import runpy
import sys
from collections import Counter
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace

import pytest

from bateleur.mamba import CacheLayout, MambaCacheMode, PrefixRetention
from oracle import Case, Report
from oracle import parallel as parts


@pytest.fixture(autouse=True)
def _threads(monkeypatch):
    """Use threads instead of processes, which would import torch."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: SimpleNamespace(Pool=ThreadPool))


def figures(report: Report) -> tuple[int, dict[str, int], dict[str, int]]:
    return report.runs, dict(report.seen), dict(report.found)


def test_the_number_of_processes_makes_no_difference():
    one, two = (list(parts.reports(80, 3, jobs, runs_of_a_part=32)) for jobs in (1, 2))
    assert [figures(report) for report in one] == [figures(report) for report in two]
    assert [report.runs for report in one] == [32, 32, 16]
    assert figures(one[0]) != figures(one[1])  # seeds of their own


def test_one_part_is_the_run_itself():
    (part,) = parts.reports(48, 5, 4)
    assert figures(part) == figures(parts.run(48, 5))


def test_the_command_adds_up_and_fails_where_a_part_does(monkeypatch, capsys):
    layout = CacheLayout(MambaCacheMode.NONE, 8, 0, 8)
    case = Case(layout, PrefixRetention.of(layout), 8)

    def run(runs: int, seed: int) -> Report:
        if seed == 0:
            return Report(runs)
        return Report(runs, found=Counter(window=2), failing=[case])

    monkeypatch.setattr(parts, "run", run)
    monkeypatch.setattr(sys, "argv", ["oracle", "--runs", "200000", "--jobs", "2"])
    assert runpy.run_path(str(Path(__file__).parent / "oracle"))["main"]() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "100000 of 200000 runs, 0 differences"
    assert lines[-2:] == ["differences: 2, window 2", f"failing: {case}"]


@pytest.mark.parametrize("wrong", [["--runs", "0"], ["--jobs", "0"]])
def test_nothing_to_do_is_refused(monkeypatch, capsys, wrong):
    monkeypatch.setattr(sys, "argv", ["oracle", *wrong])
    with pytest.raises(SystemExit):
        runpy.run_path(str(Path(__file__).parent / "oracle"))["main"]()
    assert "must be at least 1" in capsys.readouterr().err
