"""The options of the `bateleur` command, and its parser.

Options of the engine are the fields of its configuration; the others stand in tables here. What is not given is not
among the parsed arguments: defaults are those of whoever takes them.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from bateleur.runner.config.engine_config import PARTS
from bateleur.runner.config.options import Option, options_of

_EXAMPLES = """\
examples:
  bateleur generate "class Shape:"
  bateleur generate "import os" --max-tokens 200 --temperature 0
  bateleur generate --model /models/Bamba-9B "The eagle" --dtype bfloat16
  bateleur generate --prompt-file requests.jsonl --output results.jsonl
  bateleur info /models/Bamba-9B
  bateleur explain-acceptance /models/Bamba-9B /models/Bamba-9B-eagle3

A line of a prompt file is one JSON object: "prompt" (text) or "prompt_token_ids" (a list of ids), an "id" if you like,
and any of the sampling parameters below under their Python names, for example
  {"id": "f", "prompt": "def f(", "max_tokens": 32, "temperature": 0, "stop": ["\\n\\n"]}
"""


class Flag(NamedTuple):
    """A flag (or the name of a positional argument), what `--help` says of it, and what else `argparse` is told."""

    flag: str
    help: str
    more: dict[str, Any]


def _text(flag: str, metavar: str, help: str, **more: Any) -> Flag:
    return Flag(flag, help, {"metavar": metavar, **more})


def _integer(flag: str, metavar: str, help: str, **more: Any) -> Flag:
    return Flag(flag, help, {"metavar": metavar, "type": int, **more})


def _number(flag: str, metavar: str, help: str) -> Flag:
    return Flag(flag, help, {"metavar": metavar, "type": float})


def _switch(flag: str, help: str, **more: Any) -> Flag:
    return Flag(flag, help, {"action": "store_true", **more})


# --- options of the engine --------------------------------------------------------------------------------

_NOT_FLAGS = ("model", "drafter", "seed")
"""Options of `LLM` that are no flags of this kind: the folder stands by itself, a shell has no objects, and here every
request has a seed."""
_MORE_HELP = {
    "draft": '; "none" is no head. Default: the shipped head for the shipped model, but none for drawn text on a CPU'
}


def _flag(option: Option) -> Flag:
    """The flag of an option of `LLM`."""
    flag = f"--{option.name.replace('_', '-')}"
    help = option.help.replace("%", "%%").rstrip(".") + _MORE_HELP.get(option.name, "")
    if option.type == "bool":
        return _switch(flag, help)
    if option.default is not None:
        help += f" (default: {option.default})"
    if "int]" in option.type and "Sequence" in option.type:
        return _integer(flag, "N", help, nargs="+")
    if option.type.startswith("int"):
        return _integer(flag, "N", help)
    if option.type == "float":
        return _number(flag, "X", help)
    return _text(flag, "DIR" if "Path" in option.type else "NAME", help)


_ENGINE = {
    part: tuple(option for option in options_of(config) if option.name not in _NOT_FLAGS)
    for part, config in PARTS.items()
}
ENGINE = tuple(option.name for options in _ENGINE.values() for option in options)
"""Names of all that `LLM` takes and a flag can say."""


def _engine(part: str, *names: str) -> tuple[Flag, ...]:
    """Flags of a part of the configuration: all, or those of these names."""
    return tuple(_flag(option) for option in _ENGINE[part] if not names or option.name in names)


# --- the rest ---------------------------------------------------------------------------------------------

FILES = (
    _text("--prompt-file", "FILE", "Requests, one JSON object a line; - is stdin", default=None),
    Flag(
        "--output",
        "Results, one JSON object a line, as they end, and in order when all have; a second run goes on where the "
        "first stopped (default: stdout, as they end)",
        {"metavar": "FILE", "type": Path, "default": None},
    ),
    _switch("--overwrite", "Start --output anew", default=False),
)
SAMPLING = (
    _integer("--max-tokens", "N", "Tokens to write (default: 128)"),
    _integer("--min-tokens", "N", "Do not stop before (default: 0)"),
    _number("--temperature", "T", "0 is greedy (default: 0.8)"),
    _integer("--top-k", "K", "0 is off (default: 0)"),
    _number("--top-p", "P", "Default: 0.95"),
    _number("--min-p", "P", "Default: 0"),
    _integer("--seed", "N", "Same seed, same text (default: 0)"),
    _text("--stop", "TEXT", "Stop before this text (repeatable)", action="append"),
    _integer("--stop-token-ids", "N", "Stop at any of these tokens", nargs="+"),
    _switch("--ignore-eos", "Write on past the end-of-text token"),
    _integer("--logprobs", "N", "Log probabilities of as many tokens; with --prompt-file"),
    _number("--repetition-penalty", "X", "Default: 1"),
    _number("--presence-penalty", "X", "Default: 0"),
    _number("--frequency-penalty", "X", "Default: 0"),
)
_THREADS = _integer(
    "--num-threads", "N", "Threads of a CPU (default: torch's; 1 for one prompt of the shipped model)"
)
_MODEL = Flag(
    "--model",
    "Hugging Face checkpoint folder (default: the shipped model)",
    {"metavar": "DIR", "type": Path, "default": None},
)
_JSON = _switch("--json", "Print one JSON object", default=False)
_FOLDER = Flag(
    "model",
    "Checkpoint folder (default: the shipped model)",
    {"nargs": "?", "metavar": "DIR", "type": Path, "default": None},
)

_COMMANDS: dict[str, tuple[str, str, dict[str, tuple[Flag, ...]]]] = {
    "generate": (
        "continue a prompt, or a file of prompts",
        "Continue a prompt and stream the text, or run a file of prompts.",
        {
            "": (Flag("prompt", "The text to continue", {"nargs": "?", "default": None}),),
            "files": FILES,
            "model": (_MODEL, *_engine("model"), _THREADS),
            "a step": _engine("scheduler"),
            "blocks, prefix caching and Mamba states": _engine("cache"),
            "speculation": _engine("speculative"),
            "graphs": _engine("graphs"),
            "sampling (defaults are those of the model's generation_config.json, if it has any, else these)": SAMPLING,
        },
    ),
    "info": (
        "what a checkpoint is and costs",
        "Print what a checkpoint is and what it costs to run: layers, parameters, bytes of weights, KV cache and Mamba "
        "state.",
        {
            "": (
                _FOLDER,
                _JSON,
                _switch(
                    "--graphs",
                    "Print what would run on which CUDA graph, and where none would",
                    default=False,
                ),
            ),
            **{f"{part}, as of the engine that this is about": _engine(part) for part in _ENGINE},
        },
    ),
    "explain-acceptance": (
        "why drafts are accepted as rarely as they are",
        "Measure how the drafts of a head fare, and find out why: bookkeeping of the engine, features, norms, "
        "vocabulary, or just the head.",
        {
            "": (
                _FOLDER,
                Flag(
                    "draft",
                    "Folder of a draft head (default: the shipped one)",
                    {"nargs": "?", "metavar": "DRAFT", "default": "auto"},
                ),
                _JSON,
                *_engine("model", "dtype", "device"),
                *_engine("speculative", "num_speculative_tokens"),
                _integer("--max-tokens", "N", "Tokens of each answer (default: 64)"),
                _text(
                    "--prompt",
                    "TEXT",
                    "Text to continue (repeatable; default: a dozen of code)",
                    action="append",
                    default=None,
                ),
            ),
        },
    ),
}
"""A line for the list of commands, a description, and the options under their titles."""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    shape: dict[str, Any] = {
        "epilog": _EXAMPLES,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
    parser = argparse.ArgumentParser(
        prog="bateleur",
        description="Generate text with hybrid (Mamba-2 + attention) language models.",
        **shape,
    )
    parser.add_argument("--version", action="version", version=f"bateleur {version('bateleur-runner')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (line, description, sections) in _COMMANDS.items():
        more = shape if name == "generate" else {}
        command = commands.add_parser(
            name, help=line, description=description, argument_default=argparse.SUPPRESS, **more
        )
        for title, options in sections.items():
            group = command.add_argument_group(title) if title else command
            for option in options:
                group.add_argument(option.flag, help=option.help, **option.more)
    return parser


def given(args: argparse.Namespace, names: Collection[str]) -> dict[str, Any]:
    """Of these arguments, those that were given."""
    return {name: value for name, value in vars(args).items() if name in names}
