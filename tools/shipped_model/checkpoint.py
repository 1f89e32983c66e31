"""The checkpoint folder: weights, config, tokenizer, model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from shipped_model.corpus import END_OF_TEXT
from shipped_model.network import Network, Shape

CARD = Path(__file__).with_name("card.md")
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.2}
"""Of two dozen ways to sample 18 prompts with 8 seeds each: here most texts parse, and few lines come twice."""


def hf_config(s: Shape) -> dict[str, object]:
    """`config.json` in NemotronH's terms, every field that is read, so that no library has to fill in for any.

    `time_step_min` 0: no clamp, in prefill and decode alike.
    """
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "vocab_size": s.vocab_size,
        "hidden_size": s.hidden_size,
        "layers_block_type": [kinds[k] for k in s.pattern],
        "intermediate_size": s.intermediate_size,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "num_attention_heads": s.num_attention_heads,
        "num_key_value_heads": s.num_key_value_heads,
        "head_dim": s.head_dim,
        "mamba_num_heads": s.mamba_num_heads,
        "mamba_head_dim": s.mamba_head_dim,
        "ssm_state_size": s.ssm_state_size,
        "n_groups": s.n_groups,
        "conv_kernel": s.conv_kernel,
        "mamba_hidden_act": "silu",
        "mamba_ssm_cache_dtype": "float32",
        "use_conv_bias": True,
        "use_bias": False,
        "expand": 2,
        "chunk_size": 64,
        "time_step_min": 0.0,
        "time_step_limit": [0.0, float("inf")],
        "layer_norm_epsilon": s.eps,
        "residual_in_fp32": False,
        "max_position_embeddings": s.max_position_embeddings,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
    }


def save_checkpoint(net: Network, s: Shape, tokenizer: Tokenizer, out: Path) -> None:
    """Write the folder that transformers and bateleur open: bfloat16 weights, config, tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in net.state_dict().items()}
    tensors["lm_head.weight"] = tensors["model.embeddings.weight"].clone()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    config = hf_config(s)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (out / "generation_config.json").write_text(json.dumps(ends | SAMPLING, indent=2) + "\n")
    # Every training file followed this token, so a prompt behind it is the beginning of a file.
    tokenizer.post_processor = TemplateProcessing(single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)])
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": END_OF_TEXT,
                "eos_token": END_OF_TEXT,
                "pad_token": END_OF_TEXT,
                "clean_up_tokenization_spaces": False,
                "model_max_length": s.max_position_embeddings,
            },
            indent=2,
        )
        + "\n"
    )


def write_card(out: Path, record: dict[str, Any]) -> None:
    """The model card, from the record of the run."""
    shape = record["shape"]
    facts = {
        **record,
        "pattern": shape["pattern"],
        "vocab_size": shape["vocab_size"],
        "train_mb": record["train_bytes"] / 1e6,
        "held_out_mb": record["held_out_bytes"] / 1e6,
        "tokens_per_step": record["tokens_seen"] // record["steps"],
        "minutes": record["seconds"] / 60,
        "weight_mb": (out / "model.safetensors").stat().st_size / 1e6,
    }
    (out / "README.md").write_text(CARD.read_text().format(**facts))
