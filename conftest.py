"""What all tests share."""

import gc
import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Generator, Iterator
from functools import wraps
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

try:
    from hypothesis import settings
except ImportError:  # a machine with a GPU may lack it
    pass
else:  # a failure repeats, as with the seeds below
    settings.register_profile("repeatable", derandomize=True)
    settings.load_profile("repeatable")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What compiled kernels take of a multiprocessor, as their tests recorded it: in the log of every run."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    recorded = [
        value for each in reports if each.when == "call" for key, value in each.user_properties if key == "kernel"
    ]
    if not recorded:
        return
    terminalreporter.section("kernels compiled for sm_90")
    terminalreporter.line(f"{'':<56}{'registers':>10}{'spilled bytes':>15}{'shared bytes':>14}")
    for name, registers, spilled, shared in sorted(map(tuple, recorded)):
        terminalreporter.line(f"{name:<56}{registers:>10}{spilled:>15}{shared:>14,}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """What is left out by default, since it takes long and shows little more."""
    parser.addoption("--every-cell", action="store_true", help="all cells of tests/test_recurrence_matrix.py")


def pytest_configure() -> None:
    """Processes that tests start have one thread each, see `one_thread`: two that wait for each other in a loop take
    all of a busy machine. Where Triton interprets, it does so without detours.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if os.environ.get("TRITON_INTERPRET") == "1":
        from quick_interpreter import quicken

        quicken()


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Each test draws the same random numbers in every run, so that a failure can be repeated."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tests run in as many processes as there are cores, and their models are small: one thread each is the fastest."""
    torch.set_num_threads(1)


SERVER = """
import importlib, json, os, sys, traceback
import numpy, torch
for module in sys.argv[1:]:
    importlib.import_module(module)
for line in sys.stdin:
    code, folder = json.loads(line)
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        if folder:
            os.chdir(folder)
            sys.path.insert(0, folder)
        status = 1
        try:
            exec(compile(code, "<fresh>", "exec"), {"__name__": "__main__"})
            sys.stdout.flush()
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as output:
        text = output.read()
    _, ended = os.waitpid(child, 0)
    print(json.dumps([os.waitstatus_to_exitcode(ended), text]), flush=True)
"""


class FreshInterpreter:
    """Runs code in a new process that has imported numpy, torch and `imports`, and nothing of this house.

    Importing torch takes seconds, so one process does it once, and each run is a fork of it.
    """

    def __init__(self, *flags: str, imports: tuple[str, ...] = (), **environment: str) -> None:
        self._server = subprocess.Popen(
            [sys.executable, *flags, "-c", SERVER, *imports],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, folder: Path | None = None) -> tuple[int, str]:
        """Exit status and output; in `folder`, which is then searched for modules first."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps([code, None if folder is None else str(folder)]) + "\n")
        self._server.stdin.flush()
        status, text = json.loads(self._server.stdout.readline())
        return status, text

    def close(self) -> None:
        """End the process."""
        with self._server:
            assert self._server.stdin is not None
            self._server.stdin.close()


@pytest.fixture(scope="session")
def fresh() -> Iterator[Callable[[str], str]]:
    """What code prints in a fresh interpreter that has imported numpy and torch; it must succeed."""
    interpreter = FreshInterpreter()

    def run(code: str) -> str:
        status, text = interpreter.run(code)
        assert status == 0, text
        return text

    yield run
    interpreter.close()


TESTS_OF = """
import pytest
status = pytest.main(["-q", "-x", "-n0", "-p", "no:cacheprovider", "-m", "not gpu", {path!r}])
assert status == 0, status
"""


@pytest.fixture(scope="session")
def in_interpreter() -> Iterator[Callable[[str], int]]:
    """Runs a file of tests in a process whose kernels Triton interprets, and says how many passed.

    Triton decides whether to interpret when a kernel is defined, so it takes a process of its own.
    """
    interpreter = FreshInterpreter(imports=("pytest", "triton.language"), TRITON_INTERPRET="1")

    def run(path: str) -> int:
        status, text = interpreter.run(TESTS_OF.format(path=path))
        assert status == 0, text
        passed = re.search(r"(\d+) passed", text)
        assert passed, text
        return int(passed[1])

    yield run
    interpreter.close()


@pytest.fixture(scope="session")
def fresh_without_workspace() -> Iterator[Callable[[str, Path], tuple[int, str]]]:
    """Exit status and output of code in a folder, with third-party packages alone: -S leaves editable installs out."""
    import sysconfig

    interpreter = FreshInterpreter("-S", PYTHONPATH=sysconfig.get_paths()["purelib"])
    yield interpreter.run
    interpreter.close()


WEIGHT = """
import gc, json, sys
import numpy, torch
gc.freeze()
before = set(sys.modules)
{statement}
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.fixture(scope="session")
def modules_of(fresh: Callable[[str], str]) -> Callable[..., list[str]]:
    """The modules that importing a package loads on top of torch and numpy; `names`: and asking for all its names."""

    def loaded(package: str, *, names: bool = False) -> list[str]:
        statement = f"from bateleur.{package} import *" if names else f"import bateleur.{package}"
        modules: list[str] = json.loads(fresh(WEIGHT.format(statement=statement)))
        return modules

    return loaded


@pytest.fixture(scope="session")
def make_llm() -> Callable[..., Any]:
    """A small engine around the shipped model, on CPU in float32."""
    from bateleur.runner import LLM

    def make(**overrides: Any) -> Any:
        settings: dict[str, Any] = {
            "device": "cpu",
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 8,
            "block_size": 8,
        }
        return LLM(**(settings | overrides))

    return make


@pytest.fixture(scope="session")
def llm(make_llm: Callable[..., Any]) -> Any:
    """The common engine; every test leaves it idle."""
    return make_llm()


SLOW_FIXTURES = {"in_interpreter", "forked_ranks", "server", "chat_server", "agent_server"}
"""Triton's interpreter, ranks in processes, and live servers: every test that uses one of these fixtures is slow."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the users of slow fixtures, and start the longest tests first, so that no worker waits for the last one."""
    for item in items:
        if SLOW_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: "in_interpreter" not in getattr(item, "fixturenames", ()))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: to look for garbage meanwhile takes a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


_ENGINES: WeakSet[Any] = WeakSet()


def pytest_collection_finish(session: pytest.Session) -> None:
    """From here on every engine that tests make is known, where any of them has use for one."""
    gc.collect()
    gc.freeze()  # what was imported and collected stays, and need not be walked over again and again
    gc.set_threshold(20_000, 10, 10)  # nor is it worth a look after every 700 objects
    module = sys.modules.get("bateleur.runner.engine.engine")
    if module is None:
        return
    init = module.Engine.__init__

    @wraps(init)
    def remembered(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _ENGINES.add(self)

    module.Engine.__init__ = remembered  # type: ignore[attr-defined]


def pytest_sessionfinish() -> None:
    """Let go of what was frozen, so that extension modules may end in order."""
    gc.unfreeze()


def _check_pool(pool: Any, table: NDArray[np.int32], what: str) -> None:
    """Every block is held as often as it stands in `table`; others are free, or idle under a key that leads to them."""
    holders = np.bincount(table[table > 0], minlength=pool.num_blocks)
    wrong = np.flatnonzero(holders != pool._holders)
    assert not len(wrong), (
        f"{what}: block {wrong[0]} has {pool._holders[wrong[0]]} holders; rows hold it {holders[wrong[0]]} times"
    )
    spare, unheld = [*pool._free, *pool._idle], set((1 + np.flatnonzero(holders[1:] == 0)).tolist())
    assert len(spare) == len(unheld), f"{what}: {len(unheld)} are held by nobody, {len(spare)} can be had"
    assert set(spare) == unheld, f"{what}: {sorted(set(spare) ^ unheld)} are lost, or free and held"
    astray = pool._idle.keys() ^ (pool._keys.keys() & unheld)
    assert not astray, f"{what}: {sorted(astray)} are not where keys lead"
    assert pool._blocks == {key: block for block, key in pool._keys.items()}, f"{what}: keys lead elsewhere"


def _check_rows(table: Any, running: list[int]) -> None:
    """The rows of requests that run are theirs alone; the other ones are free and empty."""
    everything = sorted(running + table.free_rows)
    assert everything == list(range(len(table.num_tokens))), f"rows: {everything} are taken or free"
    columns = np.arange(table.block_table.shape[1])
    behind = table.block_table[columns >= table.num_blocks[:, None]]
    assert not behind.any(), "rows: a block stands behind those of its row"
    for name in ("num_blocks", "num_tokens", "num_computed", "num_drafts"):
        assert not getattr(table, name)[table.free_rows].any(), f"rows: a free row has {name}"


def _check_integrity(engine: Any) -> None:
    """Between steps: every row, KV block and state page is free, findable, or held by a request that runs.

    AssertionError naming what is wrong.
    """
    engine.registry.restore()
    scheduler, table = engine.scheduler, engine.table
    queued = {request.request_id for request in (*scheduler.waiting, *scheduler.running, *scheduler.fetching)}
    assert queued == engine.requests.keys(), f"requests {sorted(queued ^ engine.requests.keys())} are in one place only"
    assert all(request.row < 0 for request in scheduler.waiting), "a request that waits has a row"
    running = [request.row for request in scheduler.running]
    _check_rows(table, running)
    if scheduler.pool is not None:
        _check_pool(scheduler.pool, table.block_table, "KV blocks")
    if scheduler.states is not None:
        others = np.delete(np.arange(len(scheduler.states.table)), running)
        assert not scheduler.states.table[others].any(), "state pages: a row without a request holds some"
        assert not scheduler.states._last_cached[others].any(), "state pages: a row without a request published some"
        _check_pool(scheduler.states.pool, scheduler.states.table, "state pages")


@pytest.fixture
def check_integrity() -> Callable[[Any], None]:
    """What every test ends with, for idle engines; it holds between any two steps."""
    return _check_integrity


@pytest.fixture(autouse=True)
def idle_engines_are_whole() -> Iterator[None]:
    """A test leaves no engine idle that has lost a row, a block or a page, or whose keys lead astray."""
    yield
    for engine in [engine for engine in _ENGINES if not engine.requests]:
        try:
            _check_integrity(engine)
        except AssertionError:
            _ENGINES.discard(engine)  # one test fails for it
            raise
