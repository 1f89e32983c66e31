"""The text model of a file with a vision model: only the text model is read, and images are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bateleur.runner import LLM, SamplingParams
from bateleur.runner.checkpoint.open import Checkpoint, load_model, open_checkpoint

SEEN = {
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "image_size": 4,
    "patch_size": 2,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "patch_size": 2,
}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def made(tiny: Any, folder: Path, kind: str, text: str, **fields: Any) -> tuple[Path, Any]:
    """A folder with a text model of the tiny sizes of `text`, and transformers' model of it."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(kind, text_config=tiny.FAMILIES[text], **fields)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    tiny.randomise(model)
    return tiny.save(model, folder), model


@pytest.fixture(scope="module")
def pair(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    vision = VISION | {"out_hidden_size": tiny.FAMILIES["qwen3_5_text"]["hidden_size"]}
    tokens = {"image_token_id": 90, "video_token_id": 91}
    folder = tmp_path_factory.mktemp("larger")
    return made(tiny, folder, "qwen3_5", "qwen3_5_text", vision_config=vision, **tokens)


def test_logits_are_those_of_the_text_model(pair: tuple[Path, Any], driver: Any) -> None:
    checkpoint = compared(*pair, driver)
    assert checkpoint.spec.architecture == "Qwen3_5ForConditionalGeneration"
    assert checkpoint.unused
    assert all(name.startswith("model.visual.") for name in checkpoint.unused)


@pytest.mark.parametrize("published", [True, False])
def test_logits_of_gemma_in_both_layouts(tiny: Any, tmp_path: Path, driver: Any, published: bool) -> None:
    """transformers saves the published names; other tools save the names of its modules."""
    tokens = {"image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92, "mm_tokens_per_image": 4}
    folder, theirs = made(tiny, tmp_path, "gemma3", "gemma3_text", vision_config=SEEN, **tokens)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    assert any(name.startswith("language_model.model.layers.") for name in tensors)
    if not published:
        rest = "model.language_model."
        save_file({name.replace("language_model.model.", rest): t for name, t in tensors.items()}, file)
    checkpoint = compared(folder, theirs, driver)
    assert checkpoint.spec.architecture == "Gemma3ForConditionalGeneration"
    assert {name.partition(".")[0] for name in checkpoint.unused} == {"vision_tower", "multi_modal_projector"}
    assert checkpoint.spec.foreign_tokens == ((90, "image_token_index"),)


def compared(folder: Path, theirs: Any, driver: Any) -> Checkpoint:
    """Compare logits of a folder with those of transformers' model of it."""
    checkpoint = open_checkpoint(folder)
    tokens = torch.randint(0, 90, (23,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = theirs(tokens.unsqueeze(0)).logits[0]
    ours = driver.Driver(load_model(checkpoint, torch.float32, "cpu"))
    for chunks in ([23], [9, 1, 1, 12]):
        error = (ours.run(tokens.tolist(), chunks) - wanted).abs().max() / wanted.abs().max()
        assert error < 1e-4
    return checkpoint


def test_images_are_refused_by_name(pair: tuple[Path, Any]) -> None:
    llm = LLM(pair[0], device="cpu", max_model_len=64, max_num_seqs=2, skip_tokenizer_init=True)
    only = "its text model alone is served, which takes text and token ids"
    for token, name in ((90, "image_token_id"), (91, "video_token_id")):
        with pytest.raises(ValueError, match=f"prompt holds token {token}, the checkpoint's {name}; {only}"):
            llm.generate([[5, token, 7]], GREEDY)
    with pytest.raises(ValueError, match="multi_modal_data is given; models of text alone are served, and no images"):
        llm.generate([{"prompt_token_ids": [5, 7], "multi_modal_data": {"image": object()}}], GREEDY)
    assert len(llm.generate([[5, 7]], GREEDY)[0].outputs[0].token_ids) == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_config": None}, "layer_types or full_attention_interval is missing; it says what the layers are"),
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
