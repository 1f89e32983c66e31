"""`CaptureReport`: costs of every key, as text and as JSON."""

import pytest

from bateleur.cudagraph.batch_descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.capture_report import MIB, CaptureCost, CaptureReport, KeyEvent
from bateleur.cudagraph.modes import CudaGraphMode

FULL = BatchExecutionDescriptor(CudaGraphMode.FULL, 8, 4, 2, 2, ("lora", 3))
PIECES = BatchExecutionDescriptor(CudaGraphMode.PIECEWISE, 8)
REPORT = CaptureReport(
    "recorded",
    5,
    (CaptureCost(PIECES, 0.5, 0.25, 3 * MIB, 7, 9), CaptureCost(FULL, 0.125, 0.125, MIB // 2, 1, 9)),
    (KeyEvent(PIECES, "too large"),),
    (KeyEvent(FULL, "asleep", 3),),
)


def test_table():
    assert REPORT.table().splitlines() == [
        " warm-up s  capture s      MiB  graphs  externals  key",
        "     0.500      0.250     3.00       7          9  PIECEWISE 8 tokens",
        "     0.125      0.125     0.50       1          9  FULL 8 tokens, 4 requests, 2 each, variant ('lora', 3)",
        "failed: PIECEWISE 8 tokens: too large",
        "released 3x: FULL 8 tokens, 4 requests, 2 each, variant ('lora', 3): asleep",
        "2 of 5 keys captured by the recorded backend, 1.000 s, 3.50 MiB",
    ]


def test_of_a_manager(cpu):
    toy = cpu.Toy()
    manager = cpu.manager("FULL_AND_PIECEWISE")
    manager.capture(toy, toy.body)
    report = manager.report
    assert (report.backend, report.num_planned) == ("recorded", 8)
    assert [row.key for row in report.captured] == list(manager.dispatcher.keys)
    assert [row.num_graphs for row in report.captured] == [1] * 4 + [2] * 4
    for row in report.captured:
        assert row.num_externals == len(manager.states[row.key].externals) > 0
        assert row.warmup_s > 0
        assert row.capture_s > 0
    assert report.captured[0].nbytes > 0
    assert report.nbytes == sum(row.nbytes for row in report.captured)
    assert report.seconds == pytest.approx(sum(row.warmup_s + row.capture_s for row in report.captured))
    manager.release([cpu.full(8)], reason="asleep")
    assert len(report.captured) == 8, "a report is a snapshot"
    assert [event.reason for event in manager.report.releases] == ["asleep"]


def test_releases_are_counted_and_only_the_latest_reason_is_kept(cpu):
    toy = cpu.Toy()
    manager = cpu.manager()
    for attempt in range(5):
        manager.capture(toy, toy.body)
        manager.release(reason=f"release {attempt}")
    assert [(event.key, event.reason, event.times) for event in manager.report.releases] == [
        (key, "release 4", 5) for key in manager.dispatcher.keys
    ]
    manager.capture(toy, toy.body, keys=[cpu.full(8)])
    manager.release(reason="last")
    assert manager.report.releases[-1] == KeyEvent(cpu.full(8), "last", 6)
