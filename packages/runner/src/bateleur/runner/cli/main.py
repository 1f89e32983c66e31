"""Arguments of the `bateleur` command, and its dispatch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bateleur.runner.cli import explain, generate, info

_EXAMPLES = """\
examples:
  bateleur generate "def fibonacci(n):"
  bateleur generate "import os" --max-tokens 200 --temperature 0
  bateleur generate --model /models/Bamba-9B "The eagle" --dtype bfloat16
  bateleur generate --prompt-file requests.jsonl --output results.jsonl
  bateleur info /models/Bamba-9B
  bateleur explain-acceptance /models/Bamba-9B /models/Bamba-9B-eagle3

A line of a prompt file is one JSON object: "prompt" (text) or "prompt_token_ids" (a list of ids), and any of the
sampling parameters below under their Python names, for example
  {"prompt": "def f(", "max_tokens": 32, "temperature": 0, "stop": ["\\n\\n"]}
"""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="bateleur",
        description="Generate text with hybrid (Mamba-2 + attention) language models.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate = commands.add_parser(
        "generate",
        help="continue a prompt, or a file of prompts",
        description="Continue a prompt and stream the text, or run a file of prompts.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_generate_arguments(generate)
    info = commands.add_parser(
        "info",
        help="what a checkpoint is and costs",
        description="Print what a checkpoint is and what it costs to run: layers, parameters, bytes of weights, KV "
        "cache and Mamba state.",
    )
    info.add_argument("model", nargs="?", type=Path, help="checkpoint folder (default: the shipped model)")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    info.add_argument(
        "--dtype", default="auto", help="dtype to count the costs in (default: the checkpoint's)"
    )
    info.add_argument(
        "--graphs", action="store_true", help="print what would run on which CUDA graph, and where none would"
    )
    _add_limits(info.add_argument_group("limits, for --graphs; the first also for prefix hits"))
    _add_block_sizes(info.add_argument_group("prefix hits"))
    _add_graph_arguments(info.add_argument_group("graphs"))
    explained = commands.add_parser(
        "explain-acceptance",
        help="why drafts are accepted as rarely as they are",
        description="Measure how the drafts of a head fare, and find out why: bookkeeping of the engine, features, "
        "norms, vocabulary, or just the head.",
    )
    _add_explain_arguments(explained)
    return parser


def _add_placement(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: auto)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")


def _add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default="auto",
        metavar="DIR",
        help="checkpoint folder (default: the shipped model)",
    )
    parser.add_argument(
        "draft",
        nargs="?",
        default="auto",
        metavar="DRAFT",
        help="folder of a draft head (default: the shipped one)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _add_placement(parser)
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        default=4,
        metavar="K",
        help="drafts a step verifies (default: 4)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="tokens of each answer (default: 64)"
    )
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue (repeatable; default: a dozen of code)",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-model-len", type=int, metavar="N", help="longest request in tokens")
    group.add_argument(
        "--max-num-seqs", type=int, default=64, metavar="N", help="requests at once (default: 64)"
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="tokens of a step (default: 512 on CPU, 2048 on CUDA)",
    )


def _add_block_sizes(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--block-size", type=int, default=16, metavar="N", help="tokens of a KV block (default: 16)"
    )
    group.add_argument(
        "--mamba-block-size",
        type=int,
        metavar="N",
        help="tokens between kept Mamba states (default: the largest --block-size * 2**n up to 256 and to a quarter of "
        "--max-model-len)",
    )


def _add_graph_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--cudagraph-mode",
        metavar="MODE",
        help="NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE (default: FULL_DECODE_ONLY on CUDA, "
        "NONE on CPU)",
    )
    group.add_argument(
        "--cudagraph-backend",
        default="auto",
        metavar="NAME",
        help="auto, cuda, recorded or eager (default: auto)",
    )
    group.add_argument(
        "--cudagraph-capture-sizes", type=int, nargs="+", metavar="N", help="token counts to capture"
    )


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the text to continue")
    files = parser.add_argument_group("files")
    files.add_argument("--prompt-file", type=Path, metavar="FILE", help="requests, one JSON object a line")
    files.add_argument(
        "--output", type=Path, metavar="FILE", help="results, one JSON object a line, in order"
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", type=Path, metavar="DIR", help="Hugging Face checkpoint folder (default: shipped)"
    )
    _add_placement(model)
    _add_limits(model)
    model.add_argument(
        "--kv-cache-memory-bytes", type=int, metavar="N", help="budget for KV cache and Mamba states"
    )
    caches = parser.add_argument_group("blocks, prefix caching and Mamba states")
    caches.add_argument(
        "--enable-prefix-caching", action="store_true", help="share what was computed of equal prefixes"
    )
    caches.add_argument(
        "--mamba-cache-mode", metavar="MODE", help="all, align or none (default: all with prefix caching)"
    )
    _add_block_sizes(caches)
    caches.add_argument(
        "--mamba-retention",
        metavar="RULES",
        help="which states others may find: all, or some of last, prompt_end, "
        "every=N joined by + (default: what the mode says)",
    )
    caches.add_argument(
        "--mamba-state-policy",
        metavar="NAME",
        help="fold or slots (default: fold; slots on CPU without drafts)",
    )
    caches.add_argument(
        "--mamba-ssm-cache-dtype",
        default="auto",
        metavar="DTYPE",
        help="of Mamba states: auto, float32, bfloat16 or float16 (default: auto)",
    )
    _add_speculation(parser.add_argument_group("speculation"))
    _add_graph_arguments(parser.add_argument_group("graphs"))
    _add_sampling(parser.add_argument_group("sampling"))


def _add_speculation(drafts: argparse._ArgumentGroup) -> None:
    drafts.add_argument(
        "--draft",
        metavar="DIR",
        help="folder of a draft head, auto for the shipped one, or none (default: auto with the shipped model, but "
        "none for drawn text on a CPU)",
    )
    drafts.add_argument(
        "--num-speculative-tokens",
        type=int,
        metavar="K",
        help="drafts a step verifies at most (default: 4 with a draft)",
    )
    drafts.add_argument(
        "--draft-policy",
        default="fixed",
        choices=("auto", "fixed"),
        help="as many drafts as pay, by the times of the steps so far, or always as many (default: fixed)",
    )
    drafts.add_argument(
        "--speculative-rule",
        default="coupled",
        metavar="RULE",
        help="coupled (the tokens of plain decoding), ratio or block (their law; default: coupled)",
    )


def _add_sampling(sampling: argparse._ArgumentGroup) -> None:
    sampling.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="tokens to write (default: 128)"
    )
    sampling.add_argument(
        "--min-tokens", type=int, default=0, metavar="N", help="do not stop before (default: 0)"
    )
    sampling.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 is greedy (default: 0.8)"
    )
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="0 is off (default: 0)")
    sampling.add_argument("--top-p", type=float, default=0.95, metavar="P", help="default: 0.95")
    sampling.add_argument("--min-p", type=float, default=0.0, metavar="P", help="default: 0")
    sampling.add_argument("--seed", type=int, default=0, help="same seed, same text (default: 0)")
    sampling.add_argument(
        "--stop", action="append", metavar="TEXT", help="stop before this text (repeatable)"
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="write on past the end-of-text token")
    sampling.add_argument("--logprobs", type=int, metavar="N", help="log probabilities in the result file")
    for name in ("repetition", "presence", "frequency"):
        default = 1.0 if name == "repetition" else 0.0
        sampling.add_argument(
            f"--{name}-penalty", type=float, default=default, metavar="X", help=f"default: {default:g}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 if all went well, 1 if a request of a file failed, 2 for a wrong call."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        commands = {"explain-acceptance": explain.run, "generate": generate.run, "info": info.run}
        return commands[args.command](args)
    except (ValueError, OSError) as error:
        print(f"bateleur: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nbateleur: interrupted", file=sys.stderr)
        return 130
