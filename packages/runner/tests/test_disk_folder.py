"""A folder that several processes write, read and trim at once: a read returns what was written, or is refused."""

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from bateleur.runner.errors import PrefixRefused
from bateleur.runner.offload.disk_folder import DiskFolder
from bateleur.runner.offload.prefix_file import Prefix, encode_prefix
from bateleur.runner.offload.rows import RowLayout, RowPart
from bateleur.runner.offload.whole_file import write_whole

LAYOUT = RowLayout({"weights": "abc"}, 4, 4, 0, (RowPart("keys", torch.float32, (64,), 0),), ())


def prefix(number: int) -> Prefix:
    blocks = np.full((2, 256), number % 251, np.uint8)
    return Prefix(0, number.to_bytes(16, "little"), np.arange(8, dtype=np.int32), blocks, None)


def name(number: int) -> str:
    return f"{prefix(number).key.hex()}.kv.safetensors"


def test_two_that_share_it_never_read_half_a_file(tmp_path: Path) -> None:
    """Both have a limit of a few files, so that they remove each other's."""
    folders = [DiskFolder(tmp_path, LAYOUT, 20_000) for _ in range(2)]
    failures: list[str] = []
    read = [0]

    def work(folder: DiskFolder, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for number in rng.integers(0, 40, 400).tolist():
            try:
                got = folder.read(name(number), prefix(number).key)
                read[0] += 1
                if not np.array_equal(got.blocks, prefix(number).blocks):
                    failures.append(f"{number} is not itself")
            except PrefixRefused as error:
                if error.reason != "gone":
                    failures.append(str(error))
                folder.write(name(number), prefix(number))

    threads = [threading.Thread(target=work, args=(folders[i % 2], i)) for i in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures
    assert read[0] > 50
    assert folders[0].names() == {path.name for path in (tmp_path / LAYOUT.digest).iterdir()}


def test_names_are_those_of_this_layout_and_nothing_else(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, LAYOUT, None)
    folder.write(name(1), prefix(1))
    own = tmp_path / LAYOUT.digest
    for other in ("..safetensors", "a.kv.safetensors", name(1) + "~", ".1-2.tmp", "\udcff.kv.safetensors"):
        (own / other).write_bytes(b"")
    assert folder.names() == {name(1)}
    assert folder.limit_bytes > (own / name(1)).stat().st_size


def test_what_a_killed_process_left_goes_after_a_while(tmp_path: Path) -> None:
    DiskFolder(tmp_path, LAYOUT, None)
    old, new = tmp_path / LAYOUT.digest / ".1-2.tmp", tmp_path / LAYOUT.digest / ".1-3.tmp"
    for each in (old, new):
        each.write_bytes(b"half")
    os.utime(old, (0, 0))
    DiskFolder(tmp_path, LAYOUT, None)
    assert not old.exists()
    assert new.exists()


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / LAYOUT.digest).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="in it must not be a link"):
        DiskFolder(tmp_path, LAYOUT, None)


def test_another_key_is_refused(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, LAYOUT, None)
    folder.write(name(1), prefix(2))
    with pytest.raises(PrefixRefused) as caught:
        folder.read(name(1), prefix(1).key)
    assert caught.value.reason == "misnamed"


def test_files_take_no_more_than_the_limit_while_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files were removed after a write, so the limit was exceeded meanwhile; larger files were written at all."""
    most = [0]

    def written(path: Path, data: bytes) -> int:
        size = write_whole(path, data)
        most[0] = max(most[0], sum(each.stat().st_size for each in path.parent.iterdir()))
        return size

    monkeypatch.setattr("bateleur.runner.offload.disk_folder.write_whole", written)
    size = len(encode_prefix(LAYOUT, prefix(0)))
    folder = DiskFolder(tmp_path, LAYOUT, 3 * size + 1)
    assert [folder.write(name(number), prefix(number)) for number in range(9)] == [size] * 9
    assert 2 * size <= most[0] <= 3 * size + 1
    assert name(8) in folder.names()
    small = DiskFolder(tmp_path / "small", LAYOUT, size - 1)
    with pytest.raises(
        ValueError, match=f"kv_offload_disk_bytes is {size - 1}; it must be at least {size}: a file has"
    ):
        small.write(name(1), prefix(1))
    assert not small.names()


def test_who_looks_makes_room_for_what_others_wrote(tmp_path: Path) -> None:
    """Each process counted its own files only, so two with half of the limit each exceeded it together."""
    size = len(encode_prefix(LAYOUT, prefix(0)))
    folders = [DiskFolder(tmp_path, LAYOUT, 4 * size) for _ in range(2)]
    for number in range(8):
        folders[number % 2].write(name(number), prefix(number))
    kept = folders[0].names()
    assert len(kept) == 3, "nine tenths of four"
    assert name(1) not in kept
    assert folders[1].names() == kept
    folders[1].write(name(9), prefix(9))
    assert folders[0].names() == kept | {name(9)}
    assert folders[1].names() == kept | {name(9)}


def test_files_of_other_layouts_count_too(tmp_path: Path) -> None:
    size = len(encode_prefix(LAYOUT, prefix(0)))
    other = RowLayout({"weights": "def"}, 4, 4, 0, LAYOUT.block_parts, ())
    folders = [DiskFolder(tmp_path, layout, 4 * size) for layout in (LAYOUT, other)]
    for number in range(4):
        for folder in folders:
            folder.write(name(number), prefix(number))
    kept = [folder.names() for folder in folders]
    assert sum(map(len, kept)) == len(list(tmp_path.glob("*/*"))) == 3
    assert [folder.names() for folder in folders] == kept


def test_who_writes_nothing_removes_nothing(tmp_path: Path) -> None:
    """A limit of 0, or of less than a file, would empty the folder for all processes."""
    folder = DiskFolder(tmp_path, LAYOUT, None)
    reader = DiskFolder(tmp_path, LAYOUT, 0)
    folder.write(name(1), prefix(1))
    with pytest.raises(ValueError, match="kv_offload_disk_bytes is 0"):
        reader.write(name(2), prefix(2))
    assert reader.names() == folder.names() == {name(1)}


def test_a_folder_that_is_gone_has_no_names(tmp_path: Path) -> None:
    size = len(encode_prefix(LAYOUT, prefix(0)))
    folder, other = (DiskFolder(tmp_path / "shared", LAYOUT, size) for _ in range(2))
    folder.write(name(0), prefix(0))
    other.write(name(1), prefix(1))
    shutil.rmtree(tmp_path / "shared")
    assert folder.names() == set()
    with pytest.raises(FileNotFoundError):
        folder.write(name(2), prefix(2))
