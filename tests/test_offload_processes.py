"""Two processes share a prefix folder: both write, and each removes files that the other may be about to read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from folder_users import at_once


def test_each_finds_what_the_other_wrote_or_computes_it(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Device and host memory hold few of the prompts, and the folder half of them."""
    rng = np.random.default_rng(7)
    prompts = [rng.integers(3, 60, 70).tolist() for _ in range(8)]
    options: dict[str, Any] = {"model": tiny("llama"), "device": "cpu", "skip_tokenizer_init": True}
    options |= {"max_num_seqs": 1, "max_model_len": 80, "block_size": 4, "enable_prefix_caching": True}
    below = options | {"kv_offload_bytes": 400_000, "kv_offload_path": tmp_path / "whole"}
    (alone,) = at_once(below, prompts, [[*range(8)]])
    assert alone.disk_hit_tokens == 0
    limit = alone.written_bytes // 2
    below |= {"kv_offload_path": tmp_path / "half", "kv_offload_disk_bytes": limit}
    orders = [[0, 1, *rng.integers(0, 8, 30).tolist()], [1, 0, *rng.integers(0, 8, 30).tolist()]]
    used = at_once(below, prompts, orders)
    for order, each in zip(orders, used, strict=True):
        assert each.said == [alone.said[number] for number in order]
        assert set(each.refused) <= {"gone"}
    found = sum(each.disk_hit_tokens for each in used)
    assert found > 0
    assert sum(each.written_bytes for each in used) > 3 * limit, "files went, and were written anew"
    files = [path for path in (tmp_path / "half").glob("*/*") if path.suffix == ".safetensors"]
    assert 0 < sum(path.stat().st_size for path in files) < 2 * limit
    assert not list((tmp_path / "half").glob("*/.*"))
