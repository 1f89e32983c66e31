"""The head's folder, in the layout of the EAGLE repository: weights, config, model card."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shipped_draft.network import Head, HeadShape

CARD = Path(__file__).with_name("card.md")


def hf_config(s: HeadShape, taps: tuple[int, ...]) -> dict[str, object]:
    """`config.json`. `eagle_aux_hidden_state_layer_ids` are boundaries: inputs of layers, or the last one's output."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": s.hidden_size,
        "target_hidden_size": s.hidden_size,
        "intermediate_size": s.intermediate_size,
        "hidden_act": "silu",
        "num_attention_heads": s.num_attention_heads,
        "num_key_value_heads": s.num_key_value_heads,
        "head_dim": s.head_dim,
        "rms_norm_eps": s.eps,
        "rope_theta": s.rope_theta,
        "max_position_embeddings": s.max_position_embeddings,
        "vocab_size": s.vocab_size,
        "draft_vocab_size": s.draft_vocab_size,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(taps)},
    }


def round_weights(head: Head) -> None:
    """Round to what is shipped, so that what is measured is that."""
    for p in head.parameters():
        p.data = p.data.to(torch.bfloat16).float()


def save_head(head: Head, target_ids: Tensor, taps: tuple[int, ...], out: Path) -> None:
    """Write `config.json` and `model.safetensors`: bfloat16 weights, and the draft vocabulary both ways."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().to(torch.bfloat16).contiguous() for name, p in head.state_dict().items()}
    tensors["d2t"] = target_ids - torch.arange(len(target_ids))
    tensors["t2d"] = torch.zeros(head.s.vocab_size, dtype=torch.bool).index_fill_(0, target_ids, True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    (out / "config.json").write_text(json.dumps(hf_config(head.s, taps), indent=2) + "\n")


def open_head(folder: Path) -> tuple[Head, Tensor]:
    """(head in float32, target id of every draft id) from a folder that `save_head` wrote."""
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "eps": config["rms_norm_eps"],
        "num_taps": len(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]),
    }
    head = Head(HeadShape(**{field.name: config[field.name] for field in fields(HeadShape)}))
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("t2d")
    offsets = tensors.pop("d2t")
    head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return head, offsets + torch.arange(len(offsets))


def write_card(out: Path, record: dict[str, Any]) -> None:
    """The model card, from the record of the run."""
    facts = {
        **record,
        **record["shape"],
        "minutes": record["seconds"] / 60,
        "layers": ", ".join(map(str, record["taps"])),
    }
    runs = _runs_before(record)
    facts["before"] = ""
    if runs:
        steps, minutes = sum(run["steps"] for run in runs), sum(run["seconds"] for run in runs) / 60
        facts["before"] = (
            f"; begun from a head that had learnt for {steps:,} steps and {minutes:.0f} minutes, in {len(runs)} run(s)"
        )
    facts["weight_mb"] = (out / "model.safetensors").stat().st_size / 1e6
    for heat, name in (("0", "greedy"), ("0.8", "warm")):
        measured = record["held_out"][heat]
        facts[name] = measured["tokens_per_step"]
        facts[f"{name}_shares"] = " ".join(f"{share:.2f}" for share in measured["acceptance_per_position"])
    (out / "README.md").write_text(CARD.read_text().format(**facts))


def _runs_before(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Records of the runs that a head went through before this one, the last one first."""
    before = record.get("begun_from")
    return [] if before is None else [before, *_runs_before(before)]
