"""A tokenizer from `tiktoken.model`, the format of Kimi's checkpoints, without running code of the checkpoint.

Each line has a token: its bytes in base64, and its rank. The conversion is that of transformers' `TikTokConverter`. The
file does not say how text is split before merging. Kimi's tokenizer class does, see `KIMI_SPLIT`.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from bateleur.runner.checkpoint.tokenizer_files import special_tokens_of, template_of
from bateleur.runner.text.file_tokenizer import FileTokenizer
from bateleur.runner.text.token_bytes import BYTES
from bateleur.runner.utils.json_file import read_json

NAME = "tiktoken.model"
KIMI_CLASS = "TikTokenTokenizer"
"""Name of the class in `tokenization_kimi.py`."""
_NUM_RESERVED = 256
"""Number of special tokens after the ranks in Kimi's class; unnamed ones are <|reserved_token_ID|>."""
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_LARGE, _SMALL = (rf"[\p{{{first}}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for first in (r"Lu}\p{Lt", "Ll"))
_REST = (r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")
KIMI_SPLIT = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_LARGE}*{_SMALL}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_LARGE}+{_SMALL}*{_ENDING}",
        *_REST,
    )
)
"""Pattern that splits text in `tokenization_kimi.py` of Kimi K2 and Kimi Linear."""
DEFAULT_SPLIT = "|".join(("(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+", *_REST))
"""Pattern that splits text in transformers for other files."""


def read_tiktoken(folder: Path) -> FileTokenizer:
    """Return the tokenizer of a folder with `tiktoken.model`. Special tokens come from `tokenizer_config.json`.

    Raises ValueError, naming the file, if it is damaged, and for a tokenizer class with another split.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    file = folder / "tokenizer_config.json"
    config = read_json(file) if file.is_file() else {}
    ranks = _ranks(folder / NAME)
    backend = Tokenizer(models.BPE(_vocabulary(ranks), _merges(ranks), fuse_unk=False, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(_split_of(folder, config)), behavior="isolated", invert=False)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    for name, special in _added_tokens(config, len(ranks)):
        token = AddedToken(name, normalized=False, special=special)
        backend.add_special_tokens([token]) if special else backend.add_tokens([token])
    tokenizer = FileTokenizer(backend, chat_template=template_of(folder, config))
    tokenizer.special_tokens_map, tokenizer.extra_special_tokens = special_tokens_of(config)
    return tokenizer


def is_kimi(auto_map: Any) -> bool:
    """Return whether an `auto_map` names Kimi's tokenizer class."""
    return f".{KIMI_CLASS}" in str(auto_map)


def _split_of(folder: Path, config: dict[str, Any]) -> str:
    model = folder / "config.json"
    kind = str(read_json(model).get("model_type")) if model.is_file() else ""
    return KIMI_SPLIT if kind.startswith("kimi") or is_kimi(config.get("auto_map")) else DEFAULT_SPLIT


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


def _vocabulary(ranks: dict[bytes, int]) -> dict[str, int]:
    return {_as_characters(token): rank for token, rank in ranks.items()}


def _merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that join to another token, in the order of ranks: the merges of a BPE model."""
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(_as_characters(left), _as_characters(right)) for left, right in known]
    return merges


def _added_tokens(config: dict[str, Any], first: int) -> list[tuple[str, bool]]:
    """Return the texts of the tokens after the ranks, from id `first` on, and whether each is special."""
    described: dict[str, Any] = config.get("added_tokens_decoder") or {}
    known = {int(token): each for token, each in described.items() if isinstance(each, dict)}
    count = _NUM_RESERVED if is_kimi(config.get("auto_map")) else 0
    end = max([first + count, *(token + 1 for token in known)])
    added = []
    for token in range(first, end):
        each = known.get(token, {})
        added.append((str(each.get("content", f"<|reserved_token_{token}|>")), bool(each.get("special", True))))
    return added


def _as_characters(token: bytes) -> str:
    """Return bytes in the characters that byte-level vocabularies (GPT-2) write for them."""
    return "".join(_CHARACTERS[byte] for byte in token)


_CHARACTERS = {byte: character for character, byte in BYTES.items()}
