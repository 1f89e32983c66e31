"""`/v1/chat/completions`: the rendered prompt, and whole and streamed replies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bateleur.runner import AsyncLLM
from bateleur.runner.errors import QueueFull
from bateleur.runner.serve.config import ServeConfig
from scripted_model import marker

PATH = "/v1/chat/completions"
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
HELLO = [{"role": "user", "content": "def f("}]
TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant\n{% endif %}"
)


@pytest.fixture
def template(engine: AsyncLLM) -> Iterator[None]:
    tokenizer: Any = engine.llm.tokenizer
    tokenizer.chat_template = TEMPLATE
    yield
    tokenizer.chat_template = None


def test_a_checkpoint_without_a_template_is_an_error(client: Any) -> None:
    error = client.error(400, PATH, {"messages": HELLO})
    assert error["message"].startswith("the checkpoint has no chat template")


def test_a_template_may_be_given_beside_the_checkpoint(make_client: Callable[..., Any], tmp_path: Path) -> None:
    """The option takes text or a file, and works without a template in the checkpoint."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    for given in (TEMPLATE, str(tmp_path / "chat.jinja")):
        client = make_client(chat_template=given)
        asked = {"messages": HELLO}
        ids = client.ask("/tokenize", asked).json()["tokens"]
        assert client.ask("/detokenize", {"tokens": ids}).json()["prompt"] == "# user\ndef f(\n# assistant\n"
        reply = client.ask(PATH, asked | {"return_token_ids": True} | GREEDY).json()
        assert reply["prompt_token_ids"] == ids
        assert client.ask("/tokenizer_info").json()["chat_template"] == TEMPLATE


@pytest.mark.parametrize("given", ["nowhere.jinja", "\0", "/"])
def test_what_is_no_template_and_no_file_is_refused(given: str) -> None:
    rule = "it must be a template with {{ or {%, or a template file ("
    with pytest.raises(ValueError, match=rf"^chat_template is {re.escape(repr(given))}; {re.escape(rule)}"):
        ServeConfig(chat_template=given)


@pytest.mark.usefixtures("template")
def test_a_reply_is_one_of_openais_and_its_parts_join_to_it(client: Any) -> None:
    body = {"messages": HELLO, "return_token_ids": True, "logprobs": True, "top_logprobs": 2, **GREEDY}
    whole = client.ask(PATH, body).json()
    assert whole["object"] == "chat.completion"
    assert whole["id"].startswith("chatcmpl-")
    (expected,) = whole["choices"]
    assert expected["message"]["role"] == "assistant"
    written = client.ask("/v1/completions", {"prompt": whole["prompt_token_ids"], **GREEDY}).json()
    assert expected["message"]["content"] == written["choices"][0]["text"]
    assert "".join(whole["prompt_token_texts"]) == "# user\ndef f(\n# assistant\n"
    *chunks, last = client.stream(PATH, body | {"stream_options": {"include_usage": True}})
    assert last["usage"]["completion_tokens"] == 6
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert ["prompt_token_ids" in chunk for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert ["role" in part["delta"] for part in parts] == [True] + [False] * (len(parts) - 1)
    assert "".join(part["delta"].get("content", "") for part in parts) == expected["message"]["content"]
    assert [each for part in parts for each in part["token_ids"]] == expected["token_ids"]
    tokens = [each["token"] for part in parts for each in part["logprobs"]["content"]]
    assert tokens == [each["token"] for each in expected["logprobs"]["content"]]
    assert [len(each["top_logprobs"]) for each in expected["logprobs"]["content"]] == [2] * 6
    assert parts[-1]["finish_reason"] == expected["finish_reason"] == "length"


@pytest.mark.usefixtures("template")
def test_without_a_limit_it_goes_on_to_the_end_of_the_context(client: Any) -> None:
    content = " x" * 230
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "ignore_eos": True}
    usage = client.ask(PATH, body).json()["usage"]
    assert usage["total_tokens"] == 256
    limited = client.ask(PATH, body | {"max_completion_tokens": 3}).json()["usage"]
    assert limited["completion_tokens"] == 3


@pytest.mark.usefixtures("template")
def test_what_is_refused_names_its_place(client: Any) -> None:
    for body, param in [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
    ]:
        assert client.error(400, PATH, body)["param"] == param


def test_errors_have_openais_codes_and_phrases(make_client: Callable[..., Any]) -> None:
    """Agents compact a conversation when they read one of these phrases."""
    client = make_client(chat_template=TEMPLATE)
    long = "word " * 3000
    for path, body, field in [
        (PATH, {"messages": [{"role": "user", "content": long}]}, "prompt"),
        (PATH, {"messages": [{"role": "user", "content": long[:1500]}]}, "prompt"),
        ("/v1/completions", {"prompt": long}, "prompt"),
        ("/v1/completions", {"prompt": [1] * 300}, "prompt"),
    ]:
        error = client.error(400, path, body)
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
        assert "this model's maximum context length is 256 tokens" in error["message"]
    error = client.error(404, PATH, {"messages": HELLO, "model": "gpt-4"})
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "the model 'gpt-4' does not exist" in error["message"]
    error = client.error(400, PATH, {"model": "bateleur"})
    assert (error["code"], error["param"]) == ("missing_required_parameter", "messages")


SWITCHED = (
    "{{ messages[0].content }}{% if enable_thinking is not defined or enable_thinking %}{{ '<think>' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("options", "body", "reasons"),
    [
        ({}, {}, True),
        ({}, {"reasoning_effort": "none"}, False),
        ({}, {"enable_thinking": False}, False),
        ({"enable_thinking": False}, {}, False),
        ({"enable_thinking": False}, {"reasoning_effort": "high"}, True),
        ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
def test_thinking_is_switched_for_a_request_or_the_server(
    make_client: Callable[..., Any], options: dict[str, Any], body: dict[str, Any], reasons: bool
) -> None:
    client = make_client(chat_template=SWITCHED, default_chat_template_kwargs=options)
    reply = client.ask(PATH, {"messages": HELLO, "return_token_ids": True, **GREEDY, **body}).json()
    assert "".join(reply["prompt_token_texts"]) == "def f(" + "<think>" * reasons


def test_a_reply_begins_with_the_last_message_if_it_is_asked_to(scripted: Any) -> None:
    messages = [{"role": "user", "content": "default"}, {"role": "assistant", "content": "Said. "}]
    body = {"messages": messages, "echo": True, "temperature": 0}
    assert scripted.ask(PATH, body).json()["choices"][0]["message"]["content"] == "Said. Hello hello."
    parts = [chunk["choices"][0]["delta"].get("content", "") for chunk in scripted.stream(PATH, body)]
    assert "".join(parts) == "Said. Hello hello."
    plain = body | {"messages": messages[:1]}
    assert scripted.ask(PATH, plain).json()["choices"][0]["message"]["content"] == "Hello hello."


def test_a_reply_may_leave_out_its_reasoning(scripted: Any) -> None:
    body = {"messages": [{"role": "user", "content": "weather"}], "include_reasoning": False}
    message = scripted.ask(PATH, body).json()["choices"][0]["message"]
    assert message["reasoning_content"] is None
    assert not any("reasoning" in chunk["choices"][0]["delta"] for chunk in scripted.stream(PATH, body))
    assert (
        scripted.ask(PATH, body | {"include_reasoning": True}).json()["choices"][0]["message"]["reasoning"] == "I look."
    )


def test_usage_counts_reasoning_tokens(scripted: Any) -> None:
    """As OpenAI's clients read it, with the end tag; 0 for an answer without reasoning. A stream has the same."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "weather"}]}
    whole = scripted.ask(PATH, body).json()["usage"]
    *_, last = scripted.stream(PATH, body | {"stream_options": {"include_usage": True}})
    counted = whole["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < counted < whole["completion_tokens"]
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": counted}
    plain = scripted.ask(PATH, {"messages": [{"role": "user", "content": "hello"}]}).json()["usage"]
    assert plain["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_usage_is_in_every_chunk_only_if_it_is_asked_for_at_all(
    scripted: Any, make_scripted: Callable[..., Any]
) -> None:
    body = {"messages": [{"role": "user", "content": "default"}]}
    alone = {"stream_options": {"include_usage": False, "continuous_usage_stats": True}}
    assert not any("usage" in chunk for chunk in scripted.stream(PATH, body | alone))
    both = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    assert all(chunk["usage"]["prompt_tokens"] for chunk in scripted.stream(PATH, body | both))
    forced = make_scripted(enable_force_include_usage=True)
    assert forced.stream(PATH, body)[-1]["usage"]["completion_tokens"] > 0
    assert forced.stream("/v1/completions", {"prompt": "x", "max_tokens": 2})[-1]["usage"]["completion_tokens"] == 2


def test_log_probabilities_of_all_tokens(client: Any, make_client: Callable[..., Any]) -> None:
    error = client.error(400, "/v1/completions", {"prompt": "x", "logprobs": -1})
    assert error["message"].startswith("logprobs is -1; it must be at most max_logprobs = 20")
    every = make_client(max_logprobs=-1)
    body = {"prompt": "def f(", "max_tokens": 1, "temperature": 0, "prompt_logprobs": -1}
    (choice,) = every.ask("/v1/completions", body).json()["choices"]
    assert {len(place) for place in choice["prompt_logprobs"][1:]} == {4096}
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": -1} | GREEDY
    chat = make_client(max_logprobs=-1, chat_template=TEMPLATE)
    (choice,) = chat.ask(PATH, body).json()["choices"]
    assert {len(place["top_logprobs"]) for place in choice["logprobs"]["content"]} == {4096}


def test_a_prompt_is_truncated_at_either_side(client: Any) -> None:
    body = {"prompt": "a b c d e f g h", "max_tokens": 1, "truncate_prompt_tokens": 4, "return_token_ids": True}

    def ids(**more: Any) -> list[int]:
        found: list[int] = client.ask("/v1/completions", body | more).json()["choices"][0]["prompt_token_ids"]
        return found

    everything = ids(truncate_prompt_tokens=100)
    assert ids() == ids(truncation_side="left") == everything[-4:]
    assert ids(truncation_side="right") == everything[:4]


def test_invocations_take_both_bodies(scripted: Any) -> None:
    chat = {"messages": HELLO, "prompt": None}
    prompt = {"prompt": marker("default"), "messages": None, "max_tokens": 30}
    message = scripted.ask("/invocations", chat).json()["choices"][0]["message"]
    text = scripted.ask("/invocations", prompt).json()["choices"][0]["text"]
    assert (message["content"], text) == ("Hello hello.", "Hello hello.")
    assert scripted.stream("/invocations", chat)[0]["object"] == "chat.completion.chunk"
    assert scripted.error(400, "/invocations", {})["message"].startswith("prompt is absent")


OPENED = {"enable_thinking": True}
LONG = [{"role": "user", "content": "long"}]


def answers(client: Any, **body: Any) -> tuple[Any, Any, Any, int]:
    """Return reasoning, content, finish reason and tokens of a reply, and check that the stream has the same."""
    body = {"messages": LONG, **OPENED, **body}
    reply = client.ask(PATH, body).json()
    assert "choices" in reply, reply
    (choice,) = reply["choices"]
    message = choice["message"]
    *chunks, last = client.stream(PATH, body | {"stream_options": {"include_usage": True}})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == (message["reasoning"] or "")
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert last["usage"] | {"prompt_tokens_details": None} == reply["usage"] | {"prompt_tokens_details": None}
    return (message["reasoning"], message["content"], choice["finish_reason"], reply["usage"]["completion_tokens"])


def test_reasoning_ends_at_its_budget(scripted: Any) -> None:
    thought, answer = "one two three four five", "Done."
    whole = answers(scripted)
    assert whole[:3] == (thought, answer, "stop")
    assert answers(scripted, thinking_token_budget=100) == whole
    assert answers(scripted, thinking_token_budget=6)[:3] == (thought, answer, "stop"), "exactly as many as there are"
    reasoning, _, reason, count = answers(scripted, thinking_token_budget=2, max_tokens=8)
    assert (reasoning, reason, count) == ("one two", "length", 8)
    assert answers(scripted, thinking_token_budget=50, max_tokens=3)[2:] == ("length", 3)
    assert answers(scripted, thinking_token_budget=3, max_tokens=4)[2:] == ("length", 3)
    assert answers(scripted, thinking_token_budget=0)[0] is None


def test_a_budget_bounds_reasoning_that_the_model_begins(scripted: Any) -> None:
    asked = {"messages": [{"role": "user", "content": "thinker"}], "enable_thinking": None}
    thought, answer = "one two three four five", "Done."
    whole = answers(scripted, **asked)
    assert whole[:3] == (thought, answer, "stop")
    for budget in (6, 100):
        assert answers(scripted, thinking_token_budget=budget, **asked) == whole
    reasoning, _, reason, count = answers(scripted, thinking_token_budget=2, max_tokens=8, **asked)
    assert (reasoning, reason, count) == ("one two", "length", 8)
    for budget in (0, 1):
        reasoning, content, reason, _ = answers(scripted, thinking_token_budget=budget, **asked)
        assert (reasoning or "") == "one" * budget
        assert reason == "stop"
    form = {"structured_outputs": {"choice": ["yes", "no"]}, "temperature": 0}
    reasoning, content, reason, _ = answers(scripted, thinking_token_budget=2, **asked, **form)
    assert (reasoning, reason, content in ("yes", "no")) == ("one two", "stop", True)


def test_a_budget_changes_no_answer_without_reasoning(scripted: Any) -> None:
    asked = {"messages": HELLO, "enable_thinking": None}
    assert answers(scripted, thinking_token_budget=0, **asked) == answers(scripted, **asked)
    assert answers(scripted, **asked)[:3] == (None, "Hello hello.", "stop")
    sampled = asked | {"temperature": 1.0, "logprobs": True, "max_tokens": 1, "thinking_token_budget": 0}
    assert answers(scripted, **sampled)[2:] == ("length", 1)


def test_a_budget_and_the_end_of_the_context(scripted: Any) -> None:
    """The rest of the context limits the answer as max_tokens does."""
    text = scripted.ask("/tokenize", {"messages": LONG}).json()["count"]
    asked = {"messages": [*LONG, {"role": "system", "content": "x" * (1024 - text - 60)}]}
    left = 1024 - scripted.ask("/tokenize", asked | {"chat_template_kwargs": OPENED}).json()["count"]
    assert left > 0
    for budget in (3, left - 1, left, 1000):
        answers(scripted, thinking_token_budget=budget, **asked)


@pytest.mark.parametrize("budget", [0, 1, 3])
@pytest.mark.parametrize("asked", [OPENED, {"enable_thinking": None}])
@pytest.mark.parametrize(
    ("cut", "length"), [({"max_tokens": 20}, 1004), ({}, 1023), ({"truncate_prompt_tokens": 99}, 99)]
)
def test_a_budget_and_a_truncated_prompt(
    scripted: Any, asked: dict[str, Any], cut: dict[str, Any], length: int, budget: int
) -> None:
    """The prompt is cut as without a budget, so that it leaves room for the answer."""
    messages = [{"role": "system", "content": "x" * 2000}, {"role": "user", "content": "long"}]
    body = {"messages": messages, "truncate_prompt_tokens": -1, **asked, **cut, "thinking_token_budget": budget}
    reply = scripted.ask(PATH, body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["prompt_tokens"] == length


@pytest.mark.parametrize(
    "asked", [OPENED, {"enable_thinking": None, "messages": [{"role": "user", "content": "thinker"}]}]
)
def test_a_budget_and_more_tokens_than_the_context_has_room_for(scripted: Any, asked: dict[str, Any]) -> None:
    """`min_tokens` may exceed what is left; the context ends the answer then."""
    body = {"messages": LONG, "min_tokens": 2000, **asked}
    replies = [scripted.ask(PATH, body | {"thinking_token_budget": budget}) for budget in (None, 3)]
    assert [reply.status_code for reply in replies] == [200, 200], replies[1].text
    totals = {reply.json()["usage"]["total_tokens"] for reply in replies}
    assert totals == {1024}


@pytest.mark.parametrize("budget", [None, 0, 3])
@pytest.mark.parametrize(
    "asked", [{"messages": LONG, **OPENED}, {"messages": [{"role": "user", "content": "thinker"}]}]
)
def test_an_aborted_reasoning_has_no_answer(
    scripted: Any, aborted_at_once: list[Any], asked: dict[str, Any], budget: int | None
) -> None:
    reply = scripted.ask(PATH, asked | {"thinking_token_budget": budget}).json()
    assert reply["choices"][0]["finish_reason"] == "abort"
    assert reply["usage"]["completion_tokens"] == 0
    assert len(aborted_at_once) == 1


@pytest.mark.parametrize(
    "asked", [{"messages": LONG, **OPENED}, {"messages": [{"role": "user", "content": "thinker"}]}]
)
def test_a_full_queue_refuses_no_answer_to_a_reasoning(
    scripted: Any, scripted_engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    submit, limit, taken = scripted_engine.submit, scripted_engine._admission_limit, list[str]()

    async def submit_and_fill(*args: Any, **options: Any) -> Any:
        reader = await submit(*args, **options)
        if not taken:  # other requests take all room, also the place that the ended reasoning had
            taken.extend(limit.take([None] * 1027, 1))
            taken.extend(limit.take([None], 1, continued=True))
        return reader

    monkeypatch.setattr(scripted_engine, "submit", submit_and_fill)
    body = asked | {"thinking_token_budget": 2, "max_tokens": 8}
    reply = scripted.ask(PATH, body)
    full = scripted.ask(PATH, body)
    for name in taken:
        limit.release(name)
    assert (reply.status_code, full.status_code) == (200, 429), reply.text
    assert reply.json()["usage"]["completion_tokens"] == 8


def test_a_grammar_follows_the_end_of_a_bounded_reasoning(scripted: Any) -> None:
    form = {"structured_outputs": {"choice": ["yes", "no"]}, "temperature": 0}
    reasoning, content, reason, _ = answers(scripted, thinking_token_budget=2, **form)
    assert (reasoning, reason) == ("one two", "stop")
    assert content in ("yes", "no")


@pytest.mark.parametrize(
    "asked", [{"messages": LONG, **OPENED}, {"messages": [{"role": "user", "content": "thinker"}]}]
)
def test_every_choice_has_its_budget(scripted: Any, asked: dict[str, Any]) -> None:
    """Choice i of n is the answer of a request with seed + i."""
    asked |= {"temperature": 250, "thinking_token_budget": 2, "max_tokens": 12, "return_token_ids": True}
    one_by_one = [scripted.ask(PATH, asked | {"seed": seed}).json() for seed in (5, 6, 7)]
    reply = scripted.ask(PATH, asked | {"seed": 5, "n": 3}).json()
    assert [each["index"] for each in reply["choices"]] == [0, 1, 2]
    for single, choice in zip(one_by_one, reply["choices"], strict=True):
        assert choice | {"index": 0, "drafted": None} == single["choices"][0] | {"drafted": None}
    written = [each["usage"]["completion_tokens"] for each in one_by_one]
    assert reply["usage"]["completion_tokens"] == sum(written)
    assert reply["usage"]["prompt_tokens"] == one_by_one[0]["usage"]["prompt_tokens"]
    texts = ["", "", ""]
    for chunk in scripted.stream(PATH, asked | {"seed": 5, "n": 3}):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [each["message"]["content"] for each in reply["choices"]]
    assert len({*texts}) == 3


def test_choices_with_budgets_are_queued_together_or_not_at_all(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = scripted.service.llm
    submit, readers = llm.submit, list[Any]()

    async def submit_two(*args: Any, **options: Any) -> Any:
        if len(readers) == 2:
            raise QueueFull("two requests")
        readers.append(await submit(*args, **options))
        return readers[-1]

    aborted = list[Any]()
    monkeypatch.setattr(llm, "submit", submit_two)
    monkeypatch.setattr(llm, "abort_unfinished", aborted.append)
    body = {"messages": LONG, **OPENED, "thinking_token_budget": 3, "n": 3, "temperature": 1, "max_tokens": 9}
    assert scripted.error(429, PATH, body)["code"] == "rate_limit_exceeded"
    assert aborted == readers
    assert len(readers) == 2


def test_a_budget_that_no_token_can_end_is_refused(scripted: Any, make_client: Callable[..., Any]) -> None:
    client = make_client(chat_template="{{ messages[0].content ~ '<think>' }}", reasoning_parser="think")
    error = client.error(400, PATH, {"messages": HELLO, "thinking_token_budget": 3})
    assert "</think> is not a single token of this model" in error["message"]
    plain = make_client(chat_template="{{ messages[0].content }}", reasoning_parser="think")
    asked = {"messages": HELLO, "max_tokens": 8, "seed": 1}
    bounded, free = (plain.ask(PATH, asked | more) for more in ({"thinking_token_budget": 3}, {}))
    assert bounded.json()["choices"] == free.json()["choices"], "agents send a budget to every model"


def test_a_schema_that_cannot_be_compiled_is_named_as_the_client_wrote_it(scripted: Any) -> None:
    bad = {"type": "object", "properties": {"n": {"type": "x"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": bad, "strict": True}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": bad}}
    for body in ({"tools": [tool]}, {"tools": [tool], "tool_choice": "required"}, {"response_format": form}):
        assert scripted.error(400, PATH, {"messages": HELLO, **body})["param"] == next(iter(body))
    good = {"type": "function", "function": {"name": "f", "strict": True}}
    for field, tools in (("tools", [tool]), ("response_format", [good])):
        both = {"tools": tools, "response_format": {"type": "json_object"} if field == "tools" else form}
        assert scripted.error(400, PATH, {"messages": HELLO, **both})["param"] == field
        own = {"tools": tools, "structured_outputs": {"json": {} if field == "tools" else bad}}
        param = "structured_outputs" if field == "response_format" else field
        assert scripted.error(400, PATH, {"messages": HELLO, **own})["param"] == param
    completion = {"prompt": "x", "response_format": form}
    assert scripted.error(400, "/v1/completions", completion)["param"] == "response_format"


def test_all_wrong_keys_of_logit_bias_are_named(scripted: Any) -> None:
    error = scripted.error(400, PATH, {"messages": HELLO, "logit_bias": {"a": 1, "2": 1, "b": 1}})
    assert error["param"] == "logit_bias"
    assert "'a', 'b'" in error["message"]
    assert scripted.error(400, PATH, {"messages": HELLO, "logit_bias": {"a": 1}})["param"] == "logit_bias"


@pytest.mark.parametrize(
    ("stop", "arguments", "reason"),
    [("Os", '{"city": "', "stop"), ("slo", '{"city": "O', "stop"), ("</tool_call>", '{"city": "Oslo"}', "tool_calls")],
)
def test_a_stop_string_cuts_a_call(scripted: Any, stop: str, arguments: str, reason: str) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    body = {"messages": [{"role": "user", "content": "weather"}], "tools": [tool], "stop": [stop]}
    (choice,) = scripted.ask(PATH, body).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["arguments"], choice["finish_reason"]) == (arguments, reason)
    assert choice["stop_reason"] == stop
    chunks = [chunk["choices"][0] for chunk in scripted.stream(PATH, body)]
    parts = [each for chunk in chunks for each in chunk["delta"].get("tool_calls", ())]
    assert "".join(each["function"]["arguments"] for each in parts) == arguments
    assert chunks[-1]["finish_reason"] == reason


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"messages": HELLO, "max_completion_tokens": 5.0, "priority": 0.0}),
        (PATH, {"messages": HELLO, "logprobs": True, "top_logprobs": 1.0}),
        (PATH, {"messages": HELLO, "logprobs": False, "top_logprobs": 0}),
        (PATH, {"messages": HELLO, "thinking_token_budget": 4.0, "n": 1.0}),
        (PATH, {"messages": HELLO, "stream": True, "stream_options": {"include_obfuscation": False}}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 5.0}),
        ("/v1/responses", {"input": "default", "max_output_tokens": 5.0, "top_logprobs": 1.0}),
    ],
)
def test_values_that_other_servers_accept(scripted: Any, path: str, body: dict[str, Any]) -> None:
    assert scripted.ask(path, body).status_code == 200


def test_too_many_log_probabilities_are_named_as_the_client_wrote_them(scripted: Any) -> None:
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 21}
    assert scripted.error(400, PATH, body)["param"] == "top_logprobs"
