"""Train the small hybrid model that ships with bateleur-runner.

One command, seeded, resumable, with progress:

    uv run python tools/train_model.py --out packages/runner/src/bateleur/runner/assets/model

The data are the Python sources of CPython's own standard library (PSF licence), read from the interpreter
that runs this script. The result is a checkpoint folder in NemotronH's format: `config.json`,
`generation_config.json`, `model.safetensors`, `tokenizer.json`, `tokenizer_config.json`, the record of the
run, `training.json`, and the model card, `README.md`.

The network here is the training form of NemotronH (dense batches, autograd); the inference form is
`bateleur.runner.models`, and a test holds both to transformers' own forward.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import sys
import sysconfig
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from shipped_model.checkpoint import save_checkpoint, write_card
from shipped_model.corpus import encode, read_corpus, train_tokenizer
from shipped_model.network import Network, Shape


def optimizers(net: Network, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between layers, AdamW for embeddings, gains, biases and decay rates."""
    matrices = [p for n, p in net.named_parameters() if p.ndim == 2 and "embeddings" not in n]
    rest = [p for n, p in net.named_parameters() if p.ndim != 2 or "embeddings" in n]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Warm up over 52 steps, hold, and fall linearly to 2 % of the peak over the last 35 %."""
    warm = 52
    fall = max(1, int(steps * 0.35))
    return peak * min((step + 1) / warm, 1.0, max((steps - step) / fall, 0.02))


def batch_at(stream: np.ndarray, step: int, seed: int, batch: int, length: int) -> Tensor:
    """The batch of a step is a function of (seed, step) alone, so that a resumed run sees the same data."""
    starts = np.random.default_rng((seed, step)).integers(0, len(stream) - length - 1, batch)
    return torch.from_numpy(stream[starts[:, None] + np.arange(length + 1)].astype(np.int64))


@torch.no_grad()
def bits_per_byte(net: Network, stream: np.ndarray, num_bytes: int, length: int) -> float:
    """Held-out bits per byte over windows of `length` tokens, each starting without context (pessimistic)."""
    windows = len(stream) // (length + 1)
    ids = torch.from_numpy(stream[: windows * (length + 1)].astype(np.int64)).view(windows, length + 1)
    nats = sum(net.loss(ids[i : i + 16], reduction="sum").item() for i in range(0, windows, 16))
    bytes_per_token = num_bytes / len(stream)
    return nats / math.log(2) / (windows * length * bytes_per_token)


def prepare(args: argparse.Namespace, shape: Shape) -> tuple[Tokenizer, np.ndarray, np.ndarray, dict[str, Any]]:
    """Corpus, tokenizer and token streams, with the facts that the record of the run keeps."""
    root = Path(sysconfig.get_paths()["stdlib"])
    train, held_out, digest = read_corpus(root)
    saved = args.work / "tokenizer.json"
    if saved.exists():
        tokenizer = Tokenizer.from_file(str(saved))
    else:
        tokenizer = train_tokenizer(train, shape.vocab_size)
        args.work.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(saved))
    train_stream, held_stream = encode(tokenizer, train), encode(tokenizer, held_out)
    facts = {
        "python": sys.version.split()[0],
        "corpus_sha256": digest,
        "train_files": len(train),
        "held_out_files": len(held_out),
        "train_bytes": sum(len(t.encode()) for t in train),
        "held_out_bytes": sum(len(t.encode()) for t in held_out),
        "train_tokens": len(train_stream),
        "held_out_tokens": len(held_stream),
    }
    return tokenizer, train_stream, held_stream, facts


def keep_freed_memory() -> None:
    """Ask glibc to keep large freed blocks: otherwise half of a CPU step goes into page faults of activations."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        m_trim_threshold, m_mmap_max = -1, -4  # names and numbers of <malloc.h>
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--work", type=Path, default=Path("runs/shipped"), help="folder for resumable state")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence, a multiple of 64")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=100, help="steps between resumable snapshots")
    return parser.parse_args()


def main() -> None:
    keep_freed_memory()
    args, shape = parse_args(), Shape()
    tokenizer, stream, held_out, facts = prepare(args, shape)
    net = Network(shape, args.seed)
    opts = optimizers(net, args.lr)
    snapshot, start, seconds = args.work / "state.pt", 0, 0.0
    if snapshot.exists():
        state = torch.load(snapshot)
        net.load_state_dict(state["net"])
        for opt, saved in zip(opts, state["opts"], strict=True):
            opt.load_state_dict(saved)
        start, seconds = state["step"], state["seconds"]
    began = time.perf_counter()
    bar = tqdm(range(start, args.steps), initial=start, total=args.steps, unit="step", mininterval=5)
    for step in bar:
        lr = learning_rate(step, args.steps, args.lr)
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = lr
        loss = net.loss(batch_at(stream, step, args.seed, args.batch, args.length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        bar.set_postfix(loss=f"{loss.item():.3f}", lr=f"{lr:.1e}")
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            elapsed = seconds + time.perf_counter() - began
            state = {
                "net": net.state_dict(),
                "opts": [o.state_dict() for o in opts],
                "step": step + 1,
                "seconds": elapsed,
            }
            torch.save(state, snapshot.with_suffix(".tmp"))
            snapshot.with_suffix(".tmp").replace(snapshot)
    seconds += time.perf_counter() - began
    for p in net.parameters():  # what is measured is what is shipped: the rounded weights
        p.data = p.data.to(torch.bfloat16).float()
    bpb = bits_per_byte(net, held_out, facts["held_out_bytes"], args.length)
    save_checkpoint(net, shape, tokenizer, args.out)
    record = {
        **facts,
        "command": "python tools/train_model.py " + " ".join(sys.argv[1:]),
        "shape": asdict(shape),
        "parameters": sum(p.numel() for p in net.parameters()) + net.model.embeddings.weight.numel(),
        "steps": args.steps,
        "length": args.length,
        "tokens_seen": args.steps * args.batch * args.length,
        "seconds": round(seconds),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "held_out_bits_per_byte": round(bpb, 4),
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    write_card(args.out, record)
    print(f"held-out bits per byte: {bpb:.4f}; checkpoint in {args.out}")


if __name__ == "__main__":
    main()
