"""The block pool: references, keys, eviction."""

from __future__ import annotations

import random
from hashlib import blake2b

import numpy as np
import pytest

from bateleur.runner.cache.block_pool import BlockPool
from bateleur.runner.requests.prefix_keys import KEY_BYTES, PrefixKeys


def test_a_published_block_is_found_until_memory_is_needed() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    assert pool.insert(first, "a")
    assert pool.insert(second, "b")
    pool.free([second, first])
    assert pool.num_free == 3
    assert (pool.find("a"), pool.find("b"), pool.find("c")) == (first, second, 0)
    pool.allocate(1)  # the one that never had contents
    assert pool.num_cached == 2
    pool.allocate(1)  # the least recently freed
    assert (pool.find("a"), pool.find("b")) == (first, 0)


def test_a_shared_block_returns_with_its_last_holder() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.insert(block, "a")
    pool.hold([block])
    pool.free([block])
    assert pool.num_free == 1
    assert pool.allocate(1) != [block]
    pool.free([block])
    pool.hold([block])  # out of the idle ones again
    assert pool.num_free == 0
    pool.free([block])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([block])


def test_the_first_of_two_equal_blocks_is_kept() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    assert pool.insert(first, "a")
    assert not pool.insert(second, "a")
    pool.free([first, second])
    assert pool.find("a") == first
    pool.forget(first)
    assert pool.find("a") == 0
    assert sorted(pool.allocate(3)) == [1, 2, 3]


def test_random_traffic_never_mixes_contents() -> None:
    rng, pool, held = random.Random(0), BlockPool(9), []
    contents: dict[int, int] = {}
    for step in range(4000):
        if held and rng.random() < 0.5:
            pool.free([held.pop(rng.randrange(len(held)))])
        elif (found := pool.find(key := rng.randrange(30))) and rng.random() < 0.7:
            assert contents[found] == key
            pool.hold([found])
            held.append(found)
        elif pool.num_free:
            (block,) = pool.allocate(1)
            assert block not in held
            contents[block] = -step - 1
            if rng.random() < 0.7 and pool.insert(block, key):
                contents[block] = key
            held.append(block)
        assert pool.num_free == 8 - len(set(held))


def test_a_key_covers_every_token_before_it() -> None:
    tokens = np.arange(64, dtype=np.int32)
    keys = PrefixKeys(8)
    assert keys.of(tokens, 32) == PrefixKeys(8).of(tokens[:40].copy(), 32)
    assert keys.of(tokens, 16) != keys.of(tokens, 32)
    for changed in (0, 15, 31):
        other = tokens.copy()
        other[changed] += 1
        assert PrefixKeys(8).of(other, 32) != keys.of(tokens, 32)
        assert (PrefixKeys(8).of(other, 8) == keys.of(tokens, 8)) == (changed >= 8)
    strided = np.stack([tokens, tokens]).T[:, 0]
    assert PrefixKeys(8).of(strided, 64) == keys.of(tokens, 64)


def test_f3_a_key_ahead_covers_the_next_token() -> None:
    """A draft head's block depends on the token after it (vLLM RFC #50438), so its key does too."""
    tokens = np.arange(40, dtype=np.int32)
    other = tokens.copy()
    other[16] += 1
    ours, theirs = PrefixKeys(8), PrefixKeys(8)
    assert ours.of(tokens, 16) == theirs.of(other, 16)
    mine, others = ours.blocks_with_lookahead(tokens, 0, 2), theirs.blocks_with_lookahead(other, 0, 2)
    assert mine[0] == others[0]
    assert mine[1] != others[1]
    assert mine[1] != ours.of(tokens, 16)
    assert ours.blocks_with_lookahead(tokens, 1, 2) == mine[1:]
    assert ours.blocks(tokens, 1, 3) == [ours.of(tokens, 16), ours.of(tokens, 24)]


def test_a_name_is_the_digest_of_the_one_before_and_the_tokens() -> None:
    ids = np.arange(40, dtype=np.int32)
    keys = PrefixKeys(16)
    key = blake2b(ids[:16].tobytes(), digest_size=KEY_BYTES).digest()
    assert keys.of(ids, 16) == key
    assert keys.of(ids, 32) == blake2b(key + ids[16:32].tobytes(), digest_size=KEY_BYTES).digest()
    with pytest.raises(AssertionError, match="blocks are full"):
        keys.of(ids, 48)


def test_what_is_filled_is_found_and_its_end_is_forgotten_first() -> None:
    pool = BlockPool(5)
    (here,) = pool.allocate(1)
    pool.insert(here, "b")
    pool.free([here])
    filled = pool.fill(["a", "b", "c"])
    assert filled is not None
    assert [index for index, _ in filled] == [0, 2]
    assert pool.find_all(["a", "b", "c"]) == [filled[0][1], here, filled[1][1]]
    assert pool.num_free == 4
    pool.allocate(2)
    assert [bool(pool.find(key)) for key in "abc"] == [True, True, False]
    pool.allocate(1)
    assert [bool(pool.find(key)) for key in "abc"] == [True, False, False]


def test_what_does_not_fit_is_not_filled_at_all() -> None:
    pool = BlockPool(4)
    held = pool.allocate(2)
    assert pool.fill(["a", "b"]) is None
    assert (pool.num_cached, pool.num_free) == (0, 1)
    pool.free(held)
    pool.fresh = [held[0]]
    assert pool.fill(["a", "b", "c"]) is not None
    assert pool.fresh == [], "what is filled must not be zeroed behind that"


def test_of_equal_blocks_that_are_published_together_the_first_is_kept() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    assert [pool.insert(block, key) for block, key in zip(blocks, "abac", strict=True)] == [True, True, False, True]
    assert [pool.find(key) for key in "abc"] == [blocks[0], blocks[1], blocks[3]]
    assert pool.num_cached == 3
    with pytest.raises(AssertionError, match="inserted once"):
        pool.insert(blocks[0], "d")
