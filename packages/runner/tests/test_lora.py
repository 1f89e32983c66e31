"""LoRA adapters: files that PEFT writes, matrices in projections, and the operator that adds them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_files import merge, modules_of, write_adapter
from safetensors.torch import load_file, save_file

from bateleur.metadata.dispatch import load
from bateleur.runner.checkpoint.families import FAMILIES
from bateleur.runner.checkpoint.open import load_model, open_checkpoint
from bateleur.runner.distributed.ranks import ALONE, Ranks
from bateleur.runner.lora.adapter_file import WEIGHTS, read_adapter
from bateleur.runner.lora.adapter_manager import AdapterManager, AdapterPool, LoRARequest
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.operators import FORMS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="the last test starts the process that this is for")
in_torch = pytest.mark.skipif(INTERPRETED, reason="torch forms only")
KINDS = (
    *("llama", "nemotron_h", "qwen3_5_text", "qwen3_next", "kimi_linear"),
    *("falcon_h1", "lfm2", "olmo_hybrid", "granitemoehybrid", "bamba"),
    *("qwen2", "qwen3", "qwen3_moe", "mistral", "smollm3", "granite", "olmo3", "phi3", "gemma3_text", "mamba2"),
)


def shapes_of(checkpoint: Any) -> dict[str, tuple[int, ...]]:
    weights = HybridDecoder(checkpoint.spec, dtype=torch.float32, device="meta").weights()
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def read(adapter: Path, folder: Path, max_rank: int = 16) -> Any:
    checkpoint = open_checkpoint(folder)
    prefixes = FAMILIES[json.loads((folder / "config.json").read_text())["model_type"]].other_prefixes
    return read_adapter(adapter, checkpoint.names, shapes_of(checkpoint), prefixes, max_rank)


@in_torch
@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_matrices_are_those_of_the_merged_checkpoint(
    family: str, rank: int | None, tiny: Any, tiny_checkpoint: Any, tmp_path: Path
) -> None:
    """In each family, alone and on two ranks: base weight plus the product is the merged weight."""
    folder, _ = tiny_checkpoint(family, **({} if rank is None else tiny.EVEN[family]))
    modules = modules_of(folder)
    adapter = write_adapter(tmp_path / "adapter", folder, modules)
    merged = open_checkpoint(merge(tmp_path / "merged", folder, adapter))
    ranks = ALONE if rank is None else Ranks(rank, 2, "none")
    checkpoint = open_checkpoint(folder)
    base = load_model(checkpoint, torch.float32, "cpu", ranks)
    wanted = load_model(merged, torch.float32, "cpu", ranks).weights()
    pool = AdapterPool(base, checkpoint.names, 2, 4, 8)
    matrices = read(adapter, folder)
    assert matrices.keys() == {checkpoint.names[f"{module}.weight"].target for module in modules}
    pool.fill(2, matrices)
    changed = 0
    for name, weight in base.weights().items():
        if (low := pool.weights.get(name)) is not None:
            assert not low.a_ARK[:2].any()
            assert not low.b_ANR[:2].any()
            changed += not torch.equal(weight, wanted[name])
            weight = weight + low.b_ANR[2] @ low.a_ARK[2]
        torch.testing.assert_close(weight, wanted[name], rtol=1e-5, atol=1e-5)
    assert changed == len(matrices)
    pool.fill(2, {})
    assert not any(each.a_ARK.any() or each.b_ANR.any() for each in pool.weights.values())


@in_torch
def test_the_scale_follows_the_config(tiny_checkpoint: Any, tmp_path: Path) -> None:
    """alpha_pattern for single modules, and rank-stabilised scaling."""
    folder, _ = tiny_checkpoint("llama")
    module = "model.layers.1.self_attn.o_proj"
    plain = read(write_adapter(tmp_path / "a", folder, [module], rank=4), folder)["layers.2.o_proj"][1]
    for name, config, factor in (
        ("b", {"use_rslora": True}, 2.0),
        ("c", {"alpha_pattern": {"self_attn.o_proj": 24}}, 3.0),
        ("d", {"alpha_pattern": {"mlp.o_proj": 24}}, 1.0),
    ):
        found = read(write_adapter(tmp_path / name, folder, [module], rank=4, **config), folder)
        torch.testing.assert_close(found["layers.2.o_proj"][1], plain * factor)


@in_torch
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; it must be 'LORA'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is [[0, 1]]"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', which changes the base"),
        ({"lora_alpha": None}, "lora_alpha is None; it must be a finite number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan; it must be a finite number"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern is ['q_proj']; it must be an object"),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern['q_proj'] is '8'; it must be a finite number"),
        ({"alpha_pattern": {"q_proj(": 8}}, "alpha_pattern has 'q_proj(': missing ), unterminated"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    config: dict[str, Any], words: str, tiny_checkpoint: Any, tmp_path: Path
) -> None:
    folder, _ = tiny_checkpoint("llama")
    adapter = write_adapter(tmp_path / "adapter", folder, modules_of(folder), **config)
    with pytest.raises(ValueError, match=r"adapter_config\.json: ") as refusal:
        read(adapter, folder)
    assert words in str(refusal.value)


@in_torch
def test_tensors_that_do_not_fit_are_listed(tiny_checkpoint: Any, tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint("nemotron_h-experts")
    adapter = write_adapter(tmp_path / "adapter", folder, modules_of(folder))
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    first = next(iter(tensors))
    shape = tensors.pop(first).shape
    wide = "base_model.model.lm_head.lora_"
    experts = "base_model.model.model.layers.1.mixer.experts.0.up_proj.lora_"
    extra = {f"{stem}{side}.weight": torch.zeros(shape) for stem in (wide, experts) for side in "AB"}
    save_file({**tensors, **extra, "base_model.model.lora_embedding_A": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match="4 tensors do not fit the model") as refusal:
        read(adapter, folder)
    for words in ("lora_embedding_A: is neither", "lm_head: adapters of", "come in pairs", "experts.0.up_proj: "):
        assert words in str(refusal.value)
    with pytest.raises(ValueError, match="rank 3 is above max_lora_rank=2"):
        read(write_adapter(tmp_path / "wide", folder, modules_of(folder)[:1]), folder, max_rank=2)
    with pytest.raises(ValueError, match=r"must hold adapter_config\.json"):
        read(tmp_path, folder)


@in_torch
def test_fused_experts_are_refused(tiny_checkpoint: Any, tmp_path: Path) -> None:
    """Granite's `input_linear.weight` is one tensor for all experts, with the name of a matrix."""
    folder, _ = tiny_checkpoint("granitemoehybrid-experts")
    adapter = write_adapter(tmp_path / "adapter", folder, modules_of(folder)[:1])
    module = "base_model.model.model.layers.0.block_sparse_moe.input_linear"
    save_file({f"{module}.lora_{side}.weight": torch.zeros(4, 4) for side in "AB"}, adapter / WEIGHTS)
    with pytest.raises(ValueError, match=r"input_linear: adapters of embeddings, lm_head, routers and experts are not"):
        read(adapter, folder)


@in_torch
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a[0], "lora_A is torch.float32 (48,); it must be a matrix in F64, F32, F16, BF16"),
        (lambda a: a.int(), "lora_A is torch.int32 (3, 48); it must be a matrix"),
        (lambda a: a.fill_(torch.nan), "holds NaN or infinity"),
        (lambda a: a.double() * 1e300, "holds NaN or infinity"),
        (lambda a: a[:0], "lora_A is (0, 48) and lora_B (144, 3)"),
    ],
)
def test_matrices_that_cannot_be_used_are_named(
    change: Callable[[torch.Tensor], torch.Tensor], words: str, tiny_checkpoint: Any, tmp_path: Path
) -> None:
    folder, _ = tiny_checkpoint("llama")
    adapter = write_adapter(tmp_path / "adapter", folder, ["model.layers.0.self_attn.q_proj"])
    file = adapter / "adapter_model.safetensors"
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    tensors = load_file(file)
    save_file({**tensors, name: change(tensors[name]).contiguous()}, file)
    with pytest.raises(ValueError, match="1 tensors do not fit the model") as refusal:
        read(adapter, folder)
    assert "model.layers.0.self_attn.q_proj: " in str(refusal.value)
    assert words in str(refusal.value)


@in_torch
def test_adapters_without_matrices_or_with_two_of_a_module_are_refused(tiny_checkpoint: Any, tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint("llama")
    empty = write_adapter(tmp_path / "empty", folder, [])
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: holds no tensors; the adapter is empty"):
        read(empty, folder)
    adapter = write_adapter(tmp_path / "adapter", folder, ["model.layers.0.self_attn.q_proj"])
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    again = {name.replace(".weight", ".default.weight"): each.clone() for name, each in tensors.items()}
    save_file(again, file)
    read(adapter, folder)
    save_file({**tensors, **again}, file)
    with pytest.raises(ValueError, match=r"lora_A.*: the module has two of them"):
        read(adapter, folder)


@in_torch
def test_patterns_of_alpha_may_name_modules_as_the_adapter_does(tiny_checkpoint: Any, tmp_path: Path) -> None:
    """Adapters of multimodal models have other prefixes."""
    folder, _ = tiny_checkpoint("qwen3_5_text")
    (module,) = [each for each in modules_of(folder) if each.endswith("layers.0.mlp.down_proj")]
    other = module.replace("model.", "model.language_model.", 1)
    found = []
    for name, alpha in (("a", {}), ("b", {other: 24})):
        adapter = write_adapter(tmp_path / name, folder, [module], rank=4, alpha_pattern=alpha)
        file = adapter / "adapter_model.safetensors"
        save_file({key.replace(module, other): each for key, each in load_file(file).items()}, file)
        ((_, b),) = read(adapter, folder).values()
        found.append(b)
    torch.testing.assert_close(found[1], found[0] * 3)


@in_torch
@pytest.mark.parametrize(("name", "path"), [("", "x"), (5, "x"), ("a", None), ("a", 0), ("a", []), ("a", "\ud800")])
def test_an_adapter_is_a_name_and_a_folder(name: Any, path: Any) -> None:
    with pytest.raises(ValueError, match=r"lora_(name|path) (is|holds|has)"):
        LoRARequest(name, 1, path)


@in_torch
def test_adapters_take_the_slots_of_idle_ones(tiny_checkpoint: Any, tmp_path: Path) -> None:
    """The least recently used goes; none that an unfinished request uses, and none twice under one name."""
    folder, _ = tiny_checkpoint("llama")
    checkpoint = open_checkpoint(folder)
    pool = AdapterPool(load_model(checkpoint, torch.float32, "cpu"), checkpoint.names, 2, 4, 8)
    read = partial(read_adapter, names=checkpoint.names, shapes=shapes_of(checkpoint), prefixes=(), max_rank=4)
    manager = AdapterManager(pool, read)
    modules = modules_of(folder)[:3]
    a, b, c = (
        LoRARequest(name, seed + 1, str(write_adapter(tmp_path / name, folder, modules, seed=seed)))
        for seed, name in enumerate("abc")
    )
    digest, other = manager.acquire([a, b])
    assert digest != other
    assert manager.assign(["a", "b"]) == [1, 2]
    with pytest.raises(ValueError, match="max_loras=2: unfinished requests use all slots"):
        manager.load(c)
    with pytest.raises(ValueError, match="'a': 1 unfinished requests use it"):
        manager.unload("a")
    manager.release("b", held=True)
    manager.release("a", held=True)
    assert manager.acquire([a]) == [digest]
    assert manager.assign(["a"]) == [1]
    manager.load(c)
    assert manager.loaded == {"a": tmp_path / "a", "c": tmp_path / "c"}
    with pytest.raises(ValueError, match="'c': is loaded from"):
        manager.load(LoRARequest("c", 1, a.lora_path))
    with pytest.raises(ValueError, match="'b': is not loaded; give its folder"):
        manager.load(LoRARequest("b"))
    manager.release("a", held=True)
    manager.unload("a")
    with pytest.raises(ValueError, match="'a': is not loaded; loaded are c"):
        manager.unload("a")
    again = write_adapter(tmp_path / "again", folder, modules, seed=0)
    assert manager.acquire([LoRARequest("again", 1, str(again))]) == [digest]


@in_torch
def test_requests_wait_for_slots_first_come_first_served(tiny_checkpoint: Any, tmp_path: Path) -> None:
    """Those of the least recently used adapter wait behind others, so that its slot becomes free; the rest do not."""
    folder, _ = tiny_checkpoint("llama")
    checkpoint = open_checkpoint(folder)
    pool = AdapterPool(load_model(checkpoint, torch.float32, "cpu"), checkpoint.names, 2, 4, 8)
    read = partial(read_adapter, names=checkpoint.names, shapes=shapes_of(checkpoint), prefixes=(), max_rank=4)
    manager = AdapterManager(pool, read)
    modules = modules_of(folder)[:3]
    paths = {name: write_adapter(tmp_path / name, folder, modules, seed=seed) for seed, name in enumerate("abcd")}
    every = {name: LoRARequest(name, 1, str(path)) for name, path in paths.items()}

    def slots(waiting: str) -> list[int]:
        return manager.assign(list(waiting))

    def weights(slot: int) -> torch.Tensor:
        return torch.cat([each.a_ARK[slot].flatten() for each in pool.weights.values()])

    manager.acquire([every[name] for name in "abcab"])
    assert slots("ab") == [1, 2]
    of_a = weights(1)
    assert slots("cab") == [0, 0, 2], "a is the least recently used, so it makes room for c"
    manager.acquire([every[name] for name in "bd"])
    assert slots("cabd") == [0, 0, 2, 0], "b does not wait for c"
    manager.release("d", held=False)
    manager.acquire([every["a"]])
    manager.release("a", held=False)
    assert slots("ca") == [0, 0]
    assert manager.loaded.keys() == {"a", "b", "c"}
    paths["a"].rename(tmp_path / "gone")
    manager.release("a", held=True)
    assert slots("ca") == [1, 0]
    assert not torch.equal(weights(1), of_a)
    with pytest.raises(ValueError, match="'a': 1 unfinished requests use it"):
        manager.unload("a")
    for _ in range(2):
        manager.release("b", held=True)
        assert slots("a") == [0]
    manager.release("b", held=True)
    assert slots("a") == [2]
    assert torch.equal(weights(2), of_a), "it was kept on the host"
    manager.recount([("a", True)])
    assert manager.loaded.keys() == {"a", "c"}
    manager.unload("c")


def some(num_tokens: int, rank: int, columns: int, rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank + columns)
    shapes = ((num_tokens, rows + 5), (num_tokens, columns + 3), (4, rank, columns), (4, rows, rank))
    y, x, a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    a[0], b[0] = 0, 0
    slots = torch.randint(0, 4, (num_tokens,), generator=generator, dtype=torch.int32)
    return [y[:, :-5], x[:, 3:], a, b, slots]


@in_torch
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_has_its_own_adapter_whatever_is_beside_it(dtype: torch.dtype) -> None:
    """And the bits that it gets alone; without an adapter nothing changes."""
    y, x, a, b, slots = some(21, 12, 70, 45, dtype)
    found, before = y.clone(), y.clone()
    FORMS["add_lora"].torch(found, x, a, b, slots)
    for token, slot in enumerate(slots.tolist()):
        one = before[token : token + 1].clone()
        FORMS["add_lora"].torch(one, x[token : token + 1], a, b, slots[token : token + 1])
        assert torch.equal(found[token], one[0])
        wanted = before[token].double() + b[slot].double() @ (a[slot].double() @ x[token].double())
        places = 3e-2 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(found[token].double(), wanted, rtol=places, atol=places * 30)
        assert slot or torch.equal(found[token], before[token])


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernels_say_what_the_torch_form_says(dtype: torch.dtype) -> None:
    for sizes in ((0, 4, 8, 8), (1, 3, 40, 7), (9, 48, 300, 150), (5, 33, 64, 16)):
        y, x, a, b, slots = some(*sizes, dtype)
        wanted, found, before = y.float(), y.clone(), y.clone()
        FORMS["add_lora"].torch(wanted, x.float(), a.float(), b.float(), slots)
        load(FORMS["add_lora"].triton or "")(found, x, a, b, slots)
        assert torch.equal(found[slots == 0], before[slots == 0])
        places = 2**-7 if dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(found.float(), wanted, rtol=places, atol=places * 30)


@in_torch
def test_all_of_this_in_the_interpreter(in_interpreter: Callable[[str], int]) -> None:
    assert in_interpreter(__file__) == 2
