"""The argument parser of the `bateleur` command.

Engine and sampling flags are made from the fields of their configuration classes. A flag that is not given is absent
from the parsed arguments, so that the configuration class applies its default.

A function for each subcommand (`_generate`, `_batch`, `_serve`, `_bench`, `_info`, `_explain_acceptance`) adds the
arguments of the subcommand to its parser. The docstring of the function is the description in `--help`.
"""

from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace, RawDescriptionHelpFormatter
from collections.abc import Collection, Iterable
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import Any

from bateleur.runner.bench.config import LatencyConfig, ServeBenchConfig, ThroughputConfig
from bateleur.runner.cli.vllm_flags import add_vllm_flags, json_value
from bateleur.runner.config.engine_config import PARTS, all_options
from bateleur.runner.replicas.config import ReplicaConfig
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.serve.config import ServeConfig
from bateleur.runner.serve.parsers.options import ParserOptions
from bateleur.runner.utils.options import Option, options_of
from bateleur.runner.utils.version import package_version

_EXAMPLES = """\
examples:
  bateleur generate "class Shape:"
  bateleur generate "import os" --max-tokens 200 --temperature 0
  bateleur generate --model /models/Bamba-9B "The eagle" --dtype bfloat16
  bateleur generate --model /models/Qwen3.5-9B --draft mtp "The eagle" --dtype bfloat16
  bateleur generate --prompt-file requests.jsonl --output results.jsonl
  bateleur info /models/Bamba-9B
  bateleur explain-acceptance /models/Bamba-9B /models/Bamba-9B-eagle3

A line of a prompt file is one JSON object: "prompt" (text) or "prompt_token_ids" (a list of ids), optionally "id", and
sampling parameters by the Python names of the flags below, for example
  {"id": "f", "prompt": "def f(", "max_tokens": 32, "temperature": 0, "stop": ["\\n\\n"]}
Or all lines have the format of OpenAI's Batch API, and so have the results. The defaults of sampling parameters are
then those of the model, overridden by the flags below, else OpenAI's:
  {"custom_id": "f", "method": "POST", "url": "/v1/completions", "body": {"prompt": "def f(", "max_tokens": 32}}
"""
_SERVING = """\
examples:
  bateleur serve
  bateleur serve /models/Qwen3.5-9B --served-model-name qwen --dtype bfloat16 --draft mtp --enable-prefix-caching
  bateleur serve /models/Bamba-9B --dtype bfloat16 --replicas 4
  bateleur serve --host 0.0.0.0 --api-key SECRET --ssl-certfile cert.pem --ssl-keyfile key.pem
"""
_BATCH = """\
examples:
  bateleur batch prompts.jsonl results.jsonl --temperature 0
  bateleur batch requests.parquet results.parquet --model /models/Bamba-9B --replicas 8
"""
_BENCH = """\
examples:
  bateleur bench latency --batch-size 8
  bateleur bench latency --model /models/Bamba-9B --dtype bfloat16 --vllm /envs/vllm/bin/python
  bateleur bench throughput --num-prompts 200 --json
  bateleur bench serve --model /models/Bamba-9B --vllm /envs/vllm/bin/python --request-rate 2 8
  bateleur bench serve --base-url http://127.0.0.1:8000 --dataset-name conversations
"""
SAMPLING_DEFAULTS: dict[str, Any] = {"max_tokens": 128, "seed": 0}
"""Defaults of sampling parameters for `generate` and `batch`, instead of those of `SamplingParams`."""
FALLBACK_SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}
"""Further defaults for models without recommended sampling parameters."""
_TITLES = {
    "model": "model",
    "scheduler": "scheduler",
    "cache": "KV cache, prefix caching and Mamba states",
    "speculative": "speculative decoding",
    "graphs": "CUDA graphs",
    "parallel": "tensor and data parallelism",
    "lora": "LoRA adapters",
}
_NOT_FLAGS = ("model", "drafter", "seed")
"""Options of `LLM` without a generated flag: MODEL is an argument, a drafter is an object, requests have seeds."""
_NOT_SAMPLING_FLAGS = ("n", "output_kind", "skip_special_tokens", "detokenize", "return_tags")
"""Sampling parameters without a flag: the output format decides them, or they default to True."""
_ENGINE = {part: [each for each in options_of(config) if each.name not in _NOT_FLAGS] for part, config in PARTS.items()}
ENGINE_OPTIONS = tuple(option.name for options in _ENGINE.values() for option in options)
"""Names of the options of `LLM` that have a flag."""
_MORE_HELP = {
    "draft": '; "none" disables drafts. Default: the shipped head for the shipped model, with draft_policy "auto" for '
    "files of requests",
    "stop": "; repeatable",
    **dict.fromkeys(("logprobs", "logprob_token_ids", "prompt_logprobs"), "; with --prompt-file"),
}
_KINDS: dict[str, dict[str, Any]] = {
    "bool": {"action": "store_true"},
    "int": {"metavar": "N", "type": int},
    "float": {"metavar": "X", "type": float},
    "Sequence[int]": {"metavar": "N", "type": int, "nargs": "+"},
    "Sequence[str]": {"metavar": "TEXT", "action": "append"},
    "str | Path": {"metavar": "DIR"},
    "Sequence[float]": {"metavar": "X", "type": float, "nargs": "+"},
    "Path": {"metavar": "FILE"},
    "Mapping": {"metavar": "JSON", "type": json_value},
}
"""Arguments of `add_argument` by the beginning of an option's type; other types take a name."""
_LISTS = ("served_model_name", "api_key", "allowed_origins", "lora_modules", "peers")
"""Options that take several values after one flag, as in vLLM."""
_FOLDER: dict[str, Any] = {"metavar": "DIR", "type": Path, "default": None}
_SWITCH: dict[str, Any] = {"action": "store_true", "default": False}
_MODEL = "Hugging Face checkpoint folder (default: the shipped model)"
_THREADS: dict[str, Any] = {"metavar": "N", "type": int, "help": "Number of CPU threads (default: torch's)"}
_JSON: dict[str, Any] = {**_SWITCH, "help": "Print one JSON object"}
_REQUESTS = "Requests: a file of JSON lines or a Parquet file; - is stdin"


def build_parser() -> ArgumentParser:
    """Build the parser with all subcommands."""
    raw, about = RawDescriptionHelpFormatter, "Inference engine for hybrid (recurrent and attention) language models."
    parser = ArgumentParser(prog="bateleur", description=about, epilog=_EXAMPLES, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"bateleur {package_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, add_arguments, summary, examples in _COMMANDS:
        about = fill(" ".join((add_arguments.__doc__ or "").split()), 80)
        more: dict[str, Any] = {"description": about, "epilog": examples, "formatter_class": raw}
        add_arguments(commands.add_parser(name, argument_default=SUPPRESS, help=summary, **more))
    return parser


def given_options(args: Namespace, names: Collection[str] | type) -> dict[str, Any]:
    """Return the given arguments with names in `names`, or in the options of the configuration class `names`."""
    wanted = [each.name for each in options_of(names)] if isinstance(names, type) else names
    return {name: value for name, value in vars(args).items() if name in wanted}


def check_num_threads(args: Namespace) -> int | None:
    """Return --num-threads, None if it is not given. Raises ValueError if it is below 1."""
    num_threads: int | None = getattr(args, "num_threads", None)
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"--num-threads is {num_threads}; it must be at least 1")
    return num_threads


def check_ray() -> None:
    """Raise ValueError if ray is not installed."""
    if find_spec("ray") is None:
        raise ValueError("--replicas needs ray, which is not installed: pip install 'bateleur-runner[ray]'")


def is_follower_rank(args: Namespace) -> bool:
    """Return whether torchrun started this process as another rank than 0. Its `LLM` runs until rank 0 ends."""
    if max(getattr(args, f"{kind}_parallel_size", 1) for kind in ("tensor", "data")) == 1:
        return False
    from bateleur.runner.distributed.launch import is_follower

    return is_follower()


def _generate(command: ArgumentParser) -> None:
    """Continue a prompt and stream the text, or run a file of requests."""
    command.add_argument("prompt", nargs="?", default=None, help="Text to continue")
    files = command.add_argument_group("files")
    files.add_argument("--prompt-file", metavar="FILE", default=None, help=_REQUESTS)
    what = "File for the results, one JSON object per line, written as requests end and sorted at the end"
    more = f"{what}. An interrupted run is resumed from it (default: stdout, unsorted)"
    files.add_argument("--output", metavar="FILE", type=Path, default=None, help=more)
    _add_file_options(command, files)


def _batch(command: ArgumentParser) -> None:
    """Run a file of requests: JSON lines or a Parquet file, each request a prompt with sampling parameters or in the
    format of OpenAI's Batch API. Each result is written when its request ends; at the end the results are sorted into
    the order of the requests. A second run resumes an interrupted one. A failed request has an error as result.
    """
    command.set_defaults(prompt=None)
    command.add_argument("prompt_file", metavar="INPUT", help=_REQUESTS)
    more = "File for the results: Parquet if its name ends with .parquet, else JSON lines"
    command.add_argument("output", metavar="OUTPUT", type=Path, help=more)
    _add_file_options(command, command.add_argument_group("files"))
    _add(command.add_argument_group("replicas"), _named(options_of(ReplicaConfig), "replicas", "ray_address"))


def _add_file_options(command: ArgumentParser, files: Any) -> None:
    files.add_argument("--overwrite", **_SWITCH, help="Discard existing results instead of resuming")
    more = "Model names that OpenAI batch requests may use (default: the model folder, or bateleur)"
    files.add_argument("--served-model-name", metavar="NAME", nargs="+", default=[], help=more)
    _add(files, options_of(ParserOptions))
    for part, options in _ENGINE.items():
        group = command.add_argument_group(_TITLES[part])
        if part == "model":
            group.add_argument("--model", **_FOLDER, help=_MODEL)
            more = _THREADS["help"].replace(")", "; 1 for one prompt of the shipped model)")
            group.add_argument("--num-threads", **_THREADS | {"help": more})
        if part == "lora":
            _add(group, _named(options_of(ServeConfig), "lora_modules"))
        _add(group, options)
    group = command.add_argument_group("sampling (the model's generation_config.json overrides these defaults)")
    flags = [each for each in options_of(SamplingParams) if each.name not in _NOT_SAMPLING_FLAGS]
    _add(group, flags, **SAMPLING_DEFAULTS, **FALLBACK_SAMPLING)


def _serve(command: ArgumentParser) -> None:
    """Start an OpenAI-compatible HTTP server with a web page to try the model. Prints the URL when it is ready. Prefix
    caching is on unless --no-enable-prefix-caching is given. The shipped model uses its draft head unless --draft none
    is given.
    """
    command.add_argument("model", nargs="?", **_FOLDER, help=f"{_MODEL}, with its draft head")
    command.add_argument("--model", dest="named_model", **_FOLDER, help="Same as MODEL")
    _add(command.add_argument_group("server"), options_of(ServeConfig))
    _add(command.add_argument_group("replicas"), options_of(ReplicaConfig))
    for part, options in _ENGINE.items():
        group = command.add_argument_group(_TITLES[part])
        if part == "model":
            group.add_argument("--num-threads", **_THREADS)
            options = [*options, *_named(all_options(), "seed")]
        _add(group, options)
    add_vllm_flags(command)


def _bench(command: ArgumentParser) -> None:
    """Measure the speed of engines in interleaved rounds. A speed is reported only if at least half of the requests get
    the same tokens as from bateleur. `latency` and `throughput` also report the bandwidth bound: the time in which
    the machine could read the bytes of one step.
    """
    kinds = command.add_subparsers(dest="measure", required=True, metavar="MEASURE")
    for name, config in (("latency", LatencyConfig), ("throughput", ThroughputConfig), ("serve", ServeBenchConfig)):
        about = " ".join((config.__doc__ or "").split())
        measure = kinds.add_parser(name, argument_default=SUPPRESS, help=about, description=about)
        measure.add_argument("--model", **_FOLDER, help=_MODEL)
        measure.add_argument("--json", **_JSON)
        if config is not ServeBenchConfig:
            measure.add_argument("--num-threads", **_THREADS)
        _add(measure.add_argument_group("benchmark"), options_of(config))
        for part, options in _ENGINE.items():
            _add(measure.add_argument_group(_TITLES[part]), options)


def _info(command: ArgumentParser) -> None:
    """Print layers, parameters, and bytes of weights, KV cache and Mamba state. No weights are loaded."""
    command.add_argument("model", nargs="?", **_FOLDER, help=_MODEL)
    command.add_argument("--json", **_JSON)
    more = "Print which batches run on which CUDA graph, and which run eagerly"
    command.add_argument("--graphs", **_SWITCH, help=more)
    for part, options in _ENGINE.items():
        _add(command.add_argument_group(f"{_TITLES[part]}, for the engine to describe"), options)


def _explain_acceptance(command: ArgumentParser) -> None:
    """Measure the acceptance rate of a draft head, and find why it is low: the engine, the features that the head gets,
    its norms, its vocabulary, or its training.
    """
    command.add_argument("model", nargs="?", **_FOLDER, help=_MODEL)
    more = "Draft head folder, or mtp for the head in the model's own files (default: the shipped head)"
    command.add_argument("draft", nargs="?", metavar="DRAFT", default="auto", help=more)
    command.add_argument("--json", **_JSON)
    _add(command, _named(all_options(), "dtype", "device", "num_speculative_tokens"))
    command.add_argument("--max-tokens", metavar="N", type=int, help="Output tokens per prompt (default: 64)")
    more = "Text to continue; repeatable (default: twelve beginnings of Python code)"
    command.add_argument("--prompt", metavar="TEXT", action="append", default=None, help=more)


def _named(options: Iterable[Option], *names: str) -> list[Option]:
    return [each for each in options if each.name in names]


def _add(group: Any, options: Iterable[Option], **defaults: Any) -> None:
    """Add a flag for each option. Its help ends with its default, which `defaults` may override."""
    for option in options:
        default = defaults.get(option.name, option.default)
        more = option.help.replace("%", "%%").rstrip(".") + _MORE_HELP.get(option.name, "")
        if option.type != "bool" and default not in (None, ()):
            more += f" (default: {default})"
        kwargs = next((kwargs for kind, kwargs in _KINDS.items() if option.type.startswith(kind)), {"metavar": "NAME"})
        if option.name in ("async_scheduling", "enable_prefix_caching"):
            kwargs = {"action": BooleanOptionalAction}
        elif option.name in _LISTS and option.type.startswith("Sequence"):
            kwargs = {"metavar": "TEXT", "nargs": "+", "action": "extend"}
        group.add_argument(f"--{option.name.replace('_', '-')}", help=more, **kwargs)


_COMMANDS = (
    ("generate", _generate, "generate from one prompt, or from a file of requests", _EXAMPLES),
    ("batch", _batch, "run a file of requests, on one engine or on replicas", _BATCH),
    ("serve", _serve, "start an OpenAI-compatible server", _SERVING),
    ("bench", _bench, "benchmark against other engines and against memory bandwidth", _BENCH),
    ("info", _info, "print parameters, memory and CUDA graphs of a checkpoint", ""),
    ("explain-acceptance", _explain_acceptance, "diagnose a low draft acceptance rate", ""),
)
"""Subcommands: name, function that adds the arguments and whose docstring is the description, help, examples."""
