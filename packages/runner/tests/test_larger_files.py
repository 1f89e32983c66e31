"""The text model of a file that holds a vision model as well: it alone is read, and images are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bateleur.runner import LLM, SamplingParams
from bateleur.runner.checkpoint.open import load_model, open_checkpoint

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "patch_size": 2,
}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder, and transformers' model of it."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = tiny.FAMILIES["qwen3_5_text"]
    vision = VISION | {"out_hidden_size": text["hidden_size"]}
    config = AutoConfig.for_model(
        "qwen3_5", text_config=text, vision_config=vision, image_token_id=90, video_token_id=91
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tiny.randomise(model)
    return tiny.save(model, tmp_path_factory.mktemp("larger")), model


def test_logits_are_those_of_the_text_model(pair: tuple[Path, Any], driver: Any) -> None:
    folder, theirs = pair
    checkpoint = open_checkpoint(folder)
    assert checkpoint.spec.architecture == "Qwen3_5ForConditionalGeneration"
    assert checkpoint.unused
    assert all(name.startswith("model.visual.") for name in checkpoint.unused)
    tokens = torch.randint(0, 90, (23,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = theirs(tokens.unsqueeze(0)).logits[0]
    ours = driver.Driver(load_model(checkpoint, torch.float32, "cpu"))
    for chunks in ([23], [9, 1, 1, 12]):
        error = (ours.run(tokens.tolist(), chunks) - wanted).abs().max() / wanted.abs().max()
        assert error < 1e-4


def test_images_are_refused_by_name(pair: tuple[Path, Any]) -> None:
    llm = LLM(pair[0], device="cpu", max_model_len=64, max_num_seqs=2, skip_tokenizer_init=True)
    only = "its text model alone is served, which takes text and token ids"
    for token, name in ((90, "image_token_id"), (91, "video_token_id")):
        with pytest.raises(ValueError, match=f"prompt holds token {token}, the checkpoint's {name}; {only}"):
            llm.generate([[5, token, 7]], GREEDY)
    with pytest.raises(
        ValueError, match="multi_modal_data is given; models of text alone are served, and no images"
    ):
        llm.generate([{"prompt_token_ids": [5, 7], "multi_modal_data": {"image": object()}}], GREEDY)
    assert len(llm.generate([[5, 7]], GREEDY)[0].outputs[0].token_ids) == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"text_config": None},
            "layer_types or full_attention_interval is missing; it says what the layers are",
        ),
        ({"text_config": 5}, "text_config is 5; it must be an object"),
        ({"text_config": {"hidden_size": 0}}, "hidden_size is 0; it must be an integer in"),
        ({"image_token_id": -1}, "image_token_id is -1; it must be a token id"),
        (
            {"architectures": ["Qwen3_5ForSequenceClassification"]},
            "architectures is .*; supported is 'Qwen3_5ForConditionalGeneration'",
        ),
    ],
)
def test_what_is_refused_of_the_configuration(
    pair: tuple[Path, Any], tiny: Any, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    for file in pair[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tiny.edit_config(tmp_path, **fields)
    with pytest.raises(ValueError, match=rf"config\.json: {message}"):
        open_checkpoint(tmp_path)
