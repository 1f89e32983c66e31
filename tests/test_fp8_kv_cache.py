"""FP8 KV caches: their bytes, and tokens that depend on no chunk, hit, preemption, draft, graph, rank or tier."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import EVEN

from bateleur.metadata.backends._torch_ops import quantize
from bateleur.runner import LLM, RequestOutput, SamplingParams
from bateleur.runner.checkpoint.open import open_checkpoint
from bateleur.runner.diagnose.checkpoint_facts import checkpoint_table, describe_checkpoint
from bateleur.runner.errors import PrefixRefused

FP8 = torch.float8_e4m3fn
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True)
TOKENS: list[int] = np.random.default_rng(3).integers(3, 60, 80).tolist()
PROMPTS: list[Any] = [{"prompt_token_ids": TOKENS[:length]} for length in (45, 33, 60)]
SIZES: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 3,
    "max_model_len": 96,
    "block_size": 4,
    "skip_tokenizer_init": True,
}
SHARING: dict[str, Any] = {"enable_prefix_caching": True, "mamba_block_size": 8}
K_SCALE = 0.03


def with_scales(folder: Path, home: Path, spelling: str = "{}_scale", per_head: bool = True) -> Path:
    """A copy with scales in its attention layers, those of an MTP head too: one for keys, one for each value head."""
    copy = Path(shutil.copytree(folder, home / "scaled"))
    tensors = load_file(copy / "model.safetensors")
    for name in [name for name in tensors if name.endswith("self_attn.v_proj.weight")]:
        stem, config = name.removesuffix("v_proj.weight"), json.loads((copy / "config.json").read_text())
        heads = config["num_key_value_heads"]
        values = 0.01 * torch.arange(1, heads + 1).float().view(heads, 1, 1) if per_head else torch.tensor(0.02)
        tensors |= {stem + spelling.format("k", "k"): torch.tensor([K_SCALE]), stem + spelling.format("v", "v"): values}
    save_file(tensors, copy / "model.safetensors")
    return copy


@pytest.fixture(scope="module")
def folders(
    tiny: Callable[..., Path], tiny_hybrid: Path, tiny_mtp: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    found = {"llama": tiny("llama"), "mamba2": tiny_hybrid, "mtp": tiny_mtp, "ranks": tiny("bamba", **EVEN["bamba"])}
    return {name: with_scales(folder, tmp_path_factory.mktemp(name)) for name, folder in found.items()}


@pytest.fixture(scope="module")
def make(folders: dict[str, Path]) -> Callable[..., LLM]:
    """`make(model, **options)`: an engine with an FP8 cache."""

    def made(model: str, **options: Any) -> LLM:
        llm = LLM(folders[model], **(SIZES | {"kv_cache_dtype": "fp8"} | options))
        assert {cache.dtype for pair in llm.engine.caches.kv for cache in pair} == {llm_dtype(options)}
        return llm

    return made


def llm_dtype(options: dict[str, Any]) -> torch.dtype:
    return getattr(torch, options["kv_cache_dtype"]) if "kv_cache_dtype" in options else FP8


def said(llm: LLM, prompts: list[Any] = PROMPTS) -> list[list[int]]:
    outputs: list[RequestOutput] = llm.generate(prompts, [GREEDY, SAMPLED, GREEDY][: len(prompts)])
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain(make: Callable[..., LLM]) -> dict[str, list[list[int]]]:
    return {model: said(make(model)) for model in ("llama", "mamba2", "mtp")}


MODELS = ("llama", "mamba2", "mtp")
WAYS: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 9},
    "one at a time": {"max_num_seqs": 1},
    "lookup": {"draft": "ngram", "num_speculative_tokens": 3},
    "graphs": {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_checks": "PARANOID"},
    "pieces": {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_checks": "PARANOID"},
    "in flight": {"async_scheduling": True},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_tokens_do_not_depend_on_how_they_are_computed(
    make: Callable[..., LLM], plain: dict[str, list[list[int]]], model: str, way: str
) -> None:
    assert said(make(model, **WAYS[way])) == plain[model]


@pytest.mark.parametrize("graphs", [{}, {"cudagraph_mode": "FULL_DECODE_ONLY"}], ids=["eager", "graphs"])
@pytest.mark.parametrize("shared", [{}, SHARING], ids=["alone", "shared"])
@pytest.mark.parametrize("head", ["mtp", "eagle"])
def test_drafts_of_a_head_change_nothing(
    make: Callable[..., LLM],
    plain: dict[str, list[list[int]]],
    tiny_head: Path,
    head: str,
    shared: dict[str, Any],
    graphs: dict[str, Any],
) -> None:
    """Heads store FP8 too; the chain in C, which has no such cache, does not run."""
    model, draft = ("mtp", "mtp") if head == "mtp" else ("mamba2", tiny_head)
    llm = make(model, draft=draft, num_speculative_tokens=3, **shared, **graphs)
    assert said(llm) == plain[model]
    assert said(llm) == plain[model]
    drafter: Any = llm.engine.runner.head
    assert {cache.dtype for pair in drafter.kv for cache in pair} == {FP8}
    assert drafter.inputs.hidden.dtype == torch.float32
    assert any(bool(cache.float().any()) for pair in drafter.kv for cache in pair)
    assert all((scales is not None) == (head == "mtp") for scales in drafter._cache.kv_scales)


@pytest.mark.parametrize("model", MODELS)
def test_a_prefix_that_was_found_gives_the_same_tokens(
    make: Callable[..., LLM], plain: dict[str, list[list[int]]], model: str
) -> None:
    llm = make(model, **SHARING)
    assert said(llm) == plain[model]
    outputs = llm.generate(PROMPTS, [GREEDY, SAMPLED, GREEDY])
    assert [output.outputs[0].token_ids for output in outputs] == plain[model]
    assert [output.num_cached_tokens > 20 for output in outputs] == [True] * 3


@pytest.mark.parametrize("model", MODELS)
def test_requests_without_room_are_computed_again(
    make: Callable[..., LLM], sized: Callable[..., LLM], plain: dict[str, list[list[int]]], model: str
) -> None:
    """Blocks that change hands hold NaN codes of their last owner, so nothing masked may be read."""
    llm = sized(make, 24, model=model)
    for pair in llm.engine.caches.kv:
        for cache in pair:
            cache[1:] = float("nan")
    assert said(llm) == plain[model]
    assert llm.get_metrics().num_preemptions > 0


@pytest.mark.parametrize("model", MODELS)
def test_what_has_left_the_device_comes_back(
    make: Callable[..., LLM], sized: Callable[..., LLM], plain: dict[str, list[list[int]]], model: str, tmp_path: Path
) -> None:
    options = {"kv_offload_bytes": 1 << 20, "kv_offload_path": tmp_path, "max_num_seqs": 1, **SHARING}
    with sized(make, 26, 2, model=model, **options) as llm:
        assert said(llm) == plain[model]
        for seed in range(3):
            llm.generate([{"prompt_token_ids": np.random.default_rng(seed).integers(3, 60, 80).tolist()}], GREEDY)
        assert said(llm) == plain[model]
        stats = llm.get_metrics().offload
        assert stats is not None
        assert stats.host_hit_tokens > 0
    with sized(make, 26, 2, model=model, **options) as again:
        assert said(again) == plain[model]
        stats = again.get_metrics().offload
        assert stats is not None
        assert stats.disk_hit_tokens > 0


@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_cut_scales_like_heads(make: Callable[..., LLM]) -> None:
    expected = said(make("ranks"))
    with make("ranks", tensor_parallel_size=2, rank_timeout=20, **SHARING) as llm:
        assert said(llm) == expected
        assert said(llm) == expected


def test_prefixes_of_another_dtype_or_other_scales_are_refused(
    make: Callable[..., LLM], folders: dict[str, Path], tmp_path: Path
) -> None:
    ours = make("llama", **SHARING)
    expected = said(ours)
    assert ours.export_prefix(TOKENS[:45], tmp_path / "it") == 44
    same = make("llama", **SHARING)
    assert same.import_prefix(tmp_path / "it") == 44
    assert said(same) == expected
    with pytest.raises(PrefixRefused, match="its kv_cache_dtype is 'float8_e4m3fn', and this engine's is 'float32'"):
        make("llama", kv_cache_dtype="float32", **SHARING).import_prefix(tmp_path / "it")
    other = Path(shutil.copytree(folders["llama"], tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    for name in tensors:
        if name.endswith("k_scale"):
            tensors[name] = tensors[name] * 2
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(PrefixRefused, match="its weights is"):
        LLM(other, kv_cache_dtype="fp8", **(SIZES | SHARING)).import_prefix(tmp_path / "it")


@pytest.mark.parametrize("backend", ["native", "torch", "reference"])
def test_the_bytes_of_a_cache_are_those_of_the_scale_in_the_file(make: Callable[..., LLM], backend: str) -> None:
    """vLLM #54623 lost k_scale of Qwen3.5. The first layer sees the same in any cache."""
    caches = {}
    for dtype in ("fp8", "float32"):
        llm = make("llama", attention_backend=backend, **({} if dtype == "fp8" else {"kv_cache_dtype": dtype}))
        llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=1))
        caches[dtype] = llm.engine.caches.kv[0]
    k_scale, v_scale = torch.full((2,), K_SCALE), torch.tensor([0.01, 0.02])
    for stored, exact, scale in zip(caches["fp8"], caches["float32"], (k_scale, v_scale), strict=True):
        assert exact.any()
        expected = quantize(exact.flatten(0, 1), FP8, scale).view_as(stored)
        assert torch.equal(stored.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    "spelling", ["{}_scale", "attn.{}_scale", "{}_proj.{}_scale", "{}_proj.output_scale", "qkv_proj.{}_scale"]
)
def test_every_spelling_of_scales_is_read(tiny: Callable[..., Path], tmp_path: Path, spelling: str) -> None:
    checkpoint = open_checkpoint(with_scales(tiny("llama"), tmp_path, spelling))
    for layer in checkpoint.spec.attention:
        assert layer.k_scales == pytest.approx((K_SCALE,) * 2)
        assert layer.v_scales == pytest.approx((0.01, 0.02))


def test_one_old_scale_serves_keys_and_values(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = with_scales(tiny("llama"), tmp_path, "kv_scale", per_head=False)
    assert all(layer.k_scales == layer.v_scales != () for layer in open_checkpoint(folder).spec.attention)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_not_positive_is_refused(tiny: Callable[..., Path], tmp_path: Path, value: float) -> None:
    folder = with_scales(tiny("llama"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_scale"] = torch.tensor(value)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"layers\.1\.self_attn\.k_scale is .*; a scale of the KV cache must be positive"
    ):
        open_checkpoint(folder)


def test_two_scales_of_one_tensor_are_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = with_scales(tiny("llama"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.attn.k_scale"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="are two scales of one tensor"):
        open_checkpoint(folder)


def test_missing_scales_are_one_and_a_warning(tiny: Callable[..., Path], folders: dict[str, Path]) -> None:
    with pytest.warns(RuntimeWarning, match="no k_scale or no v_scale for 5 of 5 attention layers") as caught:
        LLM(tiny("llama"), kv_cache_dtype="fp8", **SIZES)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LLM(folders["llama"], kv_cache_dtype="fp8", **SIZES)


SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "compressed-tensors": (
        "config.json",
        {
            "quant_method": "compressed-tensors",
            "config_groups": {},
            "kv_cache_scheme": {
                "num_bits": 8,
                "type": "float",
                "strategy": "tensor",
                "dynamic": False,
                "symmetric": True,
            },
        },
    ),
    "modelopt": ("config.json", {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}),
    "modelopt file": ("hf_quant_config.json", {"kv_cache_quant_algo": "FP8", "quant_algo": None}),
    "others": ("hf_quant_config.json", {"kv_cache_quant_algo": "NVFP4"}),
}


def declaring(folder: Path, home: Path, scheme: str) -> Path:
    copy, (file, fields) = Path(shutil.copytree(folder, home / "declaring")), SCHEMES[scheme]
    if file == "config.json":
        config = json.loads((copy / file).read_text()) | {"quantization_config": fields}
        (copy / file).write_text(json.dumps(config))
    else:
        (copy / file).write_text(json.dumps({"quantization": fields}))
    return copy


@pytest.mark.parametrize("scheme", ["compressed-tensors", "modelopt", "modelopt file"])
def test_auto_follows_the_checkpoint(folders: dict[str, Path], tmp_path: Path, scheme: str) -> None:
    folder = declaring(folders["llama"], tmp_path, scheme)
    for asked, dtype in (("auto", FP8), ("bfloat16", torch.bfloat16)):
        llm = LLM(folder, kv_cache_dtype=asked, **SIZES)
        assert {cache.dtype for pair in llm.engine.caches.kv for cache in pair} == {dtype}


def test_auto_refuses_a_cache_that_is_not_supported(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = declaring(folders["llama"], tmp_path, "others")
    with pytest.raises(ValueError, match="the checkpoint asks for NVFP4, which is not supported"):
        LLM(folder, **SIZES)
    LLM(folder, kv_cache_dtype="fp8", **SIZES)


def test_bytes_are_those_of_the_cache(make: Callable[..., LLM], folders: dict[str, Path]) -> None:
    """Of plans, and of `bateleur info`."""
    facts = {
        each: describe_checkpoint(folders["llama"], device="cpu", kv_cache_dtype=each) for each in ("fp8", "float32")
    }
    assert facts["float32"]["kv_bytes_per_token"] == 4 * facts["fp8"]["kv_bytes_per_token"]
    assert "bytes, as float8_e4m3fn" in checkpoint_table(facts["fp8"])
    llm = make("llama", draft="ngram")
    held = sum(cache.nbytes for pair in llm.engine.caches.kv for cache in pair)
    assert llm.engine.setup.cache_plan.kv_bytes == held


@pytest.mark.parametrize("model", ["llama", "mamba2"])
def test_a_bfloat16_cache_of_a_float32_model(make: Callable[..., LLM], model: str) -> None:
    expected = said(make(model, kv_cache_dtype="bfloat16"))
    llm = make(model, kv_cache_dtype="bfloat16", max_num_batched_tokens=9, **SHARING)
    assert said(llm) == expected
    assert said(llm) == expected


def test_a_latent_layer_stores_plain_heads(tiny: Callable[..., Path]) -> None:
    """Keys and values that are made of a latent."""
    with pytest.warns(RuntimeWarning, match="no k_scale"):
        llm = LLM(tiny("kimi_linear"), kv_cache_dtype="fp8", **SIZES, **SHARING)
    expected = said(llm)
    assert said(llm) == expected
