"""Engines and checkpoints that several composition tests share."""

import importlib
import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bateleur.runner import LLM
from bateleur.runner.cache.plan import CachePlan, plan_caches
from scripted import RECURRENCES, Texts


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; this machine has none"))


@pytest.fixture(scope="session")
def sized() -> Callable[..., LLM]:
    """`sized(make, num_blocks, spare_pages, **settings)`: an engine with so many KV blocks, and so many state pages in
    addition to those that rows need.
    """

    def make(make: Callable[..., LLM], num_blocks: int, spare_pages: int = 0, **settings: Any) -> LLM:
        def plan(*args: Any, **choices: Any) -> CachePlan:
            made = plan_caches(*args, **choices)
            own = made.max_num_seqs * made.costs.pages_per_request
            slots = 1 + own + spare_pages if made.costs.retention else made.num_state_slots
            return replace(made, num_blocks=num_blocks, num_state_slots=slots)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("bateleur.runner.engine.setup.plan_caches", plan)
            return make(**settings)

    return make


@pytest.fixture(scope="session")
def forked_ranks() -> Iterator[None]:
    """Ranks are forked from one process that has imported everything they need."""
    from rank_pool import forked

    with forked():
        yield


@pytest.fixture(scope="session")
def make_head(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes an untrained EAGLE-3 head with a reduced vocabulary, for the shipped model or another size."""

    def make(
        hidden_size: int = 256,
        vocab_size: int = 4096,
        head_dim: int = 64,
        taps: tuple[int, ...] = (2, 5, 10),
        max_position_embeddings: int = 2048,
    ) -> Path:
        heads, kv_heads, inner, drafts = 4, 2, 96, vocab_size // 8
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": hidden_size,
            "intermediate_size": inner,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": max_position_embeddings,
            "vocab_size": vocab_size,
            "draft_vocab_size": drafts,
            "torch_dtype": "float32",
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(taps)},
        }
        generator = torch.Generator().manual_seed(1)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

        layer = "midlayer."
        norms = ("norm", f"{layer}input_layernorm", f"{layer}hidden_norm", f"{layer}post_attention_layernorm")
        tensors = {
            "fc.weight": weight(hidden_size, len(taps) * hidden_size),
            f"{layer}self_attn.q_proj.weight": weight(heads * head_dim, 2 * hidden_size),
            f"{layer}self_attn.k_proj.weight": weight(kv_heads * head_dim, 2 * hidden_size),
            f"{layer}self_attn.v_proj.weight": weight(kv_heads * head_dim, 2 * hidden_size),
            f"{layer}self_attn.o_proj.weight": weight(hidden_size, heads * head_dim),
            f"{layer}mlp.gate_proj.weight": weight(inner, hidden_size),
            f"{layer}mlp.up_proj.weight": weight(inner, hidden_size),
            f"{layer}mlp.down_proj.weight": weight(hidden_size, inner),
            "lm_head.weight": weight(drafts, hidden_size),
            "d2t": torch.arange(drafts) * 7,
            **{f"{name}.weight": torch.ones(hidden_size) for name in norms},
        }
        folder = tmp_path_factory.mktemp("head")
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


@pytest.fixture(scope="session")
def random_head(make_head: Callable[..., Path]) -> Path:
    """An untrained head for the shipped model."""
    return make_head()


TINY = Path(__file__).parents[1] / "packages" / "runner" / "tests" / "tiny.py"


@pytest.fixture(scope="session")
def tiny_models() -> ModuleType:
    """The module with tiny random models of all families, from the runner's tests."""
    return _loaded("bateleur_runner_tests_tiny", TINY)


def _loaded(name: str, path: Path) -> ModuleType:
    """Load a module from a path: test folders are not packages."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    """The module of the fake device."""
    return importlib.import_module("fake_cuda")


@pytest.fixture
def cuda(harness: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fake CUDA device for the engines of one test."""
    return harness.FakeCuda(monkeypatch)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_models: ModuleType) -> Callable[..., Path]:
    """`tiny(family, **config)`: folder of a tiny random model with printable characters as tokens. Read-only."""
    made: dict[str, Path] = {}

    def make(family: str, **overrides: Any) -> Path:
        key = repr((family, sorted(overrides.items())))
        if key not in made:
            with torch.random.fork_rng():
                model = tiny_models.make_model(family, **overrides)
                folder = tiny_models.save(model, tmp_path_factory.mktemp(family))
            write_tokenizer(folder, json.loads((folder / "config.json").read_text())["vocab_size"])
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_hybrid(tiny: Callable[..., Path]) -> Path:
    """A hybrid with three layers and 97 tokens, whose steps take a third of the shipped model's time."""
    family, overrides = RECURRENCES["mamba2"]
    return tiny(family, **overrides)


@pytest.fixture(scope="session")
def tiny_head(make_head: Callable[..., Path]) -> Path:
    """An untrained head for `tiny_hybrid`."""
    return make_head(hidden_size=48, vocab_size=97, head_dim=16, taps=(1, 2, 3))


@pytest.fixture(scope="session")
def make_mtp(
    tiny: Callable[..., Path], tiny_models: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """`make_mtp(**config)`: a tiny Qwen3.5 with a random MTP head in its files."""

    def make(**overrides: Any) -> Path:
        home = tmp_path_factory.mktemp("mtp")
        folder = Path(shutil.copytree(tiny("qwen3_5_text", **overrides), home / "target"))
        with torch.random.fork_rng():
            head = overrides | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
            tiny_models.add_mtp(folder, "qwen3_5_text", home / "head", **head)
        tiny_models.edit_config(folder, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_mtp(make_mtp: Callable[..., Path]) -> Path:
    """A tiny Qwen3.5 with a random MTP head in its files."""
    return make_mtp()


@pytest.fixture(scope="session")
def recurrent(tiny: Callable[..., Path]) -> Callable[[str], tuple[Path, Texts]]:
    """`recurrent(name)`: the tiny model of a recurrence and its texts, cached."""

    @cache
    def make(name: str) -> tuple[Path, Texts]:
        family, overrides = RECURRENCES[name]
        folder = tiny(family, **overrides)
        sizes = {"max_model_len": 96, "max_num_seqs": 1, "mamba_state_policy": "slots"}
        return folder, Texts(LLM(folder, device="cpu", skip_tokenizer_init=True, **sizes))

    return make


def write_tokenizer(folder: Path, size: int) -> None:
    """Write a tokenizer with one token for each of `size` printable characters, without special tokens."""
    vocab = {chr(33 + i): i for i in range(size)}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    (folder / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "model": model, "decoder": {"type": "Fuse"}})
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
