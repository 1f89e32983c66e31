"""The options of the `bateleur` command, and its parser.

Options of the engine are the fields of its configuration; the others stand in tables here. What is not given is not
among the parsed arguments: defaults are those of whoever takes them.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from bateleur.runner.config.engine_config import PARTS
from bateleur.runner.config.options import Option, options_of
from bateleur.runner.sampling_params import SamplingParams

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
    """A flag (or the name of a positional argument), and what `argparse` is told of it."""

    flag: str
    told: dict[str, Any]


def _flag(flag: str, help: str, **told: Any) -> Flag:
    return Flag(flag, {"help": help, **told})


# --- fields of configurations -----------------------------------------------------------------------------

DEFAULTS: dict[str, Any] = {"max_tokens": 128, "seed": 0}
"""Of `generate`, in place of those of `SamplingParams`."""
FOR_SILENT_MODELS: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}
"""The same, for models that recommend nothing."""
_NOT_FLAGS = ("model", "drafter", "seed")
"""Options of `LLM` that are no flags of this kind: the folder stands by itself, a shell has no objects, and here every
request has a seed."""
_MORE_HELP = {
    "draft": '; "none" is no head. Default: the shipped head for the shipped model, but none for drawn text on a CPU',
    "stop": "; repeatable",
    "logprobs": "; with --prompt-file",
}


def _of_field(option: Option, default: Any = None) -> Flag:
    """The flag of a field, whose default it tells, if it is no other."""
    default = option.default if default is None else default
    flag = f"--{option.name.replace('_', '-')}"
    help = option.help.replace("%", "%%").rstrip(".") + _MORE_HELP.get(option.name, "")
    if option.type == "bool":
        return _flag(flag, help, action="store_true")
    if default not in (None, ()):
        help += f" (default: {default})"
    if option.type.startswith("Sequence[str]"):
        return _flag(flag, help, metavar="TEXT", action="append")
    if option.type.startswith("Sequence[int]"):
        return _flag(flag, help, metavar="N", type=int, nargs="+")
    if option.type.startswith("int"):
        return _flag(flag, help, metavar="N", type=int)
    if option.type == "float":
        return _flag(flag, help, metavar="X", type=float)
    return _flag(flag, help, metavar="DIR" if "Path" in option.type else "NAME")


_ENGINE = {
    part: {each.name: _of_field(each) for each in options_of(config) if each.name not in _NOT_FLAGS}
    for part, config in PARTS.items()
}
ENGINE = tuple(name for flags in _ENGINE.values() for name in flags)
"""Names of all that `LLM` takes and a flag can say."""
SAMPLING = tuple(
    _of_field(each, (DEFAULTS | FOR_SILENT_MODELS).get(each.name)) for each in options_of(SamplingParams)
)

# --- the rest ---------------------------------------------------------------------------------------------

_FILES = (
    _flag("--prompt-file", "Requests, one JSON object a line; - is stdin", metavar="FILE", default=None),
    _flag(
        "--output",
        "Results, one JSON object a line, as they end, and in order when all have; a second run goes on where the "
        "first stopped (default: stdout, as they end)",
        metavar="FILE",
        type=Path,
        default=None,
    ),
    _flag("--overwrite", "Start --output anew", action="store_true", default=False),
)
_THREADS = _flag(
    "--num-threads",
    "Threads of a CPU (default: torch's; 1 for one prompt of the shipped model)",
    metavar="N",
    type=int,
)
_IN_FOLDER = {"metavar": "DIR", "type": Path, "default": None}
_MODEL = _flag("--model", "Hugging Face checkpoint folder (default: the shipped model)", **_IN_FOLDER)
_FOLDER = _flag("model", "Checkpoint folder (default: the shipped model)", nargs="?", **_IN_FOLDER)
_JSON = _flag("--json", "Print one JSON object", action="store_true", default=False)

_COMMANDS: dict[str, tuple[str, str, dict[str, Iterable[Flag]]]] = {
    "generate": (
        "continue a prompt, or a file of prompts",
        "Continue a prompt and stream the text, or run a file of prompts.",
        {
            "": (_flag("prompt", "The text to continue", nargs="?", default=None),),
            "files": _FILES,
            "model": (_MODEL, *_ENGINE["model"].values(), _THREADS),
            "a step": _ENGINE["scheduler"].values(),
            "blocks, prefix caching and Mamba states": _ENGINE["cache"].values(),
            "speculation": _ENGINE["speculative"].values(),
            "graphs": _ENGINE["graphs"].values(),
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
                _flag(
                    "--graphs",
                    "Print what would run on which CUDA graph, and where none would",
                    action="store_true",
                    default=False,
                ),
            ),
            **{f"{part}, as of the engine that this is about": _ENGINE[part].values() for part in _ENGINE},
        },
    ),
    "explain-acceptance": (
        "why drafts are accepted as rarely as they are",
        "Measure how the drafts of a head fare, and find out why: bookkeeping of the engine, features, norms, "
        "vocabulary, or just the head.",
        {
            "": (
                _FOLDER,
                _flag(
                    "draft",
                    "Folder of a draft head (default: the shipped one)",
                    nargs="?",
                    metavar="DRAFT",
                    default="auto",
                ),
                _JSON,
                *(_ENGINE["model"][name] for name in ("dtype", "device")),
                _ENGINE["speculative"]["num_speculative_tokens"],
                _flag("--max-tokens", "Tokens of each answer (default: 64)", metavar="N", type=int),
                _flag(
                    "--prompt",
                    "Text to continue (repeatable; default: a dozen of code)",
                    metavar="TEXT",
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
                group.add_argument(option.flag, **option.told)
    return parser


def given(args: argparse.Namespace, names: Collection[str]) -> dict[str, Any]:
    """Of these arguments, those that were given."""
    return {name: value for name, value in vars(args).items() if name in names}
