"""Prefix files: what was written is read, and everything else is refused."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from bateleur.runner.errors import PrefixRefused
from bateleur.runner.offload.prefix_file import MAX_HEADER, Prefix, encode_prefix, read_prefix
from bateleur.runner.offload.rows import PagedRows, RowLayout
from bateleur.runner.offload.whole_file import write_whole


def paged(**shapes: tuple[torch.dtype, tuple[int, ...]]) -> PagedRows:
    """Tensors of 5 numbers with these entries, all different."""
    return PagedRows(
        {
            name: torch.arange(5 * int(np.prod(shape))).view(5, *shape).to(dtype) + 1000 * i
            for i, (name, (dtype, shape)) in enumerate(shapes.items())
        }
    )


BLOCKS = paged(keys=(torch.bfloat16, (2, 1, 3)), values=(torch.bfloat16, (2, 1, 3)))
PAGES = paged(conv=(torch.bfloat16, (3, 1)), state=(torch.float32, (2, 2)))
LAYOUT = RowLayout({"weights": "abc", "device": "cpu"}, 2, 4, 1, BLOCKS.parts, PAGES.parts)


def prefix(start: int = 4, end: int = 8, *, page: bool = True) -> Prefix:
    count = (end - start) // 2
    blocks = BLOCKS.gather([1, 3, 2, 4][:count]).numpy() if count else np.empty((0, 24), np.uint8)
    tokens = np.arange(start, end + 1, dtype=np.int32)
    return Prefix(start, b"k" * 16, tokens, blocks, PAGES.gather([2]).numpy()[0] if page else None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_whole(tmp_path / "it", encode_prefix(LAYOUT, prefix()))
    return tmp_path / "it"


def refused(path: Path, layout: RowLayout = LAYOUT, **how: bool) -> PrefixRefused:
    with pytest.raises(PrefixRefused) as caught:
        read_prefix(path, layout, **how)
    assert str(path) in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    "meant", [prefix(), prefix(0, 8), prefix(8, 8), prefix(page=False)], ids=["part", "whole", "state", "blocks"]
)
def test_what_was_written_is_read(tmp_path: Path, meant: Prefix) -> None:
    size = write_whole(tmp_path / "it", encode_prefix(LAYOUT, meant))
    found = read_prefix(tmp_path / "it", LAYOUT)
    assert size == (tmp_path / "it").stat().st_size
    assert (found.start, found.key) == (meant.start, meant.key)
    for name in ("token_ids", "blocks", "page"):
        assert np.array_equal(getattr(found, name), getattr(meant, name)), name
    assert [each.name for each in tmp_path.iterdir()] == ["it"]
    assert (tmp_path / "it").stat().st_mode & 0o777 == 0o600


def test_others_read_it_as_safetensors(path: Path) -> None:
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata()["key"] == (b"k" * 16).hex()
        assert {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()} == {  # noqa: SIM118
            "token_ids": (5,),
            "keys": (2, 2, 1, 3),
            "values": (2, 2, 1, 3),
            "conv": (3, 1),
            "state": (2, 2),
        }
        assert torch.equal(opened.get_tensor("state"), torch.arange(8, 12).view(2, 2) + 1000.0)
        assert torch.equal(opened.get_tensor("keys")[1].flatten(), torch.arange(18, 24).bfloat16())


def test_any_changed_byte_is_seen(path: Path) -> None:
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        refused(path)


def test_any_missing_or_surplus_byte_is_seen(path: Path) -> None:
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert refused(path).reason == "truncated", size
    path.write_bytes(whole + b"\0")
    assert refused(path).reason == "truncated"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"fields": {"weights": "abd", "device": "cpu"}}, "its weights is 'abc', and this engine's is 'abd'"),
        ({"fields": {"weights": "abc", "device": "cpu", "rank": "0 of 2"}}, "its rank is None"),
        ({"fields": {"weights": "abc"}}, "not laid out"),
        ({"num_lookahead_tokens": 0}, "not laid out"),
        ({"block_parts": BLOCKS.parts[:1]}, "not laid out"),
        ({"page_parts": paged(conv=(torch.float16, (3, 1)), state=(torch.float32, (2, 2))).parts}, "not laid out"),
        ({"block_size": 4}, "not laid out"),
        ({"granularity": 2}, "not laid out"),
    ],
)
def test_another_engine_refuses_it(path: Path, changes: dict[str, Any], named: str) -> None:
    error = refused(path, replace(LAYOUT, **changes))
    assert error.reason == "foreign"
    assert named in str(error)


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The file with another header and the same data."""
    whole = path.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + size :])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda header: header.pop("__metadata__"), "foreign"),
        (lambda header: header["__metadata__"].update(version="1"), "foreign"),
        (lambda header: header["__metadata__"].update(start=4), "foreign"),
        (lambda header: header["__metadata__"].update(start="3"), "foreign"),
        (lambda header: header["__metadata__"].update(start="-4"), "foreign"),
        (lambda header: header["__metadata__"].update(end="2000000000"), "truncated"),
        (lambda header: header["__metadata__"].update(end="9" * 5000), "foreign"),
        (lambda header: header["__metadata__"].update(key="no"), "foreign"),
        (lambda header: header["__metadata__"].update(key="aa"), "corrupt"),
        (lambda header: header["__metadata__"].update(state="0"), "truncated"),
        (lambda header: header["__metadata__"].update(checksum="\ud800"), "foreign"),
        (lambda header: header["state"].update(shape=[4, 1]), "foreign"),
        (lambda header: header["state"].update(data_offsets=[0, 1 << 60]), "foreign"),
        (lambda header: header.update(more={"dtype": "F32", "shape": [], "data_offsets": [0, 0]}), "foreign"),
    ],
)
def test_a_header_that_lies_is_refused(path: Path, change: Callable[..., object], reason: str) -> None:
    edited(path, change)
    assert refused(path).reason == reason


@pytest.mark.parametrize(
    "contents",
    [
        b"",
        b"\xff" * 8,
        (MAX_HEADER + 8).to_bytes(8, "little") + b" " * (MAX_HEADER + 8),
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
        (2).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"null",
        (3).to_bytes(8, "little") + b'"\xff"',
    ],
    ids=["empty", "long", "huge", "deep", "bare", "null", "text"],
)
def test_whatever_is_no_such_file_is_refused(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "it").write_bytes(contents)
    assert refused(tmp_path / "it").reason in ("truncated", "foreign")


def test_links_pipes_and_folders_are_not_read(path: Path) -> None:
    link, pipe = path.parent / "link", path.parent / "pipe"
    link.symlink_to(path)
    os.mkfifo(pipe)
    for each in (link, pipe, path.parent):
        assert refused(each).reason == "unreadable"
    assert refused(path.parent / "none").reason == "gone"
    assert read_prefix(link, LAYOUT, follow_symlinks=True).key == b"k" * 16


def test_what_cannot_be_written_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, encode_prefix(LAYOUT, prefix(0, 4)))
    assert [each.name for each in path.parent.iterdir()] == ["it"]
    assert path.read_bytes() == before


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [1, 3, 8])
def test_rows_go_out_and_come_back(dtype: torch.dtype, width: int) -> None:
    """Also for a tensor that begins in the middle of another."""
    memory = torch.arange(7 * width).to(dtype)
    tensors = {"a": memory[width:].view(6, width), "b": torch.arange(12.0).view(6, 2)}
    rows = PagedRows(tensors)
    taken = rows.gather([4, 1])
    assert taken.shape == (2, rows.num_bytes)
    for name, part in zip(tensors, rows.parts, strict=True):
        view = taken[:, part.start : part.end].clone().view(part.dtype).view(2, *part.shape)
        assert torch.equal(view, tensors[name][[4, 1]])
    before = {name: each.clone() for name, each in tensors.items()}
    rows.put([0, 5], taken.numpy())
    for name, each in tensors.items():
        expected = before[name]
        expected[[0, 5]] = expected[[4, 1]]
        assert torch.equal(each, expected)
