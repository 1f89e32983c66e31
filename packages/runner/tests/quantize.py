"""Quantised copies of checkpoints in every format, and what their weights are by the formulas of the formats.

The packers share no code with the readers: each returns the tensors of a file and `(code - zero) * scale` in float32.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = torch.cat([E2M1, -E2M1])
GROUP, BLOCK = 16, 24
Packed = tuple[dict[str, Tensor], Tensor]
PLAIN = re.compile(r".*(embed|norm|conv1d|\.gate\.|in_proj_[ab]\.|shared_expert_gate|lm_head|fc\.|eh_proj).*")
"""Names of matrices that stay plain in published files."""


def _spread(w: Tensor, size: int) -> Tensor:
    """(N, K) of (N, G)."""
    return w.repeat_interleave(size, -1)


def fp8(w: Tensor, scale: Tensor, stored: str, **more: Tensor) -> Packed:
    """e4m3 with scales that broadcast to w."""
    codes = (w / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, stored: scale, **more}, codes.float() * scale.float()


def fp8_block(w: Tensor, dtype: torch.dtype = torch.bfloat16, stored: str = "weight_scale_inv") -> Packed:
    """A scale for each block, also for ragged ones."""
    rows, columns = w.shape
    padded = torch.zeros(-(-rows // BLOCK) * BLOCK, -(-columns // BLOCK) * BLOCK)
    padded[:rows, :columns] = w
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).abs().amax((1, 3))
    scale = (blocks / 448).to(dtype)
    wide = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    tensors, values = fp8(w, wide, "s")
    return {"weight": tensors["weight"], stored: scale}, values


def fp8_tensor(w: Tensor) -> Packed:
    """One scale without dimensions, and one of activations that is not read."""
    scale = w.abs().max() / 448
    return fp8(w, scale, "weight_scale", input_scale=torch.tensor(float("nan")))


def fp8_channel(w: Tensor) -> Packed:
    """A scale for each row."""
    return fp8(w, (w.abs().amax(1, keepdim=True) / 448).bfloat16(), "weight_scale")


def _affine(w: Tensor, bits: int, dtype: torch.dtype, symmetric: bool, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned codes (N, K), zeros and scales (N, G)."""
    x, top = w.unflatten(1, (-1, group)), (1 << bits) - 1
    low, high = x.amin(-1), x.amax(-1)
    if symmetric:
        scale = (torch.maximum(high, -low) / (top / 2)).to(dtype)
        zero = torch.full_like(low, 1 << (bits - 1))
    else:
        scale = ((high - low) / top).to(dtype)
        zero = (-low / scale.float()).round().clamp(0, top)
    codes = (x / scale.float()[..., None] + zero[..., None]).round().clamp(0, top)
    return codes.flatten(1).long(), zero.long(), scale


def _words(codes: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """(R, C * bits / 32) int32 of codes (R, C), low bits first."""
    per = 32 // bits
    x = codes.reshape(len(codes), -1, per)
    x = x if order is None else x[..., order]
    return (x << (bits * torch.arange(per))).sum(-1).to(torch.uint32).view(torch.int32)


def _value(codes: Tensor, zeros: Tensor, scales: Tensor, group: int) -> Tensor:
    return (codes - _spread(zeros, group)).float() * _spread(scales.float(), group)


def packed(w: Tensor, bits: int = 4, symmetric: bool = True, dtype: torch.dtype = torch.bfloat16) -> Packed:
    """compressed-tensors pack-quantized."""
    codes, zeros, scales = _affine(w, bits, dtype, symmetric, GROUP)
    tensors = {"weight_packed": _words(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor(w.shape)}
    if not symmetric:
        tensors["weight_zero_point"] = _words(zeros.T.contiguous(), bits).T.contiguous()
    return tensors, _value(codes, zeros, scales, GROUP)


def int8(w: Tensor) -> Packed:
    """compressed-tensors int-quantized with zero points, a scale for each row."""
    codes, zeros, scales = _affine(w, 8, torch.bfloat16, False, w.shape[1])
    tensors = {"weight": codes - 128, "weight_zero_point": zeros - 128}
    signed = {name: each.to(torch.int8) for name, each in tensors.items()}
    return {**signed, "weight_scale": scales}, _value(codes, zeros, scales, w.shape[1])


def nvfp4(w: Tensor, divides: bool) -> Packed:
    """As compressed-tensors (the factor divides), or as modelopt (it multiplies)."""
    top = w.abs().max()
    factor = 448 * 6 / top if divides else top / (448 * 6)
    x = w.unflatten(1, (-1, 16))
    largest = x.abs().amax(-1) / 6
    scales = (largest * factor if divides else largest / factor).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    scale = scales.float() / factor if divides else scales.float() * factor
    codes = (x[..., None] / scale[..., None, None] - E2M1).abs().argmin(-1).flatten(1).to(torch.uint8)
    tensors = {"weight_scale": scales}
    pairs = codes[:, ::2] | codes[:, 1::2] << 4
    if divides:
        tensors |= {"weight_packed": pairs, "weight_global_scale": factor.view(1), "input_global_scale": torch.ones(1)}
    else:
        tensors |= {"weight": pairs, "weight_scale_2": factor, "input_scale": torch.tensor(0.0)}
    return tensors, E2M1[codes.long()] * _spread(scale, 16)


def gptq(w: Tensor, bits: int = 4, symmetric: bool = True, less: int = 1, ordered: bool = False) -> Packed:
    """less: 1 for version 1, which stores z - 1. ordered: columns are in groups by their size, not their place."""
    order = torch.randperm(w.shape[1]) if ordered else torch.arange(w.shape[1])
    group = torch.empty(len(order), dtype=torch.int32)
    group[order] = torch.arange(len(order), dtype=torch.int32) // GROUP
    sorted_codes, zeros, scales = _affine(w[:, order], bits, torch.float16, symmetric, GROUP)
    codes = torch.empty_like(sorted_codes)
    codes[:, order] = sorted_codes
    tensors = {
        "qweight": _words(codes, bits).T.contiguous(),
        "qzeros": _words(((zeros - less) % (1 << bits)).T.contiguous(), bits),
        "scales": scales.T.contiguous(),
        "g_idx": group,
    }
    wide = (codes - zeros[:, group.long()]).float() * scales.float()[:, group.long()]
    return tensors, wide


def awq(w: Tensor) -> Packed:
    """Version gemm."""
    codes, zeros, scales = _affine(w, 4, torch.float16, False, GROUP)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {
        "qweight": _words(codes.T.contiguous(), 4, order),
        "qzeros": _words(zeros.T.contiguous(), 4, order),
        "scales": scales.T.contiguous(),
    }
    return tensors, _value(codes, zeros, scales, GROUP)


def mxfp4(w: Tensor) -> Packed:
    """Experts of gpt-oss, whose weights (E, K, N) are transposed; the values are, too."""
    x = w.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = (x.abs().amax(-1) / 6).log2().ceil()
    codes = (x / 2.0 ** exponents[..., None])[..., None].sub(E2M1).abs().argmin(-1).to(torch.uint8)
    values = (E2M1[codes.long()] * 2.0 ** exponents[..., None]).flatten(2)
    tensors = {"_blocks": codes[..., ::2] | codes[..., 1::2] << 4, "_scales": (exponents + 127).to(torch.uint8)}
    return tensors, values.transpose(1, 2)


def _ct(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "format": form}
    ignore = ["lm_head", "re:.*mlp.gate$", "model.nothing.here"]
    fields = {"format": form, "config_groups": {"group_0": group}, "ignore": ignore}
    return {"quant_method": "compressed-tensors", "quantization_status": "compressed", **fields}


def _gptq(**fields: Any) -> dict[str, Any]:
    rules = {"-:.*lm_head": {}, "+:.*mtp.*": {"bits": 4}}
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "dynamic": rules} | fields


def _mixed(w: Tensor) -> Packed:
    """FP8 for some sizes, NVFP4 for the others."""
    return fp8_tensor(w) if w.shape[0] == w.shape[1] else nvfp4(w, divides=False)


FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Packed]]] = {
    "fp8 blocks": ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}, fp8_block),
    "fp8 blocks, float32 scales": (
        {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": ["nothing"]},
        lambda w: fp8_block(w, torch.float32),
    ),
    "float-quantized channels": (_ct("float-quantized", num_bits=8, type="float", strategy="channel"), fp8_channel),
    "float-quantized blocks": (
        _ct("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[BLOCK, BLOCK]),
        lambda w: fp8_block(w, stored="weight_scale"),
    ),
    "int-quantized": (_ct("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False), int8),
    "pack-quantized": (_ct("pack-quantized", num_bits=4, type="int", group_size=GROUP), packed),
    "pack-quantized with zeros": (
        _ct("pack-quantized", num_bits=4, type="int", group_size=GROUP, symmetric=False),
        lambda w: packed(w, symmetric=False, dtype=torch.float16),
    ),
    "pack-quantized 8 bits": (
        _ct("pack-quantized", num_bits=8, type="int", group_size=GROUP, symmetric=False),
        lambda w: packed(w, 8, symmetric=False),
    ),
    "nvfp4-pack-quantized": (
        _ct("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        lambda w: nvfp4(w, divides=True),
    ),
    "modelopt FP8": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*norm*"]}, fp8_tensor),
    "modelopt NVFP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, lambda w: nvfp4(w, divides=False)),
    "modelopt mixed": (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"model.a": {"quant_algo": "fp8"}, "model.b": {"quant_algo": "NVFP4"}},
        },
        _mixed,
    ),
    "gptq": (_gptq(), gptq),
    "gptq with zeros": (_gptq(sym=False), lambda w: gptq(w, symmetric=False)),
    "gptq 8 bits": (_gptq(bits=8, sym=False), lambda w: gptq(w, 8, symmetric=False)),
    "gptq v2 act order": (
        _gptq(checkpoint_format="gptq_v2", desc_act=True, sym=False),
        lambda w: gptq(w, symmetric=False, less=0, ordered=True),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "auto-round": (
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:gptqmodel", "sym": False},
        lambda w: gptq(w, symmetric=False, less=0),
    ),
}
"""Name: `quantization_config`, and the packer of a matrix (N, K)."""
_PLAIN_IN_MXFP4 = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": _PLAIN_IN_MXFP4}, mxfp4
"""Of experts (E, K, N) only."""


def one_expert_a_tensor(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The layout of published quantised files, of transformers' fused experts."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if not stem.endswith(".experts") or tensor.ndim != 3:
            found[name] = tensor
            continue
        for e, matrix in enumerate(tensor):
            parts = {"gate_proj": 0, "up_proj": 1} if last == "gate_up_proj" else {last: 0}
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                found[f"{stem}.{e}.{part}.weight"] = rows.contiguous()
    return found


def quantise(folder: Path, to: Path, kind: str, plain: re.Pattern[str] = PLAIN) -> tuple[Path, Path]:
    """Write two copies of a checkpoint below `to`: quantised in a format, and with its dequantised weights in float32.

    plain: names of matrices that are not quantised.
    """
    fields, pack = (FORMATS | {"mxfp4": MXFP4})[kind]
    torch.manual_seed(5)
    stored, plain_tensors = {}, {}
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in (tensors if kind == "mxfp4" else one_expert_a_tensor(tensors)).items():
        if tensor.ndim != (3 if kind == "mxfp4" else 2) or plain.fullmatch(name):
            stored[name] = plain_tensors[name] = tensor
            continue
        made, plain_tensors[name] = pack(tensor.float())
        stored |= {f"{name.removesuffix('weight')}{part}": each for part, each in made.items()}
    for name, tensors in (("quantised", stored), ("dequantised", plain_tensors)):
        shutil.copytree(folder, to / name)
        save_file({key: each.contiguous() for key, each in tensors.items()}, to / name / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (to / "quantised" / "config.json").write_text(json.dumps({**config, "quantization_config": fields}))
    return to / "quantised", to / "dequantised"


QWEN: dict[str, Any] = {
    "vocab_size": 104,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
NEMOTRON: dict[str, Any] = {
    "vocab_size": 104,
    "hidden_size": 64,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}
GPT_OSS: dict[str, Any] = {
    "vocab_size": 104,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
MODELS = {"qwen": ("qwen3_5_moe_text", QWEN), "nemotron": ("nemotron_h-experts", NEMOTRON)}
CASES = [(model, kind) for model in MODELS for kind in FORMATS] + [("gpt_oss", "mxfp4")]
"""Models and the formats that they are published in."""


class Checkpoints:
    """`checkpoints(model, format)`: a quantised checkpoint and its dequantised copy. Qwen's have an MTP head."""

    def __init__(self, temporary: Any) -> None:
        self._temporary = temporary
        self._plain: dict[str, Path] = {}
        self._made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def __call__(self, model: str, kind: str) -> tuple[Path, Path]:
        new = self._temporary.mktemp
        family, sizes = (MODELS | {"gpt_oss": ("gpt_oss", GPT_OSS)})[model]
        if model not in self._plain:
            folder = tiny.save(tiny.make_model(family, **sizes), new(model))
            if model == "qwen":
                layers = sizes | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
                tiny.add_mtp(folder, family, new("mtp") / "body", **layers)
                tiny.edit_config(folder, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)
            self._plain[model] = folder
        if (model, kind) not in self._made:
            self._made[model, kind] = quantise(self._plain[model], new("made"), kind)
        return self._made[model, kind]
