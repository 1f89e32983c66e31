"""The scheduler alone: no model, tokens drawn by a counter."""

import importlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bateleur.runner.cache.block_pool import BlockPool

alone = importlib.import_module("scheduler_alone")
make_request, make_scheduler = alone.make_request, alone.make_scheduler
check, finish_step, run_to_end = alone.check, alone.finish_step, alone.run_to_end


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


def test_a_batch_gets_a_new_plan_with_other_drafts_and_the_same_one_without() -> None:
    scheduler = make_scheduler(4, 64, budget=32)
    for name in "abc":
        scheduler.add(make_request(name, 3, 20))
    first = scheduler.schedule()
    assert first is not None
    finish_step(scheduler, first)
    rows, last = np.arange(3), None
    for drafts in ((0, 0, 0), (2, 0, 1), (0, 0, 0), (2, 0, 1), (1, 1, 1), (2, 0, 1), (0, 0, 0)):
        scheduler.table.num_draft_slots[rows] = drafts
        plan = scheduler.schedule()
        assert plan is not None
        assert plan.query_lens.tolist() == [1 + each for each in drafts]
        assert (plan.num_decodes, plan.samples.all(), plan.num_tokens) == (3, True, 3 + sum(drafts))
        assert plan is not last
        assert last is None or plan.rows is last.rows, "what is known of the rows may be kept"
        assert scheduler.schedule() is plan
        last = plan
    scheduler.remove(plan.requests[1])
    scheduler.table.num_draft_slots[[0, 2]] = 0
    assert scheduler.schedule().query_lens.tolist() == [1, 1]
    scheduler.table.num_draft_slots[[0, 2]] = 2, 1
    assert scheduler.schedule().query_lens.tolist() == [3, 2]


def test_what_is_derived_from_a_batch_lasts_as_long_as_the_batch() -> None:
    scheduler = make_scheduler(2, 40, budget=32)
    for name in "ab":
        scheduler.add(make_request(name, 6, 9))
    finish_step(scheduler, scheduler.schedule())
    index, known = None, []
    for drafts in (0, 0, 2, 2, 0):
        scheduler.table.num_draft_slots[:] = drafts
        before = scheduler.table.num_computed.copy()
        batch = scheduler.schedule()
        known.append(index is batch.index)
        index = batch.index
        assert batch.num_computed.tolist() == before[batch.rows].tolist()
        assert batch.step_rows(scheduler.table, None, None).num_computed_tokens is batch.num_computed
        assert index.num_logits == 2 * (1 + drafts)
        scheduler.table.num_draft_slots[:] = 0
        scheduler.commit(batch, np.ones(2, np.int64))
    assert known == [False, True, False, True, False]


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
    assert len(scheduler.table.free_rows) == 2
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
    for request in pending:
        request.priority = data.draw(st.integers(-1, 1), "priority")
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
    assert len(scheduler.table.free_rows) == rows
    assert not scheduler.table.block_table.any()


def test_pool_refuses_a_size_without_a_usable_block() -> None:
    with pytest.raises(ValueError, match="num_blocks is 1"):
        BlockPool(1)
