"""What all tests share."""

from typing import Any

import pytest
import torch


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What compiled kernels take of a multiprocessor, as their tests recorded it: in the log of every run."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    recorded = [
        value
        for each in reports
        if each.when == "call"
        for key, value in each.user_properties
        if key == "kernel"
    ]
    if not recorded:
        return
    terminalreporter.section("kernels compiled for sm_90")
    terminalreporter.line(f"{'':<56}{'registers':>10}{'spilled bytes':>15}{'shared bytes':>14}")
    for name, registers, spilled, shared in sorted(map(tuple, recorded)):
        terminalreporter.line(f"{name:<56}{registers:>10}{spilled:>15}{shared:>14,}")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tests run in as many processes as there are cores, and their models are small: one thread each is the fastest."""
    torch.set_num_threads(1)
