"""With several ranks, a prefix that one rank lacks in host memory or on disk is a miss for all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import EVEN

from bateleur.runner import LLM, RequestOutput, SamplingParams
from bateleur.runner.errors import PrefixRefused

pytestmark = pytest.mark.usefixtures("forked_ranks")

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
TOKENS: list[int] = np.random.default_rng(3).integers(3, 90, 80).tolist()
PROMPTS = [{"prompt_token_ids": TOKENS[:length]} for length in (75, 43)]
OTHERS = [{"prompt_token_ids": TOKENS[::-1][:length]} for length in (70, 60, 50)]


@pytest.fixture(scope="module")
def make(tiny: Callable[..., Path]) -> Callable[..., LLM]:
    """An engine of two ranks with states and keys, which shares blocks of 4 tokens and states of 8."""

    def made(**options: Any) -> LLM:
        sizes: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 96, "block_size": 4, "mamba_block_size": 8}
        sizes |= {"device": "cpu", "skip_tokenizer_init": True, "enable_prefix_caching": True}
        sizes |= {"tensor_parallel_size": 2, "rank_timeout": 20, "cudagraph_checks": "ADDRESSES"}
        return LLM(tiny("bamba", **EVEN["bamba"]), **(sizes | options))

    return made


@pytest.fixture(scope="module")
def wanted(make: Callable[..., LLM]) -> list[list[int]]:
    """The outputs of one rank without prefix caching."""
    plain = {"tensor_parallel_size": 1, "enable_prefix_caching": False, "mamba_block_size": None}
    return ids(make(**plain).generate(PROMPTS, GREEDY))


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def found(outputs: list[RequestOutput]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


def test_what_has_left_the_device_comes_back(
    make: Callable[..., LLM], sized: Callable[..., LLM], wanted: list[list[int]]
) -> None:
    """Few blocks and pages; the rank with the fewest decides for all."""
    with sized(make, 26, 2, kv_offload_bytes=1 << 20) as llm:
        assert ids(llm.generate(PROMPTS, GREEDY)) == wanted
        for seed in range(3):
            other = np.random.default_rng(seed).integers(3, 90, 80).tolist()
            llm.generate([{"prompt_token_ids": other}], GREEDY)
        assert ids(llm.generate(PROMPTS, GREEDY)) == wanted
        stats = llm.get_metrics().offload
        assert stats is not None
        assert stats.host_hit_tokens > 40
        assert stats.host_bytes <= 1 << 19, "the ranks have it together"


def files(folder: Path, rank: int) -> list[Path]:
    """The files of a rank: those in the folder of its layout."""
    named = f'"layout.rank":"{rank} of 2"'.encode()
    return [each for each in sorted(folder.glob("*/*.safetensors")) if named in each.read_bytes()]


def flip(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[-3] ^= 4
    path.write_bytes(contents)


@pytest.fixture(scope="module")
def cache(make: Callable[..., LLM], wanted: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the prefixes of an engine."""
    folder = tmp_path_factory.mktemp("cache")
    with make(kv_offload_bytes=1 << 20, kv_offload_path=folder) as llm:
        assert ids(llm.generate(PROMPTS, GREEDY)) == wanted
    assert len(files(folder, 0)) == len(files(folder, 1)) > 3
    return folder


def spoiled(cache: Path, at: Path, rank: int, spoil: Callable[[Path], None]) -> Path:
    """A copy of a folder in which the files of one rank are changed."""
    for path in cache.glob("*/*"):
        (at / path.parent.name).mkdir(exist_ok=True)
        (at / path.parent.name / path.name).write_bytes(path.read_bytes())
    for path in files(at, rank):
        spoil(path)
    return at


@pytest.mark.parametrize(
    ("rank", "spoil", "reasons"), [(1, None, set()), (1, flip, {"corrupt"}), (0, Path.unlink, set())]
)
def test_what_one_rank_cannot_read_is_a_miss_for_all(
    make: Callable[..., LLM],
    wanted: list[list[int]],
    cache: Path,
    tmp_path: Path,
    rank: int,
    spoil: Callable[[Path], None] | None,
    reasons: set[str],
) -> None:
    """The prefix is computed and written again. A file that one rank never had is not read by the other."""
    folder = spoiled(cache, tmp_path, rank, spoil or (lambda path: None))
    options: dict[str, Any] = {"kv_offload_bytes": 1 << 20, "kv_offload_path": folder}
    for again in (False, True) if spoil is flip and rank else (False,):
        with make(**options) as llm:
            outputs = llm.generate(PROMPTS, GREEDY)
            stats = llm.get_metrics().offload
        assert stats is not None
        assert ids(outputs) == wanted
        hit = again or spoil is None
        assert (found(outputs)[0], stats.disk_hit_tokens > 0) == (72 * hit, hit)
        assert set(stats.refused) == (set() if again else reasons)


def test_a_file_that_goes_meanwhile_on_one_rank(
    make: Callable[..., LLM], wanted: list[list[int]], cache: Path, tmp_path: Path
) -> None:
    folder = spoiled(cache, tmp_path, 1, lambda path: None)
    with make(kv_offload_bytes=1 << 20, kv_offload_path=folder) as llm:
        for path in files(folder, 1):
            path.unlink()
        outputs = llm.generate(PROMPTS, GREEDY)
        stats = llm.get_metrics().offload
    assert stats is not None
    assert (ids(outputs), found(outputs)[0]) == (wanted, 0)
    assert set(stats.refused) == {"gone"}


def test_a_disk_that_takes_nothing_of_one_rank(
    make: Callable[..., LLM], wanted: list[list[int]], cache: Path, tmp_path: Path
) -> None:
    """Both ranks give up these files; without them the other rank's are useless."""
    theirs = tmp_path / files(cache, 1)[0].parent.name
    with make(kv_offload_bytes=1 << 20, kv_offload_path=tmp_path) as llm:
        theirs.rmdir()
        theirs.write_bytes(b"")
        assert ids(llm.generate(PROMPTS, GREEDY)) == wanted
        llm.engine.operate("flush_disk")
        stats = llm.get_metrics().offload
        assert stats is not None
        assert stats.unwritten_files > 3
        assert stats.written_bytes > 0, "the first rank wrote its own"
        assert ids(llm.generate(PROMPTS, GREEDY)) == wanted


def test_a_prefix_goes_from_engine_to_engine(make: Callable[..., LLM], wanted: list[list[int]], tmp_path: Path) -> None:
    """Every file of an exported folder must be intact and belong to the same prefix."""
    path = tmp_path / "it"
    with make() as ours, make() as theirs:
        ours.generate([PROMPTS[0], OTHERS[0]], GREEDY)
        with pytest.raises(ValueError, match="no request computed this prefix"):
            ours.export_prefix(TOKENS[30:], path)
        assert not path.exists()
        assert ours.export_prefix(TOKENS[:75], path) == 72
        assert sorted(each.name for each in path.iterdir()) == ["0-of-2.safetensors", "1-of-2.safetensors"]
        ours.export_prefix(OTHERS[0]["prompt_token_ids"], tmp_path / "other")
        last = path / "1-of-2.safetensors"
        kept = last.read_bytes()
        for reason, named, spoil in (
            ("corrupt", "rank 1: .* its checksum is wrong", flip),
            ("gone", "rank 1: .* No such file", Path.unlink),
            (
                "misnamed",
                "its parts are of different prefixes",
                lambda path: path.write_bytes((tmp_path / "other" / last.name).read_bytes()),
            ),
        ):
            spoil(last)
            with pytest.raises(PrefixRefused, match=named) as refused:
                theirs.import_prefix(path)
            assert refused.value.reason == reason
            last.write_bytes(kept)
        assert theirs.import_prefix(path) == 72
        outputs = theirs.generate(PROMPTS, GREEDY)
        assert (ids(outputs), found(outputs)) == (wanted, [72, 0])
        with make(tensor_parallel_size=1) as one:
            with pytest.raises(PrefixRefused, match="is of an engine of 2 ranks, and this one has 1"):
                one.import_prefix(path)
            one.generate(PROMPTS, GREEDY)
            one.export_prefix(TOKENS[:75], tmp_path / "file")
        with pytest.raises(PrefixRefused, match="is of an engine of 1 ranks, and this one has 2"):
            theirs.import_prefix(tmp_path / "file")
