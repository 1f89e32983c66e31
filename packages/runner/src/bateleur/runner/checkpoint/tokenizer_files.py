"""Reads tokenizers without transformers: those that their files describe completely, and `tiktoken.model`.

transformers adds what `tokenizer_config.json` says to `tokenizer.json`: tokens, a class that rebuilds it, clean-up of
text. Without such fields, the tokenizers library reads the same tokenizer.

`tiktoken.model` is the format of Kimi's checkpoints: a line for each token, with its bytes in base64 and its rank. It
is converted like by transformers' `TikTokConverter`. Kimi's class says how text is split (`KIMI_SPLIT`); it is not run.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bateleur.runner.text.file_tokenizer import FileTokenizer
from bateleur.runner.text.token_bytes import BYTES
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
    """Return the tokenizer of a folder, equal to that of transformers; None if its files do not describe it."""
    file, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not (file.is_file() and config.is_file()) or (folder / "additional_chat_templates").exists():
        return None
    fields = read_json(config)
    if not _is_plain(folder, fields):
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = FileTokenizer(Tokenizer.from_file(str(file)))
    except Exception:  # transformers is tried next, and its error is reported
        return None
    return _completed(tokenizer, folder, fields) if _adds_nothing(fields, tokenizer) else None


def _completed(tokenizer: FileTokenizer, folder: Path, config: Mapping[str, Any]) -> FileTokenizer:
    """Return the tokenizer with the special tokens and the chat template of its folder."""
    tokenizer.special_tokens_map = {name: _content(config[name]) for name in _NAMED if config.get(name)}
    tokenizer.extra_special_tokens = tuple(_content(each) for name in _LISTED for each in config.get(name) or ())
    file = folder / "chat_template.jinja"
    tokenizer.chat_template = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
    return tokenizer


def _model_type(folder: Path) -> str:
    file = folder / "config.json"
    return str(read_json(file).get("model_type")) if file.is_file() else ""


def _is_plain(folder: Path, fields: Mapping[str, Any]) -> bool:
    """Return whether all fields are known, and no other file changes the tokenizer."""
    known = {"tokenizer_class", "chat_template", "clean_up_tokenization_spaces", "added_tokens_decoder"}
    if not (known | {*_NAMED, *_LISTED, *_SIDES, *_IDLE}).issuperset(fields):
        return False
    return (
        fields.get("tokenizer_class") in _CLASSES
        and not _model_type(folder).startswith(_REBUILT)
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
    added: Mapping[int, AddedToken] = backend.get_added_tokens_decoder()
    has = {str(each.content): each for each in added.values()}
    named = [_content(fields[name]) for name in _NAMED if fields.get(name) is not None]
    listed = [each for name in _LISTED for each in fields.get(name) or ()]
    described = fields.get("added_tokens_decoder", {})
    flags = {str(index): {name: getattr(token, name) for name in _FLAGS} for index, token in added.items()}
    return (
        all(each in has and has[each].special for each in named)
        and all(isinstance(each, str) and each in has and _is_bare(has[each]) for each in listed)
        and isinstance(described, dict)
        and all(isinstance(each, dict) for each in described.values())
        and flags.items() >= described.items()
    )


def _content(token: Any) -> str:
    """Return the text of a special token, given as text or as an object with flags; else ""."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _is_bare(token: AddedToken) -> bool:
    """Return whether `special` is the only flag of a token, as if it had been given as text only."""
    return [name for name in _FLAGS[1:] if getattr(token, name)] == ["special"]


TIKTOKEN = "tiktoken.model"
_NUM_RESERVED = 256
"""Number of special tokens after the ranks in Kimi's class; unnamed ones are <|reserved_token_ID|>."""
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_LARGE, _SMALL = (rf"[\p{{{first}}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for first in (r"Lu}\p{Lt", "Ll"))
_REST = (r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")
_WORDS = (rf"[^\r\n\p{{L}}\p{{N}}]?{letters}{_ENDING}" for letters in (f"{_LARGE}*{_SMALL}+", f"{_LARGE}+{_SMALL}*"))
KIMI_SPLIT = "|".join((r"[\p{Han}]+", *_WORDS, *_REST))
"""Pattern that splits text in `tokenization_kimi.py` of Kimi K2 and Kimi Linear."""
DEFAULT_SPLIT = "|".join(("(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+", *_REST))
"""Pattern that splits text in transformers for other files."""


def read_tiktoken(folder: Path) -> FileTokenizer:
    """Return the tokenizer of a folder with `tiktoken.model`. Special tokens come from `tokenizer_config.json`.

    Raises ValueError, naming the file, if it is damaged, and for a tokenizer class that splits text differently.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    file = folder / "tokenizer_config.json"
    config = read_json(file) if file.is_file() else {}
    ranks = _ranks(folder / TIKTOKEN)
    vocabulary = {_as_characters(token): rank for token, rank in ranks.items()}
    backend = Tokenizer(models.BPE(vocabulary, _merges(ranks), fuse_unk=False, ignore_merges=True))
    kimi = is_kimi(config.get("auto_map"))
    pattern = KIMI_SPLIT if kimi or _model_type(folder).startswith("kimi") else DEFAULT_SPLIT
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    for name, special in _added_tokens(config, len(ranks), _NUM_RESERVED if kimi else 0):
        token = AddedToken(name, normalized=False, special=special)
        backend.add_special_tokens([token]) if special else backend.add_tokens([token])
    return _completed(FileTokenizer(backend), folder, config)


def is_kimi(auto_map: Any) -> bool:
    """Return whether an `auto_map` names the class of Kimi's `tokenization_kimi.py`."""
    return ".TikTokenTokenizer" in str(auto_map)


def _ranks(file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"{file}: line {number} is no token in base64 with its rank") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{file}: its {len(ranks)} ranks are not 0 to {len(ranks) - 1}, each once")
    return ranks


def _merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make another token, in the order of that token's rank."""
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(_as_characters(left), _as_characters(right)) for left, right in known]
    return merges


def _added_tokens(config: dict[str, Any], first: int, count: int) -> list[tuple[str, bool]]:
    """Return names of added tokens, with ids from `first` on, at least `count`, and whether each is special."""
    described: dict[str, Any] = config.get("added_tokens_decoder") or {}
    known = {int(token): each for token, each in described.items() if isinstance(each, dict)}
    end = max([first + count, *(token + 1 for token in known)])
    every = [(f"<|reserved_token_{token}|>", known.get(token, {})) for token in range(first, end)]
    return [(str(each.get("content", unnamed)), bool(each.get("special", True))) for unnamed, each in every]


_CHARACTERS = {byte: character for character, byte in BYTES.items()}


def _as_characters(token: bytes) -> str:
    """Return bytes in the characters of byte-level vocabularies (GPT-2)."""
    return "".join(_CHARACTERS[byte] for byte in token)
