"""Drives a scheduler without a model: tokens are drawn by a counter."""

from bateleur.runner.cache.block_pool import BlockPool
from bateleur.runner.requests.request import Request, RequestTable
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.scheduling.scheduler import Scheduler
from bateleur.runner.scheduling.step_batch import StepBatch

BLOCK = 4


def make_request(name: str, prompt_len: int, max_tokens: int) -> Request:
    prompt = [(7 * i) % 50 + 1 for i in range(prompt_len)]
    return Request(name, prompt, SamplingParams(), 0, frozenset(), prompt_len + max_tokens)


def make_scheduler(rows: int, blocks: int, budget: int, max_model_len: int = 64) -> Scheduler:
    table = RequestTable(rows, max_model_len, -(-max_model_len // BLOCK))
    return Scheduler(table, BlockPool(blocks), block_size=BLOCK, max_num_batched_tokens=budget)


def check(scheduler: Scheduler, plan: StepBatch, budget: int) -> None:
    """Every invariant of a plan and of the block tables."""
    table, pool = scheduler.table, scheduler.pool
    assert pool is not None
    assert plan.num_tokens <= budget
    assert len({r.request_id for r in plan.requests}) == len(plan.requests)
    assert (plan.query_lens >= 1).all()
    assert (plan.query_lens[: plan.num_decodes] == 1).all()
    held: list[int] = []
    for request in scheduler.running:
        row = request.row
        count = int(table.num_blocks[row])
        held += table.block_table[row, :count].tolist()
        assert not table.block_table[row, count:].any(), "the tail of a row is the null block"
    for request, row in zip(plan.requests, plan.rows, strict=True):
        assert request.row == row
        reach = table.num_computed[row]
        assert table.num_blocks[row] * BLOCK >= reach, "every token of the step has a slot"
        assert reach <= request.num_tokens
    assert 0 not in held
    assert len(set(held)) == len(held), "no block belongs to two requests"
    assert len(held) + pool.num_free == pool.capacity


def finish_step(scheduler: Scheduler, plan: StepBatch) -> list[Request]:
    """What the engine does after the model ran: commit, draw, retire."""
    scheduler.commit(plan)
    table, done = scheduler.table, []
    for request, row, draws in zip(plan.requests, plan.rows, plan.samples, strict=True):
        if not draws:
            continue
        request.output_token_ids.append(len(request.output_token_ids) + 1)
        table.token_ids[row, table.num_tokens[row] - 1] = request.output_token_ids[-1]
        if request.num_tokens >= request.max_total_tokens:
            scheduler.remove(request)
            done.append(request)
    return done


def run_to_end(scheduler: Scheduler, budget: int, max_steps: int = 5000) -> list[Request]:
    done: list[Request] = []
    for _ in range(max_steps):
        plan = scheduler.schedule()
        if plan is None:
            return done
        check(scheduler, plan, budget)
        done += finish_step(scheduler, plan)
    raise AssertionError("no end in sight")
