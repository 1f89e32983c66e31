"""Reads a tokenizer without transformers if its files describe it completely.

`tokenizer_config.json` can make transformers add tokens, rebuild the tokenizer by a class, or clean up text. Without
fields that do so, the tokenizers library reads the same tokenizer from `tokenizer.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bateleur.runner.text.file_tokenizer import FileTokenizer
from bateleur.runner.utils.json_file import read_json

if TYPE_CHECKING:
    from tokenizers import AddedToken

_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that use `tokenizer.json` unchanged."""
_REBUILT = "qwen"
"""Prefix of model types whose tokenizer transformers rebuilds, whatever class is named."""
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")
_SIDES = ("padding_side", "truncation_side")
_IDLE = (
    *("add_bos_token", "add_eos_token", "add_prefix_space", "backend", "is_local", "legacy", "local_files_only"),
    *("model_input_names", "model_max_length", "name_or_path", "processor_class", "spaces_between_special_tokens"),
    *("use_default_system_prompt", "use_fast"),
)
"""Fields that do not change what is used of a tokenizer with a `tokenizer.json`."""
_BESIDE = ("special_tokens_map.json", "added_tokens.json")
"""Older files, which count if `added_tokens_decoder` is missing."""
_FLAGS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")


def read_without_transformers(folder: Path) -> FileTokenizer | None:
    """Return the tokenizer of a folder if its files describe it completely; else None, and transformers must be used.

    Ids, texts, special tokens and templates equal those of transformers' tokenizer.
    """
    file, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not (file.is_file() and config.is_file()) or (folder / "additional_chat_templates").exists():
        return None
    fields = read_json(config)
    if not _is_plain(folder, fields):
        return None
    try:
        tokenizer = FileTokenizer.read(file)
    except Exception:  # transformers is tried next, and its error is reported
        return None
    if not _adds_nothing(fields, tokenizer):
        return None
    tokenizer.special_tokens_map, tokenizer.extra_special_tokens = special_tokens_of(fields)
    tokenizer.chat_template = template_of(folder, fields)
    return tokenizer


def special_tokens_of(config: Mapping[str, Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the special tokens of a `tokenizer_config.json`: a mapping of named ones, and a list of unnamed ones."""
    named = {name: _content(config[name]) for name in _NAMED if config.get(name)}
    return named, tuple(_content(each) for name in _LISTED for each in config.get(name) or ())


def template_of(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the chat template of a folder: from its own file, or the field of `tokenizer_config.json`."""
    file = folder / "chat_template.jinja"
    return file.read_text("utf-8") if file.is_file() else config.get("chat_template")


def _is_plain(folder: Path, fields: Mapping[str, Any]) -> bool:
    """Return whether all fields are known, and no other file changes the tokenizer."""
    known = {"tokenizer_class", "chat_template", "clean_up_tokenization_spaces", "added_tokens_decoder"}
    if not (known | {*_NAMED, *_LISTED, *_SIDES, *_IDLE}).issuperset(fields):
        return False
    model = folder / "config.json"
    kind = str(read_json(model).get("model_type")) if model.is_file() else ""
    return (
        fields.get("tokenizer_class") in _CLASSES
        and not kind.startswith(_REBUILT)
        and isinstance(fields.get("chat_template", ""), str)
        and all(fields.get(side, "left") in ("left", "right") for side in _SIDES)
        and all(isinstance(fields.get(name) or [], list) for name in _LISTED)
        and not any(fields.get(name) for name in _LISTED[:1] if fields.get(_LISTED[1]))
        and ("added_tokens_decoder" in fields or not any((folder / name).exists() for name in _BESIDE))
    )


def _adds_nothing(fields: Mapping[str, Any], tokenizer: FileTokenizer) -> bool:
    """Return whether `tokenizer.json` has all tokens of the configuration with the same flags."""
    backend = tokenizer.backend_tokenizer
    if backend.truncation or backend.padding or backend.post_processor is None:
        return False
    if fields.get("clean_up_tokenization_spaces") and type(backend.model).__name__ != "BPE":
        return False
    has = {str(each.content): each for each in backend.get_added_tokens_decoder().values()}
    named = [_content(fields[name]) for name in _NAMED if fields.get(name) is not None]
    listed = [each for name in _LISTED for each in fields.get(name) or ()]
    return (
        all(each in has and has[each].special for each in named)
        and all(isinstance(each, str) and each in has and _is_bare(has[each]) for each in listed)
        and _has_all(fields.get("added_tokens_decoder"), backend.get_added_tokens_decoder())
    )


def _content(token: Any) -> str:
    """Return the text of a special token, given as text or as an object with flags; else ""."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _is_bare(token: AddedToken) -> bool:
    """Return whether `special` is the only flag of a token, as if it had been given as text only."""
    return [name for name in _FLAGS[1:] if getattr(token, name)] == ["special"]


def _has_all(fields: Any, tokens: Mapping[int, AddedToken]) -> bool:
    if fields is None:
        return True
    if not isinstance(fields, dict) or not all(isinstance(each, dict) for each in fields.values()):
        return False
    added = {index: {name: getattr(token, name) for name in _FLAGS} for index, token in tokens.items()}
    return {str(index): token for index, token in added.items()}.items() >= fields.items()
