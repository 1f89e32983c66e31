"""Lossless speculative decoding of a transformers model without an engine: `pip install bateleur-eagle transformers`.

A draft head and an n-gram lookup propose tokens; the transformers model verifies them with its own KV cache. The text
equals that of plain decoding at any temperature, and at temperature 0 that of `model.generate`.

    python examples/eagle_transformers.py

To use real weights, replace `tiny_model` by `AutoModelForCausalLM.from_pretrained(...)`, on any device, and
`untrained_head` by the folder of an EAGLE-1 or EAGLE-3 head that was trained for this model.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from bateleur.eagle.causal_lm import CausalLM
from bateleur.eagle.heads import TargetInfo, load_head
from bateleur.eagle.loop import Request, sample, speculate

VOCAB, HIDDEN, HEADS, LAYERS = 128, 64, 4, 6
PROMPT = [7, 21, 9, 7, 21]


def tiny_model() -> Any:
    """A Llama with random weights. Like many models, it repeats itself at temperature 0."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.05,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def untrained_head(folder: Path) -> Path:
    """Write an EAGLE-3 head with random weights and the target's `lm_head`, in its authors' format."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, LAYERS]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    size = HIDDEN // HEADS
    shapes = {
        "fc": (HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj": (HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.k_proj": (2 * size, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (2 * size, 2 * HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, HIDDEN),
        "midlayer.mlp.gate_proj": (96, HIDDEN),
        "midlayer.mlp.up_proj": (96, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, 96),
    }
    norms = ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm")
    tensors = {f"{name}.weight": torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": torch.ones(HIDDEN) for name in norms}
    save_file(tensors, folder / "model.safetensors")
    return folder


def lookup(tokens: list[int]) -> list[int]:
    """Propose the tokens that followed an earlier occurrence of the last two tokens."""
    for at in range(len(tokens) - 3, -1, -1):
        if tokens[at : at + 2] == tokens[-2:]:
            return tokens[at + 2 :]
    return []


def main() -> None:
    """Decode with and without drafts, and compare."""
    model = tiny_model()
    with tempfile.TemporaryDirectory() as folder:
        path = untrained_head(Path(folder))
        head, report = load_head(path, TargetInfo.of(model), dtype=model.dtype, device=model.device)
    print(report)

    greedy = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=64)[0, len(PROMPT) :]
    for temperature in (0.0, 0.8):
        how: dict[str, Any] = {"seed": 7, "temperature": temperature}
        plain = sample(CausalLM(model), Request(PROMPT, 64, **how))
        assert temperature or plain == greedy.tolist()
        for name, drafter in (("the head", head), ("a look-up", lookup)):
            target = CausalLM(model, head.spec.needs)
            steps = list(speculate(target, drafter, Request(PROMPT, 64, **how), 4))
            assert [token for step in steps for token in step.tokens] == plain
            rate = len(plain) / len(steps)
            print(f"temperature {temperature}, drafts of {name}: {rate:.2f} tokens per step, the same text")

    # A request ends at a token or by a condition, also in the middle of a step.
    end = plain[20]
    steps = list(speculate(CausalLM(model), lookup, Request(PROMPT, 64, stop=[end], **how), 4))
    answer = [token for step in steps for token in step.tokens]
    assert answer == plain[: plain.index(end) + 1]
    print(f"ended by token {end} after {len(answer)} tokens")


if __name__ == "__main__":
    main()
