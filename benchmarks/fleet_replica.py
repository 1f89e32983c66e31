"""A simulated replica: the real scheduler and prefix caches, with step times from a table instead of a model."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from fleet_costs import StepTable

from bateleur.mamba import MambaStateManager
from bateleur.runner.cache.block_pool import BlockPool
from bateleur.runner.cache.costs import CacheOptions
from bateleur.runner.cache.plan import CachePlan, plan_caches
from bateleur.runner.cache.prefix_cache import PrefixCache
from bateleur.runner.checkpoint.open import open_checkpoint
from bateleur.runner.config.engine_config import EngineConfig
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.engine.output_processor import append_tokens
from bateleur.runner.requests.request import Request, RequestTable
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.scheduling.scheduler import Scheduler
from bateleur.runner.scheduling.step_batch import StepBatch

_PARAMS = SamplingParams()


@dataclass(frozen=True, slots=True)
class Kind:
    """Options that all replicas share."""

    plan: CachePlan
    limits: EngineLimits
    costs: StepTable

    @classmethod
    def of(cls, model: str, costs: StepTable, cache_bytes: int, max_num_seqs: int, longest: int) -> Kind:
        """Plan an engine for a checkpoint on a CPU with prefix caching, as `LLM` does, without reading weights."""
        config = EngineConfig.of(
            model=model,
            device="cpu",
            enable_prefix_caching=True,
            max_num_seqs=max_num_seqs,
            max_model_len=longest,
            max_num_batched_tokens=512,
            kv_cache_memory_bytes=cache_bytes,
        )
        cpu, spec = torch.device("cpu"), open_checkpoint(model).spec
        limits, options = EngineLimits.of(config, spec, cpu), CacheOptions.of(config, spec, cpu)
        return cls(plan_caches(spec, torch.float32, limits, options, cache_bytes), limits, costs)


@dataclass(slots=True)
class Turn:
    """A request of a conversation, with its times."""

    session: int
    request: Request
    came: float
    first_token: float = 0.0


@dataclass(slots=True)
class Counts:
    """Counters of a replica."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    requests: int = 0
    preemptions: int = 0
    busy_s: float = 0.0
    first_token_s: list[float] = field(default_factory=list)


class Replica:
    """One simulated engine: `begin` starts a step if there is work, and `end` applies its result."""

    def __init__(self, kind: Kind) -> None:
        plan, limits = kind.plan, kind.limits
        self.costs, self.counts = kind.costs, Counts()
        self.table = RequestTable(plan.max_num_seqs, limits.max_model_len, plan.max_blocks)
        pool = BlockPool(plan.num_blocks) if plan.num_blocks else None
        pages = None
        if plan.layout is not None and plan.costs.retention is not None:
            free = BlockPool(plan.num_state_slots)
            pages = MambaStateManager(free, plan.max_num_seqs, plan.layout, plan.costs.retention)
        prefixes = PrefixCache(self.table, pool, plan.block_size, pages) if plan.share_prefixes else None
        self.scheduler = Scheduler(
            self.table,
            pool,
            block_size=plan.block_size,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            states=pages,
            prefixes=prefixes,
        )
        self.unfinished: dict[Request, Turn] = {}
        self.step: StepBatch | None = None

    def add(self, session: int, prompt: list[int], answer: int, now: float) -> None:
        """Queue a turn."""
        request = Request(str(session), prompt, _PARAMS, 0, frozenset(), len(prompt) + answer)
        self.unfinished[request] = Turn(session, request, now)
        self.scheduler.add(request)

    def begin(self) -> float | None:
        """Start a step and return its duration in seconds; None if there is no work."""
        assert self.step is None
        self.step = plan = self.scheduler.schedule()
        if plan is None:
            return None
        for request in self.scheduler.admitted:
            if not request.num_preemptions:
                self.counts.prompt_tokens += len(request.prompt_token_ids)
                self.counts.cached_tokens += request.prefix.num_cached_tokens
        self.scheduler.admitted.clear()
        seconds = self.costs.seconds(plan.num_decodes, plan.num_tokens - plan.num_decode_tokens)
        self.counts.busy_s += seconds
        return seconds

    def end(self, now: float) -> list[Turn]:
        """End the step: each row that sampled gets a token. Returns the turns that are complete."""
        plan, self.step = self.step, None
        assert plan is not None
        requests, rows = plan.sampled
        ones = np.ones(len(rows), np.int64)
        # Any id will do: it only has to differ between conversations.
        append_tokens(self.table, rows, (self.table.num_known[rows] + 1 + rows)[:, None].astype(np.int64), ones)
        self.scheduler.commit(plan)
        over = self.table.num_known[rows] >= self.table.limit[rows]
        answered = []
        for request in [r for r in requests if not self.unfinished[r].first_token]:
            turn = self.unfinished[request]
            turn.first_token = now
            self.counts.first_token_s.append(now - turn.came)
        for index in over.nonzero()[0].tolist():
            answered.append(self._finish(requests[index]))
        return answered

    def _finish(self, request: Request) -> Turn:
        request.finish_reason = "length"
        self.scheduler.remove(request)
        self.counts.requests += 1
        self.counts.preemptions += request.num_preemptions
        return self.unfinished.pop(request)
