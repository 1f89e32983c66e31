"""The training text: CPython's own sources, and the tokenizer made from them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
PIECES = r"\n+[ ]*|[ ]?[A-Za-z_]+|[ ]?[^\sA-Za-z_0-9]+|[0-9]|\s+"
SKIPPED_FOLDERS = {"site-packages", "encodings", "pydoc_data", "__pycache__", "data"}
MAX_FILE_BYTES = 200_000


def corpus_files(root: Path) -> list[Path]:
    """The `.py` files used, sorted by path, generated tables and oversized files left out."""
    files = (p for p in root.rglob("*.py") if not SKIPPED_FOLDERS & set(p.relative_to(root).parts[:-1]))
    return sorted(p for p in files if 0 < p.stat().st_size <= MAX_FILE_BYTES)


def read_corpus(root: Path) -> tuple[list[str], list[str], str]:
    """(training texts, held-out texts, sha256 of all); one file in 40 is held out, by its name's hash."""
    train: list[str] = []
    held_out: list[str] = []
    digest = hashlib.sha256()
    for path in corpus_files(root):
        raw = path.read_bytes()
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            continue  # test files in other encodings are not text for this model
        digest.update(raw)
        name = path.relative_to(root).as_posix()
        bucket = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 40
        (held_out if bucket == 0 else train).append(text)
    return train, held_out, digest.hexdigest()


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE whose pieces keep a newline together with the indentation that follows it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts as one stream of ids, each closed by the end-of-text token (id 0)."""
    parts: list[list[int]] = []
    for start in range(0, len(texts), 256):
        parts += [[*e.ids, 0] for e in tokenizer.encode_batch(texts[start : start + 256], add_special_tokens=False)]
    return np.concatenate([np.asarray(p, dtype=np.uint16) for p in parts])
