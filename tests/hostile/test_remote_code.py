"""Code that lies in a checkpoint is never run, whoever is asked, and nobody is asked."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bateleur.runner import LLM
from bateleur.runner.checkpoint.families import FAMILIES
from bateleur.runner.checkpoint.open import open_checkpoint

EVIL = """
from pathlib import Path
Path(__file__).with_name("was_here").touch()
Path({mark!r}).touch()
class T: pass
class C: pass
"""


class Question:
    """A stdin that says yes to everything, and remembers that it was asked."""

    asked = False

    def readline(self, *_: Any) -> str:
        self.asked = True
        return "y\n"

    read = readline


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Callable[[], bool]]:
    """Lays `evil.py` into a folder; what it returns says whether it ran, or somebody wanted an answer."""
    stdin, mark = Question(), tmp_path / "mark"
    monkeypatch.setattr(sys, "stdin", stdin)

    def lay(folder: Path) -> Callable[[], bool]:
        (folder / "evil.py").write_text(EVIL.format(mark=str(mark)))
        return lambda: stdin.asked or mark.exists() or (folder / "was_here").exists()

    return lay


TOKENIZER = (
    "; code of a checkpoint is never run. Name a folder with a tokenizer.json (tokenizer), or pass token ids "
    "(skip_tokenizer_init)"
)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "tokenizer_config.json",
            {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["evil.T", None]}},
            "auto_map names ['evil.T', None] as its tokenizer",
        ),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": [None, "evil.T"]}},
            "auto_map names [None, 'evil.T'] as its tokenizer",
        ),
        (
            "tokenizer_config.json",
            {"auto_map": {"AutoTokenizer": "evil.T"}},
            "auto_map names 'evil.T' as its tokenizer",
        ),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "PreTrainedTokenizerFast", "auto_map": ["evil.T", None]},
            "auto_map names ['evil.T', None] as its tokenizer",
        ),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["somebody/else--evil.T", None]}},
            "auto_map names ['somebody/else--evil.T', None] as its tokenizer",
        ),
        (
            "config.json",
            {"auto_map": {"AutoTokenizer": ["evil.T", None]}},
            "auto_map names ['evil.T', None] as its tokenizer",
        ),
    ],
)
def test_a_tokenizer_of_its_own_code(
    shipped_copy: Any, trap: Any, refused: Any, name: str, fields: dict[str, Any], message: str
) -> None:
    folder = shipped_copy(name, **fields)
    ran = trap(folder)
    with refused(f"{folder / name}: {message}{TOKENIZER}"):
        LLM(folder, device="cpu", max_model_len=64)
    assert not ran()


def test_without_its_tokenizer_it_opens(shipped_copy: Any, trap: Any) -> None:
    folder = shipped_copy("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", None]})
    ran = trap(folder)
    LLM(folder, device="cpu", max_model_len=64, max_num_seqs=1, skip_tokenizer_init=True)
    assert not ran()


def test_a_model_of_its_own_code(shipped_copy: Any, trap: Any, refused: Any) -> None:
    auto = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"}
    folder = shipped_copy(model_type="evil", architectures=["EvilForCausalLM"], auto_map=auto)
    ran = trap(folder)
    supported = ", ".join(sorted(FAMILIES))
    with refused(
        f"{folder / 'config.json'}: model_type is 'evil', whose own code is never run; supported are {supported}"
    ):
        open_checkpoint(folder)
    assert not ran()


def test_a_supported_model_does_not_need_the_code_beside_it(shipped_copy: Any, trap: Any) -> None:
    """As NemotronH's own checkpoints have it."""
    folder = shipped_copy(auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"})
    ran = trap(folder)
    LLM(folder, device="cpu", max_model_len=64, max_num_seqs=1)
    assert not ran()
