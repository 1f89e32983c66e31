"""Who goes first, who gives way, and who is refused."""

import importlib
import random
from typing import Any

import pytest

from bateleur.runner import LLM, SamplingParams
from bateleur.runner.requests.request import Request
from bateleur.runner.scheduling.scheduler import service_order

alone = importlib.import_module("scheduler_alone")


def make(name: str, priority: int, prompt_len: int = 4, max_tokens: int = 2) -> Request:
    request: Request = alone.make_request(name, prompt_len, max_tokens)
    request.priority = priority
    return request


def test_a_queue_is_a_sorted_list_whatever_happens() -> None:
    """Against a list that is sorted anew each time: arrivals, removals of any, returns to the old place."""
    rng, scheduler = random.Random(3), alone.make_scheduler(1, 32, budget=8)
    known: list[Request] = []
    taken: list[Request] = []
    for step in range(3000):
        what = rng.random()
        if what < 0.45:
            scheduler.add(request := make(str(step), rng.randrange(-2, 3)))
        elif what < 0.6 and taken:
            scheduler._wait(request := taken.pop(rng.randrange(len(taken))))
        elif what < 0.8 and known:
            scheduler.remove(known.pop(rng.randrange(len(known))))
            continue
        elif known:
            taken.append(scheduler.waiting.pop(0))
            assert taken[-1] is known.pop(0)
            continue
        else:
            continue
        known.append(request)
        known.sort(key=service_order)
    assert scheduler.waiting == known


def test_lower_numbers_go_first_and_equal_ones_in_their_order() -> None:
    scheduler = alone.make_scheduler(1, 32, budget=8)
    for name, priority in (("a", 1), ("b", 0), ("c", -5), ("d", 0), ("e", 1)):
        scheduler.add(make(name, priority))
    assert [each.request_id for each in alone.run_to_end(scheduler, 8)] == ["c", "b", "d", "a", "e"]


def test_the_least_urgent_gives_way() -> None:
    """The one of the largest number, though it is the oldest; never the one that came later and goes first."""
    scheduler = alone.make_scheduler(3, 1 + 6, budget=32)
    low, high = make("low", 7, 7, 12), make("high", 0, 7, 12)
    scheduler.add(low)
    alone.finish_step(scheduler, scheduler.schedule())
    scheduler.add(high)
    alone.finish_step(scheduler, scheduler.schedule())
    done = alone.run_to_end(scheduler, 32)
    assert low.num_preemptions >= 1
    assert high.num_preemptions == 0
    assert [each.request_id for each in done] == ["high", "low"]
    assert len(low.output_token_ids) == 12


def test_who_waits_takes_no_row_away() -> None:
    scheduler = alone.make_scheduler(1, 32, budget=8)
    scheduler.add(make("low", 5, max_tokens=6))
    alone.finish_step(scheduler, scheduler.schedule())
    scheduler.add(make("high", -5))
    assert [each.request_id for each in alone.run_to_end(scheduler, 8)] == ["low", "high"]
    assert scheduler.num_preemptions == 0


def test_an_engine_asks_for_the_policy_by_name(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    with pytest.raises(
        ValueError, match=r"priority is 3; it must be 0 under scheduling_policy 'fcfs'; with 'priority'"
    ):
        llm.add_request("x", params, priority=3)
    with pytest.raises(ValueError, match=r"prompts\[1\]: priority is -1; it must be 0 under scheduling_policy"):
        llm.generate(["x", "y"], params, priority=[0, -1])
    assert len(llm.generate(["x", "y"], params, priority=[0, 0])) == 2
    with pytest.raises(ValueError, match="scheduling_policy is 'lifo'; it must be one of fcfs, priority"):
        LLM(scheduling_policy="lifo")


WRONG: list[tuple[Any, str]] = [
    ("1", "priority is '1'; it must be an integer, or a list of them"),
    (1.5, "priority is 1.5; it must be an integer, or a list of them"),
    ([1, None], r"priority\[1\] is None; it must be an integer"),
    ([1], "priority has 1 entries for 2 prompts"),
    (True, r"prompts\[0\]: priority is True; it must be an integer of 64 bits"),
    (2**63, r"prompts\[0\]: priority is 9223372036854775808; it must be an integer of 64 bits"),
]


@pytest.mark.parametrize(("priority", "message"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_what_is_no_priority(llm: LLM, priority: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(["x", "y"], priority=priority)


def test_requests_of_an_engine_end_by_priority() -> None:
    llm = LLM(device="cpu", max_model_len=64, max_num_seqs=1, scheduling_policy="priority")
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    names = [llm.add_request("x", params, priority=priority) for priority in (3, 1, 2)]
    ended = []
    while llm.has_unfinished_requests:
        ended += [each.request_id for each in llm.step()]
    assert ended == [names[1], names[2], names[0]]
    (urgent, usual) = llm.generate(["x", "y"], params, priority=[1, 0])
    assert urgent.metrics.first_token_time > usual.metrics.last_token_time
