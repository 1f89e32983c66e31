"""Creates the parts of an engine from the user's configuration."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

import torch

from bateleur.cudagraph import CudaGraphMode
from bateleur.eagle import AdaptiveDrafts, ByBatchSize, Drafter, DraftPolicy, FixedDrafts, NGramDrafter, Rule
from bateleur.mamba import PromptScan
from bateleur.metadata import AttentionBackend
from bateleur.runner.assets import shipped_model
from bateleur.runner.cache.costs import CacheOptions, DraftCosts, workspace_bytes
from bateleur.runner.cache.plan import CachePlan, plan_caches
from bateleur.runner.checkpoint.open import Checkpoint, load_model, open_checkpoint, resolve_dtype
from bateleur.runner.checkpoint.tokenizer import load_tokenizer, with_end_tokens
from bateleur.runner.config.engine_config import (
    DEQUANTIZE,
    NGRAM,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SpeculativeConfig,
)
from bateleur.runner.config.graph_options import GraphOptions
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.config.resolve import choose_backend, choose_scan, warn_of_missing_scales
from bateleur.runner.distributed.ranks import ALONE, Ranks
from bateleur.runner.lora.adapter_manager import AdapterManager
from bateleur.runner.model_runner.graph_dispatcher import largest_capture, query_lens_of
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.spec import ModelSpec
from bateleur.runner.offload.copies import STAGING_BYTES
from bateleur.runner.offload.host_memory import HostSizes
from bateleur.runner.spec_decode.draft_head import DraftHead
from bateleur.runner.text.tokenizer import NoTokenizer, Tokenizer
from bateleur.runner.utils.arguments import member_of, refuse
from bateleur.runner.utils.device import free_main_memory, resolve_device


def device_of(config: EngineConfig, ranks: Ranks = ALONE) -> torch.device:
    """Return the device of this rank, with its index. Raises ValueError if it is unknown or absent."""
    return ranks.device(resolve_device(config.model.device))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """The parts of an engine, chosen, checked and loaded.
    model: the model with its weights on the device, or this rank's part of it. spec: specification of the whole model.
    drafter: proposes `limits.num_speculative_tokens` tokens; the engine gives a `DraftHead` its caches and graphs.
    policy: chooses the number of drafts. rule: acceptance rule. prompt_scan: kernel that runs recurrent layers over
    prompts. host: sizes of the host-memory tier; None without offloading. disk: folder of the disk tier and its size
    limit in bytes, None for the default; None without a disk tier. adapters: LoRA adapters on the device; None without
    `enable_lora`. load_options: values of options, by name, that change the weights read from equal files.
    """

    folder: Path
    model: HybridDecoder
    spec: ModelSpec
    tokenizer: Tokenizer
    cache_plan: CachePlan
    backend: AttentionBackend
    limits: EngineLimits
    graphs: GraphOptions
    drafter: Drafter | DraftHead | None
    policy: DraftPolicy
    rule: Rule
    load_options: Mapping[str, str]
    async_scheduling: bool = False
    prompt_scan: PromptScan = PromptScan.OWN
    host: HostSizes | None = None
    disk: tuple[Path, int | None] | None = None
    adapters: AdapterManager | None = None

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Query lengths of decode steps to capture."""
        return query_lens_of(self.policy, self.limits.num_speculative_tokens)

    @classmethod
    def of(cls, config: EngineConfig, measure: Callable[[EngineSetup], int], ranks: Ranks = ALONE) -> EngineSetup:
        """Open and load the model of `config`, or this rank's part of it, and choose the sizes of the caches.
        Caches get `kv_cache_memory_bytes` if that is given. By default they get a quarter of main memory on a CPU, and
        on a GPU the memory that is left of `gpu_memory_utilization`.
        measure: returns the bytes that an engine of a setup needs on a GPU in addition to weights and caches; pass
        `memory_profile.needed_bytes`. Raises ValueError for options that do not fit together, see `LLM`.
        """
        device = device_of(config, ranks)
        layers, data = (ranks, ALONE) if config.parallel.data_parallel_size == 1 else (ALONE, ranks)
        graphs = GraphOptions.of(config.graphs, device)
        chosen, ahead = config.model, config.runs_async(device)
        checkpoint, tokenizer = _open(chosen)
        config = without_prefix_caching(config) if checkpoint.spec.has_length_dependent_rope else config
        dtype = resolve_dtype(chosen.dtype, checkpoint, device)
        recorded = graphs.mode is not CudaGraphMode.NONE
        caches = CacheOptions.of(config, checkpoint.spec, device)
        caches = replace(caches, states=replace(caches.states, steps_ahead=int(ahead)))
        limits = EngineLimits.of(config, checkpoint.spec, device)
        backend = choose_backend(chosen.attention_backend, device, dtype, checkpoint.spec, caches.kv_dtype)
        if caches.kv_dtype == torch.float8_e4m3fn and not ranks.rank:
            warn_of_missing_scales(checkpoint.spec)
        scan = choose_scan(chosen.prompt_scan, checkpoint.spec, dtype, device)
        network = load_model(checkpoint, dtype=dtype, device=device, ranks=layers, data_ranks=data)
        adapters = AdapterManager.of(config.lora, checkpoint, network, limits.max_num_batched_tokens)
        drafter: DraftHead | Drafter | None = config.speculative.drafter
        if (draft := config.speculative.draft) == NGRAM:
            caches = replace(caches, draft=DraftCosts(row_bytes=NGramDrafter.token_bytes(limits.max_model_len)))
        elif draft is not None:
            shipped = chosen.model is None
            drafter = DraftHead.open(draft, network, checkpoint=checkpoint, shipped=shipped, recorded=recorded)
        network.pack(recorded=recorded)  # after the head, which may share some of them
        rule = member_of(Rule, config.speculative.speculative_rule)
        if isinstance(drafter, DraftHead):
            caches = replace(caches, draft=drafter.costs(caches.kv_dtype or dtype, rule))
        made = partial(
            cls,
            folder=checkpoint.path,
            model=network,
            spec=checkpoint.spec,
            tokenizer=tokenizer,
            backend=backend,
            graphs=graphs,
            policy=policy_of(config.speculative, rule),
            rule=rule,
            async_scheduling=ahead,
            prompt_scan=scan,
            adapters=adapters,
            load_options=_load_options(checkpoint),
        )
        return _CacheSizes(made, config, network, caches, drafter, ranks, data).sized(limits, graphs, measure)


def _open(config: ModelConfig) -> tuple[Checkpoint, Tokenizer]:
    """Return the checkpoint, with the end tokens of its tokenizer, and the tokenizer."""
    checkpoint = open_checkpoint(
        config.model or shipped_model(),
        config.hf_overrides,
        dequantize=config.dequantizes,
        method=None if config.dequantizes else config.quantization,
    )
    if config.skip_tokenizer_init:
        return checkpoint, NoTokenizer()
    tokenizer = load_tokenizer(checkpoint, config.tokenizer)
    return with_end_tokens(checkpoint, tokenizer), tokenizer


def _load_options(checkpoint: Checkpoint) -> dict[str, str]:
    """Return `EngineSetup.load_options`; fields of `hf_overrides` as a digest, because they may be long."""
    overrides = json.dumps(checkpoint.overrides, sort_keys=True, default=str).encode()
    return {
        "hf_overrides": blake2b(overrides, digest_size=8).hexdigest() if checkpoint.overrides else "none",
        "quantization": DEQUANTIZE if checkpoint.dequantize else "of the files",
    }


@dataclass(frozen=True, slots=True)
class _CacheSizes:
    """Chooses the cache sizes of an engine.
    made: creates the setup, given its fields that depend on cache sizes (cache_plan, limits, drafter, host, disk).
    ranks: all ranks of the engine, which get equal sizes. data: equal to `ranks` if they are data-parallel, else
    `ALONE`.
    """

    made: Callable[..., EngineSetup]
    config: EngineConfig
    model: HybridDecoder
    options: CacheOptions
    drafter: DraftHead | Drafter | None
    ranks: Ranks
    data: Ranks

    def sized(self, limits: EngineLimits, graphs: GraphOptions, measure: Callable[[EngineSetup], int]) -> EngineSetup:
        cache, device = self.config.cache, self.model.device
        if device.type == "cuda":
            torch.cuda.empty_cache()  # return what loading the weights left
            limits = self._fitted(limits, graphs)
        budget = unmeasured_budget(cache, device, self.model.peers.local[1])
        if budget is not None:
            return self._within(budget, limits)
        memory = torch.cuda.mem_get_info(device)
        first = self._within(_left(cache, memory, self._needed(limits, graphs)), limits, trial=True)
        # No more rows than were measured.
        return self._within(_left(cache, memory, measure(first)), first.limits)

    def _needed(self, limits: EngineLimits, graphs: GraphOptions) -> int:
        return workspace_bytes(self.model, limits, self.config.cache.block_size, largest_capture(graphs, limits))

    def _fitted(self, limits: EngineLimits, graphs: GraphOptions) -> EngineLimits:
        """Return limits that are equal on all ranks. Defaults of `max_num_seqs` and `max_num_batched_tokens` are halved
        until the memory of steps is small enough, first the one whose half saves more memory. Steps may take a quarter
        of the GPU memory of this engine, or all that `kv_cache_memory_bytes` leaves if it is given. Limits that the
        user gave stay.
        """
        chosen, cache = self.config.scheduler, self.config.cache
        rows, tokens = chosen.max_num_seqs is None, chosen.max_num_batched_tokens is None
        if not (rows or tokens):
            return limits
        share, given = _share(cache, torch.cuda.mem_get_info(self.model.device)), cache.kv_cache_memory_bytes
        most = share // 4 if given is None else share - given
        while self._needed(limits, graphs) > most and (smaller := limits.smaller(rows=rows, tokens=tokens)):
            limits = min(smaller, key=lambda each: self._needed(each, graphs))
        least = self.ranks.least
        return replace(
            limits, max_num_seqs=least(limits.max_num_seqs), max_num_batched_tokens=least(limits.max_num_batched_tokens)
        )

    def _within(self, budget: int, limits: EngineLimits, *, trial: bool = False) -> EngineSetup:
        """Return the setup with caches of `budget` bytes. A trial keeps `max_model_len` even if caches hold less."""
        config, model = self.config, self.model
        with warnings.catch_warnings():
            if trial:
                warnings.simplefilter("ignore")
            plan = plan_caches(
                model.spec,
                model.dtype,
                limits,
                self.options,
                self.ranks.least(budget),
                rows_chosen=config.scheduler.max_num_seqs is not None,
                length_chosen=config.model.max_model_len is not None and not trial,
            ).common(self.ranks)
        longest = limits.max_model_len if trial else plan.max_model_len
        limits = replace(limits, max_num_seqs=plan.max_num_seqs, max_model_len=longest)
        drafter = self.drafter
        if config.speculative.draft == NGRAM:
            least, most = config.speculative.prompt_lookup
            bounds = {"prompt_lookup_min": least, "prompt_lookup_max": most}
            num_drafts, rows = limits.num_speculative_tokens, limits.max_num_seqs
            drafter = NGramDrafter(num_drafts, rows, limits.max_model_len, model.device, **bounds)
        path = config.cache.kv_offload_path if plan.share_prefixes else None
        if path is not None and not self.data.alone:
            rule = f"None with data_parallel_size = {self.data.size}, whose ranks keep prefixes in host memory alone"
            refuse("kv_offload_path", path, rule)
        return self.made(
            cache_plan=plan,
            limits=limits,
            drafter=drafter,
            host=_host_sizes(config.cache, plan, self.ranks),
            disk=None if path is None else (Path(path), config.cache.kv_offload_disk_bytes),
        )


def without_prefix_caching(config: EngineConfig) -> EngineConfig:
    """Return the configuration with prefix caching off, and warn if it was on."""
    if not config.cache.enable_prefix_caching:
        return config
    warnings.warn(
        "enable_prefix_caching is off: with rope_type 'longrope' or 'dynamic', keys depend on the length of the prompt",
        RuntimeWarning,
        stacklevel=4,
    )
    cache = replace(
        config.cache,
        enable_prefix_caching=False,
        mamba_cache_mode=None,
        kv_offload_bytes=0,
        kv_offload_path=None,
        kv_offload_disk_bytes=None,
    )
    return replace(config, cache=cache)


def unmeasured_budget(cache: CacheConfig, device: torch.device, num_local_ranks: int = 1) -> int | None:
    """Return the bytes for the caches of a rank, or None if they must be measured on a GPU.
    They are `kv_cache_memory_bytes`, or on a CPU a quarter of main memory for all ranks of this machine together.
    """
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes
    if device.type == "cuda":
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (4 * num_local_ranks)


def policy_of(config: SpeculativeConfig, rule: Rule) -> DraftPolicy:
    """Return the policy that chooses how many drafts each step verifies. Warns if tokens depend on that number."""
    policy, most = config.draft_policy, config.num_drafts
    if policy == "fixed" or not most:
        return FixedDrafts(most)
    if rule is not Rule.COUPLED:
        warnings.warn(
            f"draft_policy is {policy!r} with speculative_rule {rule.value!r}, under which tokens depend on how many "
            "drafts each step tests: a seed gives the same tokens again only if the policy gives every request the "
            "same numbers; draft_policy 'fixed' does, and speculative_rule 'coupled' needs no such thing",
            stacklevel=2,
        )
    if isinstance(policy, str):
        return AdaptiveDrafts(most)
    return policy if hasattr(policy, "lengths") else ByBatchSize(policy)


def _host_sizes(cache: CacheConfig, plan: CachePlan, ranks: Ranks) -> HostSizes | None:
    """Return the host memory sizes of this rank; None without offloading. Raises ValueError if they are impossible."""
    wanted = cache.kv_offload_bytes
    if not wanted or not plan.share_prefixes:
        return None
    free = ranks.least(free_main_memory())  # of a time at which none has taken its part
    if wanted * ranks.local[1] // ranks.size > free:
        raise ValueError(f"kv_offload_bytes is {wanted}; {free} bytes of main memory are free")
    return HostSizes.of(plan, wanted, ranks.size)


def _share(cache: CacheConfig, memory: tuple[int, int]) -> int:
    """Return the bytes that caches, steps and graphs may take of a GPU. memory: free and total bytes of the device."""
    free, total = memory
    return int(free - (1.0 - cache.gpu_memory_utilization) * total)


def _left(cache: CacheConfig, memory: tuple[int, int], needed: int) -> int:
    """Return the bytes that caches may take of a GPU if `needed` bytes are reserved.
    memory: free and total bytes of the device. Raises ValueError if nothing is left.
    """
    (free, total), share = memory, cache.gpu_memory_utilization
    needed += 2 * STAGING_BYTES if cache.kv_offload_bytes else 0
    left = _share(cache, memory) - needed
    if left <= 0:
        raise ValueError(
            f"gpu_memory_utilization={share}: of {total} bytes {free} are free, and steps and graphs need {needed}, so "
            "nothing is left for caches; choose a larger share, or smaller max_num_seqs or max_num_batched_tokens"
        )
    return left
