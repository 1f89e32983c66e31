"""Train the EAGLE-3 draft head that ships with bateleur-runner.

One command, seeded, resumable, with progress:

    uv run python tools/train_draft.py --out packages/runner/src/bateleur/runner/assets/draft

The shipped model first writes the text to learn from: it continues prompts from the files that it was trained on, at
temperatures 0, 0.8 and 1. The head then learns to draft it, unrolled over several draft steps as decoding has them.
`--begin` goes on with a head that is there, with `--warm-steps 0`, on the text of another `--seed`, which wants a
`--work` of its own: one that holds another run is refused. The record holds the earlier one's.
The result is a folder in the EAGLE repository's layout: `config.json`, `model.safetensors`, the record of the run,
`training.json`, and the model card, `README.md`. What it is worth is measured on continuations of held-out files.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm
from train_model import keep_freed_memory, learning_rate

from bateleur.runner.assets import shipped_model
from shipped_draft.checkpoint import open_head, round_weights, save_head, write_card
from shipped_draft.data import Text, pad, remember_taps, written_text
from shipped_draft.loss import acceptance_loss, feature_loss, logit_metric
from shipped_draft.measure import measure
from shipped_draft.network import Head, HeadShape, take
from shipped_draft.target import Target, load_target

STEP_WEIGHT = 0.8
"""Draft step j weighs this to the power j, for it is reached only if all before it were accepted."""
LOSS_TEMPERATURE = 0.8
HELD_OUT = 256
"""Continuations of held-out files, of at most 128 tokens."""
HELD_OUT_SEED = 1001
"""Of their prompts and draws: the same for every run, so that heads can be compared."""


def frequency(text: Text, vocab_size: int) -> Tensor:
    """(V,) int64: how often the target wrote each token."""
    written = np.concatenate([text.sequence(i)[n:] for i, n in enumerate(text.prompt_len)])
    return torch.from_numpy(np.bincount(written, minlength=vocab_size))


def draft_vocabulary(count: Tensor, size: int) -> Tensor:
    """(size,) int64, sorted: the most frequent ids, of equals the lowest."""
    return count.argsort(descending=True, stable=True)[:size].sort().values


def first_head(target: Target, count: Tensor, args: argparse.Namespace) -> tuple[Head, Tensor, dict[str, Any] | None]:
    """(head, target id of every draft id, record of the run that it comes from, if there was one), before training."""
    if args.begin is not None:
        return *open_head(args.begin), json.loads((args.begin / "training.json").read_text())
    target_ids = draft_vocabulary(count, args.vocabulary)
    head = Head(HeadShape(draft_vocab_size=len(target_ids)))
    head.begin_from(target.embedding[target_ids], target.net.model.norm_f.weight, args.seed)
    return head, target_ids, None


def optimizers(head: Head, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layer; AdamW for norms and, gently, for the rows that came from the target."""
    named = dict(head.named_parameters())
    output = named.pop("lm_head.weight")
    matrices = [p for p in named.values() if p.ndim == 2]
    gains = [p for p in named.values() if p.ndim == 1]
    groups = [{"params": gains, "lr": lr, "peak": lr}, {"params": [output], "lr": lr / 4, "peak": lr / 4}]
    muon = [{"params": matrices, "lr": lr, "peak": lr}]
    return [
        torch.optim.Muon(muon, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def choose(text: Text, step: int, seed: int, batch: int, need: int) -> tuple[NDArray[np.int64], Tensor]:
    """(sequences, (B,) first row of their chains) of a step: a function of (seed, step) alone, epoch by epoch.

    need: tokens that must be written behind the prompt for a sequence to be of use.
    """
    usable = np.flatnonzero(np.diff(text.start) - text.prompt_len >= need)
    epoch, place = divmod(step * batch, len(usable) - batch)
    order = np.random.default_rng((seed, 0, epoch)).permutation(usable)
    chosen = order[place : place + batch]
    room = np.diff(text.start)[chosen] - text.prompt_len[chosen] - need
    offset = np.random.default_rng((seed, 1, step)).integers(0, room + 1)
    return chosen, torch.from_numpy(text.prompt_len[chosen] - 1 + offset)


Batch: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""ids (B, L), taps (B, L, taps, D), first row of the chains (B,)."""


@dataclass(frozen=True)
class Lesson:
    """What does not change while the head learns.

    target_ids: (draft vocabulary,) int64. metric: (D, D), see `logit_metric`.
    """

    target: Target
    text: Text
    taps: NDArray[np.float16]
    target_ids: Tensor
    metric: Tensor


def loss_of(
    head: Head, lesson: Lesson, batch: Batch, args: argparse.Namespace, warm: bool
) -> tuple[Tensor, list[float]]:
    """(loss, what to show of each draft step) of `args.chains` chains per sequence, `args.unroll` steps long.

    While `warm`, the head learns to foresee the target's states, which costs a third; then, to be accepted.
    """
    target, chains, steps = lesson.target, args.chains, args.unroll
    ids, taps, begin = batch
    with torch.autocast(ids.device.type, torch.bfloat16):
        states = head.unroll(F.embedding(ids, target.embedding), taps, begin, chains, steps)
    thought = target.net.model.norm_f(take(taps[:, :, -1], begin[:, None] + 1 + torch.arange(chains + steps - 1)))
    loss, shown = torch.zeros(()), []
    if not warm:
        law = target.law(thought, LOSS_TEMPERATURE)[..., lesson.target_ids]
    for step, hidden in enumerate(states):
        hidden, now = head.norm(hidden), slice(step, step + chains)
        if warm:
            part = value = feature_loss(hidden, thought[:, now], lesson.metric)
        else:
            part, value = acceptance_loss(hidden, head.lm_head.weight, law[:, now], LOSS_TEMPERATURE)
        loss = loss + STEP_WEIGHT**step * part
        shown.append(value.item())
    return loss, shown


def batch_at(text: Text, taps: NDArray[np.float16], step: int, args: argparse.Namespace) -> Batch:
    """What a step learns from; sequences are cut behind their last chain."""
    chosen, begin = choose(text, step, args.seed, args.batch, args.chains + args.unroll)
    end = begin.numpy() + args.chains + args.unroll
    ids = pad([text.sequence(i)[:n] for i, n in zip(chosen, end, strict=True)])
    seen = torch.zeros(*ids.shape, *taps.shape[1:])
    for row, (i, n) in enumerate(zip(chosen, end, strict=True)):
        seen[row, :n] = torch.from_numpy(taps[text.start[i] : text.start[i] + n].astype(np.float32))
    return ids, seen, begin


def train(head: Head, lesson: Lesson, args: argparse.Namespace) -> float:
    """Train in place, from `args.work` on if a run stopped there; returns seconds."""
    opts = optimizers(head, args.lr)
    snapshot, start, seconds = args.work / "state.pt", 0, 0.0
    if snapshot.exists():
        state = torch.load(snapshot)
        head.load_state_dict(state["head"])
        for opt, saved in zip(opts, state["opts"], strict=True):
            opt.load_state_dict(saved)
        start, seconds = state["step"], state["seconds"]
    began = time.perf_counter()
    bar = tqdm(range(start, args.steps), initial=start, total=args.steps, unit="step", mininterval=5)
    for step in bar:
        for group in [group for opt in opts for group in opt.param_groups]:
            group["lr"] = learning_rate(step, args.steps, group["peak"])
        batch = batch_at(lesson.text, lesson.taps, step, args)
        loss, shown = loss_of(head, lesson, batch, args, warm=step < args.warm_steps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        bar.set_postfix(loss=f"{loss.item():.3f}", steps=" ".join(f"{a:.2f}" for a in shown))
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            state = {
                "head": head.state_dict(),
                "opts": [o.state_dict() for o in opts],
                "step": step + 1,
                "seconds": seconds + time.perf_counter() - began,
            }
            torch.save(state, snapshot.with_suffix(".tmp"))
            snapshot.with_suffix(".tmp").replace(snapshot)
    return seconds + time.perf_counter() - began


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--work", type=Path, default=Path("runs/draft"), help="folder for text and resumable state")
    parser.add_argument("--begin", type=Path, help="folder of a head to train on from, with what it may draft")
    parser.add_argument("--requests", type=int, default=6144, help="continuations that the target writes")
    parser.add_argument("--new-tokens", type=int, default=192, help="most tokens of a continuation")
    parser.add_argument("--steps", type=int, default=2770)
    parser.add_argument("--warm-steps", type=int, default=150, help="of them, steps that learn states, not laws")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--chains", type=int, default=128, help="chains of drafts per sequence, side by side")
    parser.add_argument("--unroll", type=int, default=4, help="draft steps of a chain")
    parser.add_argument("--vocabulary", type=int, default=3072, help="ids that the head can propose")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=100, help="steps between resumable snapshots")
    return parser.parse_args()


def require_own(work: Path, args: argparse.Namespace) -> None:
    """Raise `ValueError` where `work` is of a run with other arguments, whose text and state would be taken for this
    one's; else write them down there.
    """
    free = ("out", "work", "threads", "save_every")
    mine = {name: None if value is None else str(value) for name, value in vars(args).items() if name not in free}
    work.mkdir(parents=True, exist_ok=True)
    known = work / "arguments.json"
    theirs = json.loads(known.read_text()) if known.exists() else {} if any(work.iterdir()) else mine
    if other := {name: theirs.get(name) for name, value in mine.items() if theirs.get(name, "") != value}:
        raise ValueError(f"--work is {str(work)!r}; it must be new or of this run, and is of one with {other}")
    known.write_text(json.dumps(mine, indent=2) + "\n")


def held_out_record(head: Head, target: Target, target_ids: Tensor, args: argparse.Namespace) -> dict[str, Any]:
    """What the shipped weights are worth at K = 4, by temperature."""
    text = written_text(args.work / "held_out", HELD_OUT, 128, HELD_OUT_SEED, held_out=True)
    return {
        heat: {
            "tokens_per_step": round(measured.tokens_per_step, 3),
            "acceptance_per_position": [round(share, 4) for share in measured.acceptance],
            "steps": measured.steps,
        }
        for heat, measured in measure(head, target, text, target_ids, k=4).items()
    }


def main() -> None:
    keep_freed_memory()
    args = parse_args()
    require_own(args.work, args)
    torch.set_num_threads(args.threads)
    target = load_target(shipped_model())
    text = written_text(args.work / "train", args.requests, args.new_tokens, args.seed + 1, held_out=False)
    taps = remember_taps(target, text, args.work / "taps.f16")
    count = frequency(text, len(target.embedding))
    head, target_ids, begun_from = first_head(target, count, args)
    lesson = Lesson(target, text, taps, target_ids, logit_metric(target.embedding, count))
    seconds = train(head, lesson, args)
    round_weights(head)
    save_head(head, target_ids, target.taps, args.out)
    record = {
        "command": "python tools/train_draft.py " + " ".join(sys.argv[1:]),
        "begun_from": begun_from,
        "shape": asdict(head.s),
        "taps": list(target.taps),
        "parameters": sum(p.numel() for p in head.parameters()),
        "requests": len(text),
        "written_tokens": text.num_written,
        "prompt_tokens": int(text.prompt_len.sum()),
        "steps": args.steps,
        "warm_steps": args.warm_steps,
        "unroll": args.unroll,
        "chains_seen": args.steps * args.batch * args.chains,
        "seconds": round(seconds),
        "cores": os.cpu_count(),
        "threads": args.threads,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "num_speculative_tokens": 4,
        "held_out_requests": HELD_OUT,
        "held_out": held_out_record(head, target, target_ids, args),
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    write_card(args.out, record)
    print(json.dumps(record["held_out"], indent=2))


if __name__ == "__main__":
    main()
