"""Checkpoint folders: which ones load, and how others are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import FAMILIES

from bateleur.runner.checkpoint.open import load_model, open_checkpoint, resolve_dtype
from bateleur.runner.checkpoint.tokenizer import load_tokenizer
from bateleur.runner.config.engine_config import EngineConfig
from bateleur.runner.config.state_options import StateOptions
from bateleur.runner.models.spec import AttentionLayer, MambaLayer, MlpLayer
from bateleur.runner.utils.tensor_files import list_tensors


@pytest.fixture
def folder(tiny_checkpoint: Any, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tiny checkpoint, to be damaged."""

    def get(family: str = "nemotron_h", **overrides: Any) -> Path:
        target = tmp_path / f"{family}-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tiny_checkpoint(family, **overrides)[0], target)
        return target

    return get


def rewrite(folder: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = folder / "model.safetensors"
    tensors = edit(load_file(file))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, file, {"format": "pt"})


def weights(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return load_model(open_checkpoint(folder), dtype, "cpu").weights()


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# --- what loads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_arrives_once(tiny_checkpoint: Any, tiny: Any, family: str) -> None:
    path, model = tiny_checkpoint(family)
    checkpoint = open_checkpoint(path)
    loaded = load_model(checkpoint, torch.float32, "cpu").weights()
    assert sum(w.numel() for w in loaded.values()) == tiny.num_weights(model)
    assert checkpoint.spec.architecture == type(model).__name__
    assert checkpoint.dtype == torch.float32
    assert not checkpoint.unused


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_load_as_one_file_does(tiny_checkpoint: Any, tiny: Any, tmp_path: Path, family: str) -> None:
    path, model = tiny_checkpoint(family)
    sharded = tiny.save(model, tmp_path / "sharded", max_shard_size="20KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    assert same(weights(sharded), weights(path))


def test_merged_projections(tiny_checkpoint: Any) -> None:
    path, model = tiny_checkpoint("llama", attention_bias=True, mlp_bias=True)
    loaded = weights(path)
    stored = dict(model.named_parameters())
    layer = "model.layers.1"
    qkv = [stored[f"{layer}.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(loaded["layers.2.qkv_proj"], torch.cat(qkv))
    up = [stored[f"{layer}.mlp.{part}_proj.bias"] for part in ("gate", "up")]
    assert torch.equal(loaded["layers.3.up_bias"], torch.cat(up))


def test_mamba_parameters_keep_float32(folder: Any) -> None:
    path = folder()
    stored = load_file(path / "model.safetensors")
    loaded = weights(path, torch.bfloat16)
    assert torch.equal(loaded["layers.0.A"], -stored["backbone.layers.0.mixer.A_log"].exp())
    assert torch.equal(loaded["layers.0.dt_bias"], stored["backbone.layers.0.mixer.dt_bias"])
    assert loaded["layers.0.conv"].dtype == torch.bfloat16
    assert loaded["layers.0.conv"].shape == stored["backbone.layers.0.mixer.conv1d.weight"][:, 0].shape


def test_stored_dtype_is_found_and_converted(folder: Any) -> None:
    path = folder()
    rewrite(path, lambda t: {n: w.bfloat16() if "A_log" not in n else w for n, w in t.items()})
    checkpoint = open_checkpoint(path)
    assert checkpoint.dtype == torch.bfloat16
    assert weights(path)["layers.0.in_proj"].dtype == torch.float32
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_dtype("auto", checkpoint, cpu) == torch.float32
    assert resolve_dtype("auto", checkpoint, cuda) == torch.bfloat16
    assert resolve_dtype("float16", checkpoint, cuda) == torch.float16
    assert resolve_dtype("bfloat16", checkpoint, cpu) == torch.bfloat16


def test_other_nemotron_h_names(folder: Any, tiny: Any) -> None:
    path, old = folder(), folder()
    assert any(name.startswith("backbone.") for name in load_file(path / "model.safetensors"))
    rewrite(old, lambda t: {n.replace("backbone.", "model.", 1): w for n, w in t.items()})
    rewrite(old, lambda t: {**t, "mtp.layers.0.norm.weight": torch.ones(3)})
    tiny.edit_config(old, layers_block_type=None, hybrid_override_pattern="M-*M-*")
    checkpoint = open_checkpoint(old)
    assert checkpoint.spec == open_checkpoint(path).spec
    assert [*checkpoint.unused] == ["mtp.layers.0.norm.weight"]
    assert same(weights(old), weights(path))
    tiny.edit_config(old, layers_block_type=["mamba", "mlp", "attention"] * 2)
    if tiny.transformers_before(5, 23):  # seen in 5.17
        with pytest.raises(ValueError, match="layers_block_type` contains invalid types"):
            open_checkpoint(old)
        return
    assert open_checkpoint(old).spec == checkpoint.spec


def test_both_layouts_of_experts(folder: Any) -> None:
    """transformers writes separate tensors of NemotronH's experts; in memory and other files, they are one tensor."""
    apart, fused = folder("nemotron_h-experts"), folder("nemotron_h-experts")
    for name in ("up_proj", "down_proj"):
        for layer in (1, 4):
            stem = f"backbone.layers.{layer}.mixer.experts."

            def fuse(t: dict[str, torch.Tensor], stem: str = stem, name: str = name) -> dict[str, torch.Tensor]:
                each = [t.pop(f"{stem}{e}.{name}.weight") for e in range(12)]
                return {**t, stem + name: torch.stack(each)}

            rewrite(fused, fuse)
    assert same(weights(apart), weights(fused))
    assert open_checkpoint(apart).spec == open_checkpoint(fused).spec

    old, new = folder("granitemoehybrid-experts"), folder("granitemoehybrid-experts")
    called = {
        "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
        "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
    }

    def rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for before, after in called.items():
            tensors = {name.replace(before, after): tensor for name, tensor in tensors.items()}
        return tensors

    rewrite(new, rename)
    assert same(weights(old), weights(new))


def test_convolutions_as_transformers_cuts_them(tiny_checkpoint: Any, tmp_path: Path) -> None:
    folder, model = tiny_checkpoint("olmo_hybrid")
    model.save_pretrained(tmp_path)
    first, of = "model.layers.0.linear_attn.q_conv1d.weight", "model.safetensors"
    assert len(load_file(tmp_path / of)[first]) == 64, "keys of 36 rows, values of 120"
    assert len(load_file(folder / of)[first]) == 36
    assert same(weights(tmp_path), weights(folder))


@pytest.mark.parametrize("field", ["mamba_ssm_cache_dtype", "mamba_ssm_dtype"])
@pytest.mark.parametrize(
    "family", ["nemotron_h", "qwen3_5_text", "qwen3_next", "bamba", "falcon_h1", "granitemoehybrid"]
)
def test_states_are_float32_unless_the_field_of_the_family_says_otherwise(
    folder: Any, tiny: Any, family: str, field: str
) -> None:
    """The two names of the field belong to NemotronH and to Qwen3.5; only NemotronH's may ask for another dtype."""
    path = folder(family)

    def dtypes() -> set[torch.dtype]:
        options = StateOptions.of(EngineConfig.of().cache, 0, torch.device("cpu"))
        return {each.ssm_dtype for each in options.specs(open_checkpoint(path).spec, torch.bfloat16)}

    assert dtypes() == {torch.float32}
    tiny.edit_config(path, **{field: "bfloat16"})
    own = (family, field) == ("nemotron_h", "mamba_ssm_cache_dtype")
    assert dtypes() == {torch.bfloat16 if own else torch.float32}


def test_both_prefixes_at_once_are_refused(folder: Any) -> None:
    path = folder()
    rewrite(path, lambda t: {**t, "model.norm_f.weight": t["backbone.norm_f.weight"]})
    with pytest.raises(ValueError, match=r"model\.norm_f\.weight is also in .* as backbone\.norm_f\.weight"):
        open_checkpoint(path)


def test_rotary_frequencies_in_the_file_are_not_needed(folder: Any) -> None:
    path = folder("llama")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(path, lambda t: {**t, name: torch.ones(12)})
    assert [*open_checkpoint(path).unused] == [name]


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_embeddings(folder: Any, tiny: Any, family: str) -> None:
    path = folder(family)
    tiny.edit_config(path, tie_word_embeddings=True)
    model = load_model(open_checkpoint(path), torch.float32, "cpu")
    assert model.lm_head is not model.embedding, "two different tensors in the file are two tensors"

    rewrite(path, lambda t: {n: w for n, w in t.items() if n != "lm_head.weight"})
    model = load_model(open_checkpoint(path), torch.float32, "cpu")
    assert model.lm_head is model.embedding
    assert "lm_head" not in model.weights()
    embedding = model.embedding.clone()

    rewrite(path, lambda t: {**t, "lm_head.weight": embedding})
    model = load_model(open_checkpoint(path), torch.float32, "cpu")
    assert model.lm_head is model.embedding, "equal tensors are held once"

    name = "backbone.embeddings.weight" if family.startswith(("nemotron_h", "mamba2")) else "model.embed_tokens.weight"
    rewrite(path, lambda t: {n: w for n, w in t.items() if n != name})
    model = load_model(open_checkpoint(path), torch.float32, "cpu")
    assert model.lm_head is model.embedding
    assert torch.equal(model.embedding, embedding)

    tiny.edit_config(path, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=f"missing   {name}"):
        open_checkpoint(path)


def test_end_of_text_ids_of_both_files(folder: Any, tiny: Any) -> None:
    path = folder("llama")
    tiny.edit_config(path, eos_token_id=[5, 7])
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert open_checkpoint(path).spec.eos_token_ids == (5, 7, 9)


def test_spec_of_each_kind(tiny_checkpoint: Any) -> None:
    bamba = open_checkpoint(tiny_checkpoint("bamba")[0]).spec
    assert [type(layer) for layer in bamba.layers[:4]] == [MambaLayer, MlpLayer, AttentionLayer, MlpLayer]
    attention = bamba.layers[2]
    assert isinstance(attention, AttentionLayer)
    assert attention.rope is not None
    assert (attention.head_dim, attention.rope.rotary_dim) == (16, 8)
    granite = open_checkpoint(tiny_checkpoint("granitemoehybrid")[0]).spec
    assert (granite.embedding_multiplier, granite.residual_multiplier, granite.logits_divisor) == (3.5, 0.37, 2.5)
    attention = granite.layers[2]
    assert isinstance(attention, AttentionLayer)
    assert (attention.scale, attention.rope) == (0.125, None)


def test_layers_of_kimi_linear_as_it_was_published(folder: Any, tiny: Any) -> None:
    path = folder("kimi_linear")
    wanted = open_checkpoint(path).spec
    own = {"full_attn_layers": [2, 4], "kda_layers": [1, 3], "head_dim": 12, "num_heads": 3}
    tiny.edit_config(
        path,
        layer_types=None,
        linear_attn_config=own | {"short_conv_kernel_size": 4},
        linear_head_dim=None,
        linear_num_heads=None,
        linear_conv_kernel_dim=None,
    )
    assert open_checkpoint(path).spec == wanted


# --- what is refused ---------------------------------------------------------------------------------------------


def test_all_faults_of_the_weights_in_one_message(folder: Any) -> None:
    path = folder()

    def damage(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        del tensors["backbone.layers.0.mixer.A_log"], tensors["backbone.layers.2.mixer.k_proj.weight"]
        tensors["backbone.layers.1.mixer.up_proj.weight"] = torch.ones(3, 4)
        tensors["backbone.layers.3.mixer.conv1d.weight"] = tensors["backbone.layers.3.mixer.conv1d.weight"][:, 0]
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int32)
        tensors["backbone.layers.9.mixer.gate.weight"] = torch.ones(2)
        return tensors

    rewrite(path, damage)
    with pytest.raises(ValueError, match="6 weights do not fit NemotronHForCausalLM") as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert str(path) in message
    for line in (
        "missing   backbone.layers.0.mixer.A_log (6,)",
        "missing   backbone.layers.2.mixer.k_proj.weight (32, 40)",
        "misshapen backbone.layers.1.mixer.up_proj.weight (3, 4), expected (56, 40)",
        "misshapen backbone.layers.3.mixer.conv1d.weight (168, 4), expected (168, 1, 4)",
        "dtype     lm_head.weight I32, expected one of F64, F32, F16, BF16",
        "surplus   backbone.layers.9.mixer.gate.weight (2,)",
    ):
        assert line in message


def test_experts_that_are_missing_or_too_many(folder: Any) -> None:
    path = folder("nemotron_h-experts")
    experts = "backbone.layers.1.mixer.experts"

    def damage(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        del tensors[f"{experts}.7.up_proj.weight"], tensors["backbone.layers.4.mixer.gate.weight"]
        tensors[f"{experts}.12.up_proj.weight"] = tensors[f"{experts}.3.up_proj.weight"]
        tensors["backbone.layers.4.mixer.experts.up_proj"] = torch.ones(13, 24, 40)
        return tensors

    rewrite(path, damage)
    with pytest.raises(ValueError, match="weights do not fit NemotronHForCausalLM") as caught:
        open_checkpoint(path)
    lines = str(caught.value).splitlines()
    assert str(path) in lines[0]
    for line in (
        f"  missing   {experts}.7.up_proj.weight (24, 40)",
        "  missing   backbone.layers.4.mixer.gate.weight (12, 40)",
        "  misshapen backbone.layers.4.mixer.experts.up_proj (13, 24, 40), expected (12, 24, 40)",
        f"  surplus   {experts}.12.up_proj.weight (24, 40)",
        "  surplus   backbone.layers.4.mixer.experts.0.up_proj.weight (24, 40)",
    ):
        assert line in lines


def test_a_bias_the_configuration_denies_is_surplus(folder: Any, tiny: Any) -> None:
    path = folder("llama", attention_bias=True)
    tiny.edit_config(path, attention_bias=False)
    with pytest.raises(ValueError, match=r"20 weights do not fit(.|\n)*surplus   model.layers.4.self_attn.v_proj.bias"):
        open_checkpoint(path)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_truncated_weights(folder: Any, keep: int) -> None:
    file = folder() / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors: is no complete safetensors file"):
        open_checkpoint(file.parent)


def test_headers_of_files_larger_than_memory(tmp_path: Path) -> None:
    size = 1 << 42  # of a hole in a file
    header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    assert list_tensors(tmp_path)["w"].shape == (size // 4,)


def test_shards_that_do_not_match_their_index(tiny_checkpoint: Any, tiny: Any, tmp_path: Path) -> None:
    path = tiny.save(tiny_checkpoint("llama")[1], tmp_path / "sharded", max_shard_size="20KB")
    index = path / "model.safetensors.index.json"
    original = json.loads(index.read_text())
    shards = sorted(set(original["weight_map"].values()))

    def write(weight_map: Any) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))

    write({**original["weight_map"], "model.extra": shards[0]})
    with pytest.raises(ValueError, match=rf"names tensors that are missing: model.extra in {shards[0]}"):
        open_checkpoint(path)
    write({**original["weight_map"], "model.extra": "../elsewhere.safetensors"})
    with pytest.raises(ValueError, match="is not the name of a file in this folder"):
        open_checkpoint(path)
    write(["a"])
    with pytest.raises(ValueError, match="weight_map must map"):
        open_checkpoint(path)
    index.write_text("{")
    with pytest.raises(ValueError, match=r"index\.json: cannot be read as JSON"):
        open_checkpoint(path)
    write(original["weight_map"])
    for name in shards[:2]:
        (path / name).unlink()
    with pytest.raises(ValueError, match=f"names shards that are missing: {shards[0]}, {shards[1]}"):
        open_checkpoint(path)


def test_folders_that_are_no_checkpoints(folder: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere: is no folder"):
        open_checkpoint(tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"empty: has no config\.json"):
        open_checkpoint(empty)
    for text in ("{", "[]", "\x00", '"text"'):
        (empty / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json: (cannot be read as JSON|holds)"):
            open_checkpoint(empty)
    path = folder("llama")
    with pytest.raises(ValueError, match=r"config\.json: is no folder"):
        open_checkpoint(path / "config.json")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="only safetensors weights can be read"):
        open_checkpoint(path)


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "qwen3_next"])
def test_a_folder_without_a_tokenizer(tiny_checkpoint: Any, family: str) -> None:
    """transformers makes an empty tokenizer for Qwen's models."""
    checkpoint = open_checkpoint(tiny_checkpoint(family)[0])
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        load_tokenizer(checkpoint)


def test_transformers_is_imported_late(modules_of: Callable[[str], list[str]]) -> None:
    assert "transformers" not in modules_of("runner.diagnose.checkpoint_facts")
