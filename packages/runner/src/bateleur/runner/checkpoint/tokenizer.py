"""The tokenizer of a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from bateleur.runner.checkpoint.open import Checkpoint
from bateleur.runner.json_file import read_json
from bateleur.runner.text.tokenizer import Tokenizer

_ANY_LENGTH = 1 << 62
"""Prompts are measured here, so that the tokenizer's own limit has nothing to warn about."""


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The checkpoint's own tokenizer.

    Raises ValueError if the folder holds none that can be read, or one that is code of its own, which is never run.
    """
    _refuse_code(checkpoint.path)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(checkpoint.path),
            local_files_only=True,
            trust_remote_code=False,
            model_max_length=_ANY_LENGTH,
        )
    except Exception as error:  # whatever transformers or tokenizers raise for files they cannot read
        raise ValueError(f"{checkpoint.path}: its tokenizer cannot be read: {error}") from error
    return cast(Tokenizer, tokenizer)


def _refuse_code(folder: Path) -> None:
    """Refuse a tokenizer that is a class in a file beside it: transformers' own in its place would split otherwise."""
    for file in (folder / "tokenizer_config.json", folder / "config.json"):
        named = read_json(file).get("auto_map") if file.is_file() else None
        named = named.get("AutoTokenizer") if isinstance(named, dict) else named
        if named:
            raise ValueError(
                f"{file}: auto_map names {named!r} as its tokenizer; code of a checkpoint is never run. With "
                "skip_tokenizer_init it takes token ids"
            )
