"""Converts a Llama checkpoint to a GGUF file with the same float32 weights, or quantised ones, for llama.cpp.

    python benchmarks/write_gguf.py FOLDER FILE.gguf [Q8_0|Q4_0]

Needs only `gguf`, `safetensors` and numpy, so that it runs in the environment of llama.cpp. The file has no tokenizer:
requests have token ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def interleaved(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of query or key weights in GGUF's order: the two rows of a rotary pair are adjacent."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def write(folder: Path, file: Path, kind: str = "F32") -> None:
    """Write the file. kind: name of a GGML type for matrices."""
    wanted = gguf.GGMLQuantizationType[kind]
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    out = gguf.GGUFWriter(str(file), "llama")
    out.add_file_type(0)
    out.add_block_count(config["num_hidden_layers"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_key_length(head_dim)
    out.add_value_length(head_dim)
    out.add_rope_dimension_count(head_dim)
    out.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_vocab_size(config["vocab_size"])
    out.add_tokenizer_model("no_vocab")
    for name, tensor in load_file(folder / "model.safetensors").items():
        weight = tensor.astype(np.float32)
        stored = wanted if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        if name in OUTSIDE:
            out.add_tensor(OUTSIDE[name], gguf.quants.quantize(weight, stored), raw_dtype=stored)
            continue
        layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
        if part in ("self_attn.q_proj", "self_attn.k_proj"):
            weight = interleaved(weight, heads if part.endswith("q_proj") else kv_heads)
        quantised = gguf.quants.quantize(weight, stored)
        out.add_tensor(f"blk.{layer}.{NAMES[part]}.weight", quantised, raw_dtype=stored)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
