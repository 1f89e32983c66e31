"""Flags of `vllm serve` that are none here: accepted if they ask for what happens, else refused with the reason."""

from __future__ import annotations

import json
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Mapping
from typing import Any

from bateleur.runner.utils.vllm_names import ENGINE, table, without

_PLUGINS = (
    "plug-ins are not loaded: see --tool-call-parser and --reasoning-parser for the parsers that there are"
)
_HTTP = "put a proxy in front, such as nginx"
_LOGS = "requests are not logged: see --uvicorn-log-level and /metrics"

SERVER = table(
    ("api_server_count data_parallel_supervisor_port", (None, 1), "say --replicas"),
    ("dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s", (...,), ""),
    ("dp_supervisor_probe_timeout_s", (...,), ""),
    ("anthropic_disabled_thinking_effort cohere_format", (...,), ""),
    ("cohere_is_reasoning_model enable_flash_late_interaction", (False, True), ""),
    ("headless", (False,), "ranks of other machines are started by torchrun"),
    ("config", (None,), "write the options on the command line"),
    ("grpc", (False,), "the server speaks HTTP"),
    ("grpc_port tool_server", (None,), "the server speaks HTTP, and clients run the tools"),
    ("lora_modules", (None,), "LoRA adapters are not loaded: merge them into the checkpoint"),
    ("chat_template_content_format", ("auto", "string"), "contents are passed to the template as texts"),
    ("trust_request_chat_template", (False,), "a template is a program: say --chat-template"),
    ("trust_request_mm_kwargs", (False,), "models of text alone are served"),
    (
        "reasoning_effort_map",
        (None, {}),
        "the template reads it: see --default-chat-template-kwargs",
    ),
    ("response_role", ("assistant",), "answers have the role assistant"),
    ("exclude_tools_when_tool_choice_none", (True, False), ""),
    ("tool_parser_plugin reasoning_parser_plugin", (None, ""), _PLUGINS),
    ("tool_strict_level", (None,), "tools with strict: true follow their schema"),
    ("enable_prompt_tokens_details enable_per_request_metrics", (True, False), ""),
    ("enable_server_load_tracking", (False,), "see num_requests_running in /metrics"),
    ("enable_tokenizer_info_endpoint", (True, False), ""),
    ("sse_keep_alive_interval", (0,), "connections are kept open without events"),
    ("max_log_len", (...,), ""),
    ("enable_log_outputs log_error_stack", (False,), _LOGS),
    ("enable_log_deltas", (True, False), ""),
    ("disable_uvicorn_access_log", (True, False), ""),
    ("disable_access_log_for_endpoints", (...,), ""),
    ("tokens_only enable_scale_out", (False,), "say --skip-tokenizer-init"),
    ("fingerprint_mode fingerprint_value", (None, "none"), "replies have no system_fingerprint"),
    ("allow_credentials", (False,), "pages of other origins send the key in a header: see --api-key"),
    ("allowed_methods allowed_headers", ("*", ["*"]), "all are allowed: see --allowed-origins"),
    ("enable_ssl_refresh", (False,), "restart the server for a new certificate"),
    ("ssl_cert_reqs", (0, 2), "say --ssl-ca-certs"),
    ("ssl_ciphers middleware h11_max_header_count", (None,), _HTTP),
    (
        "enable_request_id_headers",
        (False,),
        "the id of a reply ends with the field request_id of its request",
    ),
    ("enable_offline_docs", (False,), "see /openapi.json"),
    ("max_num_queued_reqs", (None,), "say --max-queued-requests"),
    ("max_num_queued_tokens max_num_active_seqs", (None,), "say --max-queued-requests, --max-num-seqs"),
)
"""Flags of the server with the values that ask for what happens. `...` is any value."""
_LISTS = (
    "allowed_media_domains",
    "collect_detailed_traces",
    "device_ids",
    "logits_processors",
    "lora_modules",
)
"""Flags that take several values at once."""
_SHORT = {"tensor_parallel_size": "-tp", "data_parallel_size": "-dp"}


def add_vllm_flags(command: ArgumentParser) -> None:
    """Let a command take vLLM's flags, which its help does not list."""
    known = command._option_string_actions
    for name, (values, _) in {**ENGINE, **SERVER}.items():
        flag = f"--{name.replace('_', '-')}"
        if flag in known:
            continue
        if any(isinstance(each, bool) for each in values):
            command.add_argument(
                flag, action=BooleanOptionalAction, dest=name, help=SUPPRESS, default=SUPPRESS
            )
        else:
            several = "+" if name in _LISTS else None
            command.add_argument(flag, type=_value, nargs=several, dest=name, help=SUPPRESS, default=SUPPRESS)
    for flag, kind in (
        ("--enforce-eager", {"action": BooleanOptionalAction}),
        ("--speculative-config", {"type": json_value}),
    ):
        command.add_argument(flag, help=SUPPRESS, default=SUPPRESS, **kind)
    for name, short in _SHORT.items():
        command.add_argument(short, type=int, dest=name, help=SUPPRESS, default=SUPPRESS)


def check_vllm_flags(args: Namespace) -> None:
    """Raise ValueError for a flag that asks for what is not done; names the reason and the option to use."""
    given: dict[str, Any] = {
        name: _single(value) for name, value in vars(args).items() if name in {*ENGINE, *SERVER}
    }
    try:
        without({**ENGINE, **SERVER}, given)
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        raise ValueError(f"--{name.replace('_', '-')} {rest}") from error


def json_value(text: str) -> Mapping[str, Any]:
    """A JSON object. Raises ValueError for anything else."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


json_value.__name__ = "JSON object"  # as argparse names it in an error


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _single(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value
