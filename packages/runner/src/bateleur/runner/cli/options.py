"""The options of the `bateleur` command, and its parser.

Options of the engine and of sampling are the fields of their configurations. Of these, what is not given is not among
the parsed arguments: defaults are those of whoever takes them.
"""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace, RawDescriptionHelpFormatter
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
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

A line of a prompt file is one JSON object: "prompt" (text) or "prompt_token_ids" (a list of ids), an "id" if you like,
and any of the sampling parameters below under their Python names, for example
  {"id": "f", "prompt": "def f(", "max_tokens": 32, "temperature": 0, "stop": ["\\n\\n"]}
Or all lines are of OpenAI's batch form, and the results, too; parameters that a body leaves out are those of the model
and of the options below, and OpenAI's where these are silent:
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

_OF_BATCHES = (
    "Run a file of requests, one JSON object a line or a row of a Parquet file each: prompts with sampling "
    "parameters, or OpenAI's batch form. Results are written as they end, and put in order when all have; a second run "
    "goes on where the first stopped. What is wrong with a request is its result."
)

_BENCH = """\
examples:
  bateleur bench latency --batch-size 8
  bateleur bench latency --model /models/Bamba-9B --dtype bfloat16 --vllm /envs/vllm/bin/python
  bateleur bench throughput --num-prompts 200 --json
  bateleur bench serve --model /models/Bamba-9B --vllm /envs/vllm/bin/python --request-rate 2 8
  bateleur bench serve --base-url http://127.0.0.1:8000 --dataset-name conversations
"""


DEFAULTS: dict[str, Any] = {"max_tokens": 128, "seed": 0}
"""Sampling parameters of `generate`, in place of the defaults that they have elsewhere."""
FOR_SILENT_MODELS: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}
"""The same, for models that recommend nothing."""
_TITLES = {
    "model": "model",
    "scheduler": "a step",
    "cache": "blocks, prefix caching and Mamba states",
    "speculative": "speculation",
    "graphs": "graphs",
    "parallel": "several processes",
}
_NOT_FLAGS = ("model", "drafter", "seed")
"""Options of `LLM` that are no flags of this kind: the folder stands by itself, a shell has no objects, and here every
request has a seed."""
_NOT_SAMPLING_FLAGS = ("n", "output_kind", "skip_special_tokens", "detokenize", "return_tags")
"""Sampling parameters that are no flags: what is written decides them, or a flag cannot say no."""
_ENGINE = {
    part: [each for each in options_of(config) if each.name not in _NOT_FLAGS]
    for part, config in PARTS.items()
}
ENGINE = tuple(option.name for options in _ENGINE.values() for option in options)
"""Names of all that `LLM` takes and a flag can say."""
_MORE_HELP = {
    "draft": '; "none" is no draft. Default: the shipped head for the shipped model, of files with draft_policy "auto"',
    "stop": "; repeatable",
    "logprobs": "; with --prompt-file",
    "prompt_logprobs": "; with --prompt-file",
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
"""What `argparse` is told of an option, by what its type begins with; others are names."""
_LISTS = ("served_model_name", "api_key", "allowed_origins", "peers")
"""Options that take several values at once, as vLLM's do."""
_FOLDER: dict[str, Any] = {"metavar": "DIR", "type": Path, "default": None}
_SWITCH: dict[str, Any] = {"action": "store_true", "default": False}
_MODEL = "Checkpoint folder (default: the shipped model)"
_THREADS = "Threads of a CPU (default: torch's)"
_JSON = "Print one JSON object"


def build_parser() -> ArgumentParser:
    """The whole command line."""
    shape: dict[str, Any] = {"epilog": _EXAMPLES, "formatter_class": RawDescriptionHelpFormatter}
    parser = ArgumentParser(
        prog="bateleur",
        description="Generate text with hybrid (recurrent and attention) language models.",
        **shape,
    )
    parser.add_argument("--version", action="version", version=f"bateleur {package_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = partial(commands.add_parser, argument_default=SUPPRESS)
    _generate(
        add(
            "generate",
            help="continue a prompt, or a file of prompts",
            description="Continue a prompt and stream the text, or run a file of prompts.",
            **shape,
        )
    )
    more = "run a file of requests, on several engines"
    _batch(add("batch", help=more, description=_OF_BATCHES, **(shape | {"epilog": _BATCH})))
    _serve(
        add(
            "serve",
            help="answer at an address, as OpenAI's clients ask",
            description="Serve a model over HTTP: OpenAI's completions and chat, and a page to try it. Prints the "
            "address when it answers. Prefix caching is on, and the shipped model has its draft head, unless "
            "--no-enable-prefix-caching and --draft none say otherwise.",
            epilog=_SERVING,
            formatter_class=RawDescriptionHelpFormatter,
        )
    )
    _bench(
        add(
            "bench",
            help="how fast it is, beside other engines and beside what memory allows",
            description="Measure speeds: engines take turns, tokens are compared before a speed is told, and beside "
            "the time stands what a plain read of all that a step moves would take.",
            epilog=_BENCH,
            formatter_class=RawDescriptionHelpFormatter,
        )
    )
    _info(
        add(
            "info",
            help="what a checkpoint is and costs",
            description="Print what a checkpoint is and what it costs to run: layers, parameters, bytes of weights, "
            "KV cache and Mamba state.",
        )
    )
    _explain_acceptance(
        add(
            "explain-acceptance",
            help="why drafts are accepted as rarely as they are",
            description="Measure how the drafts of a head fare, and find out why: bookkeeping of the engine, features, "
            "norms, vocabulary, or just the head.",
        )
    )
    return parser


def given(args: Namespace, names: Collection[str]) -> dict[str, Any]:
    """Of these arguments, those that were given."""
    return {name: value for name, value in vars(args).items() if name in names}


def follows_another(args: Namespace) -> bool:
    """Whether torchrun has started this process as another than the first of several ranks: it has no work of its own,
    and its `LLM` ends it with the first.
    """
    sizes = (getattr(args, name, 1) for name in ("tensor_parallel_size", "data_parallel_size"))
    if max(sizes) == 1:
        return False
    from bateleur.runner.distributed.torchrun import is_follower

    return is_follower()


def _generate(command: ArgumentParser) -> None:
    command.add_argument("prompt", nargs="?", default=None, help="The text to continue")
    files = command.add_argument_group("files")
    more = "Requests, one JSON object a line, or a Parquet file; - is stdin"
    files.add_argument("--prompt-file", metavar="FILE", default=None, help=more)
    more = (
        "Results, one JSON object a line, as they end, and in order when all have; a second run goes on where the "
        "first stopped (default: stdout, as they end)"
    )
    files.add_argument("--output", metavar="FILE", type=Path, default=None, help=more)
    _of_files(command, files)


def _batch(command: ArgumentParser) -> None:
    more = "Requests, one JSON object a line, or a Parquet file; - is stdin"
    command.add_argument("prompt_file", metavar="INPUT", help=more)
    more = "Results, one JSON object a line, or a Parquet file where it is called so"
    command.add_argument("output", metavar="OUTPUT", type=Path, help=more)
    _of_files(command, command.add_argument_group("files"))
    names = ("replicas", "ray_address")
    _add(
        command.add_argument_group("replicas"),
        [each for each in options_of(ReplicaConfig) if each.name in names],
    )


def _of_files(command: ArgumentParser, files: Any) -> None:
    files.add_argument("--overwrite", **_SWITCH, help="Start the results anew")
    more = "What bodies of a batch may call the model (default: its folder, or bateleur)"
    files.add_argument("--served-model-name", metavar="NAME", nargs="+", default=[], help=more)
    _add(files, options_of(ParserOptions))
    for part, options in _ENGINE.items():
        group = command.add_argument_group(_TITLES[part])
        if part == "model":
            group.add_argument(
                "--model", **_FOLDER, help="Hugging Face checkpoint folder (default: the shipped model)"
            )
            more = "; 1 for one prompt of the shipped model)"
            group.add_argument("--num-threads", metavar="N", type=int, help=_THREADS.replace(")", more))
        _add(group, options)
    group = command.add_argument_group(
        "sampling (defaults are those of the model's generation_config.json, if it has any, else these)"
    )
    flags = [each for each in options_of(SamplingParams) if each.name not in _NOT_SAMPLING_FLAGS]
    _add(group, flags, **DEFAULTS, **FOR_SILENT_MODELS)


def _serve(command: ArgumentParser) -> None:
    command.add_argument("model", nargs="?", **_FOLDER, help=f"{_MODEL}, with its draft head")
    command.add_argument("--model", dest="named_model", **_FOLDER, help="The same as MODEL")
    _add(command.add_argument_group("server"), options_of(ServeConfig))
    _add(command.add_argument_group("replicas"), options_of(ReplicaConfig))
    for part, options in _ENGINE.items():
        group = command.add_argument_group(_TITLES[part])
        if part == "model":
            group.add_argument("--num-threads", metavar="N", type=int, help=_THREADS)
            options = [*options, *(each for each in all_options() if each.name == "seed")]
        _add(group, options)
    add_vllm_flags(command)


def _bench(command: ArgumentParser) -> None:
    kinds = command.add_subparsers(dest="measure", required=True, metavar="MEASURE")
    for name, config in (
        ("latency", LatencyConfig),
        ("throughput", ThroughputConfig),
        ("serve", ServeBenchConfig),
    ):
        about = " ".join((config.__doc__ or "").split())
        measure = kinds.add_parser(name, argument_default=SUPPRESS, help=about, description=about)
        measure.add_argument("--model", **_FOLDER, help=_MODEL)
        measure.add_argument("--json", **_SWITCH, help=_JSON)
        if config is not ServeBenchConfig:
            measure.add_argument("--num-threads", metavar="N", type=int, help=_THREADS)
        _add(measure.add_argument_group("what is measured"), options_of(config))
        for part, options in _ENGINE.items():
            _add(measure.add_argument_group(_TITLES[part]), options)


def _info(command: ArgumentParser) -> None:
    command.add_argument("model", nargs="?", **_FOLDER, help=_MODEL)
    command.add_argument("--json", **_SWITCH, help=_JSON)
    more = "Print what would run on which CUDA graph, and where none would"
    command.add_argument("--graphs", **_SWITCH, help=more)
    for part, options in _ENGINE.items():
        _add(command.add_argument_group(f"{part}, as of the engine that this is about"), options)


def _explain_acceptance(command: ArgumentParser) -> None:
    command.add_argument("model", nargs="?", **_FOLDER, help=_MODEL)
    more = "Folder of a draft head, or mtp for the one in the model's own files (default: the shipped one)"
    command.add_argument("draft", nargs="?", metavar="DRAFT", default="auto", help=more)
    command.add_argument("--json", **_SWITCH, help=_JSON)
    names = ("dtype", "device", "num_speculative_tokens")
    _add(command, [each for each in all_options() if each.name in names])
    more = "Tokens of each answer (default: 64)"
    command.add_argument("--max-tokens", metavar="N", type=int, help=more)
    more = "Text to continue (repeatable; default: a dozen of code)"
    command.add_argument("--prompt", metavar="TEXT", action="append", default=None, help=more)


def _add(group: Any, options: Iterable[Option], **defaults: Any) -> None:
    """A flag for each option, which tells its default, or that of `defaults`."""
    for option in options:
        default = defaults.get(option.name, option.default)
        more = option.help.replace("%", "%%").rstrip(".") + _MORE_HELP.get(option.name, "")
        if option.type != "bool" and default not in (None, ()):
            more += f" (default: {default})"
        told = next(
            (told for kind, told in _KINDS.items() if option.type.startswith(kind)), {"metavar": "NAME"}
        )
        if option.name in ("async_scheduling", "enable_prefix_caching"):
            told = {"action": BooleanOptionalAction}
        if option.name in _LISTS and option.type.startswith("Sequence"):
            told = {"metavar": "TEXT", "nargs": "+", "action": "extend"}
        group.add_argument(f"--{option.name.replace('_', '-')}", help=more, **told)
