"""Names that vLLM's users type and that are no choice here: taken where they ask for what there is, refused else."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from bateleur.runner.arguments import refuse, shown

Refusals = dict[str, tuple[tuple[Any, ...], str]]
"""By name: the values that mean what is done here, and why there are no others."""


def table(*rows: tuple[str, tuple[Any, ...], str]) -> Refusals:
    """Rows of names, the values of them that are accepted, and why no others are."""
    return {name: (values, why) for names, values, why in rows for name in names.split()}


ENGINE = table(
    ("pipeline_parallel_size", (1,), "say tensor_parallel_size"),
    ("distributed_executor_backend", (None, "mp"), "ranks are processes; under torchrun it starts them"),
    ("disable_custom_all_reduce", (True,), "sums over ranks are those of NCCL and gloo"),
    ("quantization", (None,), "weights are not quantised"),
    ("kv_cache_dtype", ("auto",), "keys and values have the dtype of the model"),
    ("trust_remote_code", (False,), "code of a checkpoint is never run"),
    ("tokenizer_mode", ("auto",), "the tokenizer is the one that its files describe, see tokenizer"),
    (
        "revision code_revision tokenizer_revision hf_token download_dir",
        (None,),
        "a checkpoint is a folder, and nothing is downloaded",
    ),
    ("hf_overrides", (None, {}), "the configuration is the checkpoint's own"),
    ("load_format", ("auto", "safetensors"), "weights are read from safetensors"),
    ("config_format", ("auto", "hf"), "the configuration is read from config.json"),
    ("enforce_eager", (False,), "say cudagraph_mode='NONE'"),
    ("max_seq_len_to_capture", (None,), "say cudagraph_capture_sizes"),
    ("compilation_config", (None, {}), "say cudagraph_mode and cudagraph_capture_sizes"),
    ("enable_chunked_prefill", (None, True), "long prompts always run in chunks"),
    ("swap_space", (0,), "what has no room is computed again"),
    ("cpu_offload_gb", (0,), "weights stay where they are"),
    ("num_gpu_blocks_override", (None,), "say kv_cache_memory_bytes"),
    ("enable_lora", (None, False), "adapters are not loaded"),
    ("limit_mm_per_prompt", (None, {}), "prompts are text or token ids"),
    ("disable_log_stats", (True,), "nothing is logged; see get_metrics"),
    ("task runner", ("auto", "generate"), "models generate"),
    ("logits_processors", (None, []), "there are none"),
)
"""Arguments of vLLM's `LLM`."""

SAMPLING = table(
    ("best_of", (None, 1), "every continuation is returned; say n"),
    ("guided_decoding", (None,), "say structured_outputs"),
    ("spaces_between_special_tokens", (True,), "text is what the tokenizer makes of all tokens together"),
    ("extra_args", (None, {}), "there are none"),
    ("logits_processors", (None, []), "there are none"),
)
"""Parameters of vLLM's `SamplingParams`."""

STRUCTURED = table(
    ("disable_fallback", (False, True), "there is one library, and nothing to fall back to"),
    ("disable_additional_properties", (False,), "a schema says additionalProperties itself"),
    ("whitespace_pattern", (None,), "whitespace is as JSON has it, or none: say disable_any_whitespace"),
)
"""Parameters of vLLM's `StructuredOutputsParams`."""


_MTP = dict.fromkeys(("mtp", "qwen3_next_mtp", "qwen3_5_mtp", "nemotron_h_mtp"), "mtp")
_METHODS = {"ngram": "ngram", **_MTP, "eagle": None, "eagle3": None}
"""Methods of a `speculative_config`, and what `draft` each is; None is the folder of its `model`."""
_PASSED = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")


def with_draft(given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, with vLLM's `speculative_config` in the names of here. Raises ValueError for what is none."""
    name, options = "speculative_config", dict(given)
    config = options.pop(name, None)
    if config is None:
        return options
    if not isinstance(config, Mapping):
        refuse(name, config, "None or a mapping: say draft, num_speculative_tokens and draft_policy")
    for key, value in config.items():
        if key not in ("method", "model", *_PASSED):
            refuse(f"{name}[{key!r}]", value, f"absent: it has method, model, {', '.join(_PASSED)}")
    method, model = config.get("method"), config.get("model")
    if method not in (None, *_METHODS):
        refuse(f"{name}['method']", method, f"one of {', '.join(_METHODS)}")
    draft = _METHODS[method] if method is not None else None
    if (draft is None) == (model is None):
        rule = "the folder of a draft head" if draft is None else f"None: {method} has no model of its own"
        refuse(f"{name}['model']", model, rule)
    meant = {"draft": draft or model} | {key: config[key] for key in _PASSED if key in config}
    for key in meant.keys() & options.keys():
        refuse(key, options[key], f"absent beside {name}, which says {shown(meant[key])}")
    return options | meant


def without(table: Refusals, given: Mapping[str, Any], *, keep: Collection[str] = ()) -> dict[str, Any]:
    """What was given, less the names of the table. Raises ValueError for a value that asks for what there isn't.

    keep: names that are passed on, although the table has them.
    """
    refused = {name for name in given if name in table and name not in keep}
    for name in refused:
        values, why = table[name]
        if not any(type(given[name]) is type(each) and given[name] == each for each in values):
            known = " or ".join(map(repr, values)) or "absent"
            raise ValueError(f"{name} is {shown(given[name])}; it must be {known}: {why}")
    return {name: value for name, value in given.items() if name not in refused}
