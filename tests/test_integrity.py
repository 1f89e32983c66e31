"""The integrity check at the end of every engine test passes between any two steps, and finds errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bateleur.mamba import MambaStateManager
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.cache.block_pool import BlockPool
from bateleur.runner.engine.engine import Engine
from bateleur.runner.requests.request import RequestTable

PARAMS = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


@pytest.fixture(params=["none", "all"])
def make(make_llm: Callable[..., LLM], request: pytest.FixtureRequest) -> Callable[[], LLM]:
    def made() -> LLM:
        sharing = {"enable_prefix_caching": True, "mamba_block_size": 8} if request.param == "all" else {}
        return make_llm(max_model_len=128, max_num_seqs=4, block_size=4, **sharing)

    return made


def busy(llm: LLM) -> list[str]:
    """Start five requests, four of which run, and run some steps."""
    names = [llm.add_request([1 + i, *range(7, 30)], PARAMS) for i in range(5)]
    for _ in range(9):
        llm.step()
    return names


def test_it_holds_between_steps(make: Callable[[], LLM], check_integrity: Callable[[Engine], None]) -> None:
    llm = make()
    for name in busy(llm)[1:3]:
        llm.abort(name)
        check_integrity(llm.engine)
    while llm.has_unfinished_requests:
        llm.step()
        check_integrity(llm.engine)


def lost_at_abort(pool: BlockPool, blocks: list[int], free: Any = BlockPool.free) -> None:
    free(pool, blocks[1:])


def freed_twice(pool: BlockPool, blocks: list[int], free: Any = BlockPool.free) -> None:
    free(pool, blocks)
    pool._free.append(blocks[0])


def key_left_behind(pool: BlockPool, blocks: list[int], free: Any = BlockPool.free) -> None:
    free(pool, blocks)
    pool._keys.clear()


def pages_kept(states: MambaStateManager, row: int) -> None:
    pass


def row_kept(table: RequestTable, request: Any, release: Any = RequestTable.release) -> list[int]:
    held: list[int] = release(table, request)
    table.free_rows.pop()
    return held


def row_not_emptied(table: RequestTable, request: Any, release: Any = RequestTable.release) -> list[int]:
    row, drafts = request.row, 2
    held: list[int] = release(table, request)
    table.num_drafts[row] = drafts
    return held


@pytest.mark.parametrize(
    ("where", "name", "defect", "message"),
    [
        (BlockPool, "free", lost_at_abort, "has 1 holders; rows hold it 0 times"),
        (BlockPool, "free", freed_twice, "are held by nobody"),
        (BlockPool, "free", key_left_behind, "are not where keys lead|held by nobody"),
        (MambaStateManager, "release", pages_kept, "state pages: a row without a request holds some"),
        (RequestTable, "release", row_kept, "are taken or free"),
        (RequestTable, "release", row_not_emptied, "rows: a free row has num_drafts"),
    ],
)
def test_it_names_what_is_wrong(
    make_llm: Callable[..., LLM],
    check_integrity: Callable[[Engine], None],
    monkeypatch: pytest.MonkeyPatch,
    where: type,
    name: str,
    defect: Callable[..., object],
    message: str,
) -> None:
    sharing = {"enable_prefix_caching": True, "mamba_block_size": 8}
    llm = make_llm(max_model_len=128, max_num_seqs=4, block_size=4, **sharing)
    victim = busy(llm)[1]
    monkeypatch.setattr(where, name, defect)
    llm.abort(victim)
    with pytest.raises(AssertionError, match=message):
        check_integrity(llm.engine)


def test_a_request_in_one_place_only_is_named(
    make: Callable[[], LLM], check_integrity: Callable[[Engine], None]
) -> None:
    llm = make()
    name = busy(llm)[0]
    del llm.engine.requests[name]
    with pytest.raises(AssertionError, match=name):
        check_integrity(llm.engine)
