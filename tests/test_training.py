"""The training script is seeded and resumable; tested with a few thousand weights."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.slow

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    import train_model
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    from shipped_model.network import Shape

    small = Shape(
        vocab_size=64,
        hidden_size=16,
        pattern="M*-",
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        mamba_num_heads=2,
        mamba_head_dim=8,
        ssm_state_size=8,
    )
    stream = np.random.default_rng(0).integers(0, 64, 5000).astype(np.uint16)
    facts = {"held_out_bytes": 4000, "train_bytes": 20000, "train_files": 1, "held_out_files": 1}
    facts |= {"train_tokens": 5000, "held_out_tokens": 1000}
    prepared = (Tokenizer(BPE()), stream, stream[:1000], facts | {"python": "3"})
    monkeypatch.setattr(train_model, "prepare", lambda *_: prepared)
    monkeypatch.setattr(train_model, "Shape", lambda: small)
    return train_model


def run(train: Any, monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, torch.Tensor]:
    arguments = ["--out", str(folder / "out"), "--work", str(folder), "--steps", "6", "--save-every", "2"]
    monkeypatch.setattr(sys, "argv", ["train_model.py", *arguments, "--batch", "2", "--length", "64"])
    folder.mkdir(exist_ok=True)
    train.main()
    state: dict[str, torch.Tensor] = torch.load(folder / "state.pt")["net"]
    return state


def test_a_resumed_run_ends_like_an_unbroken_one(train: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = run(train, monkeypatch, tmp_path / "whole")
    batches = train.batch_at

    def broken(stream: np.ndarray, step: int, *rest: int) -> torch.Tensor:
        if step == 5:
            raise KeyboardInterrupt
        batch: torch.Tensor = batches(stream, step, *rest)
        return batch

    with monkeypatch.context() as patch:
        patch.setattr(train, "batch_at", broken)
        with pytest.raises(KeyboardInterrupt):
            run(train, monkeypatch, tmp_path / "broken")
    assert torch.load(tmp_path / "broken" / "state.pt")["step"] == 4
    resumed = run(train, monkeypatch, tmp_path / "broken")
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name
    card = (tmp_path / "broken" / "out" / "README.md").read_text()
    assert "6 steps of 128 tokens" in card
