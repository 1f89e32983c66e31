"""The scheduler alone: no model, tokens drawn by a counter."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bateleur.runner.cache.block_pool import BlockPool
from bateleur.runner.requests.request import Request
from bateleur.runner.requests.request_table import RequestTable
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.scheduling.scheduler import Scheduler, StepPlan

BLOCK = 4


def make_request(name: str, prompt_len: int, max_tokens: int) -> Request:
    prompt = [(7 * i) % 50 + 1 for i in range(prompt_len)]
    return Request(name, prompt, SamplingParams(), 0, frozenset(), prompt_len + max_tokens, None)


def make_scheduler(rows: int, blocks: int, budget: int, max_model_len: int = 64) -> Scheduler:
    table = RequestTable(rows, max_model_len, -(-max_model_len // BLOCK))
    return Scheduler(table, BlockPool(blocks), block_size=BLOCK, max_num_batched_tokens=budget)


def check(scheduler: Scheduler, plan: StepPlan, budget: int) -> None:
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
    for request, row, count in zip(plan.requests, plan.rows, plan.query_lens, strict=True):
        assert request.row == row
        reach = table.num_computed[row] + count
        assert table.num_blocks[row] * BLOCK >= reach, "every token of the step has a slot"
        assert reach <= table.num_tokens[row]
    assert 0 not in held
    assert len(set(held)) == len(held), "no block belongs to two requests"
    assert len(held) + pool.num_free == pool.capacity


def finish_step(scheduler: Scheduler, plan: StepPlan) -> list[Request]:
    """What the engine does after the model ran: commit, draw, retire."""
    scheduler.commit(plan)
    table, done = scheduler.table, []
    for request, row, draws in zip(plan.requests, plan.rows, plan.samples, strict=True):
        if not draws:
            continue
        request.output_token_ids.append(len(request.output_token_ids) + 1)
        table.token_ids[row, table.num_tokens[row]] = request.output_token_ids[-1]
        table.num_tokens[row] += 1
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


def test_a_long_prompt_runs_in_chunks_of_the_budget() -> None:
    scheduler = make_scheduler(2, 32, budget=8)
    scheduler.add(make_request("a", 19, 2))
    lens = []
    while (plan := scheduler.schedule()) is not None:
        lens.append(plan.query_lens.tolist())
        finish_step(scheduler, plan)
    assert lens == [[8], [8], [3], [1]]


def test_decodes_run_beside_a_prefill_and_come_first() -> None:
    scheduler = make_scheduler(2, 32, budget=8)
    scheduler.add(make_request("a", 3, 5))
    plan = scheduler.schedule()
    assert plan is not None
    finish_step(scheduler, plan)
    scheduler.add(make_request("b", 20, 2))
    plan = scheduler.schedule()
    assert plan is not None
    assert [r.request_id for r in plan.requests] == ["a", "b"]
    assert plan.query_lens.tolist() == [1, 7]
    assert plan.num_decodes == 1
    assert plan.samples.tolist() == [True, False]


def test_steady_decoding_returns_the_same_plan_object() -> None:
    scheduler = make_scheduler(4, 64, budget=16)
    for name in "abc":
        scheduler.add(make_request(name, 3, 8))
    plans = []
    for _ in range(4):
        plan = scheduler.schedule()
        assert plan is not None
        plans.append(plan)
        finish_step(scheduler, plan)
    assert plans[1] is plans[2] is plans[3]


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    scheduler = make_scheduler(3, 1 + 5, budget=32)
    first, second = make_request("old", 7, 9), make_request("young", 7, 9)
    scheduler.add(first)
    scheduler.add(second)
    waiting = make_request("late", 4, 2)
    seen = []
    for step in range(200):
        plan = scheduler.schedule()
        if plan is None:
            break
        check(scheduler, plan, 32)
        seen.append([r.request_id for r in plan.requests])
        finish_step(scheduler, plan)
        if step == 0:
            scheduler.add(waiting)
    assert second.num_preemptions >= 1
    assert first.num_preemptions == 0
    order = [name for names in seen for name in names]
    assert order.index("late") > max(i for i, name in enumerate(order) if name == "old")
    assert len(first.output_token_ids) == len(second.output_token_ids) == 9


def test_two_half_done_prefills_do_not_block_each_other() -> None:
    """Both hold blocks, none can go on: the younger one has to give way (a hang in engines that only wait)."""
    scheduler = make_scheduler(2, 1 + 6, budget=8)
    for name in "ab":
        scheduler.add(make_request(name, 20, 2))
    assert len(run_to_end(scheduler, 8)) == 2


def test_abort_frees_everything_in_every_state() -> None:
    scheduler = make_scheduler(2, 16, budget=8)
    requests = [make_request(name, 12, 4) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    scheduler.schedule()
    for request in requests:
        scheduler.remove(request)
    assert scheduler.pool is not None
    assert scheduler.pool.num_free == scheduler.pool.capacity
    assert scheduler.table.num_free_rows == 2
    assert scheduler.schedule() is None


def test_a_restart_recomputes_in_the_old_order() -> None:
    scheduler = make_scheduler(3, 64, budget=32)
    requests = [make_request(name, 5, 4) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    plan = scheduler.schedule()
    assert plan is not None
    finish_step(scheduler, plan)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.restart(requests)
    assert scheduler.num_preemptions == 3
    assert [r.request_id for r in scheduler.waiting] == ["a", "b", "c"]
    done = run_to_end(scheduler, 32)
    assert sorted(r.request_id for r in done) == ["a", "b", "c"]
    assert all(r.output_token_ids == [1, 2, 3, 4] for r in done)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_lives_end_and_leak_nothing(data: st.DataObject) -> None:
    """Liveness and conservation under random arrivals, aborts and a cache that is often too small."""
    rows = data.draw(st.integers(1, 5), "rows")
    blocks = data.draw(st.integers(9, 20), "blocks")  # 8 blocks hold the longest request
    budget = data.draw(st.integers(rows, 24), "budget")
    scheduler = make_scheduler(rows, blocks, budget, max_model_len=32)
    pending = [
        make_request(f"r{i}", data.draw(st.integers(1, 24), "prompt"), data.draw(st.integers(1, 8), "new"))
        for i in range(data.draw(st.integers(1, 8), "count"))
    ]
    alive, done = [], []
    for _ in range(2000):
        if pending and data.draw(st.booleans(), "arrive"):
            alive.append(pending.pop())
            scheduler.add(alive[-1])
        victims = [r for r in alive if r not in done]
        if victims and data.draw(st.integers(0, 19), "abort") == 0:
            scheduler.remove(victims[0])
            done.append(victims[0])
        plan = scheduler.schedule()
        if plan is None:
            if not pending:
                break
            continue
        check(scheduler, plan, budget)
        done += finish_step(scheduler, plan)
    assert len(done) == len(alive)
    assert scheduler.pool is not None
    assert scheduler.pool.num_free == scheduler.pool.capacity
    assert scheduler.table.num_free_rows == rows
    assert not scheduler.table.block_table.any()


def test_pool_refuses_a_size_without_a_usable_block() -> None:
    with pytest.raises(ValueError, match="num_blocks is 1"):
        BlockPool(1)
