"""Loads the tokenizer of a checkpoint folder."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from bateleur.runner.checkpoint.open import Checkpoint, quiet_transformers
from bateleur.runner.checkpoint.tokenizer_files import TIKTOKEN, is_kimi, read_tiktoken, read_without_transformers
from bateleur.runner.text.tokenizer import Tokenizer
from bateleur.runner.utils.json_file import read_json

_ANY_LENGTH = 1 << 62
"""Disables the tokenizer's own length warning, because the engine checks lengths."""
_END_TOKENS = ("eos_token", "eot_token")
"""Names of special tokens that end a text."""
_INSTEAD = "Name a folder with a tokenizer.json (tokenizer), or pass token ids (skip_tokenizer_init)"


def load_tokenizer(checkpoint: Checkpoint, folder: str | Path | None = None) -> Tokenizer:
    """Load the tokenizer of a folder, or the checkpoint's own. Warns if it has tokens that the model lacks."""
    folder, known = checkpoint.path if folder is None else Path(folder), checkpoint.spec.vocab_size
    if not folder.is_dir():
        raise ValueError(f"tokenizer is {str(folder)!r}; it must be a folder with tokenizer.json or tiktoken.model")
    tokenizer: Any
    if (folder / TIKTOKEN).is_file() and not (folder / "tokenizer.json").is_file():
        _refuse_code(folder, known=is_kimi)
        tokenizer = read_tiktoken(folder)
    else:
        _refuse_code(folder)
        tokenizer = read_without_transformers(folder) or _ask_transformers(folder)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers makes an empty one for some models
        _find_fault(folder)
        raise ValueError(f"{folder}: its tokenizer has no tokens but special ones. {_INSTEAD}")
    if len(tokenizer) > known:
        warnings.warn(
            f"{folder}: its tokenizer has {len(tokenizer)} tokens, the model {known}; text with the others is refused",
            RuntimeWarning,
            stacklevel=2,
        )
    return cast(Tokenizer, tokenizer)


def with_end_tokens(checkpoint: Checkpoint, tokenizer: Tokenizer) -> Checkpoint:
    """Return the checkpoint with the end tokens of its tokenizer added to those of its configuration.

    A fine-tuned model often ends its messages with a token that only the tokenizer names.
    """
    vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    named = (vocabulary.get(_named_token(tokenizer, name)) for name in _END_TOKENS)
    known = [token for token in named if token is not None and token < checkpoint.spec.vocab_size]
    ends = tuple(dict.fromkeys((*checkpoint.spec.eos_token_ids, *known)))
    return replace(checkpoint, spec=replace(checkpoint.spec, eos_token_ids=ends))


def _named_token(tokenizer: Tokenizer, name: str) -> str:
    """Return the text of a special token such as `eos_token`; "" if there is none."""
    given = getattr(tokenizer, name, None) or getattr(tokenizer, "init_kwargs", {}).get(name)
    return str(given.get("content", "")) if isinstance(given, dict) else str(given or "")


def _ask_transformers(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False, model_max_length=_ANY_LENGTH
            )
    except Exception as error:  # transformers and tokenizers raise various exceptions
        _find_fault(folder)
        raise ValueError(f"{folder}: its tokenizer cannot be read. {_INSTEAD}") from error


def _refuse_code(folder: Path, known: Callable[[Any], bool] = lambda named: False) -> None:
    """Raise ValueError if the tokenizer is code in the checkpoint. known: whether we split text like a class."""
    for file in (folder / "tokenizer_config.json", folder / "config.json"):
        named = read_json(file).get("auto_map") if file.is_file() else None
        named = named.get("AutoTokenizer") if isinstance(named, dict) else named
        if named and not known(named):
            raise ValueError(
                f"{file}: auto_map names {named!r} as its tokenizer; code of a checkpoint is never run. {_INSTEAD}"
            )


def _find_fault(folder: Path) -> None:
    """Raise ValueError that names a known fault in a tokenizer's files, if there is one."""
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder}: has no tokenizer.json and no {TIKTOKEN}. {_INSTEAD}")
    for name in ("tokenizer.json", "special_tokens_map.json", "added_tokens.json"):
        if (folder / name).is_file():
            read_json(folder / name)
