"""Loads the tokenizer of a checkpoint folder, without transformers if its files describe it completely.

transformers completes `tokenizer.json` by fields of `tokenizer_config.json`: more tokens, a class that rebuilds the
tokenizer, clean-up of text. Without these fields, the tokenizers library reads the same tokenizer.

`tiktoken.model` is the format of Kimi's checkpoints: a line for each token, with its bytes in base64 and its rank. It
is converted like by transformers' `TikTokConverter`. Kimi's class says how text is split (`KIMI_SPLIT`); it is not run.
"""

import base64
import binascii
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from bateleur.runner.checkpoint.open import Checkpoint, quiet_transformers
from bateleur.runner.text.file_tokenizer import FileTokenizer
from bateleur.runner.text.token_bytes import BYTES
from bateleur.runner.text.tokenizer import Tokenizer
from bateleur.runner.utils.json_file import read_json

_ANY_LENGTH = 1 << 62
"""Disables the tokenizer's own length warning, because the engine checks lengths."""
TIKTOKEN = "tiktoken.model"
_END_TOKENS = ("eos_token", "eot_token")
"""Names of special tokens that end a text."""
_INSTEAD = "Name a folder with a tokenizer.json (tokenizer), or pass token ids (skip_tokenizer_init)"


def load_tokenizer(checkpoint: Checkpoint, folder: str | Path | None = None) -> Tokenizer:
    """Load the tokenizer of a folder, or the checkpoint's own. Warns if it has tokens that the model lacks."""
    folder, known = checkpoint.path if folder is None else Path(folder), checkpoint.spec.vocab_size
    if not folder.is_dir():
        raise ValueError(f"tokenizer is {str(folder)!r}; it must be a folder with tokenizer.json or tiktoken.model")
    tiktoken = (folder / TIKTOKEN).is_file() and not (folder / "tokenizer.json").is_file()
    _refuse_code(folder, tiktoken)
    tokenizer = read_tiktoken(folder) if tiktoken else read_without_transformers(folder) or _ask_transformers(folder)
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


def _refuse_code(folder: Path, tiktoken: bool) -> None:
    """Raise ValueError if the tokenizer's class is code in the checkpoint, which may split text differently.

    Kimi's class is accepted together with tiktoken.model.
    """
    for file in (folder / "tokenizer_config.json", folder / "config.json"):
        named = read_json(file).get("auto_map") if file.is_file() else None
        named = named.get("AutoTokenizer") if isinstance(named, dict) else named
        if named and not (tiktoken and is_kimi(named)):
            raise ValueError(
                f"{file}: auto_map names {named!r} as its tokenizer; code of a checkpoint is never run. {_INSTEAD}"
            )


def _find_fault(folder: Path) -> None:
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder}: has no tokenizer.json and no {TIKTOKEN}. {_INSTEAD}")
    for name in ("tokenizer.json", "special_tokens_map.json", "added_tokens.json"):
        if (folder / name).is_file():
            read_json(folder / name)


# --- tokenizer.json ------------------------------------------------------------------------------------------------

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
    """Return the tokenizer of a folder with the ids and texts of transformers. None if its files do not describe it."""
    file, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not (file.is_file() and config.is_file()) or (folder / "additional_chat_templates").exists():
        return None
    fields = read_json(config)
    if not _is_plain(folder, fields):
        return None
    from tokenizers import Tokenizer as Backend

    try:
        tokenizer = FileTokenizer(Backend.from_file(str(file)))
    except Exception:  # transformers is tried next, and its error is reported
        return None
    return _completed(tokenizer, folder, fields) if _adds_nothing(fields, tokenizer) else None


def _completed(tokenizer: FileTokenizer, folder: Path, config: Mapping[str, Any]) -> FileTokenizer:
    tokenizer.special_tokens_map = {name: _content(config[name]) for name in _NAMED if config.get(name)}
    tokenizer.extra_special_tokens = tuple(_content(each) for name in _LISTED for each in config.get(name) or ())
    file = folder / "chat_template.jinja"
    tokenizer.chat_template = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
    return tokenizer


def _model_type(folder: Path) -> str:
    file = folder / "config.json"
    return str(read_json(file).get("model_type")) if file.is_file() else ""


def _is_plain(folder: Path, fields: Mapping[str, Any]) -> bool:
    """Return whether all fields of tokenizer_config.json are known, and no other file changes the tokenizer."""
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
    """Return whether `tokenizer.json` has all tokens of tokenizer_config.json (`fields`), and does not pad or cut."""
    backend = tokenizer.backend_tokenizer
    if backend.truncation or backend.padding or backend.post_processor is None:
        return False
    if fields.get("clean_up_tokenization_spaces") and type(backend.model).__name__ != "BPE":
        return False
    added: Mapping[int, Any] = backend.get_added_tokens_decoder()
    has = {str(each.content): each for each in added.values()}
    named = [_content(fields[name]) for name in _NAMED if fields.get(name) is not None]
    listed = [each for name in _LISTED for each in fields.get(name) or ()]
    described: Any = {} if (given := fields.get("added_tokens_decoder")) is None else given
    flags = {str(index): {name: getattr(token, name) for name in _FLAGS} for index, token in added.items()}
    bare = {text for text, token in has.items() if [name for name in _FLAGS[1:] if getattr(token, name)] == ["special"]}
    return (
        all(each in has and has[each].special for each in named)
        and all(isinstance(each, str) and each in bare for each in listed)
        and isinstance(described, dict)
        and all(isinstance(each, dict) for each in described.values())
        and flags.items() >= described.items()
    )


def _content(token: Any) -> str:
    """Return the text of a special token, given as text or as an object with flags; else ""."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


# --- tiktoken.model ------------------------------------------------------------------------------------------------

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
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend

    file = folder / "tokenizer_config.json"
    config = read_json(file) if file.is_file() else {}
    ranks = _ranks(folder / TIKTOKEN)
    vocabulary = {_as_characters(token): rank for token, rank in ranks.items()}
    backend = Backend(models.BPE(vocabulary, _merges(ranks), fuse_unk=False, ignore_merges=True))
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
    """Return (name, whether special) of added tokens, whose ids begin at `first`. count: minimum number of tokens."""
    described: dict[str, Any] = config.get("added_tokens_decoder") or {}
    known = {int(token): each for token, each in described.items() if isinstance(each, dict)}
    end = max([first + count, *(token + 1 for token in known)])
    every = [(f"<|reserved_token_{token}|>", known.get(token, {})) for token in range(first, end)]
    return [(str(each.get("content", unnamed)), bool(each.get("special", True))) for unnamed, each in every]


_CHARACTERS = {byte: character for character, byte in BYTES.items()}


def _as_characters(token: bytes) -> str:
    """Return bytes in the characters of byte-level vocabularies (GPT-2)."""
    return "".join(_CHARACTERS[byte] for byte in token)
