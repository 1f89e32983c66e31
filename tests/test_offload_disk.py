"""Prefixes on disk survive their engine, are shared by engines, and are checked before use."""

import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bateleur.runner import LLM, RequestOutput, SamplingParams
from bateleur.runner.errors import EngineDead
from bateleur.runner.offload.disk_folder import DiskFolder
from sharing import sharing

GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
TOKENS: list[int] = np.random.default_rng(3).integers(3, 60, 60).tolist()
PROMPTS = [{"prompt_token_ids": TOKENS[:length]} for length in (54, 43, 30)]
KINDS: dict[str, dict[str, Any]] = {
    "attention": {},
    "all": {"mamba_state_policy": "slots"},
    "align": {"mamba_cache_mode": "align"},
    "fold": {"mamba_state_policy": "fold", "async_scheduling": True},
    "gated_delta": {},
    "short_conv": {"mamba_block_size": 24},
    "head": {"draft": "head", "num_speculative_tokens": 2},
    "mtp": {"draft": "mtp", "num_speculative_tokens": 2, "async_scheduling": True},
}


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """One file for each 16 tokens, and no delay before files of other engines are seen."""
    monkeypatch.setattr("bateleur.runner.offload.spans.SEGMENT_BLOCKS", 4)
    monkeypatch.setattr("bateleur.runner.offload.disk_tier._SCAN_SECONDS", 0.0)


@pytest.fixture
def engine(tiny: Callable[..., Path], tiny_head: Path, tiny_mtp: Path, tmp_path: Path) -> Callable[..., LLM]:
    """An engine of one kind, which shares blocks of 4 tokens and states of 8, and one folder with all others."""
    below = {"kv_offload_bytes": 1 << 22, "kv_offload_path": tmp_path / "cache"}
    return sharing(tiny, tiny_head, tiny_mtp, KINDS, max_model_len=96, **below)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def found(outputs: list[RequestOutput]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").glob("*/*.safetensors"))


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_goes_on_where_another_ended(engine: Callable[..., LLM], tmp_path: Path, kind: str) -> None:
    with engine(kind) as first:
        said = ids(first.generate(PROMPTS, GREEDY))
    assert ids(engine(kind, kv_offload_bytes=0, kv_offload_path=None).generate(PROMPTS, GREEDY)) == said
    written = first.get_metrics().offload
    assert written is not None
    assert (written.unwritten_files, written.refused.total()) == (0, 0)
    assert written.written_bytes == sum(path.stat().st_size for path in files(tmp_path))
    second = engine(kind)
    for tensor in second.engine.caches.named().values():
        tensor[1:].fill_(float("nan"))
    again = second.generate(PROMPTS[:1], GREEDY)
    assert ids(again) == said[:1]
    assert found(again) == [{"attention": 52, "short_conv": 48}.get(kind, 48)]
    stats = second.get_metrics().offload
    assert stats is not None
    assert stats.disk_hit_tokens == found(again)[0]
    assert ids(second.generate(PROMPTS, GREEDY)) == said
    assert stats.refused.total() == 0
    if kind == "align":  # keeps no states within a prompt
        return
    third = engine(kind)
    shorter = third.generate([{"prompt_token_ids": [*TOKENS[:33], 5, 6]}], GREEDY)
    assert found(shorter) == [{"short_conv": 24}.get(kind, 32)]
    assert ids(shorter) == ids(
        engine(kind, kv_offload_path=None).generate([{"prompt_token_ids": [*TOKENS[:33], 5, 6]}], GREEDY)
    )


def flip(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[-3] ^= 4
    path.write_bytes(contents)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def link(path: Path) -> None:
    shutil.move(path, path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (flip, "corrupt"),
        (shorten, "truncated"),
        (empty, "truncated"),
        (link, "unreadable"),
        (folder, "unreadable"),
        (pipe, "unreadable"),
        (Path.unlink, "gone"),
    ],
)
def test_a_spoiled_file_is_computed_anew(
    engine: Callable[..., LLM],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path], None],
    reason: str,
) -> None:
    with engine() as first:
        said = ids(first.generate(PROMPTS, GREEDY))
    second = engine()
    for path in files(tmp_path):
        spoil(path)
    with caplog.at_level(logging.WARNING, "bateleur"):
        assert ids(second.generate(PROMPTS, GREEDY)) == said
    stats = second.get_metrics().offload
    assert stats is not None
    assert set(stats.refused) == {reason}
    assert stats.disk_hit_tokens == 0
    told = [each for each in caplog.records if "is ignored" in each.getMessage()]
    assert len(told) == 1, "once, whatever their number"
    second.close()
    if spoil is not folder:  # a damaged file is replaced
        third = engine()
        again = third.generate(PROMPTS, GREEDY)
        assert ids(again) == said
        assert found(again)[0] == 48


def test_files_under_each_others_names_are_not_believed(engine: Callable[..., LLM], tmp_path: Path) -> None:
    with engine() as first:
        said = ids(first.generate(PROMPTS, GREEDY))
    for kind in ("kv", "end"):
        names = sorted((tmp_path / "cache").glob(f"*/*.{kind}.safetensors"))
        contents = [path.read_bytes() for path in names]
        for path, other in zip(names, contents[1:] + contents[:1], strict=True):
            path.write_bytes(other)
    second = engine()
    assert ids(second.generate(PROMPTS, GREEDY)) == said
    stats = second.get_metrics().offload
    assert stats is not None
    assert set(stats.refused) == {"misnamed"}


def test_files_of_another_engine_are_not_believed_where_they_lie(engine: Callable[..., LLM], tmp_path: Path) -> None:
    """Each layout has its own folder, and a file that was moved to another folder still names its layout."""
    with engine() as first:
        first.generate(PROMPTS, GREEDY)
    (theirs,) = {path.parent for path in files(tmp_path)}
    other = engine(mamba_ssm_cache_dtype="bfloat16")
    said = ids(engine(mamba_ssm_cache_dtype="bfloat16", kv_offload_path=None).generate(PROMPTS, GREEDY))
    (ours,) = {path for path in (tmp_path / "cache").iterdir() if path.is_dir()} - {theirs}
    shutil.copytree(theirs, ours, dirs_exist_ok=True)
    other.generate([{"prompt_token_ids": [1, 2, 3]}], GREEDY)
    other.engine.operate("flush_disk")
    other.generate([{"prompt_token_ids": [1, 2, 3]}], GREEDY)
    assert ids(other.generate(PROMPTS, GREEDY)) == said
    stats = other.get_metrics().offload
    assert stats is not None
    assert (set(stats.refused), stats.disk_hit_tokens) == ({"foreign"}, 0)


def test_what_one_engine_writes_another_finds(engine: Callable[..., LLM]) -> None:
    first, second = engine(), engine()
    said = ids(first.generate(PROMPTS, GREEDY))
    first.engine.operate("flush_disk")
    for _ in range(3):  # steps, in which the engine looks at the folder
        second.generate([{"prompt_token_ids": [1, 2, 3]}], GREEDY)
        second.engine.operate("flush_disk")
    again = second.generate(PROMPTS[:1], GREEDY)
    assert (ids(again), found(again)) == (said[:1], [48])


def test_others_go_on_while_files_are_read(engine: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    with engine() as first:
        said = ids(first.generate(PROMPTS, GREEDY))
    second = engine()
    read, gate = DiskFolder.read, threading.Event()

    def slow(self: DiskFolder, name: str, key: bytes) -> Any:
        assert gate.wait(60)
        return read(self, name, key)

    monkeypatch.setattr(DiskFolder, "read", slow)
    done: dict[str, RequestOutput] = {}

    def step() -> None:
        done.update({each.request_id: each for each in second.step()})

    for name in ("waits", "gone", "waits, too"):
        second.add_request(PROMPTS[0], GREEDY, request_id=name)
    second.add_request({"prompt_token_ids": TOKENS[::-1]}, GREEDY, request_id="goes")
    step()
    assert second.get_metrics().num_waiting == 4, "rows are kept for them"
    second.abort("gone")
    step()
    while "goes" not in done:
        step()
    assert second.get_metrics().num_waiting == 2
    gate.set()
    while second.has_unfinished_requests:
        step()
    assert ids([done["waits"], done["waits, too"]]) == said[:1] * 2
    assert found([done["waits"], done["waits, too"]]) == [48, 48]


def test_a_step_that_breaks_off_meanwhile_loses_nobody(
    engine: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine() as first:
        said = ids(first.generate(PROMPTS, GREEDY))
    second = engine()
    for number, prompt in enumerate(PROMPTS):
        second.add_request(prompt, GREEDY, request_id=str(number))
    schedule = type(second.engine.scheduler).schedule

    def fails(self: Any, **how: Any) -> Any:
        schedule(self, **how)
        raise RuntimeError("once")

    with monkeypatch.context() as patch:
        patch.setattr(type(second.engine.scheduler), "schedule", fails)
        with pytest.raises(RuntimeError, match="once"):
            second.step()
    done: dict[str, RequestOutput] = {}
    while second.has_unfinished_requests:
        done |= {each.request_id: each for each in second.step()}
    assert ids([done[str(number)] for number in range(3)]) == said


def test_a_full_disk_is_counted_and_changes_nothing(
    engine: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = ids(engine(kv_offload_path=None).generate(PROMPTS, GREEDY))
    llm = engine()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert ids(llm.generate(PROMPTS, GREEDY)) == said
    llm.engine.operate("flush_disk")
    stats = llm.get_metrics().offload
    assert stats is not None
    assert stats.unwritten_files > 3
    assert stats.written_bytes == 0
    assert len([each for each in caplog.records if "could not be written" in each.getMessage()]) == 1
    assert not files(tmp_path)


def test_an_interrupt_while_the_last_files_are_written_closes_the_engine(
    engine: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, calls = engine("attention"), []

    def interrupted(name: str) -> None:
        calls.append(name)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "operate", interrupted)
    with pytest.raises(KeyboardInterrupt), llm:
        llm.generate(PROMPTS, GREEDY)
    with pytest.raises(EngineDead, match="it was closed"):
        llm.generate(PROMPTS, GREEDY)
    llm.close()
    assert calls == ["flush_disk"], "a second call does nothing"


def test_files_stay_within_their_limit(engine: Callable[..., LLM], tmp_path: Path) -> None:
    """Other files in the folder stay, whatever their names."""
    with engine() as first:
        first.generate(PROMPTS, GREEDY)
    whole = sum(path.stat().st_size for path in files(tmp_path))
    mine = tmp_path / "cache" / "mine.safetensors"
    mine.write_bytes(b"0" * 4 * whole)
    for path in files(tmp_path):
        os.utime(path, (0, 0))
    with engine(kv_offload_disk_bytes=whole) as second:
        other = {"prompt_token_ids": TOKENS[::-1]}
        said = ids(second.generate([other], GREEDY))
    assert sum(path.stat().st_size for path in files(tmp_path)) <= whole
    assert mine.exists()
    again = engine().generate([other], GREEDY)
    assert (ids(again), found(again)) == (said, [56])


def test_what_went_wrong_is_not_on_the_disk(engine: Callable[..., LLM], tmp_path: Path) -> None:
    llm = engine()
    embedding = llm.engine.model.embedding
    llm.generate([{"prompt_token_ids": TOKENS[:25]}], SamplingParams(temperature=0, max_tokens=1))
    llm.engine.operate("flush_disk")
    assert files(tmp_path)
    kept = embedding[TOKENS[30]].clone()
    embedding[TOKENS[30]] = torch.nan
    (output,) = llm.generate(PROMPTS[:1], GREEDY)
    assert (output.outputs[0].finish_reason, output.num_cached_tokens) == ("error", 24)
    embedding[TOKENS[30]] = kept
    llm.close()
    llm.engine.offload.disk._writer.shutdown()  # type: ignore[union-attr]
    assert not files(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offload_bytes": 0}, "it must be None without kv_offload_bytes"),
        ({"kv_offload_path": None, "kv_offload_disk_bytes": 5}, "kv_offload_disk_bytes is 5; it must be None without"),
        ({"kv_offload_disk_bytes": -5}, "kv_offload_disk_bytes is -5; it must be an integer >= 0"),
        ({"kv_offload_path": 7}, "kv_offload_path is 7; it must be the path of a folder"),
        ({"kv_offload_path": "/dev/null/cache"}, "kv_offload_path is '/dev/null/cache'; it must be a writable folder"),
        ({"kv_offload_path": "a\0b"}, "it must be a writable folder"),
        ({"kv_offload_path": "/proc"}, "kv_offload_path is '/proc'; it must be a writable folder"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(
    engine: Callable[..., LLM], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine(**options)


def test_weights_are_read_once_for_their_digest(engine: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Later starts remember which files are invalid, until the files change or that record is damaged."""
    with engine() as first:
        first.generate(PROMPTS, GREEDY)
    read: list[Path] = []
    digest = __import__("bateleur.runner.offload.weights_digest", fromlist=["_digest"])._digest
    monkeypatch.setattr(
        "bateleur.runner.offload.weights_digest._digest", lambda path: read.append(path) or digest(path)
    )
    second = engine()
    assert not read
    remembered = Path(str(second.config.cache.kv_offload_path)).glob("weights-*.json")
    for path in remembered:
        path.write_text('["0"]')
    assert found(engine().generate(PROMPTS[:1], GREEDY)) == [48]
    assert read
