"""`tiktoken.model` is read without running code: tokens equal those of tiktoken's algorithm."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import regex
import tiny

from bateleur.runner import LLM, SamplingParams
from bateleur.runner.checkpoint.open import open_checkpoint
from bateleur.runner.checkpoint.tokenizer import DEFAULT_SPLIT, KIMI_SPLIT, load_tokenizer, read_tiktoken

SAMPLE = "Hello helloWorld HELLO don't 12345 naïve 你好世界 hello你好, the end.\n\n  def f(x):\n\treturn x🦅 "
TEXTS = (SAMPLE, "", " ", "a", "helloWorld", "世界hello", "I'LL we've", "1234567", "x\r\n\r\ny", "<|im_end|>hi[BOS]")
BYTES = [bytes([byte]) for byte in range(256)]
NAMED = {0: ("[BOS]", True), 1: ("[EOS]", True), 2: ("<|im_end|>", True), 5: ("<|tool_call_begin|>", False)}
AUTO_MAP = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}


def trained(split: str, num_merges: int = 60) -> list[bytes]:
    """Tokens of a byte pair encoding of the sample, by rank."""
    words = [[bytes([byte]) for byte in piece.encode()] for piece in pieces(split, SAMPLE * 3)]
    tokens = list(BYTES)
    for _ in range(num_merges):
        counts: dict[tuple[bytes, bytes], int] = {}
        for word in words:
            for pair in itertools.pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        left, right = max(counts, key=lambda pair: (counts[pair], pair))
        tokens.append(left + right)
        words = [joined(word, left + right) for word in words]
    return list(dict.fromkeys(tokens))


def joined(word: list[bytes], token: bytes) -> list[bytes]:
    found, at = list[bytes](), 0
    while at < len(word):
        pair = b"".join(word[at : at + 2])
        step = 2 if pair == token and at + 1 < len(word) else 1
        found.append(b"".join(word[at : at + step]))
        at += step
    return found


def pieces(split: str, text: str) -> list[str]:
    return regex.findall(split, text, regex.V1)


def encoded(split: str, ranks: dict[bytes, int], text: str) -> list[int]:
    """tiktoken's algorithm: within each piece, join the neighbours whose union has the lowest rank first."""
    ids: list[int] = []
    for piece in pieces(split, text):
        raw = piece.encode()
        parts = [raw] if raw in ranks else [bytes([byte]) for byte in raw]
        while True:
            pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
            if not pairs:
                break
            _, at = min(pairs)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def written(folder: Path, tokens: list[bytes], **config: Any) -> dict[bytes, int]:
    folder.mkdir(parents=True, exist_ok=True)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("\n".join(lines))
    described = {str(len(tokens) + at): {"content": name, "special": kind} for at, (name, kind) in NAMED.items()}
    about = {"added_tokens_decoder": described, "bos_token": "[BOS]", "eos_token": {"content": "[EOS]"}, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return ranks


@pytest.mark.parametrize(("split", "config"), [(KIMI_SPLIT, {"auto_map": AUTO_MAP}), (DEFAULT_SPLIT, {})])
def test_tokens_are_those_of_tiktoken(tmp_path: Path, split: str, config: dict[str, Any]) -> None:
    ranks = written(tmp_path, trained(split), **config)
    tokenizer = read_tiktoken(tmp_path)
    for text in TEXTS[:-1]:
        assert tokenizer.encode(text) == encoded(split, ranks, text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    first = len(ranks)
    assert tokenizer.encode(TEXTS[-1]) == [first + 2, *encoded(split, ranks, "hi"), first]
    assert (
        tokenizer.decode([first, 104, first + 5, first + 3])
        == f"[BOS]h<|tool_call_begin|><|reserved_token_{first + 3}|>"
    )
    assert tokenizer.decode([first, 104, first + 5, first + 3], skip_special_tokens=True) == "h<|tool_call_begin|>"
    assert len(tokenizer) == first + (256 if config else 6)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("[BOS]", "[EOS]")


def test_the_default_is_that_of_transformers() -> None:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    assert TikTokenConverter("x").pattern == DEFAULT_SPLIT


@pytest.fixture
def kimi(tmp_path: Path) -> Path:
    """A tiny Kimi Linear as published: its own tokenizer class, and no tokenizer.json."""
    tokens = trained(KIMI_SPLIT)
    folder = tiny.save(tiny.make_model("kimi_linear", vocab_size=len(tokens) + 256), tmp_path / "kimi")
    written(folder, tokens, auto_map=AUTO_MAP)
    tiny.edit_config(folder, auto_map={"AutoConfig": "configuration_kimi.KimiLinearConfig"})
    (folder / "tokenization_kimi.py").write_text("raise SystemExit('this ran')")
    return folder


def test_a_published_folder_takes_text(kimi: Path) -> None:
    (output,) = LLM(kimi, device="cpu", max_model_len=64).generate("hello 世界", SamplingParams(max_tokens=3))
    assert output.prompt_token_ids == read_tiktoken(kimi).encode("hello 世界")
    assert len(output.outputs[0].token_ids) == 3


def test_a_folder_of_its_own_holds_the_tokenizer(kimi: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.move(kimi / name, tokens / name)
    with pytest.raises(ValueError, match=r"has no tokenizer\.json and no tiktoken\.model\. Name a folder with"):
        LLM(kimi, device="cpu", max_model_len=64)
    llm = LLM(kimi, device="cpu", max_model_len=64, tokenizer=tokens)
    assert llm.tokenizer.encode("hello") == load_tokenizer(open_checkpoint(kimi), tokens).encode("hello")
    with pytest.raises(ValueError, match=r"tokenizer is '.*nowhere'; it must be a folder"):
        LLM(kimi, device="cpu", max_model_len=64, tokenizer=tmp_path / "nowhere")


@pytest.mark.parametrize("line", [b"", b"YQ==", b"!! 3", b"YQ== x", b"YQ== 3"])
def test_a_damaged_file_is_named(tmp_path: Path, line: bytes) -> None:
    written(tmp_path, list(BYTES))
    file = tmp_path / "tiktoken.model"
    file.write_bytes(file.read_bytes().replace(b"YQ== 97", line))
    with pytest.raises(ValueError, match=r"tiktoken\.model: (line 98 is no token|its 25\d ranks are not)"):
        read_tiktoken(tmp_path)
