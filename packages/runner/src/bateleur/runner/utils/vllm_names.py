"""vLLM's arguments that are not options here. Values that change nothing are accepted, others are refused."""

from collections.abc import Collection, Mapping
from typing import Any

from bateleur.runner.utils.arguments import refuse, shown

Refusals = dict[str, tuple[tuple[Any, ...], str]]  # by name: the accepted values, and the reason why others are refused


def table(*rows: tuple[str, tuple[Any, ...], str]) -> Refusals:
    """Build a table from rows of space-separated names, accepted values, and the reason why others are refused."""
    return {name: (values, why) for names, values, why in rows for name in names.split()}


_RANKS = "ranks are processes of one machine: use tensor_parallel_size or data_parallel_size; torchrun places others"
_KERNELS = "kernels are chosen by device, dtype and shape: see attention_backend and prompt_scan"
_ADAPTERS = "see enable_lora, max_loras and max_lora_rank for what there is of adapters"
_MEDIA = "only text models are supported"
_FILES = "a checkpoint is a local folder: fetch it with hf download"
_OFFLOAD = "weights stay on the device; see kv_offload_bytes for the prefix cache"
_LOGS = "not logged: see get_metrics, and /metrics of the server"
_PLUGINS = "classes are not loaded by name: see bateleur.eagle.Drafter and the registries of backends"

# fmt: off
ENGINE = table(
    ("pipeline_parallel_size nnodes", (1,), "use tensor_parallel_size"),
    ("prefill_context_parallel_size decode_context_parallel_size", (1,), "use tensor_parallel_size"),
    ("data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb", (False,), _RANKS),
    ("data_parallel_rank data_parallel_start_rank data_parallel_address data_parallel_rpc_port", (None,), _RANKS),
    ("data_parallel_size_local master_addr master_port device_ids worker_cls worker_extension_cls", (None,), _RANKS),
    ("node_rank", (0,), _RANKS),
    ("data_parallel_backend", ("mp",), _RANKS),
    ("distributed_executor_backend", (None, "mp"), "ranks are processes; under torchrun it starts them"),
    ("distributed_timeout_seconds cpu_distributed_timeout_seconds", (None,), "use rank_timeout"),
    ("disable_custom_all_reduce", (True,), "sums over ranks are those of NCCL and gloo"),
    ("enable_expert_parallel", (False,), "use data_parallel_size, whose ranks divide the experts"),
    ("enable_eplb enable_elastic_ep enable_ep_weight_filter enable_dbo", (False,), "experts stay on their ranks"),
    ("eplb_config expert_placement_strategy all2all_backend", (None, {}, "linear"), "experts stay on their ranks"),
    ("quantization_config", (None, {}), "config.json of the checkpoint says how its weights are quantised"),
    ("allow_deprecated_quantization", (False,), "config.json says how weights are quantised"),
    ("mamba_cache_dtype", ("auto",), "windows have the dtype of the model"),
    ("kv_cache_dtype_skip_layers", (None, []), "keys and values of all layers have one dtype, see kv_cache_dtype"),
    ("calculate_kv_scales", (False,), "scales of an FP8 cache come from the checkpoint"),
    ("kv_sharing_fast_prefill", (False,), "layers do not share keys and values"),
    ("trust_remote_code", (False,), "code of a checkpoint is never run"),
    ("tokenizer_mode", ("auto",), "the tokenizer is the one that its files describe, see tokenizer"),
    ("revision code_revision tokenizer_revision hf_token download_dir ignore_patterns", (None,), _FILES),
    ("hf_config_path", (None,), "config.json is the one of the folder: see hf_overrides"),
    ("load_format", ("auto", "safetensors"), "weights are read from safetensors"),
    ("safetensors_load_strategy pt_load_map_location", (None, "lazy", "cpu"), "weights are read from safetensors"),
    ("model_loader_extra_config", (None, {}), "weights are read from safetensors"),
    ("config_format", ("auto", "hf"), "the configuration is read from config.json"),
    ("model_impl", ("auto", "vllm"), "models are those of this project"),
    ("max_seq_len_to_capture max_cudagraph_capture_size", (None,), "use cudagraph_capture_sizes"),
    ("compilation_config", (None, {}), "use cudagraph_mode and cudagraph_capture_sizes"),
    ("optimization_level performance_mode", (None, 2, "balanced"), "use cudagraph_mode"),
    ("enable_chunked_prefill", (None, True), "long prompts always run in chunks"),
    ("long_prefill_token_threshold max_num_partial_prefills max_long_partial_prefills",
     (0, 1), "use max_num_batched_tokens"),
    ("disable_hybrid_kv_cache_manager", (None, False), "models with recurrent layers need it"),
    ("disable_sliding_window", (False,), "layers keep their sliding windows; use max_model_len"),
    ("scheduler_cls scheduler_reserve_full_isl", (None, True), "use scheduling_policy"),
    ("max_num_scheduled_tokens", (None,), "use max_num_batched_tokens"),
    ("stream_interval", (1,), "every step is reported"),
    ("prefix_caching_hash_algo", ("sha256", "builtin", None), "prefixes are compared by their tokens"),
    ("swap_space", (0,), "what has no room is computed again"),
    ("cpu_offload_gb offload_group_size", (0,), _OFFLOAD),
    ("offload_backend", ("auto",), _OFFLOAD),
    ("kv_offloading_size kv_offloading_backend", (None,), "use kv_offload_bytes, kv_offload_path"),
    ("kv_transfer_config ec_transfer_config kv_events_config weight_transfer_config",
     (None, {}), "use kv_offload_path"),
    ("num_gpu_blocks_override", (None,), "use kv_cache_memory_bytes"),
    ("fully_sharded_loras enable_tower_connector_lora specialize_active_lora", (None, False), _ADAPTERS),
    ("max_cpu_loras lora_dtype lora_target_modules default_mm_loras", (None,), _ADAPTERS),
    ("limit_mm_per_prompt mm_processor_kwargs media_io_kwargs", (None, {}), _MEDIA),
    ("allowed_local_media_path allowed_media_domains", (None, "", []), _MEDIA),
    ("enable_mm_embeds enable_prompt_embeds interleave_mm_strings mm_encoder_only", (None, False), _MEDIA),
    ("moe_backend linear_backend mamba_backend mamba_ssu_algorithm", (None, "auto", "triton"), _KERNELS),
    ("gdn_prefill_backend kda_prefill_backend kda_decode_backend", (None, "auto", "triton"), _KERNELS),
    ("attention_config kernel_config", (None, {}), _KERNELS),
    ("enable_flashinfer_autotune", (None, False, True), ""),
    ("use_replayssm", (False,), "use mamba_state_policy='fold'"),
    ("spec_method spec_model spec_tokens", (None,), "use speculative_config"),
    ("reasoning_config structured_outputs_config", (None, {}), "use reasoning_parser of the server"),
    ("logprobs_mode", ("raw_logprobs",), "log probabilities are those of the model, before any processing"),
    ("logits_processors", (None, []), _PLUGINS),
    ("io_processor_plugin additional_config", (None, {}), _PLUGINS),
    ("pooler_config", (None, {}), "models generate"),
    ("convert", ("auto", "none"), "models generate"),
    ("task runner", ("auto", "generate"), "models generate"),
    ("enable_sleep_mode", (False,), "end the process instead: it starts in seconds"),
    ("numa_bind", (False,), "start the process under numactl"),
    ("enable_log_requests aggregate_engine_logging enable_logging_iteration_details", (False,), _LOGS),
    ("enable_mfu_metrics kv_cache_metrics cudagraph_metrics enable_layerwise_nvtx_tracing", (False,), _LOGS),
    ("otlp_traces_endpoint collect_detailed_traces show_hidden_metrics_for_version profiler_config", (None,), _LOGS),
    ("disable_nccl_for_dp_synchronization dcp_q_replicate enable_batch_sharded_sampling", (None, False), _RANKS),
    ("dcp_comm_backend elastic_ep_max_dp_size fault_tolerance_config", (None, {}), _RANKS),
    ("cp_kv_cache_interleave_size dcp_kv_cache_interleave_size", (1,), _RANKS),
    ("enable_fault_tolerance enable_nccl_comm_suspend enable_hc_sp ray_workers_use_nsight", (False,), _RANKS),
    ("enable_mixed_moe_lora_format enable_moe_shared_loras", (False,), _ADAPTERS),
    ("max_lora_cls_labels", (None,), _ADAPTERS),
    ("video_pruning_method video_pruning_rate diffusion_config ec_manager_config", (None, {}), _MEDIA),
    ("cpu_offload_params offload_params", (None, "", []), _OFFLOAD),
    ("enable_cumem_allocator enable_shm_tensor_arena use_fp64_gumbel monokernel", (False,), _KERNELS),
    ("sparse_indexer_topk_backend ir_op_priority", (None, "auto", {}), _KERNELS),
    ("enable_mamba_cache_stochastic_rounding", (False,), "see mamba_ssm_cache_dtype"),
    ("enable_mamba_shared_prefix_checkpoint", (False,), "use mamba_retention"),
    ("prefix_cache_retention_interval prefix_match_unit", (None, 0), "use mamba_retention"),
    ("long_prefill_token_threshold_adaptive", (False,), "use max_num_batched_tokens"),
    ("prefill_schedule_interval", (1,), "use max_num_batched_tokens"),
    ("watermark", (0,), "blocks are given when they are needed"),
    ("watermark_config watchdog_config engram_config aux_output_config", (None, {}), _PLUGINS),
    ("model_class_overrides", (None, {}), _PLUGINS),
    ("numa_bind_cpus numa_bind_nodes", (None,), "start the process under numactl"),
    ("enable_return_routed_experts return_sampling_mask", (False,), "outputs have tokens, texts and log probabilities"),
    ("per_request_spec_decode_metrics", ("none",), "accepted drafts are in the reply with return_token_ids"),
    ("custom_histogram_buckets", (None, {}), "the buckets of histograms are fixed"),
    ("logging_config log_config_file", (None, {}), _LOGS),
    ("use_tqdm_on_load disable_cascade_attn language_model_only skip_mm_profiling disable_log_stats "
     "disable_chunked_mm_input sleep_mode_offload_cudagraph jit_monitor_verbose fail_on_environ_validation "
     "enable_trace_replay swa_bounded_replay", (False, True), ""),
    ("max_parallel_loading_workers mm_processor_cache_gb mm_processor_cache_type mm_encoder_tp_mode "
     "mm_encoder_attn_backend dp_sync_interval renderer_num_workers ubatch_size dbo_decode_token_threshold "
     "dbo_prefill_token_threshold kv_cache_metrics_sample mm_device_do_normalize mm_encoder_attn_dtype "
     "mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_hasher_algorithm "
     "mm_ipc_gpu_memory_gb mm_processor_device mm_shm_cache_max_object_size_mb mm_tensor_ipc offload_num_in_group "
     "offload_prefetch_step safetensors_prefetch_block_size safetensors_prefetch_num_threads sleep_mode_backend "
     "sleep_preserve_parameter_names jit_monitor_mode mamba_cache_philox_rounds replayssm_buffer_len log_level",
     (...,), ""),
)
# fmt: on
"""Arguments of vLLM's `LLM` that are not options here, with their accepted values. `...` accepts any value."""

SAMPLING = table(
    ("best_of", (None, 1), "every continuation is returned; use n"),
    ("guided_decoding", (None,), "use structured_outputs"),
    ("spaces_between_special_tokens", (True,), "text is what the tokenizer makes of all tokens together"),
    ("extra_args", (None, {}), "there are none"),
    ("logits_processors", (None, []), "there are none"),
)
"""Parameters of vLLM's `SamplingParams` that are not parameters here."""

STRUCTURED = table(
    ("disable_fallback", (False, True), "there is one library, and nothing to fall back to"),
    ("disable_additional_properties", (False,), "a schema says additionalProperties itself"),
    ("whitespace_pattern", (None,), "whitespace is as JSON has it, or none: use disable_any_whitespace"),
)
"""Parameters of vLLM's `StructuredOutputsParams` that are not parameters here."""


_MTP = dict.fromkeys(("mtp", "qwen3_next_mtp", "qwen3_5_mtp", "nemotron_h_mtp"), "mtp")
_METHODS = {"ngram": "ngram", **_MTP, "eagle": None, "eagle3": None}
"""`draft` for each method of a `speculative_config`; None: the folder given as `model`."""
_PASSED = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")


def translate_vllm_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Replace vLLM's enforce_eager and speculative_config by the options here. Other arguments are returned unchanged.

    Raises ValueError for an enforce_eager that is no bool, a speculative_config without an equivalent, and if another
    argument contradicts one of them.
    """
    options = _translate_speculative_config(given)
    eager, mode = options.pop("enforce_eager", False), options.get("cudagraph_mode")
    if not isinstance(eager, bool):
        refuse("enforce_eager", eager, "True or False")
    if eager and mode not in ("NONE", None):
        refuse("cudagraph_mode", mode, "NONE with enforce_eager")
    return options | {"cudagraph_mode": "NONE"} if eager else options


def _translate_speculative_config(given: Mapping[str, Any]) -> dict[str, Any]:
    name, options = "speculative_config", dict(given)
    config = options.pop(name, None)
    if config is None:
        return options
    if not isinstance(config, Mapping):
        refuse(name, config, "None or a mapping: use draft, num_speculative_tokens and draft_policy")
    for key, value in config.items():
        if key not in ("method", "model", *_PASSED):
            refuse(f"{name}[{key!r}]", value, f"absent: it has method, model, {', '.join(_PASSED)}")
    method, model = config.get("method"), config.get("model")
    if method not in (None, *_METHODS):
        refuse(f"{name}['method']", method, f"one of {', '.join(_METHODS)}")
    draft = None if method is None else _METHODS[method]
    if (draft is None) == (model is None):
        rule = "the folder of a draft head" if draft is None else f"None: {method} has no model of its own"
        refuse(f"{name}['model']", model, rule)
    meant = {"draft": draft or model} | {key: config[key] for key in _PASSED if key in config}
    for key in meant.keys() & options.keys():
        refuse(key, options[key], f"absent with {name}, which sets it to {shown(meant[key])}")
    return options | meant


def drop_unsupported(table: Refusals, given: Mapping[str, Any], *, keep: Collection[str] = ()) -> dict[str, Any]:
    """Return the arguments `given` without those in the table; arguments named by `keep` stay and are not checked.

    Raises ValueError if the table refuses the value of a removed argument.
    """
    refused = {name for name in given if name in table and name not in keep}
    for name in refused:
        (values, why), value = table[name], given[name]
        if ... not in values and not any(type(value) is type(each) and value == each for each in values):
            known = " or ".join(map(repr, values)) or "absent"
            raise ValueError(f"{name} is {shown(value)}; it must be {known}: {why}")
    return {name: value for name, value in given.items() if name not in refused}
