"""Arguments of the wrong type or size are refused by name, before anything is computed with them."""

from __future__ import annotations

from typing import Any

import pytest

from bateleur.runner import LLM

CACHED = {"enable_prefix_caching": True}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            ({name: value}, rf"^{name} is {value!r}; it must be an integer")
            for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes")
            for value in ("64", 64.0, True)
        ),
        *(
            (caching | {"mamba_block_size": value}, "^mamba_block_size is .*; it must be an integer")
            for caching in ({}, CACHED)
            for value in ("16", 16.0, True)
        ),
        *(
            (caching | {"mamba_block_size": 0}, "^mamba_block_size is 0; it must be at least 1")
            for caching in ({}, CACHED)
        ),
        (
            CACHED | {"mamba_block_size": 64},
            "^mamba_block_size is 64; it must be at most max_model_len - 2 = 62",
        ),
        (CACHED | {"mamba_block_size": 10**12}, "^mamba_block_size is 1000000000000; it must be at most"),
        (CACHED | {"mamba_retention": 5}, "^mamba_retention is 5; it must be text"),
        (CACHED | {"mamba_retention": "most"}, "^mamba_retention: retention is 'most'; it must be"),
        (CACHED | {"mamba_retention": "every=7"}, "^mamba_retention: every is 7; it must be a multiple of"),
        ({"enable_prefix_caching": "no"}, "^enable_prefix_caching is 'no'; it must be True or False"),
        ({"skip_tokenizer_init": "no"}, "^skip_tokenizer_init is 'no'; it must be True or False"),
        ({"gpu_memory_utilization": "all"}, "^gpu_memory_utilization is 'all'; it must be a number"),
        ({"model": 5}, "^model is 5; it must be the path of a folder"),
        ({"draft": 5}, "^draft is 5; it must be the path of a folder"),
        ({"cudagraph_capture_sizes": 5}, "^cudagraph_capture_sizes is 5; it must be a sequence"),
        (
            {"cudagraph_capture_sizes": [1, "2"]},
            r"^cudagraph_capture_sizes\[1\] is '2'; it must be an integer",
        ),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(**({"device": "cpu", "max_model_len": 64, "max_num_seqs": 2} | arguments))
