"""`LLM`: the whole engine behind the names that vLLM's users type."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from bateleur.cudagraph import Checks, CudaGraphMode
from bateleur.eagle import ByBatchSize, ByMeasuredCost, Drafter, DraftPolicy, FixedDrafts, Rule
from bateleur.mamba import MambaCacheMode, StatePolicy
from bateleur.metadata import get_backend
from bateleur.runner.arguments import (
    require_bools,
    require_integers,
    require_integers_or_none,
    require_numbers,
    require_paths,
)
from bateleur.runner.cache.plan import DEFAULT_KV_BLOCK, CachePlan, plan_caches
from bateleur.runner.checkpoint import Checkpoint, load_model, load_tokenizer, open_checkpoint, resolve_dtype
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.config.state_options import StateOptions
from bateleur.runner.device import resolve_device
from bateleur.runner.engine.engine import Engine
from bateleur.runner.engine.input_processor import InputProcessor, Prompt, as_prompts
from bateleur.runner.model_runner.graph_dispatcher import GraphOptions
from bateleur.runner.models import HybridDecoder
from bateleur.runner.outputs import RequestOutput
from bateleur.runner.requests.request import Request
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.spec_decode.draft_model import DEFAULT_DRAFTS, DraftModel
from bateleur.runner.stats import EngineStats
from bateleur.runner.text.tokenizer import NoTokenizer


def shipped_model() -> Path:
    """The folder of the model that comes with this package."""
    return Path(str(files("bateleur.runner") / "assets" / "model"))


class LLM:
    """A model ready to generate.

    Args:
        model: Hugging Face checkpoint folder; None is the model that ships with the package.
        dtype: "auto" (float32 on CPU, the checkpoint's own on CUDA), "float32", "bfloat16", "float16".
        device: "auto", "cpu", "cuda" or "cuda:N".
        max_model_len: longest request in tokens, prompt and output; default: what the model was made for.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens of one step; longer prompts run in chunks. Default: 512 on CPU, where larger
            chunks only leave its caches, 2048 on CUDA.
        block_size: tokens of a KV-cache block.
        seed: what the noise of requests without a seed of their own derives from.
        kv_cache_memory_bytes: budget for KV cache and Mamba states together; default: all that could be used, up to
            a quarter of main memory on CPU, or what `gpu_memory_utilization` leaves beside the weights on CUDA.
        gpu_memory_utilization: share of the GPU's memory for weights and caches together.
        enable_prefix_caching: let requests share what others computed of the same leading tokens.
        mamba_cache_mode: which Mamba states are kept for that: "all" block boundaries (the default with prefix
            caching), "align" (of each request the newest, and its prompt's last) or "none" (the default without).
        mamba_block_size: tokens between two states that may be kept, a multiple of `block_size`; default the
            largest `block_size` * 2**n up to 256 and to a quarter of `max_model_len`.
        mamba_state_policy: "fold" (one state and a ring of inputs per request) or "slots" (a state for each draft
            token); default: "fold", but "slots" on CPU without drafts, where it is faster.
        mamba_retention: which of the states of `mamba_cache_mode` others may find: "all", "none", or some of
            "last", "prompt_end" and "every=N" (tokens) joined by "+"; default: what the mode says.
        mamba_ssm_cache_dtype: of the SSM states: "auto" (the checkpoint's own, else float32), "float32", "bfloat16" or
            "float16".
        draft: folder of a draft head (EAGLE-1, EAGLE-3 or NemotronH's MTP, see `bateleur.eagle.heads`), or "auto" for
            the one that is shipped with the shipped model; the tokens stay those of plain decoding.
        num_speculative_tokens: drafts that a step verifies for each request, at most; default: 4 with `draft`, else 0.
        drafter: what proposes them in place of a head: anything that is a `bateleur.eagle.Drafter`.
        draft_policy: how many drafts each request's next step verifies: "fixed" (as many as there are), "auto" (as many
            as pay, by the times of the steps so far; none where none do), a mapping of batch sizes to numbers such as
            {1: 4, 8: 2, 32: 0}, or a `bateleur.eagle.DraftPolicy`.
        speculative_rule: how drafts are tested: "coupled" (the tokens of plain decoding), or "ratio" or "block", which
            have the target's law; a head then keeps the logits of its drafts, max_num_seqs * drafts * draft vocabulary
            * 4 bytes, and a `drafter` that doesn't declare its law is shown greedy rows only. Greedy requests are the
            same under all.
        attention_backend: "auto" or the name of a registered backend.
        cudagraph_mode: which steps run on CUDA graphs: "NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY" or
            "FULL_AND_PIECEWISE"; default: FULL_DECODE_ONLY on CUDA, NONE on CPU. A mode that the model's parts can't
            support is lowered with a warning.
        cudagraph_backend: "auto" (CUDA graphs on CUDA; on CPU the captured body runs eagerly), "recorded" (on CPU, with
            the semantics of CUDA graphs: for tests) or "eager".
        cudagraph_capture_sizes: token counts to capture; default: up to 512, dense for small batches.
        cudagraph_checks: what each replay verifies: "OFF", "CHEAP", "ADDRESSES" or "PARANOID".
        skip_tokenizer_init: open a checkpoint without its tokenizer; prompts are token ids, and texts stay empty.

    Raises:
        ValueError: an argument is out of range, or the folder is no supported checkpoint.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int | None = None,
        block_size: int = DEFAULT_KV_BLOCK,
        seed: int = 0,
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool = False,
        mamba_cache_mode: MambaCacheMode | str | None = None,
        mamba_block_size: int | None = None,
        mamba_state_policy: StatePolicy | str | None = None,
        mamba_retention: str | None = None,
        mamba_ssm_cache_dtype: torch.dtype | str = "auto",
        draft: str | Path | None = None,
        num_speculative_tokens: int | None = None,
        drafter: Drafter | None = None,
        draft_policy: DraftPolicy | Mapping[int, int] | str = "fixed",
        speculative_rule: Rule | str = Rule.COUPLED,
        attention_backend: str = "auto",
        cudagraph_mode: CudaGraphMode | str | None = None,
        cudagraph_backend: str = "auto",
        cudagraph_capture_sizes: Sequence[int] | None = None,
        cudagraph_checks: Checks | str = Checks.CHEAP,
        skip_tokenizer_init: bool = False,
    ) -> None:
        drafts = _num_drafts(num_speculative_tokens, draft, drafter)
        require_integers(block_size=block_size, seed=seed)
        require_bools(enable_prefix_caching=enable_prefix_caching, skip_tokenizer_init=skip_tokenizer_init)
        self.device = resolve_device(device)
        captures = (cudagraph_mode, cudagraph_backend, cudagraph_capture_sizes, cudagraph_checks)
        graphs = GraphOptions.parse(*captures, self.device)
        states = StateOptions.parse(
            *(mamba_cache_mode, mamba_state_policy, mamba_block_size, mamba_retention, mamba_ssm_cache_dtype),
            share_prefixes=enable_prefix_caching,
            num_speculative_tokens=drafts,
            device=self.device,
        )
        checkpoint = open_checkpoint(shipped_model() if model is None else model)
        self.spec = spec = checkpoint.spec
        self.dtype = resolve_dtype(dtype, checkpoint, self.device)
        sizes = (max_model_len, max_num_seqs, max_num_batched_tokens, drafts)
        self.limits = EngineLimits.resolve(spec, self.device, *sizes)
        self.tokenizer = NoTokenizer() if skip_tokenizer_init else load_tokenizer(checkpoint)
        widest = spec.widest_head
        backend = get_backend(attention_backend, device=self.device, dtype=self.dtype, head_dim=widest)
        drafting = (draft, drafter, model is None, graphs.mode is CudaGraphMode.NONE)
        network, proposer = _load(checkpoint, self.dtype, self.device, *drafting)
        budget = _budget(kv_cache_memory_bytes, self.device, gpu_memory_utilization)
        self.cache_plan = self._plan_caches(block_size, budget, enable_prefix_caching, states, proposer)
        policy = _policy(draft_policy, drafts)
        parts = (network, self.tokenizer, self.cache_plan, backend, self.limits, graphs)
        self.engine = Engine(*parts, proposer, policy, _rule(speculative_rule))
        self._admission = InputProcessor(self.tokenizer, spec, self.engine.scheduler, self.limits, seed=seed)
        self._unclaimed: list[RequestOutput] = []

    def _plan_caches(
        self,
        block_size: int,
        budget_bytes: int,
        share_prefixes: bool,
        states: StateOptions,
        proposer: DraftModel | Drafter | None,
    ) -> CachePlan:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be at least 1")
        beside = proposer.kv_bytes_per_token(self.dtype) if isinstance(proposer, DraftModel) else 0
        return plan_caches(
            self.spec,
            self.dtype,
            block_size=block_size,
            max_model_len=self.limits.max_model_len,
            max_num_seqs=self.limits.max_num_seqs,
            budget_bytes=budget_bytes,
            share_prefixes=share_prefixes,
            states=states,
            draft_kv_bytes_per_token=beside,
        )

    # --- whole batches ------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Run all prompts to their end; results in the order of the prompts.

        All prompts are validated before the first is queued: a ValueError means that nothing was started. Requests
        queued by `add_request` run along; what they report meanwhile is kept for the next `step`.
        """
        requests = self._requests(prompts, sampling_params, stream=False)
        results: dict[str, RequestOutput] = {}
        with _progress(len(requests), use_tqdm) as bar:
            for output in self._run(requests):
                results[output.request_id] = output
                bar.update(1)
        return [results[request.request_id] for request in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yields each request after each of its tokens, with all of its text so far.

        Text that could still change (half a character, the start of a stop string) is held back. Closing the
        iterator aborts what has not finished.
        """
        return self._run(self._requests(prompts, sampling_params, stream=True))

    def _run(self, requests: list[Request]) -> Iterator[RequestOutput]:
        """Run these requests to their end; whatever stops the caller early aborts the rest of them."""
        pending = {request.request_id for request in requests}
        for request in requests:
            self.engine.add(request)
        try:
            while pending:
                for output in self.engine.step():
                    if output.request_id not in pending:
                        self._unclaimed.append(output)
                        continue
                    if output.finished:
                        pending.discard(output.request_id)
                    yield output
        finally:
            for request_id in pending & self.engine.requests.keys():
                self.engine.abort(request_id)

    # --- one request at a time ----------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: bool = False,
    ) -> str:
        """Queue a request beside those that run; returns its id. `step` reports it."""
        request = self._admission.request(
            prompt,
            sampling_params or SamplingParams(),
            request_id=request_id,
            stream=stream,
            taken=self.engine.requests,
        )
        self.engine.add(request)
        return request.request_id

    def abort(self, request_id: str) -> RequestOutput:
        """End a request now and return what it has. Raises ValueError for an unknown id."""
        return self.engine.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """One engine step; the requests that finished in it, and those added with `stream`."""
        kept, self._unclaimed = self._unclaimed, []
        return kept + self.engine.step()

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return self.engine.has_unfinished or bool(self._unclaimed)

    def get_metrics(self) -> EngineStats:
        """Counters since the start."""
        return self.engine.stats

    # --- admission ----------------------------------------------------------------------------------------

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        stream: bool,
    ) -> list[Request]:
        listed = as_prompts(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(listed)
        else:
            params = list(sampling_params)
        if len(params) != len(listed):
            raise ValueError(f"sampling_params has {len(params)} entries for {len(listed)} prompts")
        requests = []
        for index, (prompt, p) in enumerate(zip(listed, params, strict=True)):
            try:
                requests.append(self._admission.request(prompt, p, stream=stream, taken=self.engine.requests))
            except ValueError as error:
                raise ValueError(f"prompts[{index}]: {error}") from error
        return requests


def _load(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    draft: str | Path | None,
    drafter: Drafter | None,
    shipped: bool,
    pack: bool,
) -> tuple[HybridDecoder, DraftModel | Drafter | None]:
    """The model and what drafts for it; `pack` their matrices, as long as no graph is recorded over them."""
    network = load_model(checkpoint, dtype=dtype, device=device)
    proposer = DraftModel.choose(draft, drafter, network, shipped=shipped, pack=pack)
    if pack:  # behind the head, which may share some of them
        network.pack()
    return network, proposer


def _num_drafts(given: int | None, draft: str | Path | None, drafter: Drafter | None) -> int:
    if drafter is not None and not (isinstance(drafter, DraftModel) or hasattr(drafter, "propose")):
        raise ValueError(
            f"drafter is {drafter!r}; it must be a bateleur.eagle.Drafter, with a method propose"
        )
    require_paths(draft=draft)
    if given is None:
        return DEFAULT_DRAFTS if draft is not None else 0
    require_integers(num_speculative_tokens=given)
    if given > 0 and draft is None and drafter is None:
        raise ValueError(f"num_speculative_tokens is {given}; there is no draft or drafter to propose them")
    return given


def _policy(policy: DraftPolicy | Mapping[int, int] | str, num_drafts: int) -> DraftPolicy:
    if isinstance(policy, Mapping):
        if (most := max(policy.values(), default=0)) > num_drafts:
            raise ValueError(
                f"draft_policy is {policy}; num_speculative_tokens = {num_drafts} is less than {most}"
            )
        return ByBatchSize(policy)
    if hasattr(policy, "lengths"):
        return policy
    if policy not in ("fixed", "auto"):
        raise ValueError(
            f"draft_policy is {policy!r}; it must be fixed, auto, a mapping of batch sizes or a DraftPolicy"
        )
    return ByMeasuredCost(num_drafts) if num_drafts and policy == "auto" else FixedDrafts(num_drafts)


def _rule(rule: Rule | str) -> Rule:
    if not isinstance(rule, Rule):
        if rule not in (known := [each.value for each in Rule]):
            raise ValueError(f"speculative_rule is {rule!r}; it must be one of {', '.join(known)}")
        rule = Rule(rule)
    return rule


def _budget(given: int | None, device: torch.device, utilization: float) -> int:
    """Memory that caches may take: what is left of a GPU's share, a quarter of main memory on CPU."""
    require_integers_or_none(kv_cache_memory_bytes=given)
    require_numbers(gpu_memory_utilization=utilization)
    if not 0.0 < utilization <= 1.0:
        raise ValueError(f"gpu_memory_utilization is {utilization}; it must be in (0, 1]")
    if given is not None:
        return given
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1.0 - utilization) * total)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


def _progress(total: int, enabled: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit="request", disable=not enabled)
