"""CPU time of vLLM's scheduler in a steady decode step. `benchmarks/host.py --vllm PYTHON` runs this script.

Measured are `Scheduler.schedule` and `update_from_output` alone: one group of full attention with blocks of 16 tokens,
prefix caching, no speculative decoding, prompts of 512 tokens, and synthetic outputs. Input preparation, metadata,
detokenisation and request outputs are not included. vLLM 0.32 took 7.7 to 9.0 us per request at 256 requests and 22 to
24 us at one. Nothing else runs between the steps, so CPU caches stay warm.
"""

from __future__ import annotations

import gc
import json
import logging
import statistics
import sys
import tempfile
import time
from typing import Any

BATCHES = (1, 8, 64, 256)
BLOCK, PROMPT, STEPS, SKIPPED = 16, 512, 200, 30


def scheduler(num_requests: int, folder: str) -> Any:
    """vLLM's scheduler without workers."""
    import torch
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    sizes: dict[str, Any] = {"max_model_len": 8192}
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    config = VllmConfig(
        model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", **sizes),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=num_requests, max_num_batched_tokens=8192, is_encoder_decoder=False, **sizes
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
    )
    cache.num_gpu_blocks = 100_000
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    group = KVCacheGroupSpec(["layer"], spec)
    blocks = KVCacheConfig(num_blocks=100_000, kv_cache_tensors=[], kv_cache_groups=[group])
    manager = StructuredOutputManager(config)
    return Scheduler(config, blocks, manager, block_size=BLOCK, log_stats=False)


def add_requests(engine: Any, num_requests: int) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    params = SamplingParams(max_tokens=STEPS, ignore_eos=True, temperature=0.0)
    for i in range(num_requests):
        engine.add_request(
            Request(
                request_id=str(i),
                prompt_token_ids=[(31 * i + j) % 30_000 for j in range(PROMPT)],
                sampling_params=params,
                pooling_params=None,
                block_hasher=get_request_block_hasher(BLOCK, sha256),
            )
        )


def step(engine: Any) -> tuple[int, float]:
    """Run one step; returns the number of requests and microseconds."""
    from vllm.v1.outputs import ModelRunnerOutput

    began = time.thread_time()
    scheduled = engine.schedule()
    seconds = time.thread_time() - began
    names = list(scheduled.num_scheduled_tokens)
    running = [engine.requests[name] for name in names]
    drawn = [[7] if each.num_computed_tokens >= each.num_prompt_tokens else [] for each in running]
    output = ModelRunnerOutput(
        req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=drawn
    )
    began = time.thread_time()
    engine.update_from_output(scheduled, output)
    return len(names), (seconds + time.thread_time() - began) * 1e6


def main() -> None:
    import vllm
    from transformers import LlamaConfig

    logging.disable(logging.CRITICAL)
    sizes = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 8192}
    table = []
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(**sizes, **heads, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
        gc.disable()
        for batch in BATCHES:
            engine = scheduler(batch, folder)
            add_requests(engine, batch)
            found = [us for count, us in (step(engine) for _ in range(STEPS)) if count == batch][SKIPPED:]
            faster = sorted(found)[: len(found) // 2]
            total = statistics.median(faster)
            table.append({"batch": batch, "total": total, "per_request": total / batch})
    json.dump({"vllm": vllm.__version__, "steps": table}, sys.stdout)


if __name__ == "__main__":
    main()
