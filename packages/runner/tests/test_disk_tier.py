"""The disk tier, with threads that a test runs: forgotten files are not read, and all others are found."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bateleur.runner.cache.block_pool import BlockPool
from bateleur.runner.distributed.ranks import ALONE
from bateleur.runner.offload.copies import Copies
from bateleur.runner.offload.disk_folder import DiskFolder
from bateleur.runner.offload.disk_tier import DiskTier
from bateleur.runner.offload.host_memory import OffloadedRows
from bateleur.runner.offload.rows import DeviceCache, PagedCache, PagedRows, RowLayout
from bateleur.runner.offload.tier import HostTier
from bateleur.runner.requests.prefix_keys import PrefixKeys
from bateleur.runner.stats import OffloadStats

CPU = torch.device("cpu")
SIZE = 4  # tokens of a block
IDS = np.arange(16, dtype=np.int32)  # two segments of two blocks


class Thread:
    """A thread that runs the next calls submitted to it when `run` says so."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def submit(self, function: Callable[..., Any], *args: Any) -> "Future[Any]":
        future: Future[Any] = Future()

        def call() -> None:
            try:
                future.set_result(function(*args))
            except Exception as error:
                future.set_exception(error)

        self.calls.append(call)
        return future

    def run(self, count: int | None = None) -> None:
        """Run the next `count` calls, or all."""
        now, self.calls = (self.calls, []) if count is None else (self.calls[:count], self.calls[count:])
        for call in now:
            call()


class Tiers:
    """Device memory, host memory and a folder of KV blocks, with one prefix on the device."""

    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        self.tensor = torch.zeros(10, 16)
        self.pool, rows, self.stats = BlockPool(10), PagedRows({"kv": self.tensor}), OffloadStats()
        paged = PagedCache(self.pool, rows)
        self.host = OffloadedRows(paged, 16, Copies(CPU, rows.num_bytes), self.stats)
        self.tier = HostTier(self.host, None, self.stats)
        prefixes: Any = SimpleNamespace(
            num_lookahead_tokens=0, block_size=SIZE, granularity=SIZE, block_keys=PrefixKeys.blocks
        )
        layout = RowLayout({"weights": "abc"}, SIZE, SIZE, 0, rows.parts, ())
        self.folder, self.reader, self.writer = DiskFolder(folder, layout, limit_bytes), Thread(), Thread()
        self.path = folder / layout.digest
        self.disk = DiskTier(self.folder, DeviceCache(prefixes, paged, None), self.host, None, ALONE)
        self.disk._reader, self.disk._writer = self.reader, self.writer  # type: ignore[assignment]
        self.tier.disk = self.disk
        self.keys = PrefixKeys(SIZE).blocks(IDS, 0, len(IDS) // SIZE)
        self.names = [f"{key.hex()}.kv.safetensors" for key in self.keys[1::2]]
        self.contents = 1.0  # of all valid rows

    def save(self) -> None:
        """Compute the prefix on the device, and let a request with it end."""
        for _, block in self.pool.fill(self.keys) or ():
            self.tensor[block] = self.contents
        self.disk.save(PrefixKeys(SIZE), IDS, len(IDS), len(IDS) + 1)

    def forget(self) -> None:
        """A request with the prefix computes NaN."""
        self.drop()
        self.tier.forget(self.keys, [])
        self.contents += 1

    def drop(self) -> None:
        """Remove the prefix from the device and from host memory."""
        for key in self.keys:
            self.pool.forget(self.pool.find(key))
            self.host.forget(key)

    def fetch(self) -> bool:
        """Start to read the prefix from the folder; returns whether a file of it is known."""
        request: Any = object()
        return self.disk.fetch(request, PrefixKeys(SIZE), IDS, len(IDS))

    def arrive(self) -> int:
        """Let the reading thread read. Returns the number of blocks of the prefix that host memory has then."""
        self.reader.run()
        assert len(self.disk.arrived()) == 1
        return self.check_rows()

    def check_rows(self) -> int:
        """Rows of the prefix in host memory are valid. Returns their number."""
        here = [key for key in self.keys if key in self.host]
        rows = self.host.find(here)
        self.host.release(rows)
        assert (self.host.rows.view(torch.float32)[rows] == self.contents).all()
        return len(rows)

    def write(self) -> None:
        """Write all waiting files, and collect the writes."""
        self.disk.advance(idle=True)
        self.writer.run()
        self.disk.advance(idle=True)

    def scan(self) -> None:
        """Start a scan, if none runs."""
        self.disk._next_scan = 0.0
        self.disk.advance(idle=True)

    def files(self) -> list[str]:
        return sorted(each.name for each in self.path.iterdir())

    def check(self) -> None:
        """Host memory has no row that is held, and no file was refused."""
        assert self.host._pool.num_free == 16
        assert not self.stats.refused


@pytest.fixture(autouse=True)
def no_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of two blocks, and scans only when a test asks for one."""
    monkeypatch.setattr("bateleur.runner.offload.spans.SEGMENT_BLOCKS", 2)
    monkeypatch.setattr("bateleur.runner.offload.disk_tier._SCAN_SECONDS", 1e9)


@pytest.fixture
def tiers(tmp_path: Path) -> Tiers:
    return Tiers(tmp_path)


def test_files_are_written_and_read(tiers: Tiers) -> None:
    tiers.save()
    assert not tiers.fetch()
    tiers.write()
    assert sorted(tiers.names) == tiers.files()
    tiers.drop()
    assert tiers.fetch()
    assert tiers.arrive() == 4
    assert tiers.stats.disk_hit_tokens == 16
    tiers.check()


def test_a_forgotten_file_is_removed_and_not_read_before(tiers: Tiers) -> None:
    tiers.save()
    tiers.write()
    tiers.forget()
    assert not tiers.fetch()
    tiers.writer.run()
    assert not tiers.files()
    tiers.check()


def test_a_waiting_file_that_was_forgotten_is_written_later(tiers: Tiers) -> None:
    """Its name stayed among the queued ones, so that it was never written again."""
    tiers.save()
    tiers.forget()
    tiers.write()
    assert not tiers.files()
    assert not tiers.fetch()
    assert not tiers.stats.unwritten_files
    tiers.save()
    tiers.write()
    assert len(tiers.files()) == 2
    tiers.drop()
    assert tiers.fetch()
    assert tiers.arrive() == 4
    tiers.check()


def test_a_waiting_file_that_was_forgotten_is_read_if_another_process_writes_it(tiers: Tiers) -> None:
    """Its name stayed marked as bad, and was left out of each scan."""
    tiers.save()
    tiers.forget()
    other = Tiers(tiers.path.parent)
    other.contents = tiers.contents
    tiers.writer.run()
    other.save()
    other.write()
    tiers.disk._next_scan = 0.0
    tiers.write()
    assert tiers.fetch()
    assert tiers.arrive() == 4
    tiers.check()


@pytest.mark.parametrize("started", [0, 1, 2])
def test_a_file_that_is_forgotten_while_it_is_written_is_not_read(tiers: Tiers, started: int) -> None:
    """Its write was collected after the removal was queued, and its name was added to the known ones."""
    tiers.save()
    tiers.disk.advance(idle=True)
    tiers.writer.run(started)
    tiers.forget()
    tiers.writer.run(2 - started)
    tiers.disk.advance(idle=True)
    assert len(tiers.files()) == 2, "the removal waits"
    assert not tiers.fetch()
    tiers.writer.run()
    assert not tiers.files()
    assert not tiers.fetch()
    tiers.save()
    tiers.write()
    tiers.drop()
    assert tiers.fetch()
    assert tiers.arrive() == 4
    tiers.check()


@pytest.mark.parametrize("finished", [False, True])
def test_a_scan_does_not_bring_back_a_forgotten_file(tiers: Tiers, finished: bool) -> None:
    """A scan from before `forget` was collected after it, and put the names back."""
    tiers.save()
    tiers.write()
    tiers.scan()
    tiers.writer.run(int(finished))
    tiers.forget()
    tiers.writer.run(int(not finished))
    tiers.disk.advance(idle=True)
    assert len(tiers.files()) == 2, "the removal waits"
    assert not tiers.fetch()
    tiers.write()
    assert not tiers.fetch()
    tiers.check()


@pytest.mark.parametrize("read_first", [False, True])
def test_a_file_that_is_forgotten_while_it_is_read_does_not_arrive(tiers: Tiers, read_first: bool) -> None:
    """Its rows were added to host memory. If the removal was faster, the file was refused as gone."""
    tiers.save()
    tiers.write()
    tiers.drop()
    assert tiers.fetch()
    if read_first:
        tiers.reader.run()
    tiers.forget()
    tiers.writer.run()
    assert tiers.arrive() == 0
    assert tiers.stats.disk_hit_tokens == 0
    assert not tiers.disk._bad
    tiers.check()


def test_a_file_above_the_limit_is_counted_and_not_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It counted as written. The next request with its prefix refused it as gone."""
    tiers = Tiers(tmp_path, limit_bytes=0)
    tiers.save()
    tiers.write()
    assert (tiers.stats.unwritten_files, tiers.stats.written_bytes) == (2, 0)
    assert "could not be written: kv_offload_disk_bytes is 0; it must be at least" in caplog.text
    tiers.drop()
    assert not tiers.fetch()
    tiers.check()


def test_a_write_that_ends_after_a_scan_stays_known(tiers: Tiers) -> None:
    """The write was collected before the result of the scan, which does not have it, was taken."""
    tiers.scan()
    tiers.save()
    tiers.disk.advance(idle=True)
    tiers.writer.run()
    tiers.disk.advance(idle=True)
    tiers.drop()
    assert tiers.fetch()
    assert tiers.arrive() == 4
    tiers.check()


def test_a_file_that_is_not_written_yet_is_not_known(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of a scan was joined with the files being written, which may never be."""
    tiers.scan()
    tiers.save()
    tiers.disk.advance(idle=True)
    tiers.writer.run(1)
    tiers.disk.advance(idle=True)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    tiers.writer.run()
    tiers.disk.advance(idle=True)
    tiers.drop()
    assert not tiers.fetch()
    assert tiers.stats.unwritten_files == 2
    tiers.check()


ACTIONS: dict[str, Callable[[Tiers], object]] = {
    **{each.__name__: each for each in (Tiers.save, Tiers.forget, Tiers.drop, Tiers.fetch, Tiers.scan, Tiers.write)},
    "advance": lambda tiers: tiers.disk.advance(idle=True),
    "run writer once": lambda tiers: tiers.writer.run(1),
    "run reader": lambda tiers: tiers.reader.run(),
    "arrived": lambda tiers: tiers.disk.arrived(),
}


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from([*ACTIONS]), max_size=20))
def test_in_any_order_rows_are_valid_and_written_files_are_known(actions: list[str]) -> None:
    with TemporaryDirectory() as folder:
        tiers = Tiers(Path(folder))
        for action in ["save", "write", *actions, "run reader", "arrived", "write"]:
            ACTIONS[action](tiers)
            tiers.check_rows()
        assert sorted(tiers.disk._names) == tiers.files()
        tiers.check()
