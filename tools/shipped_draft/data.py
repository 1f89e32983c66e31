"""What the head learns from: text that the target itself wrote, and what the target thought while it wrote.

Legend for shapes: S sequences, n tokens of all of them, D hidden size of the target.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from bateleur.runner import LLM, SamplingParams
from shipped_draft.target import Target
from shipped_model.corpus import read_corpus

TEMPERATURES = (0.0, 0.8, 1.0, 0.8)
"""Request i is written at the i-th of these, in turn: half of the text at 0.8."""
CHUNK = 512
"""Requests per file of written text, which is what an interrupted run keeps."""


@dataclass(frozen=True)
class Text:
    """Sequences one behind another: a prompt and its continuation each.

    ids: (n,) uint16. start: (S + 1,) int64. prompt_len: (S,) int64. temperature: (S,) float32. seed: (S,) int64.
    """

    ids: NDArray[np.uint16]
    start: NDArray[np.int64]
    prompt_len: NDArray[np.int64]
    temperature: NDArray[np.float32]
    seed: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.prompt_len)

    def sequence(self, index: int) -> NDArray[np.uint16]:
        """The tokens of one sequence."""
        return self.ids[self.start[index] : self.start[index + 1]]

    @property
    def num_written(self) -> int:
        """Tokens that the target wrote."""
        return len(self.ids) - int(self.prompt_len.sum())

    @classmethod
    def join(cls, parts: Sequence[Text]) -> Text:
        """The sequences of all parts, in order."""
        lengths = np.concatenate([np.diff(part.start) for part in parts])
        return cls(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([[0], np.cumsum(lengths)]),
            np.concatenate([part.prompt_len for part in parts]),
            np.concatenate([part.temperature for part in parts]),
            np.concatenate([part.seed for part in parts]),
        )


def corpus(held_out: bool) -> list[str]:
    """The files that the target was trained on, or those that neither it nor the head ever sees."""
    train, held, _ = read_corpus(Path(sysconfig.get_paths()["stdlib"]))
    return held if held_out else train


def choose_prompts(llm: LLM, texts: Sequence[str], count: int, seed: tuple[int, ...]) -> list[list[int]]:
    """Beginnings of files and places inside them, cut at the start of a line; 8 to 96 tokens, as `llm` takes text."""
    rng, prompts = np.random.default_rng(seed), list[list[int]]()
    while len(prompts) < count:
        text = texts[int(rng.integers(len(texts)))]
        if rng.random() < 0.5:
            text = text[text.find("\n", int(rng.integers(len(text)))) + 1 :]
        ids = llm.tokenizer.encode(text[:1000])[: int(rng.integers(8, 97))]
        if len(ids) >= 8:
            prompts.append(ids)
    return prompts


def write(llm: LLM, prompts: Sequence[list[int]], first_seed: int, new_tokens: int) -> Text:
    """Let the target continue every prompt; request i has the seed `first_seed` + i."""
    temperatures = [TEMPERATURES[i % len(TEMPERATURES)] for i in range(len(prompts))]
    params = [
        SamplingParams(max_tokens=new_tokens, temperature=t, seed=first_seed + i) for i, t in enumerate(temperatures)
    ]
    outputs = llm.generate(list(prompts), params)
    sequences = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
    return Text(
        np.concatenate([np.asarray(s, dtype=np.uint16) for s in sequences]),
        np.concatenate([[0], np.cumsum([len(s) for s in sequences])]),
        np.array([len(p) for p in prompts], dtype=np.int64),
        np.array(temperatures, dtype=np.float32),
        np.arange(first_seed, first_seed + len(prompts)),
    )


def written_text(folder: Path, requests: int, new_tokens: int, seed: int, held_out: bool) -> Text:
    """The target's own text, from `folder` as far as it is there already; deterministic in its arguments."""
    folder.mkdir(parents=True, exist_ok=True)
    parts, llm, texts = [], None, corpus(held_out)
    for number in tqdm(range(-(-requests // CHUNK)), desc=f"writing {folder.name}", unit="chunk"):
        saved = folder / f"{number:04d}.npz"
        if not saved.exists():
            llm = llm or LLM(device="cpu", max_num_seqs=128, max_model_len=128 + new_tokens)
            count = min(CHUNK, requests - number * CHUNK)
            prompts = choose_prompts(llm, texts, count, (seed, number))
            part = write(llm, prompts, (seed << 32) + number * CHUNK, new_tokens)
            np.savez(saved.with_suffix(".tmp.npz"), **vars(part))
            saved.with_suffix(".tmp.npz").replace(saved)
        with np.load(saved) as arrays:
            parts.append(Text(**{name: arrays[name] for name in arrays.files}))
    return Text.join(parts)


def remember_taps(target: Target, text: Text, saved: Path) -> NDArray[np.float16]:
    """(n, taps, D): what the target holds at every tap and token, computed once and kept in `saved`."""
    shape = (len(text.ids), len(target.taps), target.hidden_size)
    if saved.exists():
        return np.memmap(saved, np.float16, "r", shape=shape)
    unfinished = saved.with_suffix(".tmp")
    kept = np.memmap(unfinished, np.float16, "w+", shape=shape)
    order = np.argsort(np.diff(text.start), kind="stable")  # alike in length, little padding
    for begin in tqdm(range(0, len(text), 8), desc="taps", unit="batch", mininterval=5):
        chosen = order[begin : begin + 8]
        with torch.autocast("cpu", torch.bfloat16):
            taps = target.taps_of(pad([text.sequence(i) for i in chosen], multiple=64))
        for row, i in enumerate(chosen):
            kept[text.start[i] : text.start[i + 1]] = taps[row, : text.start[i + 1] - text.start[i]].numpy()
    kept.flush()
    unfinished.replace(saved)
    return kept


def pad(sequences: Sequence[NDArray[np.uint16]], multiple: int = 1) -> Tensor:
    """(B, L) int64, id 0 behind the end of a sequence; L is rounded up to `multiple`."""
    longest = -(-max(len(s) for s in sequences) // multiple) * multiple
    ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.from_numpy(sequence.astype(np.int64))
    return ids
