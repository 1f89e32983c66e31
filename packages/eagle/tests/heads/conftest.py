"""Random draft heads as they are published: a configuration, tensors under their names, files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bateleur.eagle.heads import Head, LoadReport, TargetInfo, load_head

Config = dict[str, Any]
Tensors = dict[str, Tensor]


class Checkpoints:
    """Writes and loads heads. H hidden size, Ht the target's, V vocabulary, Vd draft vocabulary."""

    H, Ht, V, Vd, HEADS, KV_HEADS, D, F, L = 16, 16, 40, 12, 4, 2, 6, 20, 10

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._generator = torch.Generator().manual_seed(11)
        self._count = 0
        self.target = self.make_target()

    def make_target(self, num_layers: int = L, hidden: int = Ht) -> TargetInfo:
        return TargetInfo(
            num_layers=num_layers,
            hidden_size=hidden,
            vocab_size=self.V,
            embedding=self.random(self.V, hidden),
            lm_head=self.random(self.V, hidden),
        )

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator, dtype=torch.float64) * 0.4

    def layer(self, name: str, width: int) -> Tensors:
        """A Llama layer without the norms in front of its attention."""
        h, q, kv = self.H, self.HEADS * self.D, self.KV_HEADS * self.D
        return {
            f"{name}.self_attn.q_proj.weight": self.random(q, width),
            f"{name}.self_attn.k_proj.weight": self.random(kv, width),
            f"{name}.self_attn.v_proj.weight": self.random(kv, width),
            f"{name}.self_attn.o_proj.weight": self.random(h, q),
            f"{name}.post_attention_layernorm.weight": 1 + self.random(h),
            f"{name}.mlp.gate_proj.weight": self.random(self.F, h),
            f"{name}.mlp.up_proj.weight": self.random(self.F, h),
            f"{name}.mlp.down_proj.weight": self.random(h, self.F),
        }

    def layer_config(self) -> Config:
        return {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": self.H,
            "intermediate_size": self.F,
            "num_attention_heads": self.HEADS,
            "num_key_value_heads": self.KV_HEADS,
            "head_dim": self.D,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500.0,
            "max_position_embeddings": 64,
            "vocab_size": self.V,
        }

    def eagle3(self, taps: tuple[int, ...] = (2, 5, 10)) -> tuple[Config, Tensors]:
        """EAGLE-3 as its repository writes it."""
        ids = torch.randperm(self.V, generator=self._generator)[: self.Vd].sort().values
        config = {
            **self.layer_config(),
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": self.Vd,
            "target_hidden_size": self.Ht,
            "torch_dtype": "bfloat16",
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(taps)},
        }
        tensors = {
            "fc.weight": self.random(self.H, len(taps) * self.Ht),
            "midlayer.input_layernorm.weight": 1 + self.random(self.H),
            "midlayer.hidden_norm.weight": 1 + self.random(self.H),
            **self.layer("midlayer", 2 * self.H),
            "norm.weight": 1 + self.random(self.H),
            "lm_head.weight": self.random(self.Vd, self.H),
            "d2t": ids - torch.arange(self.Vd),
            "t2d": torch.isin(torch.arange(self.V), ids),
        }
        return config, tensors

    def eagle1(self, layers: int = 1) -> tuple[Config, Tensors]:
        """EAGLE-1 as its repository writes it."""
        config = {**self.layer_config(), "architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers}
        tensors = {"fc.weight": self.random(self.H, 2 * self.H)}
        for i in range(layers):
            tensors |= self.layer(f"layers.{i}", self.H)
            if i:
                tensors[f"layers.{i}.input_layernorm.weight"] = 1 + self.random(self.H)
        return config, tensors

    def write(self, config: Config, tensors: Tensors, form: str = "safetensors") -> Path:
        """A new folder. Forms: safetensors, safetensors-shards."""
        self._count += 1
        folder = self.folder / f"head{self._count}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        name = "model.safetensors"
        plain = {key: value.contiguous() for key, value in tensors.items()}
        if "shards" not in form:
            save_file(plain, folder / name)
            return folder
        names = sorted(plain)
        shards = {"one.part": names[::2], "two.part": names[1::2]}
        for shard, held in shards.items():
            save_file({key: plain[key] for key in held}, folder / shard)
        weight_map = {key: shard for shard, held in shards.items() for key in held}
        (folder / f"{name}.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder

    def load(
        self,
        config: Config,
        tensors: Tensors,
        *,
        target: TargetInfo | None = None,
        form: str = "safetensors",
        **options: Any,
    ) -> tuple[Head, LoadReport]:
        folder = self.write(config, tensors, form)
        options = {"dtype": torch.float64, "device": "cpu", **options}
        return load_head(folder, target or self.target, **options)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path)


@pytest.fixture
def sized_checkpoints(tmp_path: Path) -> Callable[..., Checkpoints]:
    """The same for other sizes, by the names of `Checkpoints`."""
    return lambda **sizes: type("Sized", (Checkpoints,), sizes)(tmp_path)
