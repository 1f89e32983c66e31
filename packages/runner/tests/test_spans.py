"""Which files are read for a prefix: as far as memory and files together reach, and nothing that is in memory."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bateleur.runner.offload.spans import PrefixSpans, missing_spans
from bateleur.runner.requests.prefix_keys import PrefixKeys

LENGTH, SEGMENT, SIZE = 26, 3, 2
IDS = np.arange(LENGTH + 1, dtype=np.int32)


def chain(*, blocks: bool, pages: bool, granularity: int, monkeypatch: Any) -> PrefixSpans:
    """Blocks of 2 tokens, segments of 3 blocks."""
    monkeypatch.setattr("bateleur.runner.offload.spans.SEGMENT_BLOCKS", SEGMENT)
    prefixes = SimpleNamespace(
        num_lookahead_tokens=0, block_size=SIZE, granularity=granularity, block_keys=PrefixKeys.blocks
    )
    cache: Any = SimpleNamespace(prefixes=prefixes, blocks=blocks or None, pages=pages or None)
    return PrefixSpans(cache, PrefixKeys(SIZE), IDS, LENGTH)


@pytest.mark.parametrize(("blocks", "pages"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("granularity", [2, 4])
@settings(max_examples=120, deadline=None)
@given(in_memory=st.sets(st.integers(0, 40)), on_disk=st.sets(st.integers(0, 40)))
def test_files_take_a_request_as_far_as_it_goes(
    blocks: bool, pages: bool, granularity: int, in_memory: set[int], on_disk: set[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        found = chain(blocks=blocks, pages=pages, granularity=granularity, monkeypatch=patch)
    ends = list(found.ends())
    parts = [(b"block", key) for key in found.blocks] + [(b"page", found.page(end)) for end in ends]
    memory = {(kind, key) for i, (kind, key) in enumerate(parts) if i in in_memory and key is not None}
    spans = [*found.segments(), *map(found.ending, ends)]
    files = {span.name for i, span in enumerate(spans) if i in on_disk}

    def after(read: Any) -> int:
        blocks_then = {key for kind, key in memory if kind == b"block"} | {k for span in read for k in span.blocks}
        pages_then = {key for kind, key in memory if kind == b"page"} | {span.page for span in read if span.page}
        count = next((i for i, key in enumerate(found.blocks) if key not in blocks_then), len(found.blocks))
        most = count * SIZE if found.has_blocks else LENGTH
        return next((e for e in ends if e <= most and ((p := found.page(e)) is None or p in pages_then)), 0)

    read = missing_spans(
        found, lambda key: (b"block", key) in memory, lambda key: (b"page", key) in memory, files.__contains__
    )
    assert {span.name for span in read} <= files
    for span in read:
        lacking = [key for key in span.blocks if (b"block", key) not in memory]
        assert lacking or (span.page is not None and (b"page", span.page) not in memory)
    assert after(read) >= after([])
    whole = [span for span in spans if span.name in files and span.name.endswith("kv.safetensors")]
    for end in ends:  # by its own file, or without it
        own = [found.ending(end)] if found.ending(end).name in files else []
        if after([*whole, *own]) >= end and after([s for s in whole if s.end <= found.base(end)] + own) >= end:
            assert after(read) >= end
            break
