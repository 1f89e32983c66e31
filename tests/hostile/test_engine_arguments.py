"""Arguments of `LLM` by name: every refusal, word for word."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bateleur.runner import LLM, SamplingParams
from bateleur.runner.config.engine_config import QUANTIZATION_METHODS, EngineConfig, all_options
from eagle_doubles.drafters import StickyDrafter


def brief(value: object) -> str:
    return ascii(value)[1:41] if isinstance(value, str) else ""


@pytest.fixture(scope="module")
def make(tiny: Callable[[str], Path]) -> Callable[..., LLM]:
    def build(**arguments: Any) -> LLM:
        small = {"model": tiny("nemotron_h"), "device": "cpu", "max_model_len": 64, "max_num_seqs": 2}
        return LLM(**(small | arguments))

    return build


WHOLE = [0, -1, 1.5, "64", True, [], {}, math.nan, b"x"]
TEXT = [None, 5, [], "", True]

RULES: dict[str, tuple[str, list[Any]]] = {
    "model": ("the path of a folder", [5, "", b"x", [], True]),
    "enable_lora": ("True or False", [None, 1, "yes", []]),
    "max_loras": ("an integer >= 1", [0, -1, "4", True, 1.5]),
    "max_lora_rank": ("an integer >= 1", [0, -1, "4", True, 1.5]),
    "quantization": (f"one of dequantize, {', '.join(QUANTIZATION_METHODS)}", ["bitsandbytes", "", 5, True, []]),
    "kv_cache_dtype": ("one of auto, fp8, fp8_e4m3, bfloat16, float16, float32", ["fp8_e5m2", "int8", "", 5, None]),
    "dtype": ("one of auto, float32, bfloat16, float16", ["float8", "", None, 5, [], np.float32, "float64"]),
    "device": ("auto, cpu, cuda or cuda:N", [None, 5, [], True]),
    "max_model_len": ("an integer >= 2, or None", [*WHOLE, 1]),
    "tokenizer": ("the path of a folder", [5, "", b"x", [], True]),
    "hf_overrides": ("a mapping from names to values, or None", [5, "x", [], {1: 2}]),
    "generation_config": ("text that is not empty", [5, "", None, []]),
    "override_generation_config": ("a mapping from names to values, or None", [5, "x", [], {1: 2}]),
    "skip_tokenizer_init": ("True or False", ["no", 0, 1, None]),
    "seed": ("an integer", [None, "1", 1.5, True, []]),
    "max_num_seqs": ("an integer >= 1, or None", WHOLE),
    "max_num_batched_tokens": ("an integer >= 1, or None", WHOLE),
    "async_scheduling": ("True or False", ["no", 0, 1]),
    "scheduling_policy": ("one of fcfs, priority", ["lifo", None, 5, [], "", True, "FCFS"]),
    "block_size": ("an integer >= 1", [*WHOLE, None]),
    "kv_cache_memory_bytes": ("an integer >= 0, or None", WHOLE[1:]),
    "gpu_memory_utilization": ("a finite number in (0, 1]", [0, -1, 1.5, "all", None, math.nan, True]),
    "enable_prefix_caching": ("True or False", ["no", 0, 1, None]),
    "mamba_cache_mode": ("one of none, align, all", ["foo", 1, [], True, "", "ALL "]),
    "mamba_block_size": ("an integer >= 1, or None", WHOLE),
    "mamba_state_policy": ("one of slots, fold", ["foo", 1, [], True, ""]),
    "mamba_retention": ("text that is not empty", [5, "", [], True]),
    "mamba_ssm_cache_dtype": ("one of auto, float32, bfloat16, float16", ["foo", None, 5, "float64", []]),
    "kv_offload_bytes": ("an integer >= 0", [*WHOLE[1:], None]),
    "kv_offload_path": ("the path of a folder", [5, "", b"x", []]),
    "kv_offload_disk_bytes": ("an integer >= 0, or None", WHOLE[1:]),
    "draft": ("the path of a folder", [5, "", b"x", []]),
    "num_speculative_tokens": ("an integer >= 0, or None", WHOLE[1:]),
    "prompt_lookup_min": ("an integer >= 1, or None", WHOLE),
    "prompt_lookup_max": ("an integer >= 1, or None", WHOLE),
    "drafter": (
        "a bateleur.eagle.Drafter, which has admit, needs, num_speculative_tokens, propose",
        [5, "x", Ellipsis, StickyDrafter, dict],
    ),
    "draft_policy": (
        "fixed, auto, a mapping of batch sizes to numbers, or a bateleur.eagle.DraftPolicy",
        [5, None, "foo", [], True, dict],
    ),
    "speculative_rule": ("one of coupled, ratio, block", ["foo", None, 1, []]),
    "cudagraph_mode": (
        "one of NONE, PIECEWISE, FULL, FULL_DECODE_ONLY, FULL_AND_PIECEWISE",
        ["foo", [1], 1, "full", {}, True],
    ),
    "cudagraph_backend": ("one of auto, recorded, cuda, eager", ["foo", None, 5, []]),
    "cudagraph_capture_sizes": ("a sequence of integers", [5, "12", b"12", {1}, True]),
    "cudagraph_checks": ("one of OFF, CHEAP, ADDRESSES, PARANOID", ["foo", None, 1, []]),
    "attention_backend": ("text that is not empty", TEXT),
    "prompt_scan": ("one of own, fla", ["foo", None, 5, [], "", True]),
    "tensor_parallel_size": ("an integer >= 1", [0, -1, None, True, 1.5, "2"]),
    "data_parallel_size": ("an integer >= 1", [0, -1, None, True, 1.5, "2"]),
    "rank_timeout": ("a finite number > 0", [0, -1, None, True, "60", float("inf"), float("nan")]),
}

RULES_OF_RETENTION = "'all', 'last', 'prompt_end', 'doubling', 'every=N' joined by '+', with one N above 0"
RETENTION = f"it must be 'none', or some of {RULES_OF_RETENTION}"
CACHED: dict[str, Any] = {"enable_prefix_caching": True}
NGRAM: dict[str, Any] = {"draft": "ngram"}
HEAD: dict[str, Any] = {"model": None, "draft": "auto"}

MORE: list[tuple[dict[str, Any], str]] = [
    ({"max_model_len": 257}, "max_model_len is 257; it must be at least 2 and at most the model's 256"),
    ({"max_model_len": 10**30}, f"max_model_len is {10**30}; it must be at least 2 and at most the model's 256"),
    (
        {"max_num_batched_tokens": 1},
        "max_num_batched_tokens is 1; it must be at least max_num_seqs = 2 rows, or a step could not decode all "
        "running requests",
    ),
    ({"dtype": torch.int8}, "dtype is 'int8'; it must be one of auto, float32, bfloat16, float16"),
    ({"dtype": torch.float64}, "dtype is 'float64'; it must be one of auto, float32, bfloat16, float16"),
    (
        {"mamba_ssm_cache_dtype": torch.int8},
        "mamba_ssm_cache_dtype is 'int8'; it must be one of auto, float32, bfloat16, float16",
    ),
    *(
        ({"device": device}, f"device is {device!r}; expected 'auto', 'cpu', 'cuda' or 'cuda:N'")
        for device in ("tpu", "cuda:x", "", "CPU:")
    ),
    *(
        ({"device": device}, f"device is '{device}'; supported are 'cpu' and 'cuda'")
        for device in ("meta", "cpu:3", torch.device("meta"), "mps")
    ),
    *(
        ({"attention_backend": name}, f"attention_backend is {name!r}; {why}")
        for name, why in [
            ("foo", "it must be one of auto, torch, native, reference, triton, torch_varlen, flashinfer"),
            ("name", "it must be one of auto, torch, native, reference, triton, torch_varlen, flashinfer"),
        ]
    ),
    *(
        (CACHED | {"mamba_retention": text}, f"mamba_retention is {text!r}; {RETENTION}")
        for text in ("most", "every=", "every=0", "every=x", "all+", "none+last", "every=16+every=32", " ")
    ),
    (CACHED | {"mamba_retention": "every=7"}, "mamba_retention is 'every=7'; it must be a multiple of block_size = 16"),
    ({"prompt_scan": "fla"}, "prompt_scan is 'fla'; fla-core scans delta rules, and the model has none"),
    (
        {"mamba_retention": "last"},
        "mamba_retention is 'last'; it must be None in cache mode 'none', which keeps no states",
    ),
    (
        CACHED | {"mamba_cache_mode": "none"},
        "mamba_cache_mode is 'none' and enable_prefix_caching True; prefix caching needs the mode "
        "'align' or 'all', and only these",
    ),
    (
        {"mamba_cache_mode": "all"},
        "mamba_cache_mode is 'all' and enable_prefix_caching False; prefix caching needs the mode "
        "'align' or 'all', and only these",
    ),
    *(
        (
            CACHED | {"mamba_block_size": size},
            f"mamba_block_size is {size}; it must be at most max_model_len - 2 = 62, or no request could start "
            "after a block and draw a token",
        )
        for size in (64, 10**12, 10**30)
    ),
    (
        CACHED | {"mamba_block_size": np.int64(8)},
        "mamba_block_size is 8; it must be a multiple of block_size = 16, so that KV blocks and states end at the same "
        "tokens",
    ),
    ({"num_speculative_tokens": 3}, "num_speculative_tokens is 3; it must be 0 without a draft or a drafter"),
    (
        {"num_speculative_tokens": 10**30},
        f"num_speculative_tokens is {10**30}; it must be 0 without a draft or a drafter",
    ),
    (
        HEAD | {"num_speculative_tokens": 63},
        "num_speculative_tokens is 63; it must be at least 0, and below max_model_len - 1 = 63",
    ),
    ({"draft": "auto"}, "draft is 'auto'; the shipped head fits the shipped model only, name a folder"),
    ({"draft": "/nowhere"}, "/nowhere: holds no config.json; a draft head is a folder with config.json and weights"),
    ({"draft": "none"}, "none: holds no config.json; a draft head is a folder with config.json and weights"),
    ({"prompt_lookup_min": 2}, "prompt_lookup_min is 2; it must be None without draft = 'ngram'"),
    (
        NGRAM | {"async_scheduling": True, "attention_backend": "flashinfer"},
        "async_scheduling is True; it must be None or False with drafts and attention_backend 'flashinfer', which "
        "plans from exact lengths",
    ),
    (HEAD | {"prompt_lookup_max": 2}, "prompt_lookup_max is 2; it must be None without draft = 'ngram'"),
    (
        NGRAM | {"prompt_lookup_min": 4, "prompt_lookup_max": 3},
        "prompt_lookup_min is 4; it must be at most prompt_lookup_max = 3",
    ),
    (NGRAM | {"num_speculative_tokens": 0}, "num_speculative_tokens is 0; with a draft it must be at least 1"),
    (
        {"speculative_config": {"method": "medusa"}},
        "speculative_config['method'] is 'medusa'; it must be one of ngram, mtp, qwen3_next_mtp, qwen3_5_mtp, "
        "nemotron_h_mtp, eagle, eagle3",
    ),
    (
        {"speculative_config": {"method": "ngram", "model": "x"}},
        "speculative_config['model'] is 'x'; it must be None: ngram has no model of its own",
    ),
    (
        {"speculative_config": {"method": "eagle3"}},
        "speculative_config['model'] is None; it must be the folder of a draft head",
    ),
    (
        {"speculative_config": {"method": "ngram", "top": 2}},
        "speculative_config['top'] is 2; it must be absent: it has method, model, num_speculative_tokens, "
        "prompt_lookup_min, prompt_lookup_max",
    ),
    (
        HEAD | {"speculative_config": {"method": "ngram"}},
        "draft is 'auto'; it must be absent with speculative_config, which sets it to 'ngram'",
    ),
    (HEAD | {"draft_policy": {}}, "draft_policy is {}; it must be a mapping that has a number for 1 request"),
    (HEAD | {"draft_policy": {2: 1}}, "draft_policy is {2: 1}; it must be a mapping that has a number for 1 request"),
    (HEAD | {"draft_policy": {1: "x"}}, "draft_policy[1] is 'x'; it must be an integer >= 0"),
    (HEAD | {"draft_policy": {1: -1}}, "draft_policy[1] is -1; it must be an integer >= 0"),
    (HEAD | {"draft_policy": {1: True}}, "draft_policy[1] is True; it must be an integer >= 0"),
    (HEAD | {"draft_policy": {1: 1, 2: None}}, "draft_policy[2] is None; it must be an integer >= 0"),
    (HEAD | {"draft_policy": {0: 1}}, "draft_policy: a batch size is 0; it must be an integer >= 1"),
    (HEAD | {"draft_policy": {"1": 1}}, "draft_policy: a batch size is '1'; it must be an integer >= 1"),
    (HEAD | {"draft_policy": {1: 9}}, "draft_policy is {1: 9}; it must be at most num_speculative_tokens = 4"),
    ({"draft_policy": {1: 1}}, "draft_policy is {1: 1}; it must be at most num_speculative_tokens = 0"),
    ({"cudagraph_backend": "cuda"}, "cudagraph_backend is 'cuda'; it must be another one on device cpu"),
    ({"cudagraph_capture_sizes": []}, "cudagraph_capture_sizes is (); it must be None, or have at least one size"),
    ({"cudagraph_capture_sizes": [1, "2"]}, "cudagraph_capture_sizes[1] is '2'; it must be an integer >= 1"),
    ({"cudagraph_capture_sizes": [0]}, "cudagraph_capture_sizes[0] is 0; it must be an integer >= 1"),
    ({"cudagraph_capture_sizes": [4, -1]}, "cudagraph_capture_sizes[1] is -1; it must be an integer >= 1"),
    ({"cudagraph_capture_sizes": [1.5]}, "cudagraph_capture_sizes[0] is 1.5; it must be an integer >= 1"),
    ({"max_num_seq": 1}, "max_num_seq is no argument of LLM; did you mean max_num_seqs?"),
    ({"foo": 1}, "foo is no argument of LLM"),
    ({"self": 1}, "self is no argument of LLM"),
    ({"cls": 1}, "cls is no argument of LLM"),
    ({"options": {}}, "options is no argument of LLM"),
]

RANKS = "use tensor_parallel_size"
KERNELS = "kernels are chosen by device, dtype and shape: see attention_backend and prompt_scan"
PLUGINS = "classes are not loaded by name: see bateleur.eagle.Drafter and the registries of backends"
NOT_READ = "a checkpoint is a local folder: fetch it with hf download"
OWN = "the tokenizer is the one that its files describe, see tokenizer"
FOREIGN: list[tuple[str, Any, str]] = [
    ("pipeline_parallel_size", 2, f"1: {RANKS}"),
    ("distributed_executor_backend", "ray", "None or 'mp': ranks are processes; under torchrun it starts them"),
    ("disable_custom_all_reduce", False, "True: sums over ranks are those of NCCL and gloo"),
    (
        "quantization_config",
        {"bits": 4},
        "None or {}: config.json of the checkpoint says how its weights are quantised",
    ),
    ("trust_remote_code", True, "False: code of a checkpoint is never run"),
    ("trust_remote_code", 1, "False: code of a checkpoint is never run"),
    ("tokenizer_mode", "slow", f"'auto': {OWN}"),
    ("revision", "main", f"None: {NOT_READ}"),
    ("code_revision", "main", f"None: {NOT_READ}"),
    ("tokenizer_revision", "main", f"None: {NOT_READ}"),
    ("hf_token", "secret", f"None: {NOT_READ}"),
    ("download_dir", "/tmp", f"None: {NOT_READ}"),
    ("load_format", "pt", "'auto' or 'safetensors': weights are read from safetensors"),
    ("config_format", "mistral", "'auto' or 'hf': the configuration is read from config.json"),
    ("max_seq_len_to_capture", 8192, "None: use cudagraph_capture_sizes"),
    ("compilation_config", 3, "None or {}: use cudagraph_mode and cudagraph_capture_sizes"),
    ("speculative_config", 3, "None or a mapping: use draft, num_speculative_tokens and draft_policy"),
    ("enable_chunked_prefill", False, "None or True: long prompts always run in chunks"),
    ("swap_space", 4, "0: what has no room is computed again"),
    ("cpu_offload_gb", 1, "0: weights stay on the device; see kv_offload_bytes for the prefix cache"),
    ("num_gpu_blocks_override", 9, "None: use kv_cache_memory_bytes"),
    ("limit_mm_per_prompt", {"image": 1}, "None or {}: only text models are supported"),
    ("task", "embed", "'auto' or 'generate': models generate"),
    ("runner", "pooling", "'auto' or 'generate': models generate"),
    ("logits_processors", [1], f"None or []: {PLUGINS}"),
    ("moe_backend", "cutlass", f"None or 'auto' or 'triton': {KERNELS}"),
]


def test_every_argument_has_its_refusals() -> None:
    assert set(RULES) == {option.name for option in all_options()}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (name, value, f"{name} is {value!r}; it must be {rule}")
        for name, (rule, values) in RULES.items()
        for value in values
    ],
    ids=brief,
)
def test_values(refused: Any, name: str, value: Any, message: str) -> None:
    """Before anything is opened."""
    with refused(message):
        LLM(**({"model": "/nowhere", "device": "cpu"} | {name: value}))


@pytest.mark.parametrize(("arguments", "message"), MORE, ids=brief)
def test_what_does_not_go_together(
    make: Callable[..., LLM], refused: Any, arguments: dict[str, Any], message: str
) -> None:
    with refused(message):
        make(**arguments)


@pytest.mark.parametrize(("name", "value", "rule"), FOREIGN, ids=brief)
def test_names_of_vllm(refused: Any, name: str, value: Any, rule: str) -> None:
    with refused(f"{name} is {value!r}; it must be {rule}"):
        LLM("/nowhere", **{name: value})


def test_enforce_eager_captures_no_graphs(refused: Any) -> None:
    for given in ({}, {"cudagraph_mode": None}, {"cudagraph_mode": "NONE"}):
        config = EngineConfig.of(enforce_eager=True, device="cpu", **given)
        assert config.graphs.cudagraph_mode == "NONE"
    with refused("enforce_eager is 'yes'; it must be True or False"):
        EngineConfig.of(enforce_eager="yes")
    with refused("cudagraph_mode is 'FULL'; it must be NONE with enforce_eager"):
        EngineConfig.of(enforce_eager=True, cudagraph_mode="FULL")


def test_names_of_vllm_that_ask_for_what_there_is(make: Callable[..., LLM]) -> None:
    make(
        tensor_parallel_size=1,
        data_parallel_size=1,
        quantization=None,
        trust_remote_code=False,
        tokenizer=None,
        enforce_eager=False,
        disable_log_stats=True,
        language_model_only=True,
        mm_processor_cache_gb=0,
    )


HUB = (
    "it must be a folder with config.json and safetensors weights. Fetch a model of the Hub with "
    "`hf download NAME --local-dir DIR`"
)


@pytest.mark.parametrize("name", ["nvidia/Nemotron-H-8B-Base-8K", "/nowhere", "a\0b", "x" * 5000, "~", __file__])
def test_a_model_that_is_no_folder(refused: Any, name: str) -> None:
    with refused(f"{name}: is no folder; {HUB}"):
        LLM(name, device="cpu")


def test_what_a_cuda_device_would_need(refused: Any) -> None:
    count = torch.cuda.device_count()
    with refused(f"device is 'cuda:99'; this machine has {count} CUDA devices"):
        LLM(device="cuda:99")


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_num_batched_tokens": 10**12},
        {"max_num_batched_tokens": 10**30},
        {"kv_cache_memory_bytes": 10**30},
        {"seed": 10**30},
        {"max_model_len": np.int64(8)},
        {"cudagraph_capture_sizes": [10**12, 1]},
        {"device": torch.device("cpu"), "dtype": torch.float32},
        {"device": "cpu:0", "dtype": "float32"},
        CACHED | {"mamba_retention": "last+every=16"},
    ],
)
def test_what_is_more_than_can_be_used_is_taken(make: Callable[..., LLM], arguments: dict[str, Any]) -> None:
    (output,) = make(**arguments).generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2


def test_an_engine_that_does_not_fit_into_memory(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever allocates: numpy, torch on the CPU, torch on a GPU."""
    for error in (MemoryError("none"), RuntimeError("can't allocate memory"), torch.OutOfMemoryError("allocate 9 GiB")):
        monkeypatch.setattr("bateleur.runner.llm.Engine", _raising(error))
        with pytest.raises(
            ValueError, match="max_num_seqs = 2, max_num_batched_tokens = 128; there is not enough memory"
        ):
            make()
    monkeypatch.setattr("bateleur.runner.llm.Engine", _raising(RuntimeError("something else")))
    with pytest.raises(RuntimeError, match="something else"):
        make()


def _raising(error: Exception) -> Callable[..., None]:
    def make(*_: object) -> None:
        raise error

    return make
