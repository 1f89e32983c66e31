"""Which replica takes a request, without replicas."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bateleur.runner.replicas.prefix_routing import SHORTEST, PrefixRouting, prefix_keys

FOUR = {"a": 0, "b": 0, "c": 0, "d": 0}


def keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_what_was_sent_somewhere_goes_there_again() -> None:
    routing = PrefixRouting()
    first = routing.choose(keys("x", "xy"), FOUR)
    assert first.num_matched == 0
    again = routing.choose(keys("x", "xy", "xyz"), FOUR | {first.replica: 1})
    assert again == (first.replica, 2)


def test_the_longest_prefix_counts() -> None:
    routing = PrefixRouting()
    short = routing.choose(keys("x"), {"a": 0})
    long = routing.choose(keys("x", "xy"), {"a": 99, "b": 0})
    assert (short.replica, long.replica) == ("a", "b")
    assert routing.choose(keys("x", "xy"), {"a": 0, "b": 3}) == ("b", 2)
    assert routing.choose(keys("x", "xz"), {"a": 0, "b": 3}) == ("a", 1)


def test_who_has_too_much_to_do_is_passed_over() -> None:
    routing = PrefixRouting(imbalance=0, slack=2)
    routing.choose(keys("x", "xy"), {"a": 0})
    routing.choose(keys("x"), {"b": 0})
    assert routing.choose(keys("x", "xy"), {"a": 1, "b": 0, "c": 0}) == ("a", 2)
    assert routing.choose(keys("x", "xy"), {"a": 9, "b": 1, "c": 0}).replica == "b"
    assert routing.choose(keys("x", "xy"), {"a": 9, "b": 9, "c": 0}).replica == "c"


def test_nobody_is_chosen_who_is_gone() -> None:
    routing = PrefixRouting()
    home = routing.choose(keys("x"), FOUR).replica
    left = {name: 0 for name in FOUR if name != home}
    assert routing.choose(keys("x"), left).replica in left
    with pytest.raises(ValueError, match="loads holds no replica"):
        routing.choose(keys("x"), {})


@given(st.data())
def test_no_choice_is_beyond_the_bound(data: st.DataObject) -> None:
    """Loads only grow here, by what is chosen: the worst that may happen."""
    imbalance = data.draw(st.sampled_from([0.0, 0.25, 1.0]))
    slack = data.draw(st.sampled_from([1.0, 4.0]))
    routing = PrefixRouting(imbalance=imbalance, slack=slack)
    loads = {str(n): float(data.draw(st.integers(0, 20))) for n in range(data.draw(st.integers(1, 6)))}
    for _ in range(40):
        asked = data.draw(st.sampled_from([[], keys("x"), keys("x", "xy"), keys("x", "xz"), keys("z")]))
        chosen = routing.choose(asked, loads).replica
        loads[chosen] += 1
        assert loads[chosen] <= (1 + imbalance) * sum(loads.values()) / len(loads) + slack


def test_routers_that_know_nothing_of_each_other_agree() -> None:
    """What begins alike goes to two of many, whichever router it comes through; new replicas change little."""
    names = [f"replica-{n}" for n in range(12)]
    moved = 0
    for number in range(200):
        homes = {
            PrefixRouting().choose(keys(f"system {number}", tail), dict.fromkeys(names, 0.0) | {busy: 1.0})
            for tail in "uvw"
            for busy in names
        }
        assert len(homes) == 2
        before = PrefixRouting().choose(keys(f"system {number}"), dict.fromkeys(names, 0.0))
        after = PrefixRouting().choose(keys(f"system {number}"), dict.fromkeys([*names, "new"], 0.0))
        moved += before != after
    assert moved < 200 * 3 / 13


def test_prefixes_spread() -> None:
    routing = PrefixRouting()
    loads = dict.fromkeys(map(str, range(8)), 0.0)
    for number in range(4000):
        loads[routing.choose(keys(f"prompt {number}"), loads).replica] += 1
    assert max(loads.values()) <= 500 + 10


def test_what_has_no_prefix_takes_turns() -> None:
    routing = PrefixRouting()
    assert Counter(routing.choose([], FOUR).replica for _ in range(12)) == dict.fromkeys(FOUR, 3)


def test_what_is_remembered_is_bounded() -> None:
    """The prefixes asked for last stay, the shorter before the longer."""
    routing = PrefixRouting(max_prefixes=3)
    for name in "xyz":
        routing.choose(keys(name, name * 2), {"a": 0})
    assert len(routing) == 3
    assert routing.choose(keys("z", "zz"), {"a": 0}).num_matched == 2
    assert routing.choose(keys("y", "yy"), {"a": 0}).num_matched == 1
    assert routing.choose(keys("x", "xx"), {"a": 0}).num_matched == 0


def test_holders_that_are_gone_are_not_kept() -> None:
    routing = PrefixRouting()
    for number in range(50):
        routing.choose(keys("x"), {f"replica-{number}": 0.0})
    assert len(routing._holders[b"x"]) == 1
    assert len(routing._last_request) <= 2


@pytest.mark.parametrize(
    ("name", "value"), [("imbalance", -0.1), ("slack", 0.5), ("max_prefixes", 0), ("slack", "four")]
)
def test_wrong_bounds_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        PrefixRouting(**{name: value})  # type: ignore[arg-type]


# --- keys -------------------------------------------------------------------------------------------------

LOREM = "".join(f"sentence {n} of a long document, " for n in range(2000))


def completion(prompt: object, **more: object) -> tuple[bytes, ...]:
    return prefix_keys("/v1/completions", {"prompt": prompt, **more})


def chat(*said: str, **more: object) -> tuple[bytes, ...]:
    roles = ("system", "user", "assistant")
    messages = [{"role": roles[min(n, 1 + n % 2)], "content": text} for n, text in enumerate(said)]
    return prefix_keys("/v1/chat/completions", {"messages": messages, **more})


@given(st.integers(0, 20_000), st.integers(0, 2000), st.integers(0, 2000))
def test_whatever_is_shared_has_a_key_of_eight_ninths(shared: int, one: int, other: int) -> None:
    left, right = (completion(LOREM[:shared] + tail) for tail in ("x" * one, "y" * other))
    common = sum(a == b for a, b in zip(left, right, strict=False))
    assert left[:common] == right[:common]
    assert len(set(left)) == len(left)
    length = SHORTEST
    for _ in range(common - 1):
        length += length >> 3
    assert shared < SHORTEST if common == 0 else length <= shared < length * 9 / 8 + 1 or one == other == 0


def test_a_chat_has_keys_at_the_ends_of_its_messages() -> None:
    first = chat(LOREM[:5000], "one question")
    following = chat(LOREM[:5000], "one question", "an answer", "and another question")
    assert following[: len(first)] == first
    foreign = chat(LOREM[:5000], "what another asks", "an answer", "and another question")
    assert first[:-1] == foreign[: len(first) - 1]
    assert first[-1] not in foreign


def test_what_shares_nothing_has_no_key_in_common() -> None:
    alike = [
        completion(LOREM[:500]),
        completion(LOREM[:500], model="another"),
        completion(list(LOREM[:500].encode())),
        chat(LOREM[:500]),
        chat(LOREM[:500], tools=[{"type": "function"}]),
    ]
    everything = [key for each in alike for key in each]
    assert len(everything) == len(set(everything)) > 5 * 5


@pytest.mark.parametrize(("path", "field"), [("/v1/messages", "messages"), ("/v1/responses", "input")])
def test_conversations_of_other_apis_have_keys_too(path: str, field: str) -> None:
    messages = [{"role": "user", "content": LOREM[:500]}]
    keys = prefix_keys(path, {field: messages})
    assert len(keys) > 5
    assert prefix_keys(path, {field: messages, "instructions": "x", "system": "x"})[0] != keys[0]
    assert prefix_keys("/v1/responses", {"input": LOREM[:500]})


def test_the_first_of_several_prompts_counts() -> None:
    assert completion([LOREM[:500], "other"]) == completion(LOREM[:500])
    assert completion([[7] * 500, [8]]) == completion([7] * 500)


def test_keys_are_few() -> None:
    assert len(completion("x" * 1_000_000)) < 80
    assert len(chat(*["a message of some length " * 6] * 1000)) < 64 + 75


@pytest.mark.parametrize("prompt", [None, 7, "short", [], [-1] * 500, ["x", 7], [None] * 500, [1.5] * 500, {"a": 1}])
def test_a_wrong_prompt_has_none(prompt: object) -> None:
    assert completion(prompt) == ()


def test_wrong_messages_have_none() -> None:
    assert prefix_keys("/v1/chat/completions", {"messages": 7}) == ()
    nested = json.loads("[" * 900 + "]" * 900)
    assert isinstance(prefix_keys("/v1/chat/completions", {"messages": [nested]}), tuple)
    assert prefix_keys("/tokenize", {"prompt": LOREM}) == ()
