"""The other files of a checkpoint, generation_config.json, tokenizer and weights, and the folder of a draft head."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bateleur.runner import LLM, SamplingParams
from bateleur.runner.assets import shipped_draft
from bateleur.runner.checkpoint.open import open_checkpoint
from bateleur.runner.checkpoint.tokenizer import load_tokenizer
from bateleur.runner.spec_decode.draft_head import DraftHead


def brief(value: object) -> str:
    return ascii(value)[1:41] if isinstance(value, str) else ""


@pytest.fixture
def folder(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a tiny Llama of 101 tokens, to be damaged."""
    shutil.copytree(tiny("llama"), tmp_path / "copy")
    return tmp_path / "copy"


JSON_FAULTS: list[tuple[bytes, str]] = [
    (b"", "cannot be read as JSON: Expecting value, line 1, column 1"),
    (b"{", "cannot be read as JSON: Expecting property name enclosed in double quotes, line 1, column 2"),
    (b"\x00", "cannot be read as JSON: Expecting value, line 1, column 1"),
    (b'{"a": "\xe9"}', "cannot be read as JSON: byte 7 is no UTF-8"),
    (b"[" * 100_000, "cannot be read as JSON: it is nested too deeply"),
    (b'{"a": 1' + b"0" * 5000 + b"}", "cannot be read as JSON: it holds a number of too many digits"),
    (b"[]", "holds list; it must hold a JSON object"),
    (b"null", "holds NoneType; it must hold a JSON object"),
    (b'"text"', "holds str; it must hold a JSON object"),
    (b"5", "holds int; it must hold a JSON object"),
]


@pytest.mark.parametrize(("contents", "message"), JSON_FAULTS, ids=brief)
@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_json(folder: Path, refused: Any, name: str, contents: bytes, message: str) -> None:
    (folder / name).write_bytes(contents)
    with refused(f"{folder / name}: {message}"):
        load_tokenizer(open_checkpoint(folder))


IDS = "it must be a token id or a list of them"
GENERATION: list[tuple[Any, str]] = [
    (101, "eos_token_id holds 101; the vocabulary has 101 tokens"),
    ([1, 500], "eos_token_id holds 500; the vocabulary has 101 tokens"),
    (10**30, f"eos_token_id holds {10**30}; the vocabulary has 101 tokens"),
    (-1, f"eos_token_id is -1; {IDS}"),
    ("a", f"eos_token_id is 'a'; {IDS}"),
    (True, f"eos_token_id is True; {IDS}"),
    (1.5, f"eos_token_id is 1.5; {IDS}"),
    ({}, f"eos_token_id is {{}}; {IDS}"),
    ([1, "a"], f"eos_token_id[1] is 'a'; {IDS}"),
    ([[1]], f"eos_token_id[0] is [1]; {IDS}"),
    ([None], f"eos_token_id[0] is None; {IDS}"),
]


@pytest.mark.parametrize(("value", "message"), GENERATION, ids=brief)
def test_generation_config(folder: Path, refused: Any, value: Any, message: str) -> None:
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": value}))
    with refused(f"{file}: {message}"):
        open_checkpoint(folder)


@pytest.mark.parametrize(("value", "ids"), [(None, (2,)), (3, (2, 3)), ([3, 4, 2], (2, 3, 4)), ([], (2,))])
def test_ends_of_text_that_are_tokens(folder: Path, value: Any, ids: tuple[int, ...]) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert open_checkpoint(folder).spec.eos_token_ids == ids


# --- tokenizers ---------------------------------------------------------------------------------------------------

INSTEAD = "Name a folder with a tokenizer.json (tokenizer), or pass token ids (skip_tokenizer_init)"
UNREADABLE = f"its tokenizer cannot be read. {INSTEAD}"
TOKENIZERS: list[tuple[str, dict[str, Any]]] = [
    ("tokenizer.json", {"added_tokens": 5}),
    ("tokenizer.json", {"model": None}),
    ("tokenizer.json", {"model": {"type": "Unheard"}}),
    ("tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}),
    ("tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["b", "c"]]}}),
    ("tokenizer.json", {"decoder": {"type": "Unheard"}}),
    ("tokenizer_config.json", {"tokenizer_class": 5}),
    ("tokenizer_config.json", {"tokenizer_class": ["T"]}),
    ("tokenizer_config.json", {"tokenizer_class": "Trainer"}),
    ("tokenizer_config.json", {"tokenizer_class": "pipeline"}),
    ("tokenizer_config.json", {"added_tokens_decoder": 5}),
    ("tokenizer_config.json", {"added_tokens_decoder": {"x": 5}}),
    ("tokenizer_config.json", {"bos_token": 5}),
    ("tokenizer_config.json", {"eos_token": {"a": 1}}),
    ("tokenizer_config.json", {"pad_token": []}),
    ("tokenizer_config.json", {"extra_special_tokens": 5}),
    ("tokenizer_config.json", {"padding_side": "up"}),
    ("special_tokens_map.json", {"bos_token": 5}),
]


@pytest.mark.parametrize(("name", "fields"), TOKENIZERS)
def test_tokenizers(folder: Path, refused: Any, name: str, fields: dict[str, Any]) -> None:
    file = folder / name
    said = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(said | fields))
    with refused(f"{folder}: {UNREADABLE}"):
        load_tokenizer(open_checkpoint(folder))


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json"])
def test_files_beside_a_tokenizer(folder: Path, refused: Any, name: str) -> None:
    (folder / name).write_text("{")
    with refused(
        f"{folder / name}: cannot be read as JSON: Expecting property name enclosed in double quotes, line 1, column 2"
    ):
        load_tokenizer(open_checkpoint(folder))


@pytest.mark.parametrize("gone", [["tokenizer.json"], ["tokenizer.json", "tokenizer_config.json"]])
@pytest.mark.parametrize("folder_in_place", [False, True])
def test_no_tokenizer(folder: Path, refused: Any, gone: list[str], folder_in_place: bool) -> None:
    for name in gone:
        (folder / name).unlink()
    if folder_in_place:
        (folder / "tokenizer.json").mkdir()
    with refused(f"{folder}: has no tokenizer.json and no tiktoken.model. {INSTEAD}"):
        LLM(folder, device="cpu")
    LLM(folder, device="cpu", max_num_seqs=1, skip_tokenizer_init=True)


def test_a_tokenizer_larger_than_its_model(folder: Path, refused: Any) -> None:
    file = folder / "tokenizer.json"
    said = json.loads(file.read_text())
    said["model"]["vocab"] |= {chr(1000 + i): 101 + i for i in range(9)}
    file.write_text(json.dumps(said))
    with pytest.warns(RuntimeWarning, match="its tokenizer has 110 tokens, the model 101; text with the others is ref"):
        llm = LLM(folder, device="cpu", max_model_len=32, max_num_seqs=1)
    with refused("prompts[0]: prompt holds a word whose token is 103; the model has 101 tokens"):
        llm.generate("abc" + chr(1002))
    assert llm.generate("abc", SamplingParams(max_tokens=1))


def test_a_long_prompt_is_measured_here(folder: Path, refused: Any, capfd: pytest.CaptureFixture[str]) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": 5}))
    llm = LLM(folder, device="cpu", max_model_len=32, max_num_seqs=1)
    with refused(
        "prompts[0]: prompt has 40 tokens; this model's maximum context length is 32 tokens (max_model_len), the "
        "output included: reduce the length of the messages or of the prompt"
    ):
        llm.generate("a" * 40)
    assert "indexing errors" not in capfd.readouterr().err


# --- weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contents", [b"", b"\xff" * 100, b"\x08\0\0\0\0\0\0\0{}      "[:12], b"PK\x03\x04pickle"])
def test_weights(folder: Path, refused: Any, contents: bytes) -> None:
    (folder / "model.safetensors").write_bytes(contents)
    with refused(f"{folder / 'model.safetensors'}: is no complete safetensors file"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_weights_of_another_kind(folder: Path, refused: Any, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with refused(
        f"{folder}: has neither model.safetensors nor model.safetensors.index.json; only safetensors weights can be "
        "read"
    ):
        open_checkpoint(folder)


INDEXES: list[tuple[Any, str]] = [
    ({}, "weight_map must map tensor names to file names"),
    ({"weight_map": []}, "weight_map must map tensor names to file names"),
    ({"weight_map": {"a": 5}}, "weight_map must map tensor names to file names"),
    ({"weight_map": {"a": "../b"}}, "'../b' is not the name of a file in this folder"),
    ({"weight_map": {"a": "/etc/passwd"}}, "'/etc/passwd' is not the name of a file in this folder"),
    ({"weight_map": {"a": ""}}, "'' is not the name of a file in this folder"),
    ({"weight_map": {"a": "."}}, "'.' is not the name of a file in this folder"),
    ({"weight_map": {"a": ".."}}, "names shards that are missing: .."),
    ({"weight_map": {"a": "gone"}}, "names shards that are missing: gone"),
    ({"weight_map": {"a": "a\0b"}}, "names shards that are missing: a\0b"),
    ({"weight_map": {"a": "x" * 5000}}, f"names shards that are missing: {'x' * 5000}"),
]


@pytest.mark.parametrize(("index", "message"), INDEXES, ids=brief)
def test_indexes(folder: Path, refused: Any, index: Any, message: str) -> None:
    (folder / "model.safetensors").unlink()
    file = folder / "model.safetensors.index.json"
    file.write_text(json.dumps(index))
    with refused(f"{file}: {message}"):
        open_checkpoint(folder)


# --- the folder of a draft head -----------------------------------------------------------------------------------

LARGEST = "it must be a whole number in [1, 16777216]"
HEADS: list[tuple[str, Any, str]] = [
    *(
        (name, value, f"{name} is {value!r}; {LARGEST}")
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        for value in (0, -1, 1.5, "4", True, [], 10**30)
    ),
    *(
        ("num_hidden_layers", value, f"num_hidden_layers is {value!r}; it must be a whole number in [1, 1024]")
        for value in (0, "1", 10**9, 10**30)
    ),
    *(
        (name, value, f"{name} is {value!r}; it must be a finite number above 0, in float32")
        for name in ("rms_norm_eps", "rope_theta")
        for value in (0, -1, "1", True, [], 10**400)
    ),
    ("rope_scaling", "linear", "rope_scaling is 'linear'; it must be an object"),
    ("rope_scaling", {"type": "dynamic"}, "rope_type is 'dynamic'; supported is 'default', 'linear', 'llama3', 'yarn'"),
]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("head") / "copy"
    shutil.copytree(shipped_draft(), copy)
    return copy


@pytest.fixture(scope="module")
def target() -> Any:
    import torch

    from bateleur.runner.assets import shipped_model
    from bateleur.runner.checkpoint.open import load_model

    return load_model(open_checkpoint(shipped_model()), torch.float32, "cpu")


@pytest.mark.parametrize(("name", "value", "message"), HEADS, ids=brief)
def test_heads(head: Path, target: Any, refused: Any, name: str, value: Any, message: str) -> None:
    config = json.loads((shipped_draft() / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {name: value}))
    with refused(f"{head}: {message}"):
        DraftHead.open(head, target)


@pytest.mark.parametrize("value", [5, True, -1, 10**400, {"a": 1}, "LlamaForCausalLMEagle3"])
def test_a_head_by_any_name(head: Path, target: Any, value: Any) -> None:
    """`architectures` is a hint, and the tensors tell as much."""
    config = json.loads((shipped_draft() / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"architectures": value}))
    assert DraftHead.open(head, target).head.spec.kind == "eagle3"


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "cannot be read as JSON, line 1"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b'{"a": "\xe9"}', "cannot be read as JSON"),
        (b"[]", "holds list; it must hold a JSON object"),
    ],
    ids=brief,
)
def test_the_json_of_a_head(head: Path, target: Any, refused: Any, contents: bytes, message: str) -> None:
    (head / "config.json").write_bytes(contents)
    with refused(f"{head / 'config.json'}: {message}"):
        DraftHead.open(head, target)
