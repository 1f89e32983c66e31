"""Quantised checkpoints: weights by the formulas of their formats, in every family, whole and cut for ranks."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import quantize
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from bateleur.metadata.native import unavailable_reason
from bateleur.runner.checkpoint.open import describe_model, load_model, open_checkpoint
from bateleur.runner.config.engine_config import QUANTIZATION_METHODS
from bateleur.runner.diagnose.checkpoint_facts import checkpoint_table, describe_checkpoint
from bateleur.runner.diagnose.step_costs import default_cache_costs, step_costs
from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.memory_report import packed_change, quantized_parts, weight_sizes
from bateleur.runner.quantization.config import READERS, check_method, reader_of
from bateleur.runner.quantization.module import find_modules
from bateleur.runner.spec_decode.draft_head import DraftHead
from bateleur.runner.utils.tensor_files import list_tensors

Folders = tuple[Path, Path]
MODELS = quantize.MODELS


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Folders]:
    """`folders(model, format)`: a quantised checkpoint and its dequantised copy; Qwen's have an MTP head."""
    return quantize.Checkpoints(tmp_path_factory)


def loaded(folder: Path, dtype: torch.dtype = torch.float32, dequantize: bool = False, **ranks: Any) -> HybridDecoder:
    return load_model(open_checkpoint(folder, dequantize=dequantize), dtype, "cpu", **ranks)


def matrices(model: Any) -> dict[str, Tensor]:
    """All weights in the dtype of the model, whatever they are kept as."""
    plain = {name: each for name, each in model.weights().items() if name.rpartition(".")[2] not in PARTS}
    return plain | {name: each.weight for name, each in model.matrices.items()}


PARTS = ("codes", "scales", "zeros", "factors", "index", "plain")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("model", "kind"), quantize.CASES)
def test_weights_are_those_of_the_formula(
    folders: Callable[[str, str], Folders], model: str, kind: str, dtype: torch.dtype
) -> None:
    """Of the model and of its MTP head, kept quantised or converted, bit for bit."""
    quantised, plain = folders(model, kind)
    wanted = matrices(loaded(plain, dtype))
    kept = loaded(quantised, dtype)
    converted = loaded(quantised, dtype, dequantize=True)
    assert any(each.stored is None for each in kept.matrices.values())
    for found in (matrices(kept), matrices(converted)):
        assert found.keys() == wanted.keys()
        for name, weight in wanted.items():
            assert torch.equal(found[name], weight), name
    if model == "qwen":
        heads = []
        for folder, dequantize in ((plain, False), (quantised, False), (quantised, True)):
            checkpoint = open_checkpoint(folder, dequantize=dequantize)
            heads.append(DraftHead.open("mtp", loaded(folder, dtype), checkpoint=checkpoint).head)
        for head in heads[1:]:
            for name, weight in matrices(heads[0]).items():
                assert torch.equal(matrices(head)[name], weight), name


@pytest.mark.parametrize(("model", "kind"), quantize.CASES)
def test_ranks_have_their_parts(folders: Callable[[str, str], Folders], model: str, kind: str) -> None:
    """Rows and columns of codes, and the scales that these need; experts whole, for data-parallel ranks."""
    quantised, plain = folders(model, kind)
    for name in ("ranks", "data_ranks"):
        for rank in range(2):
            ranks = {name: Ranks(rank, 2, "none")}
            wanted = matrices(loaded(plain, **ranks))
            for dequantize in (False, True):
                found = matrices(loaded(quantised, dequantize=dequantize, **ranks))
                for weight, each in wanted.items():
                    assert torch.equal(found[weight], each), (name, rank, weight)


@pytest.mark.parametrize(
    "kind", ["fp8 blocks", "pack-quantized with zeros", "gptq v2 act order", "nvfp4-pack-quantized"]
)
def test_ranks_cut_blocks_and_groups_anywhere(tmp_path: Path, tiny: ModuleType, kind: str) -> None:
    """On 2, 4 and 8 ranks, of which none ends with a block or a group (SGLang 10852)."""
    sizes = tiny.EVEN["llama"] | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    plain = tiny.save(tiny.make_model("llama", **sizes), tmp_path / "plain")
    quantised, dequantised = quantize.quantise(plain, tmp_path, kind)
    for count in (2, 4, 8):
        for rank in range(count):
            ranks = Ranks(rank, count, "none")
            wanted = matrices(loaded(dequantised, ranks=ranks))
            assert wanted["layers.0.o_proj"].shape == (64, 64 // count)
            for dequantize in (False, True):
                found = matrices(loaded(quantised, dequantize=dequantize, ranks=ranks))
                for weight, each in wanted.items():
                    assert torch.equal(found[weight], each), (count, rank, weight)


def edited(folder: Path, to: Path, tensors: Callable[[dict[str, Tensor]], object], **fields: Any) -> Path:
    """A copy of a quantised checkpoint whose tensors, or fields of `quantization_config`, are others."""
    shutil.copytree(folder, to)
    stored = load_file(to / "model.safetensors")
    tensors(stored)
    save_file(stored, to / "model.safetensors")
    config = json.loads((to / "config.json").read_text())
    config["quantization_config"] |= fields
    (to / "config.json").write_text(json.dumps(config))
    return to


Q = "model.layers.1.self_attn.q_proj."
FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("fp8 blocks", {"quant_method": "bitsandbytes"}, "use an FP8 or W4A16 checkpoint of the model"),
    ("fp8 blocks", {"quant_method": "mxfp8"}, "MXFP8 is not read yet"),
    ("fp8 blocks", {"quant_method": "quark"}, "quark is not read yet"),
    ("fp8 blocks", {"quant_method": "hqq"}, "'hqq'; nothing here reads it. Supported are fp8, compressed-tensors"),
    ("fp8 blocks", {"fmt": "e5m2"}, "fmt is 'e5m2'; supported is 'e4m3'"),
    ("awq", {"version": "gemv"}, "version is 'gemv'; supported is 'gemm'"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; supported are gptq, gptq_v2"),
    ("gptq", {"pack_dtype": "int16"}, "pack_dtype is 'int16'"),
    ("modelopt FP8", {"quant_algo": "NVFP4_AWQ"}, "quant_algo is 'NVFP4_AWQ'; supported are FP8"),
    ("modelopt mixed", {"quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}}}, "quant_algo is 'W4A8_AWQ'"),
    ("pack-quantized", {"transform_config": {"a": 1}}, "transform_config is set; rotated weights"),
    ("pack-quantized", {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config is set; sparse weights"),
    ("pack-quantized", {"format": "marlin-24"}, "format is 'marlin-24'; supported are float-quantized"),
    ("pack-quantized", {"quantization_status": "frozen"}, "quantization_status is 'frozen'; it must be 'compressed'"),
    (
        "pack-quantized",
        {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 3}}}},
        "num_bits is 3; supported for packed weights are 4 and 8",
    ),
    ("fp8 blocks", {"weight_block_size": [128]}, "weight_block_size is [128]; it must be two positive integers"),
    ("fp8 blocks", {"weight_block_size": [0, 128]}, "weight_block_size is [0, 128]; it must be two positive"),
    ("fp8 blocks", {"weight_block_size": {}}, "weight_block_size is {}; it must be two positive integers"),
    ("fp8 blocks", {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'; it must be a list"),
    ("fp8 blocks", {"ignored_layers": [None]}, "ignored_layers is [None]; it must be a list of names of modules"),
    ("awq", {"group_size": []}, "group_size is []; it must be an integer"),
    ("gptq", {"group_size": "many"}, "group_size is 'many'; it must be an integer"),
    ("gptq", {"sym": "yes"}, "sym is 'yes'; it must be true or false"),
    ("gptq", {"dynamic": ["a"]}, "dynamic is ['a']; it must be an object"),
    ("gptq", {"dynamic": {"a": 3}}, "dynamic['a'] is 3; it must be an object"),
    ("gptq", {"dynamic": {"a(": {}}}, "'a(' is no regular expression"),
    ("gptq", {"quant_method": "auto-round", "packing_format": "auto_round:hpu"}, "packing_format is 'auto_round:hpu'"),
    ("gptq", {"quant_method": "auto-round", "extra_config": {"a": {"bits": "16"}}}, "bits is '16'; it must be an int"),
    ("modelopt mixed", {"quantized_layers": ["a"]}, "quantized_layers is ['a']; it must be an object"),
    ("pack-quantized", {"config_groups": []}, "config_groups is []; it must be an object"),
    ("pack-quantized", {"config_groups": {"a": ["Linear"]}}, "config_groups['a'] is ['Linear']; it must be an object"),
    ("pack-quantized", {"config_groups": {"a": {"weights": 4}}}, "weights is 4; it must be an object"),
    ("pack-quantized", {"config_groups": {"a": {"weights": {"strategy": "row"}}}}, "strategy is 'row'; it must be one"),
    ("pack-quantized", {"config_groups": {"a": {"weights": {"block_structure": "8"}}}}, "block_structure is '8'; it"),
    ("pack-quantized", {"config_groups": {"a": {"targets": ["lm_head"]}}}, "no group of quantization_config names it"),
    ("pack-quantized", {"sparsity_config": "dense"}, "sparsity_config is 'dense'; it must be an object"),
]


@pytest.mark.parametrize(("kind", "fields", "message"), FIELDS)
def test_what_is_not_supported_is_refused_by_name(
    folders: Callable[[str, str], Folders], tmp_path: Path, kind: str, fields: dict[str, Any], message: str
) -> None:
    folder = edited(folders("qwen", kind)[0], tmp_path / "edited", lambda tensors: None, **fields)
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        open_checkpoint(folder)
    assert str(folder) in str(refused.value)


def _put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


def _drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


TENSORS: list[tuple[str, Callable[[dict[str, Tensor]], object], str]] = [
    ("fp8 blocks", _drop(f"{Q}weight_scale_inv"), f"{Q[:-1]}: is quantised, but has no weight_scale"),
    ("fp8 blocks", _put("model.layers.1.self_attn.weight_scale_inv", torch.ones(1)), "surplus   model.layers.1.self"),
    ("fp8 blocks", _put(f"{Q}weight", torch.ones(3, 64).to(torch.float8_e4m3fn)), f"misshapen {Q[:-1]} (3, 64)"),
    ("fp8 blocks", _put(f"{Q}weight_scale_inv", torch.ones(2, 2)), "in blocks of (24, 24) needs"),
    ("gptq", _drop(f"{Q}scales"), f"{Q[:-1]}: is quantised, but has no scales"),
    ("modelopt NVFP4", _drop(f"{Q}weight_scale_2"), "U8 with weight_scale_2"),
    ("modelopt NVFP4", _put(f"{Q}pre_quant_scale", torch.ones(64)), "activations would have to be scaled by it"),
    ("modelopt NVFP4", _put(f"{Q}weight_scale", torch.ones(128, 5).byte()), "NVFP4 needs F8_E4M3"),
    ("awq", _put(f"{Q}qweight", torch.ones(64, 3).int()), "of 4 bits need I32 words, 8 rows each"),
    ("fp8 blocks", _put(f"{Q}weight.absmax", torch.ones(3)), "bitsandbytes is not supported"),
    ("fp8 blocks", _put(f"{Q}weight_scale", torch.ones(1)), "weight_scale: is F32 (1,); quant_method 'fp8' does not"),
    ("fp8 blocks", _put(f"{Q}weight_zero_point", torch.ones(1).int()), "quant_method 'fp8' does not read it beside"),
    # e8m0, which must not be read as numbers (omlx 2159)
    ("fp8 blocks", _put(f"{Q}weight_scale_inv", torch.ones(6, 3).byte()), "its dtype must be one of F32, F16, BF16"),
    (
        "fp8 blocks",
        _put(f"{Q}weight_scale_inv", torch.ones(6, 3).to(torch.float8_e8m0fnu)),
        "weight_scale_inv: is F8_E8M0 (6, 3); its dtype must be one of F32, F16, BF16",
    ),
    ("fp8 blocks", _put(f"{Q}weight_scale_inv", torch.ones(3, 6)), "in blocks of (24, 24) needs (6, 3)"),
    ("fp8 blocks", _put(f"{Q}weight", torch.ones(64).to(torch.float8_e4m3fn)), "it must have rows and columns"),
    ("float-quantized channels", _put(f"{Q}weight_scale", torch.ones(2, 64)), "or one for each of 128 rows"),
    ("gptq", _put(f"{Q}qweight", torch.ones(8).int()), "q_proj.qweight: is I32 (8,); it must have rows and columns"),
    ("gptq", _put(f"{Q}scales", torch.ones(()).half()), "q_proj.scales: is F16 (); it must have rows and columns"),
    ("gptq with zeros", _put(f"{Q}qzeros", torch.ones(4, 16)), "q_proj.qzeros: is F32 (4, 16); packed codes must"),
    ("awq", _put(f"{Q}qzeros", torch.ones(3, 16).int()), "its zeros are (128, 3) torch.uint8; they must be (128, 4)"),
    ("awq", _put(f"{Q}qzeros", torch.ones(4, 16).long()), "q_proj.qzeros: is I64 (4, 16); packed codes must be I32"),
    ("gptq v2 act order", _put(f"{Q}g_idx", torch.full((64,), 4).int()), "g_idx must be in [0, 3]"),
    ("gptq v2 act order", _put(f"{Q}g_idx", torch.full((64,), -1).int()), "g_idx must be in [0, 3]"),
    (
        "gptq v2 act order",
        _put(f"{Q}g_idx", torch.ones(8).int()),
        "g_idx: is I32 (8,); it must hold the group of each of 64 columns",
    ),
    ("gptq", _put(f"{Q}g_idx", torch.ones(()).int()), "g_idx: is I32 (); it must hold the group of each of 64 columns"),
    ("gptq", _put(f"{Q}g_idx", torch.ones(0).int()), "g_idx: is I32 (0,); it must hold the group of each of 64"),
    ("gptq v2 act order", _drop(f"{Q}g_idx"), f"{Q[:-1]}: has no g_idx, which desc_act"),
    ("gptq", _put(f"{Q}qweight", torch.ones(1, 8, 128).int()), "q_proj.qweight: is I32 (1, 8, 128); it must have rows"),
    ("awq", _put(f"{Q}qweight", torch.ones(1, 64, 16).int()), "q_proj.qweight: is I32 (1, 64, 16); it must have rows"),
    ("pack-quantized with zeros", _drop(f"{Q}weight_zero_point"), f"{Q[:-1]}: has no weight_zero_point, but symm"),
    ("int-quantized", _drop(f"{Q}weight_zero_point"), f"{Q[:-1]}: has no weight_zero_point, but symmetric is false"),
    ("pack-quantized", _put(f"{Q}weight_shape", torch.tensor([64, 64])), "is I32 (128, 8); weight_shape is"),
    ("pack-quantized", _put(f"{Q}weight_shape", torch.ones(0).int()), "weight_shape is ()"),
    ("pack-quantized with zeros", _put(f"{Q}weight_zero_point", torch.ones(32, 4).int()), "must hold 128 rows"),
    ("pack-quantized with zeros", _put(f"{Q}weight_zero_point", torch.ones(128, 4).char()), "packed codes must be I32"),
    ("pack-quantized", _put(f"{Q}weight_scale", torch.ones(64, 4)), "its scales are (64, 4) torch.float32; they must"),
    ("nvfp4-pack-quantized", _put(f"{Q}weight_global_scale", torch.zeros(1)), "divided by, so it must be positive"),
    ("nvfp4-pack-quantized", _put(f"{Q}weight_global_scale", torch.ones(0)), "1 matrices need as many"),
    ("nvfp4-pack-quantized", _put(f"{Q}weight_global_scale", torch.ones(1).byte()), "its dtype must be one of F32"),
]


@pytest.mark.parametrize(("kind", "change", "message"), TENSORS)
def test_tensors_that_do_not_fit_are_named(
    folders: Callable[[str, str], Folders], tmp_path: Path, kind: str, change: Any, message: str
) -> None:
    folder = edited(folders("qwen", kind)[0], tmp_path / "edited", change)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_model(open_checkpoint(folder), torch.float32, "meta")


@pytest.mark.parametrize("kind", ["fp8 blocks", "nvfp4-pack-quantized", "gptq v2 act order"])
def test_tensors_of_a_module_may_lie_in_several_files(
    folders: Callable[[str, str], Folders], tmp_path: Path, kind: str
) -> None:
    """In three files, by turns; without one of them in the index the error names a module."""
    quantised, plain = folders("qwen", kind)
    shutil.copytree(quantised, tmp_path / "shards")
    (tmp_path / "shards" / "model.safetensors").unlink()
    tensors = sorted(load_file(quantised / "model.safetensors").items())
    files = {f"{i}.safetensors": dict(tensors[i::3]) for i in range(3)}
    for file, held in files.items():
        save_file(held, tmp_path / "shards" / file)
    index = {name: file for file, held in files.items() for name in held}
    (tmp_path / "shards" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    found = matrices(loaded(tmp_path / "shards"))
    for name, weight in matrices(loaded(plain)).items():
        assert torch.equal(found[name], weight), name
    index = {name: file for name, file in index.items() if file != "1.safetensors"}
    (tmp_path / "shards" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ValueError, match=r"model\.layers\.0\.\S+:? (is|\(\d)"):
        loaded(tmp_path / "shards")


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("fp8 blocks", f"{Q}weight_scale_inv", torch.inf),
        ("fp8 blocks", f"{Q}weight_scale_inv", torch.nan),
        ("fp8 blocks", f"{Q}weight", torch.nan),
        ("gptq", f"{Q}scales", torch.inf),
        ("modelopt NVFP4", f"{Q}weight_scale", torch.nan),
        ("modelopt NVFP4", f"{Q}weight_scale_2", torch.inf),
    ],
)
def test_damaged_numbers_are_named(
    folders: Callable[[str, str], Folders], tmp_path: Path, kind: str, name: str, value: float
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        wide = tensors[name].float()
        tensors[name] = wide.view(-1).index_fill(0, torch.tensor([0]), value).view(wide.shape).to(tensors[name].dtype)

    folder = edited(folders("qwen", kind)[0], tmp_path / "edited", change)
    with pytest.raises(ValueError, match=rf"{re.escape(name)}: holds NaN"):
        loaded(folder)


def test_a_tensor_of_zeros_may_have_an_infinite_divisor(folders: Callable[[str, str], Folders], tmp_path: Path) -> None:
    """compressed-tensors writes it for experts that no token reached."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}weight_packed"].zero_()
        tensors[f"{Q}weight_global_scale"].fill_(torch.inf)

    folder = edited(folders("qwen", "nvfp4-pack-quantized")[0], tmp_path / "edited", change)
    for dequantize in (False, True):
        weight = matrices(loaded(folder, dequantize=dequantize))["layers.2.qkv_proj"]
        assert not weight[:128].any()
        assert weight.isfinite().all()


@pytest.mark.parametrize("kind", ["nvfp4-pack-quantized", "modelopt NVFP4"])
def test_a_block_scale_of_zero_is_a_block_of_zeros(
    folders: Callable[[str, str], Folders], tmp_path: Path, kind: str
) -> None:
    """Old exporters let the scale of tiny weights underflow (Model-Optimizer PR 1397)."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}weight_scale"].view(torch.uint8)[:, 1] = 0

    quantised, plain = folders("qwen", kind)
    folder = edited(quantised, tmp_path / "edited", change)
    wanted = matrices(loaded(plain))["layers.2.qkv_proj"].clone()
    assert wanted[:128, 16:32].any()
    wanted[:128, 16:32] = 0
    for dequantize in (False, True):
        assert torch.equal(matrices(loaded(folder, dequantize=dequantize))["layers.2.qkv_proj"], wanted)


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_zero_are_stored_as_the_largest_code(tmp_path: Path, bits: int) -> None:
    """GPTQ version 1 stores one less, so that 0 wraps: one is added to each code, not to a word (GPTQModel 2350)."""
    w = torch.rand(32, 64)
    w[1::2] -= 0.5
    tensors, wanted = quantize.gptq(w, bits, symmetric=False)
    stored = tensors["qzeros"].view(torch.uint8)
    assert (stored & 15 == 15 if bits == 4 else stored == 255).any()
    save_file({f"x.{part}": each for part, each in tensors.items()}, tmp_path / "model.safetensors")
    module = find_modules(list_tensors(tmp_path))[0]["x.weight"]
    reader = reader_of({"quant_method": "gptq", "bits": bits, "group_size": quantize.GROUP, "sym": False})
    assert torch.equal(reader.load(module).dequantize(), wanted)


def test_the_file_wins_over_the_ignore_list(folders: Callable[[str, str], Folders], tmp_path: Path) -> None:
    quantised, plain = folders("qwen", "fp8 blocks")
    folder = edited(quantised, tmp_path / "edited", lambda tensors: None, modules_to_not_convert=["self_attn.q_proj"])
    with pytest.warns(UserWarning, match=r"2 modules that quantization_config excludes are quantised .* as \S*q_proj"):
        found = matrices(loaded(folder))
    for name, weight in matrices(loaded(plain)).items():
        assert torch.equal(found[name], weight), name


def test_a_group_for_one_module_is_not_that_of_all_others(
    folders: Callable[[str, str], Folders], tmp_path: Path
) -> None:
    quantised, plain = folders("qwen", "pack-quantized")
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    config = json.loads((quantised / "config.json").read_text())["quantization_config"]["config_groups"]
    config = {"a": {"targets": ["lm_head"], "weights": weights}, **config}
    found = matrices(loaded(edited(quantised, tmp_path / "edited", lambda tensors: None, config_groups=config)))
    for name, weight in matrices(loaded(plain)).items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("kind", ["fp8 blocks", "modelopt NVFP4", "gptq with zeros"])
@pytest.mark.parametrize("model", MODELS)
def test_any_matrix_may_be_quantised_or_plain(
    folders: Callable[[str, str], Folders], tmp_path: Path, tiny: ModuleType, model: str, kind: str
) -> None:
    """Embeddings are quantised, tied or not, and `v_proj` and `lm_head` are plain beside quantised neighbours."""
    plain = re.compile(quantize.PLAIN.pattern.replace("embed|", "v_proj|"))
    for tied in (False, True):
        found, wanted = quantize.quantise(folders(model, kind)[1], tmp_path / str(tied), kind, plain)
        for each in (found, wanted) if tied else ():
            tiny.edit_config(each, tie_word_embeddings=True)
            tensors = load_file(each / "model.safetensors")
            del tensors["lm_head.weight"]
            save_file(tensors, each / "model.safetensors")
        stored = {each.dtype for name, each in load_file(found / "model.safetensors").items() if ".embed" in name}
        assert stored & {torch.float8_e4m3fn, torch.uint8, torch.int32}
        model_of = {each: matrices(loaded(found, dequantize=each)) for each in (False, True)}
        for name, weight in matrices(loaded(wanted)).items():
            assert torch.equal(model_of[False][name], weight), name
            assert torch.equal(model_of[True][name], weight), name


def test_zero_points_of_symmetric_files_are_not_used(folders: Callable[[str, str], Folders], tmp_path: Path) -> None:
    """Whether files have those of version 1 or 2; others with a warning."""
    quantised, plain = folders("qwen", "gptq")
    wanted = matrices(loaded(plain))["layers.2.qkv_proj"]
    for stored in (0x77777777, 0x88888888 - (1 << 32), 0x12345678):
        words = torch.full((4, 16), stored).int()
        folder = edited(quantised, tmp_path / str(stored), _put(f"{Q}qzeros", words))
        with pytest.warns(UserWarning, match="sym is true") if stored == 0x12345678 else nullcontext():
            assert torch.equal(matrices(loaded(folder))["layers.2.qkv_proj"], wanted)


def test_fp8_may_have_zero_points_of_zero(folders: Callable[[str, str], Folders], tmp_path: Path) -> None:
    """Old versions of compressed-tensors write them."""
    quantised, plain = folders("qwen", "float-quantized channels")
    name = f"{Q}weight_zero_point"
    zeros = torch.zeros(128, 1).to(torch.float8_e4m3fn)
    found = matrices(loaded(edited(quantised, tmp_path / "zeros", _put(name, zeros))))
    for each, weight in matrices(loaded(plain)).items():
        assert torch.equal(found[each], weight), each
    with pytest.raises(ValueError, match=r"weight_zero_point: .* no zero point other than 0"):
        loaded(edited(quantised, tmp_path / "ones", _put(name, torch.ones(128, 1).to(torch.float8_e4m3fn))))


def test_auto_round_stores_zeros_less_one_by_default(folders: Callable[[str, str], Folders], tmp_path: Path) -> None:
    quantised, plain = folders("qwen", "gptq with zeros")
    found = matrices(loaded(edited(quantised, tmp_path / "edited", lambda tensors: None, quant_method="auto-round")))
    for name, weight in matrices(loaded(plain)).items():
        assert torch.equal(found[name], weight), name


def test_auto_round_has_modules_of_other_settings(folders: Callable[[str, str], Folders], tmp_path: Path) -> None:
    """`extra_config` names each module whose settings differ, here one with zero points."""
    router = "model.layers.1.mlp.shared_expert"  # not the prefix of names
    extra = {router: {"sym": True}, Q[:-1]: {"sym": False}, "layers[.]1[.]mlp": {"sym": False}}
    fields = {"sym": True, "extra_config": extra}
    quantised, plain = folders("qwen", "auto-round")
    with pytest.warns(UserWarning, match="sym is true, but qzeros"):
        found = matrices(loaded(edited(quantised, tmp_path / "edited", lambda tensors: None, **fields)))
    wanted = matrices(loaded(plain))
    rows = slice(0, 64)  # of the query's 128 rows
    assert torch.equal(found["layers.2.qkv_proj"][rows], wanted["layers.2.qkv_proj"][rows])
    for name in ("layers.3.down_proj", "layers.3.shared_down_proj"):
        assert torch.equal(found[name], wanted[name])
    assert not torch.equal(found["layers.2.o_proj"], wanted["layers.2.o_proj"])


def test_fused_experts_of_three_dimensions(folders: Callable[[str, str], Folders], tmp_path: Path) -> None:
    """Scales with the names of transformers 5, for parameters without `.weight`."""
    quantised, plain = folders("qwen", "float-quantized channels")
    folders_of = {}
    for name, folder in (("quantised", quantised), ("plain", plain)):
        shutil.copytree(folder, tmp_path / name)
        tensors = load_file(tmp_path / name / "model.safetensors")
        for stem in {each.partition(".experts.")[0] for each in tensors if ".experts." in each}:
            for ours, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
                for end, to in (("weight", ""), ("weight_scale", "_weight_scale")):
                    each = [[tensors.pop(f"{stem}.experts.{e}.{part}.{end}", None) for part in parts] for e in range(4)]
                    if each[0][0] is not None:
                        view = [torch.cat([part.view(torch.uint8) for part in one]) for one in each]
                        tensors[f"{stem}.experts.{ours}{to}"] = torch.stack(view).view(each[0][0].dtype)
        save_file(tensors, tmp_path / name / "model.safetensors")
        folders_of[name] = tmp_path / name
    wanted, found = (matrices(loaded(folders_of[name])) for name in ("plain", "quantised"))
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight), name
    kept = loaded(folders_of["quantised"])
    assert kept.matrices["layers.1.up_proj"].quantized is not None  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["fp8 blocks", "float-quantized channels"])
def test_multipliers_are_folded_before_the_only_rounding(tmp_path: Path, tiny: ModuleType, kind: str) -> None:
    """Falcon-H1 in bfloat16: kept or dequantised, a weight is the same."""
    plain = tiny.save(tiny.make_model("falcon_h1", **tiny.EVEN["falcon_h1"]), tmp_path / "plain")
    quantised, _ = quantize.quantise(plain, tmp_path, kind)
    for ranks in ({}, {"ranks": Ranks(1, 2, "none")}):
        kept, exact = (loaded(quantised, dtype, **ranks) for dtype in (torch.bfloat16, torch.float32))
        wanted, rounded = matrices(kept), matrices(exact)
        for name, weight in matrices(loaded(quantised, torch.bfloat16, dequantize=True, **ranks)).items():
            assert torch.equal(weight, wanted[name]), name
            if name in kept.matrices:
                assert torch.equal(weight, rounded[name].to(weight.dtype)), name


def test_quantised_modules_that_no_index_lists_are_left_out(
    folders: Callable[[str, str], Folders], tmp_path: Path
) -> None:
    """As plain tensors in a shard that are not in the index; a listed one that the model lacks is surplus."""
    folder = Path(shutil.copytree(folders("qwen", "fp8 blocks")[0], tmp_path / "shard"))
    tensors = load_file(folder / "model.safetensors")
    listed = dict.fromkeys(tensors, "a.safetensors")
    extra = {f"other.{part}": tensors[f"{Q}{part}"].clone() for part in ("weight", "weight_scale_inv")}
    save_file(tensors | extra, folder / "a.safetensors")
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": listed}))
    assert "other.weight" in open_checkpoint(folder).unused
    index.write_text(json.dumps({"weight_map": listed | dict.fromkeys(extra, "a.safetensors")}))
    with pytest.raises(ValueError, match="surplus   other"):
        open_checkpoint(folder)


@pytest.mark.parametrize("family", [name for name in quantize.tiny.EVEN if name not in ("gpt_oss", "nemotron_h")])
def test_every_family_may_be_quantised(tmp_path: Path, tiny: ModuleType, family: str) -> None:
    """Whatever a family stacks, reorders or renames (vLLM 51249), whole and on one of two ranks."""
    plain = tiny.save(tiny.make_model(family, **tiny.EVEN[family]), tmp_path / "plain")
    quantised, dequantised = quantize.quantise(plain, tmp_path, "fp8 blocks")
    for ranks in ({}, {"ranks": Ranks(1, 2, "none")}):
        kept, wanted = loaded(quantised, **ranks), matrices(loaded(dequantised, **ranks))
        assert sum(each.stored is None for each in kept.matrices.values()) >= len(kept.matrices) // 2
        for name, weight in matrices(kept).items():
            torch.testing.assert_close(weight, wanted[name], rtol=2e-7, atol=0, msg=name)


def test_fused_experts_may_be_named_like_matrices(tmp_path: Path, tiny: ModuleType) -> None:
    """`input_linear.weight` of Granite, (E, N, K), with a scale for each row, as llm-compressor writes it."""
    family = "granitemoehybrid-experts"
    plain = tiny.save(tiny.make_model(family, **tiny.EVEN[family]), tmp_path / "plain")
    quantised, dequantised = quantize.quantise(plain, tmp_path, "float-quantized channels")
    stored, wanted = (load_file(folder / "model.safetensors") for folder in (quantised, dequantised))
    fused = [name for name in stored if name.endswith(("_moe.input_linear.weight", "_moe.output_linear.weight"))]
    for name in fused:
        each = [quantize.fp8_channel(matrix.float()) for matrix in stored[name]]
        codes = torch.stack([tensors["weight"].view(torch.uint8) for tensors, _ in each])
        stored[name] = codes.view(torch.float8_e4m3fn)
        stored[f"{name}_scale"] = torch.stack([tensors["weight_scale"] for tensors, _ in each])
        wanted[name] = torch.stack([values for _, values in each])
    save_file(stored, quantised / "model.safetensors")
    save_file(wanted, dequantised / "model.safetensors")
    kept, values = loaded(quantised), matrices(loaded(dequantised))
    assert sum(each.stored is None for each in kept.matrices.values()) >= len(fused) > 0
    for name, weight in matrices(kept).items():
        assert torch.equal(weight, values[name]), name


@pytest.mark.parametrize("head", ["plain", "quantised"])
def test_lm_head_of_a_tied_configuration_is_its_own(
    folders: Callable[[str, str], Folders], tmp_path: Path, tiny: ModuleType, head: str
) -> None:
    plain = re.compile(quantize.PLAIN.pattern.replace("|lm_head", "")) if head == "quantised" else quantize.PLAIN
    source = folders("qwen", "modelopt NVFP4")[1]
    folder, wanted = quantize.quantise(source, tmp_path, "modelopt NVFP4", plain)
    for each in (folder, wanted):
        tiny.edit_config(each, tie_word_embeddings=True)
    model = loaded(folder)
    assert bool(model.output.pieces) == (head == "quantised")
    assert torch.equal(model.lm_head, loaded(wanted).lm_head)
    assert not torch.equal(model.lm_head, model.embedding)


def test_scales_of_keys_and_values_are_left_to_the_cache(
    folders: Callable[[str, str], Folders], tmp_path: Path
) -> None:
    names = [
        f"model.layers.1.self_attn.{name}"
        for name in ("k_scale", "v_proj.v_scale", "attn.q_scale", "q_proj.output_scale", "prob_scale")
    ]
    scales = {name: torch.ones(1) for name in [*names, "mtp.layers.0.self_attn.k_scale"]}
    folder = edited(folders("qwen", "fp8 blocks")[0], tmp_path / "edited", lambda tensors: tensors.update(scales))
    checkpoint = open_checkpoint(folder)
    assert scales.keys() <= checkpoint.unused.keys()
    DraftHead.open("mtp", load_model(checkpoint, torch.float32, "meta"), checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("file", "kind", "fields"),
    [
        ("hf_quant_config.json", "modelopt FP8", {"producer": {}, "quantization": {"quant_algo": "FP8"}}),
        ("quantize_config.json", "gptq", {"bits": 4, "group_size": 16, "sym": True}),
        ("quant_config.json", "awq", {"w_bit": 4, "q_group_size": 16, "version": "GEMM"}),
    ],
)
def test_configurations_in_files_of_their_own(
    folders: Callable[[str, str], Folders], tmp_path: Path, file: str, kind: str, fields: dict[str, Any]
) -> None:
    quantised, plain = folders("nemotron", kind)
    folder = tmp_path / "moved"
    shutil.copytree(quantised, folder)
    shutil.copy(plain / "config.json", folder / "config.json")
    (folder / file).write_text(json.dumps(fields))
    found = matrices(loaded(folder))
    for name, weight in matrices(loaded(plain)).items():
        assert torch.equal(found[name], weight), name


def test_info_tells_schemes_bytes_and_kernels(folders: Callable[[str, str], Folders]) -> None:
    """Parameters are those of the plain model, and bytes those in memory."""
    quantised, plain = folders("qwen", "pack-quantized")
    facts, wanted = (describe_checkpoint(folder, device="cpu", draft="mtp") for folder in (quantised, plain))
    assert {kind: part["parameters"] for kind, part in facts["parts"].items()} == {
        kind: part["parameters"] for kind, part in wanted["parts"].items()
    }
    assert facts["parts"]["experts"]["weight_bytes"] < 0.2 * wanted["parts"]["experts"]["weight_bytes"]
    kernel = "C, dequantised in registers" if unavailable_reason() is None else "torch, dequantised in tiles"
    told = f"INT4, groups of 16: {kernel}"
    assert facts["quantized"].keys() == {"delta", "attention", "experts"}
    assert all(list(each) == [told] for each in facts["quantized"].values())
    model = loaded(quantised)
    held = sum(each.nbytes for name, each in model.weights().items() if name.rpartition(".")[2] in ("codes", "scales"))
    assert sum(size for each in facts["quantized"].values() for size in each.values()) == held
    assert f"INT4, groups of 16: {kernel}" in checkpoint_table(facts)
    assert not wanted["quantized"]
    foreseen = {
        name: sum(packed_change(part, torch.float32) for part in quantized_parts(each))
        for name, each in describe_model(open_checkpoint(quantised), torch.float32, "meta")[0].matrices.items()
    }
    before = weight_sizes(model.weights(), model.matrices)
    model.pack()
    after = weight_sizes(model.weights(), model.matrices)
    assert {name: after[name].num_bytes - before[name].num_bytes for name in foreseen} == foreseen
    assert facts["held_bytes"] >= sum(each.num_bytes for each in after.values())


def test_steps_read_quantised_bytes(folders: Callable[[str, str], Folders]) -> None:
    """As many sums as the plain model, and fewer bytes of weights."""
    costs = []
    for folder in folders("nemotron", "modelopt FP8"):
        model = load_model(open_checkpoint(folder), torch.bfloat16, "meta")
        caches = default_cache_costs(model.spec, torch.bfloat16, 64, "cpu")
        costs.append(step_costs(model, caches, 1, 32))
    assert costs[0].keys() == costs[1].keys()
    for kind, part in costs[0].items():
        assert part.flops == costs[1][kind].flops
        assert part.weight_bytes <= costs[1][kind].weight_bytes
    assert costs[0]["mlp"].weight_bytes < 0.6 * costs[1]["mlp"].weight_bytes


LIBRARIES = Path(__file__).parent / "quantized_files" / "libraries.safetensors"
"""Written by compressed-tensors, modelopt and auto-round; see `make.py` there."""


def test_weights_that_other_libraries_packed_are_what_these_unpack(tmp_path: Path) -> None:
    """Bit for bit, in the dtype that they unpack to."""
    tensors = load_file(LIBRARIES)
    with safe_open(LIBRARIES, "pt") as opened:
        configs: dict[str, dict[str, Any]] = json.loads(opened.metadata()["configs"])
    assert len(configs) == 19
    for name, config in configs.items():
        parts = {key.rpartition(".")[2]: each for key, each in tensors.items() if key.startswith(f"{name}.")}
        save_file({f"x.{part}": each for part, each in parts.items()}, tmp_path / "model.safetensors")
        modules, used = find_modules(list_tensors(tmp_path))
        assert used == {f"x.{part}" for part in parts}, name
        wanted = tensors[f"wanted.{name}"]
        found = reader_of(config).load(modules["x.weight"]).dequantize()
        assert torch.equal(found.to(wanted.dtype), wanted), name


def test_the_option_names_the_method_of_the_checkpoint() -> None:
    """Each method by vLLM's names; another one is refused with the right one."""
    for name in QUANTIZATION_METHODS:
        accepted = []
        for method in READERS:
            with suppress(ValueError):
                check_method(name, reader_of({"quant_method": method}))
                accepted.append(method)
        assert len(accepted) == 1
        assert accepted[0][:3] == {"inc": "auto-round"}.get(name, name)[:3]
    with pytest.raises(ValueError, match="quantization is 'awq'; the method of the checkpoint is none"):
        check_method("awq", None)
    for packing in ("auto_round:llm_compressor", "auto_round:auto_awq", "auto_round"):
        reader = reader_of({"quant_method": "auto-round", "packing_format": packing})
        check_method("inc", reader)
        with pytest.raises(ValueError, match="the method of the checkpoint is auto-round"):
            check_method("compressed-tensors", reader)


def test_mxfp4_is_what_transformers_dequantises(tmp_path: Path, tiny: ModuleType, driver: Any) -> None:
    """All codes, with scales from subnormal to large: bit for bit in bfloat16. Then logits of a model, whose experts
    both dequantise.
    """
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = torch.randint(0, 256, (3, 64, 4, 16)).byte(), torch.randint(4, 240, (3, 64, 4)).byte()
    save_file({"x_blocks": blocks, "x_scales": scales}, tmp_path / "model.safetensors")
    modules, _ = find_modules(list_tensors(tmp_path))
    found = reader_of({"quant_method": "mxfp4"}).load(modules["x_blocks"]).dequantize()
    assert torch.equal(found.bfloat16(), convert_moe_packed_tensors(blocks, scales).transpose(1, 2))
    model = tiny.make_model("gpt_oss", **quantize.GPT_OSS)
    folder, _ = quantize.quantise(tiny.save(model, tmp_path / "plain"), tmp_path, "mxfp4")
    stored, weights = load_file(folder / "model.safetensors"), model.state_dict()
    names = [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]
    assert len(names) == 4
    for name in names:
        blocks, scales = stored[f"{name}_blocks"], stored[f"{name}_scales"]
        weights[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    tokens = torch.arange(3, 32)
    wanted = model(tokens[None], use_cache=False).logits[0].detach()
    for dequantize in (False, True):
        logits = driver.Driver(loaded(folder, dequantize=dequantize)).run(tokens.tolist(), [20, 9])
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("scales"), "gate_up_proj: is quantised, but has no scales"),
        (_drop("blocks"), "surplus   model.layers.1.mlp.experts.gate_up_proj_scales"),
        (_put("scales", torch.full((4, 192, 2), 255).byte()), "gate_up_proj_scales: holds NaN"),
        (_put("scales", torch.ones(4, 192, 2)), "MXFP4 needs U8 (4, 192, 2)"),
        (_put("scales", torch.ones(4, 192, 3).byte()), "MXFP4 needs U8 (4, 192, 2)"),
        (_put("blocks", torch.ones(4, 192, 64).byte()), "MXFP4 needs U8 (experts, rows, groups, 16)"),
        (_put("blocks", torch.ones(4, 64, 2, 16).byte()), "MXFP4 needs U8 (4, 64, 2)"),
    ],
)
def test_damaged_mxfp4_is_named(
    folders: Callable[[str, str], Folders], tmp_path: Path, change: Any, message: str
) -> None:
    def changed(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.1.mlp.experts.gate_up_proj_"
        own = {part: tensors.pop(name + part) for part in ("blocks", "scales")}
        change(own)
        tensors |= {name + part: each for part, each in own.items()}

    with pytest.raises(ValueError, match=re.escape(message)):
        loaded(edited(folders("gpt_oss", "mxfp4")[0], tmp_path / "edited", changed))


@pytest.mark.parametrize("inner", [[1], "x", 3, True])
def test_a_text_config_that_is_no_object_says_nothing(inner: Any, tiny_checkpoint: Any, tmp_path: Path) -> None:
    """In a family without one: such a field of config.json is ignored, by the readers and by the KV cache."""
    shutil.copytree(tiny_checkpoint("llama")[0], tmp_path / "llama")
    file = tmp_path / "llama" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"text_config": inner}))
    assert open_checkpoint(tmp_path / "llama").spec.kv_cache_dtype == "auto"
