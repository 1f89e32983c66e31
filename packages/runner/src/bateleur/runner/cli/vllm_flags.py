"""Flags of `vllm serve` without an equivalent: accepted if the value changes nothing, else refused with the reason."""

import json
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Mapping
from typing import Any

from bateleur.runner.utils.vllm_names import ENGINE, drop_unsupported, table

_PLUGINS = "plug-ins are not supported: use a built-in parser of --tool-call-parser or --reasoning-parser"
_HTTP = "use a reverse proxy, for example nginx"
_LOGS = "requests are not logged: use --uvicorn-log-level and /metrics"

SERVER = table(
    ("api_server_count data_parallel_supervisor_port", (None, 1), "use --replicas"),
    ("dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s", (...,), ""),
    ("dp_supervisor_probe_timeout_s", (...,), ""),
    ("anthropic_disabled_thinking_effort cohere_format", (...,), ""),
    ("cohere_is_reasoning_model enable_flash_late_interaction", (False, True), ""),
    ("headless", (False,), "start ranks on other machines with torchrun"),
    ("config", (None,), "give the options on the command line"),
    ("grpc", (False,), "the server has HTTP only"),
    ("grpc_port tool_server", (None,), "the server has HTTP only, and clients run the tools"),
    ("chat_template_content_format", ("auto", "string"), "templates get message contents as strings"),
    ("trust_request_chat_template", (False,), "a template is a program: use --chat-template"),
    ("trust_request_mm_kwargs", (False,), "only text models are served"),
    ("reasoning_effort_map", (None, {}), "use --default-chat-template-kwargs"),
    ("response_role", ("assistant",), "responses have the role assistant"),
    ("exclude_tools_when_tool_choice_none", (True, False), ""),
    ("tool_parser_plugin reasoning_parser_plugin", (None, ""), _PLUGINS),
    ("tool_strict_level", (None,), "tools with strict: true follow their schema"),
    ("enable_prompt_tokens_details enable_per_request_metrics", (True, False), ""),
    ("enable_server_load_tracking", (False,), "use num_requests_running of /metrics"),
    ("enable_tokenizer_info_endpoint", (True, False), ""),
    ("sse_keep_alive_interval", (0,), "no keep-alive events are sent"),
    ("max_log_len", (...,), ""),
    ("enable_log_outputs log_error_stack", (False,), _LOGS),
    ("enable_log_deltas", (True, False), ""),
    ("disable_uvicorn_access_log", (True, False), ""),
    ("disable_access_log_for_endpoints", (...,), ""),
    ("tokens_only enable_scale_out", (False,), "use --skip-tokenizer-init"),
    ("fingerprint_mode fingerprint_value", (None, "none"), "responses have no system_fingerprint"),
    ("allow_credentials", (False,), "other origins send the key in a header: use --api-key"),
    ("allowed_methods allowed_headers", ("*", ["*"]), "all are allowed: use --allowed-origins"),
    ("enable_ssl_refresh", (False,), "restart the server to load a new certificate"),
    ("ssl_cert_reqs", (0, 2), "use --ssl-ca-certs"),
    ("ssl_ciphers middleware h11_max_header_count", (None,), _HTTP),
    ("enable_request_id_headers", (False,), "the id of a response ends with the request's field request_id"),
    ("enable_offline_docs", (False,), "use /openapi.json"),
    ("max_num_queued_reqs", (None,), "use --max-queued-requests"),
    ("max_num_queued_tokens max_num_active_seqs", (None,), "use --max-queued-requests, --max-num-seqs"),
)
"""Flag names, accepted values (`...` is any), and what to do instead of another value."""
_LISTS = ("allowed_media_domains", "collect_detailed_traces", "device_ids", "logits_processors")
"""Flags that take several values."""
_SHORT = {"tensor_parallel_size": "-tp", "data_parallel_size": "-dp"}


def add_vllm_flags(command: ArgumentParser) -> None:
    """Add vLLM's flags to a command, without listing them in its help."""
    known = command._option_string_actions
    switch: dict[str, Any] = {"action": BooleanOptionalAction}
    kinds: dict[str, dict[str, Any]] = {"--enforce-eager": switch, "--speculative-config": {"type": json_value}}
    for name, (values, _) in {**ENGINE, **SERVER}.items():
        kind = {"type": _value, "nargs": "+" if name in _LISTS else None}
        if (flag := f"--{name.replace('_', '-')}") not in known:
            kinds[flag] = (switch if any(isinstance(each, bool) for each in values) else kind) | {"dest": name}
    kinds |= {short: {"type": int, "dest": name} for name, short in _SHORT.items()}
    for flag, kwargs in kinds.items():
        command.add_argument(flag, help=SUPPRESS, default=SUPPRESS, **kwargs)


def check_vllm_flags(args: Namespace) -> None:
    """Raise ValueError for a flag with an unsupported value; the message has the reason and the option to use."""
    given: dict[str, Any] = {name: value for name, value in vars(args).items() if name in {*ENGINE, *SERVER}}
    given |= {name: each[0] for name, each in given.items() if isinstance(each, list) and len(each) == 1}
    try:
        drop_unsupported({**ENGINE, **SERVER}, given)
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        raise ValueError(f"--{name.replace('_', '-')} {rest}") from error


def json_value(text: str) -> Mapping[str, Any]:
    """Parse a JSON object. Raises ValueError for any other value."""
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
