"""Conversations are rendered by a template; errors name the place of what is malformed."""

from typing import Any

import pytest

from bateleur.runner import LLM, SamplingParams
from bateleur.runner.text.chat import render
from bateleur.runner.text.messages import checked_messages
from bateleur.runner.text.tokenizer import NoTokenizer
from bateleur.runner.utils.log_once import _logged

TEMPLATE = (
    "{{ bos_token or '' }}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'rude' %}{{ raise_exception('no rudeness') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "({{ c.function.arguments.city }}){% endfor %}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ 'hm' if enable_thinking else '' }}{% endif %}"
)
USER = {"role": "user", "content": "x = 1"}
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_a_conversation_as_the_template_writes_it(llm: LLM) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": [CALL]}, USER]
    prompt = render(llm.tokenizer, messages, chat_template=TEMPLATE, chat_template_kwargs={"enable_thinking": True})
    bos = llm.tokenizer.bos_token  # type: ignore[attr-defined]
    written = "<user>a\nb</><assistant>weather(Bern)</><user>x = 1</><assistant>hm"
    assert prompt["prompt"] == (bos or "") + written
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Bern"}', "the caller's own stay"
    assert prompt["prompt_token_ids"] == llm.tokenizer.encode(prompt["prompt"], add_special_tokens=False)
    with_tools = render(llm.tokenizer, [USER], tools=[TOOL], chat_template=TEMPLATE)
    assert '"name": "weather"' in with_tools["prompt"]


def test_what_begins_a_text_is_there_once(llm: LLM) -> None:
    plain = llm.tokenizer.encode("x")
    bare = llm.tokenizer.encode("x", add_special_tokens=False)
    first = plain[: len(plain) - len(bare)]
    assert first, "the shipped tokenizer puts a token before every text"
    template = "{{ bos_token }}{{ messages[0].content }}"
    prompt = render(llm.tokenizer, [USER | {"content": "x"}], chat_template=template)
    assert prompt["prompt_token_ids"] == plain


def test_a_final_message_goes_on(llm: LLM) -> None:
    messages = [USER, {"role": "assistant", "content": "y ="}]
    how: dict[str, Any] = {"chat_template": TEMPLATE, "continue_final_message": True}
    prompt = render(llm.tokenizer, messages, add_generation_prompt=False, **how)
    assert prompt["prompt"].endswith("<assistant>y =")
    with pytest.raises(ValueError, match="continue_final_message is True; it must be False with add_generation_"):
        render(llm.tokenizer, messages, **how)


def test_chat_is_generate_behind_the_template(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompt = render(llm.tokenizer, [USER], chat_template=TEMPLATE)
    (expected,) = llm.generate(prompt["prompt_token_ids"], params)
    (one,) = llm.chat([USER], params, chat_template=TEMPLATE)
    assert one.outputs == expected.outputs
    assert one.prompt == prompt["prompt"]
    assert one.prompt_token_ids == prompt["prompt_token_ids"]
    assert [each.outputs for each in llm.chat([[USER], [USER]], params, chat_template=TEMPLATE)] == [one.outputs] * 2


def test_the_template_may_be_the_checkpoints_own(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="the checkpoint has no chat template"):
        llm.chat([USER])
    with pytest.raises(ValueError, match="the checkpoint has no chat template"):
        render(NoTokenizer(), [USER])
    monkeypatch.setattr(llm.tokenizer, "chat_template", TEMPLATE)
    assert render(llm.tokenizer, [USER]) == render(llm.tokenizer, [USER], chat_template=TEMPLATE)


def assistant(call: Any) -> list[Any]:
    return [USER, {"role": "assistant", "content": None, "tool_calls": call}]


def calls(arguments: Any) -> list[Any]:
    return assistant([{"function": {"name": "f", "arguments": arguments}}])


MALFORMED: list[tuple[Any, str]] = [
    ("hello", r"messages is 'hello'; it must be a list of messages"),
    (None, r"messages is None; it must be a list of messages"),
    ([], r"messages is \[\]; it must be at least one message"),
    ([USER, "x"], r"messages\[1\] is 'x'; it must be an object"),
    ([{1: 2}], r"messages\[0\] is \{1: 2\}; it must be an object"),
    ([{"content": "x"}], r"messages\[0\].role is None; it must be text"),
    ([{"role": 1, "content": "x"}], r"messages\[0\].role is 1; it must be text"),
    ([USER, USER, {"role": "user", "content": 5}], r"messages\[2\].content is 5; it must be text, or a list of parts"),
    ([{"role": "user"}], r"messages\[0\].content is None; it must be text"),
    ([{"role": "user", "content": "\ud800"}], r"messages\[0\].content holds '\\ud800'"),
    ([{"role": "user", "content": ["x"]}], r"messages\[0\].content\[0\] is 'x'; it must be an object"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        r"messages\[0\].content\[0\].type is 'image_url'; it must be 'text': .* no images",
    ),
    ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content\[0\].text is None; it must be text"),
    (assistant({}), r"messages\[1\].tool_calls is \{\}; it must be a list"),
    (assistant([3]), r"messages\[1\].tool_calls\[0\] is 3; it must be an object"),
    (assistant([{}]), r"messages\[1\].tool_calls\[0\].function is None; it must be an object"),
    ([{"role": "rude", "content": "x"}], "^the chat template refuses these messages: no rudeness$"),
]


@pytest.mark.parametrize(("messages", "message"), MALFORMED, ids=[str(i) for i in range(len(MALFORMED))])
def test_malformed_messages_are_named_by_place(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(llm.tokenizer, messages, chat_template=TEMPLATE)


PAST: list[tuple[Any, Any]] = [
    (calls('{"city": "Par'), "(Par)"),
    (calls('{"city": "Par\\'), "(Par)"),
    (calls('{"city": "Bern", "da'), "(Bern)"),
    (calls('{"city": "Bern", "days":'), "(Bern)"),
    (calls('"{\\"city\\": \\"Bern\\"}"'), "(Bern)"),
    (calls('{"city": "\\ud83e"}'), "(\ufffd)"),
    (calls('{"city": "\\ud83e\\udd85"}'), "(\U0001f985)"),
    (calls("{"), "f()"),
    (calls("[" * 100_000), "f()"),
    (calls("3"), "f()"),
    (calls(None), "f()"),
    (calls("[1]"), "f()"),
    ([USER, {"role": "assistant", "content": None}, {"role": "tool", "content": None}], "<tool></>"),
    ([USER, {"role": "assistant", "content": None, "refusal": "No."}], "<assistant>No.</>"),
    ([USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}], "<assistant>No.</>"),
    (
        [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "a"}],
            },
            {"role": "assistant", "content": "b\ud800"},
            USER,
        ],
        "<user>[image_url]\na</><assistant>b\ufffd</>",
    ),
    ([{"role": "user"}, {"role": "assistant", "content": {"a": 1}}, USER], '<user></><assistant>{"a": 1}</>'),
    (assistant([{"type": "custom", "custom": {"name": "sh", "input": "ls"}}]), "sh()"),
    ([USER, {"role": "assistant", "function_call": {"name": "f", "arguments": '{"city": "Bern"}'}}], "f(Bern)"),
    ([USER | {"name": 3, "reasoning": ["x"]}], "<user>x = 1</>"),
]


@pytest.mark.parametrize(("messages", "written"), PAST, ids=[str(i) for i in range(len(PAST))])
def test_malformed_past_messages_are_read_as_well_as_possible(llm: LLM, messages: Any, written: str) -> None:
    assert written in render(llm.tokenizer, messages, chat_template=TEMPLATE)["prompt"]


def test_arguments_that_were_cut_keep_what_is_complete() -> None:
    def read(given: Any) -> Any:
        message = checked_messages(calls(given))[1]
        return message["tool_calls"][0]["function"]["arguments"]

    assert read('{"city": "Par", "days": [1, {"a": 2') == {"city": "Par", "days": [1, {"a": 2}]}
    assert read("ls -la") == {"arguments": "ls -la"}
    assert read([1, 2]) == {"arguments": [1, 2]}


def test_a_fault_of_past_messages_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    _logged.clear()
    for _ in range(3):
        checked_messages(calls("{"))
    assert [record.getMessage() for record in caplog.records] == [
        "malformed message in a conversation: arguments of a past tool call that are no JSON object are read as well "
        "as possible"
    ]


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}"
    "{% endif %}{{ '<' ~ m.role ~ '>' ~ m.content }}{% endfor %}"
)
FIRST_ALONE = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role == 'user' %}{{ '<user>' ~ m.content }}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ '<' ~ m.role ~ '>' ~ m.content }}{% endfor %}"
KNOWS = "{# developer #}" + PLAIN


@pytest.mark.parametrize(
    ("template", "roles", "written"),
    [
        (STRICT, "system system user", "<system>0\n\n1<user>2"),
        (STRICT, "system developer user", "<system>0\n\n1<user>2"),
        (STRICT, "developer user", "<system>0<user>1"),
        (STRICT, "user system", "<system>1<user>0"),
        (STRICT, "system user assistant system user", "<system>0\n\n3<user>1<assistant>2<user>4"),
        (FIRST_ALONE, "system developer user", "0\n\n1<user>2"),
        (PLAIN, "system system user system", "<system>0<system>1<user>2<system>3"),
        (PLAIN, "user developer", "<user>0<system>1"),
        (KNOWS, "system developer user", "<system>0<developer>1<user>2"),
    ],
)
def test_system_messages_are_merged_if_the_template_wants_one(
    llm: LLM, template: str, roles: str, written: str
) -> None:
    messages = [{"role": role, "content": str(i)} for i, role in enumerate(roles.split())]
    assert render(llm.tokenizer, messages, chat_template=template)["prompt"] == written


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, r"tools is \{\}; it must be a list of tools, or None"),
    ({"tools": [TOOL, {}]}, r"tools\[1\].type is None; it must be 'function'"),
    ({"tools": [{"type": "function", "function": {}}]}, r"tools\[0\].function.name is None; it must be text"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]},
        r"tools\[0\].function.parameters is 3; it must be an object",
    ),
    ({"chat_template": 3}, "chat_template is 3; it must be text"),
    ({"chat_template": "{{"}, "the chat template refuses these messages: TemplateSyntaxError: "),
    ({"chat_template": "{{ 1 // 0 }}"}, "the chat template refuses these messages: ZeroDivisionError: "),
    ({"chat_template": "{{ a.b.c }}"}, "the chat template refuses these messages: UndefinedError: "),
    ({"chat_template": "{{ ''.__class__.__mro__[1].__subclasses__() }}"}, "SecurityError"),
    ({"add_generation_prompt": 1}, "add_generation_prompt is 1; it must be True or False"),
    ({"continue_final_message": "no"}, "continue_final_message is 'no'; it must be True or False"),
    ({"chat_template_kwargs": [1]}, r"chat_template_kwargs is \[1\]; it must be a mapping"),
    ({"chat_template_kwargs": {"tokenize": True}}, r"chat_template_kwargs\['tokenize'\] is True; it must be absent"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=[str(i) for i in range(len(OPTIONS))])
def test_malformed_options_are_named(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(llm.tokenizer, [USER], **({"chat_template": TEMPLATE} | options))
