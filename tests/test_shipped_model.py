"""The model in the wheel: its card is right, and transformers loads it unchanged."""

import ast
import json
import math
import shlex
import sysconfig
from pathlib import Path
from random import Random

import pytest
import torch

from bateleur.runner import LLM, SamplingParams
from bateleur.runner.assets import shipped_model
from bateleur.runner.cli import main

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture(scope="module")
def record() -> dict[str, object]:
    facts: dict[str, object] = json.loads((shipped_model() / "training.json").read_text())
    return facts


def test_weights_are_small_and_counted(record: dict[str, object]) -> None:
    from safetensors import safe_open

    path = shipped_model() / "model.safetensors"
    assert path.stat().st_size <= 16_000_000
    with safe_open(path, "pt") as tensors:
        count = sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    assert count == record["parameters"]


def test_card_states_data_size_loss_and_limits(record: dict[str, object]) -> None:
    card = (shipped_model() / "README.md").read_text()
    assert f"{record['held_out_bits_per_byte']:.3f} bits per byte" in card
    assert f"{record['parameters']:,}-parameter" in card
    for word in ("PSF licence", "Limits.", "standard library", str(record["command"])):
        assert word in card


def test_it_recommends_what_its_maker_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    from shipped_model.checkpoint import SAMPLING

    assert json.loads((shipped_model() / "generation_config.json").read_text()).items() >= SAMPLING.items()


def test_transformers_opens_it_without_a_missing_or_surplus_weight() -> None:
    from transformers import AutoModelForCausalLM

    _, loading = AutoModelForCausalLM.from_pretrained(shipped_model(), output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert not loading["mismatched_keys"]


def test_the_training_network_is_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """One model: as trained, as loaded by transformers, and as run by bateleur."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    monkeypatch.syspath_prepend(str(TOOLS))
    from shipped_model.network import Network, Shape

    tensors = {k: v.float() for k, v in load_file(shipped_model() / "model.safetensors").items()}
    assert torch.equal(tensors.pop("lm_head.weight"), tensors["model.embeddings.weight"])
    network = Network(Shape(), seed=0)
    network.load_state_dict(tensors)
    ids = torch.arange(5, 5 + 128).unsqueeze(0) * 17 % 4000
    with torch.no_grad():
        ours = network.model(ids) @ network.model.embeddings.weight.T
        model = AutoModelForCausalLM.from_pretrained(shipped_model(), dtype=torch.float32).eval()
        theirs = model(ids).logits
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.slow
def test_held_out_text_is_compressed_as_the_record_says(
    record: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits per byte on held-out files of this Python's library: other versions have other files, so within 15 %."""
    monkeypatch.syspath_prepend(str(TOOLS))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from shipped_model.corpus import read_corpus

    _, held_out, _ = read_corpus(Path(sysconfig.get_paths()["stdlib"]))
    text = "".join(held_out)[:60_000]
    ids = AutoTokenizer.from_pretrained(shipped_model())(text, return_tensors="pt").input_ids[0]
    windows = ids[: len(ids) // 512 * 512].view(-1, 512)
    model = AutoModelForCausalLM.from_pretrained(shipped_model(), dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(windows).logits[:, :-1]
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()
    bits = nats / math.log(2) * len(ids) / len(text.encode())
    assert bits == pytest.approx(record["held_out_bits_per_byte"], rel=0.15)


def code_lines(text: str) -> list[str]:
    """Non-blank lines without docstrings, comments and indentation."""
    lines, quoted = [], False
    for line in text.split("\n"):
        if line.count('"""') % 2:
            quoted = not quoted
        elif line.strip() and not quoted and '"""' not in line and not line.strip().startswith("#"):
            lines.append(line.strip())
    return lines


def parses(line: str) -> bool:
    """Whether a line is valid Python by itself, with a body added if it opens a block."""
    body = line + " pass" if line.endswith(":") else line
    openings = {"elif": "if x: pass\n", "else": "if x: pass\n", "except": "try: pass\n", "finally": "try: pass\n"}
    before = next((text for word, text in openings.items() if body.startswith(word)), "")
    try:
        ast.parse(before + body)
    except (SyntaxError, ValueError):
        return False
    return True


def test_its_text_has_the_look_of_python() -> None:
    """Most lines of code that it writes parse by themselves; of its lines with shuffled words, few do."""
    llm = LLM(device="cpu", max_model_len=512)
    heads = ["def add(self, value):", "class Stack:", "import os", "for line in open(path):", "try:", "def main():"]
    params = [
        SamplingParams(temperature=0.8, top_p=0.95, seed=seed, max_tokens=150) for seed in range(4) for _ in heads
    ]
    texts = [o.outputs[0].text for o in llm.generate(heads * 4, params)]
    # max_tokens may cut the last line of a text.
    lines = [line for text in texts for line in code_lines(text.rpartition("\n")[0])]
    assert len(lines) > 100
    shuffled = [" ".join(Random(0).sample(line.split(), len(line.split()))) for line in lines if len(line.split()) > 2]
    share = sum(map(parses, lines)) / len(lines)
    assert share > 0.8
    assert sum(map(parses, shuffled)) / len(shuffled) < share - 0.3


def test_the_first_command_of_the_readme_writes_python(capsys: pytest.CaptureFixture[str]) -> None:
    """The output of the README's first command parses up to its last whole line, and does not repeat itself."""
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    line = next(line for line in readme.splitlines() if "uv run bateleur generate" in line)
    assert main([*shlex.split(line)[shlex.split(line).index("bateleur") + 1 :], "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    whole = text.rpartition("\n")[0].rpartition("\n")[0]
    ast.parse(whole)
    lines = [line.strip() for line in whole.splitlines() if line.strip()]
    assert len(lines) >= 10
    assert len(set(lines)) >= 0.9 * len(lines)
