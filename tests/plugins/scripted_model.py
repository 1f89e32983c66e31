"""A tiny Llama checkpoint that generates given texts, token by token.

Every text has a marker, a token that ends the prompt. The model answers a prompt with the text of its last marker.

Embeddings are one-hot and the MLP is zero. Attention head j looks exactly j tokens back, because its query is the key
of that position rotated by RoPE. So head j finds a marker j tokens back, and its output projection has the token that
follows there. The nearer of two markers wins.
"""

# Shape letters: V vocabulary, H heads, D head_dim.

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file

Text: TypeAlias = str | tuple[str | bytes, ...]
"""A text, which is split into tokens and ended by `EOS`; or its tokens, with or without an end."""

EOS = "<|im_end|>"
TAGS = {
    "<think>": False,
    "</think>": False,
    "<tool_call>": False,
    "</tool_call>": False,
    "<tool_response>": False,
    "</tool_response>": False,
}
"""Tags that are one token, as in Qwen's tokenizers, and whether each is a special token."""
CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\n' }}"
    "{% if message.content %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}{{ '\n<tool_call>\n' ~ call.function | tojson ~ '\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking %}{{ '<think>\n' }}{% endif %}{% endif %}"
)
"""A chat template in the form of ChatML. `enable_thinking` opens the reasoning."""
_CHOICE = (
    "{{% set texts = {texts} %}}"
    "{{% set asked = messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | first | trim %}}"
    "{{% set name = asked if asked in texts else 'default' %}}"
    "{{% set turn = messages | selectattr('role', 'equalto', 'assistant') | list | length %}}"
    "{{{{ '<|' ~ name ~ ':' ~ [turn, texts[name] - 1] | min ~ '|>' }}}}"
)
"""Ends a chat template with the marker of the text to generate."""
_FREQUENCY_BASE = 10_000.0
_SHARPNESS = 50.0
"""Attention score per unit of distance from the wanted position: no other position gets more than e**-30."""
_LOGIT = 100.0


def write_scripted_model(
    folder: Path,
    texts: Mapping[str, Text | list[Text]],
    *,
    tags: Mapping[str, bool] = TAGS,
    chat_template: str = CHAT,
    piece_length: int = 4,
    **config: Any,
) -> Path:
    """Write a checkpoint folder whose model generates these texts, and return the folder.

    texts: by name, the text of each turn of a conversation. The chat template selects the name equal to the first user
    message, or "default", and the turn by the number of assistant messages. A prompt that ends with `marker(name,
    turn)` does the same without a template. A single text is the text of every turn.

    tags: strings that are one token, and whether each is a special token.

    chat_template: a template without the marker, which is added here.

    piece_length: characters of each other token of a text.

    config: fields of config.json that replace the defaults.
    """
    turns = {name: given if isinstance(given, list) else [given] for name, given in texts.items()}
    scripts = {
        _marker(name, turn): list(_pieces(text, tags, piece_length))
        for name, several in turns.items()
        for turn, text in enumerate(several)
    }
    special = {EOS: True, "<|im_start|>": True, **tags, **dict.fromkeys(scripts, False)}
    pieces = [bytes([i]) for i in range(256)]
    pieces += [each for script in scripts.values() for each in script if isinstance(each, bytes)]
    vocab = {name: i for i, name in enumerate(dict.fromkeys([*map(_as_characters, pieces), *special]))}
    lines = {
        vocab[name]: [vocab[_as_characters(each) if isinstance(each, bytes) else each] for each in script]
        for name, script in scripts.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder, vocab, special, chat_template, {name: len(each) for name, each in turns.items()})
    _write_model(folder, len(vocab), lines, {"eos_token_id": vocab[EOS], **config})
    return folder


def marker(name: str, turn: int = 0) -> str:
    """The end of a prompt that is answered with this text: two tokens, the second of which is the marker.

    A head that looks back past the beginning of a prompt reads its first token, so the first token must not be the
    marker.
    """
    return f"<|im_start|>{_marker(name, turn)}"


def _marker(name: str, turn: int) -> str:
    return f"<|{name}:{turn}|>"


def _pieces(text: Text, tags: Mapping[str, bool], length: int) -> Iterator[str | bytes]:
    """The tokens of a text: a tag as text, everything else as bytes."""
    known = {*tags, EOS, "<|im_start|>"}
    if not isinstance(text, str):
        for each in text:
            yield each if isinstance(each, bytes) or each in known else each.encode()
        return
    for part in re.split(f"({'|'.join(map(re.escape, sorted(known, key=len, reverse=True)))})", text):
        if part in known:
            yield part
        else:
            yield from (part[at : at + length].encode() for at in range(0, len(part), length))
    yield EOS


def _as_characters(piece: bytes) -> str:
    """Bytes in the characters of byte-level vocabularies (GPT-2)."""
    return "".join(_CHARACTERS[byte] for byte in piece)


def _characters() -> list[str]:
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256))
    return [chr(byte if byte in itself else 256 + next(others)) for byte in range(256)]


_CHARACTERS = _characters()


def _write_tokenizer(
    folder: Path, vocab: Mapping[str, int], special: Mapping[str, bool], template: str, turns: Mapping[str, int]
) -> None:
    """Write the tokenizer files. Without merges, a prompt has one token for each byte, and one for each tag."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": vocab[name], "content": name, "special": kind, **flags} for name, kind in special.items()]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    words = {word: i for word, i in vocab.items() if word not in special}
    described = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": level,
        "post_processor": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": words, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(described))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    about["chat_template"] = template + _CHOICE.format(texts=json.dumps(turns))
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def _write_model(folder: Path, size: int, lines: Mapping[int, Sequence[int]], config: Mapping[str, Any]) -> None:
    """Write weights and config. lines: by marker token, the tokens that follow it."""
    heads = 4 * -(-max(map(len, lines.values())) // 4)
    hidden = heads * -(-(size + 1) // heads)  # transformers requires a multiple of the number of heads
    head_dim = 1 << max(5, (len(lines) - 1).bit_length())
    described: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": hidden,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-12,
        "rope_parameters": {"rope_type": "default", "rope_theta": _FREQUENCY_BASE},
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "dtype": "float32",
    } | dict(config)
    (folder / "config.json").write_text(json.dumps(described))
    save_file(_weights(size, hidden, heads, head_dim, lines), folder / "model.safetensors", {"format": "pt"})


def _weights(
    size: int, hidden: int, heads: int, head_dim: int, lines: Mapping[int, Sequence[int]]
) -> dict[str, torch.Tensor]:
    """Every token has its own dimension, and the last dimension is 1 for all tokens."""
    half = head_dim // 2
    active = (hidden / 2) ** 0.5  # a normalised embedding has this value in its two dimensions
    embedding = torch.eye(size, hidden)
    embedding[:, -1] = 1
    frequencies = _FREQUENCY_BASE ** (-torch.arange(half) / half)
    angles_HF = torch.arange(heads)[:, None] * frequencies
    query = torch.zeros(heads, head_dim, hidden)
    query[:, :, -1] = torch.cat((angles_HF.cos(), -angles_HF.sin()), 1) * _SHARPNESS * head_dim**0.5 / active
    key, value = torch.zeros(2, head_dim, hidden)
    key[:half, -1] = 1 / active
    output = torch.zeros(hidden, heads, head_dim)
    for lane, (begin, line) in enumerate(lines.items()):
        value[lane, begin] = 1 / active
        for distance, token in enumerate(line):
            output[token, distance, lane] = 1000 * (1.5 - distance / (2 * heads))  # nearer markers have higher scores
    layer = "model.layers.0."
    zeros = torch.zeros(8, hidden)
    return {
        "model.embed_tokens.weight": embedding,
        f"{layer}self_attn.q_proj.weight": query.reshape(-1, hidden),
        f"{layer}self_attn.k_proj.weight": key,
        f"{layer}self_attn.v_proj.weight": value,
        f"{layer}self_attn.o_proj.weight": output.reshape(hidden, -1),
        f"{layer}mlp.gate_proj.weight": zeros,
        f"{layer}mlp.up_proj.weight": zeros.clone(),
        f"{layer}mlp.down_proj.weight": zeros.T.contiguous(),
        f"{layer}input_layernorm.weight": torch.ones(hidden),
        f"{layer}post_attention_layernorm.weight": torch.ones(hidden),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": torch.eye(size, hidden) * _LOGIT,
    }
