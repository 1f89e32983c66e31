"""Write `libraries.safetensors`: weights that other libraries packed, with the weights that these unpack from them.

Each library lies in a folder of its own, beside the project's torch and transformers:

    uv pip install --target CT --no-deps compressed-tensors==0.20.0 loguru
    uv pip install --target MO --no-deps nvidia-modelopt==0.47.0 omegaconf antlr4-python3-runtime==4.9.3 'pulp<4' \
        nvidia-ml-py scipy regex rich markdown-it-py mdurl
    uv pip install --target AR --no-deps auto-round==0.16.1 accelerate psutil
    PYTHONPATH=CT:MO:AR python packages/runner/tests/quantized_files/make.py
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from safetensors.torch import save_file
from torch import Tensor

E4M3 = torch.float8_e4m3fn
torch.manual_seed(0)
W = torch.randn(16, 256)
TENSORS: dict[str, Tensor] = {}
CONFIGS: dict[str, dict[str, Any]] = {}


def put(name: str, config: dict[str, Any], tensors: dict[str, Tensor], wanted: Tensor) -> None:
    """Keep the tensors of a module, its configuration, and its weight."""
    CONFIGS[name] = config
    TENSORS.update({f"{name}.{part}": tensor.contiguous().clone() for part, tensor in tensors.items()})
    TENSORS[f"wanted.{name}"] = wanted.contiguous().clone()


def compressed(name: str, form: str, w: Tensor, x: Tensor, keepdim: bool, **args: Any) -> None:
    """x: w with the entries of a group along the last axis."""
    weights = QuantizationArgs(**args)
    scheme, top = QuantizationScheme(targets=["Linear"], weights=weights), None
    state: dict[str, Tensor] = {"weight": w}
    if form.startswith("nvfp4"):
        top = state["weight_global_scale"] = generate_gparam(w.amin(), w.amax())
    low, high = x.amin(-1, keepdim=keepdim), x.amax(-1, keepdim=keepdim)
    scale, zero = calculate_qparams(low, high, weights, global_scale=top)
    state["weight_scale"] = scale
    if not weights.symmetric:
        state["weight_zero_point"] = zero
    compressor = BaseCompressor.get_value_from_registry(form)
    made = compressor.compress(state, scheme)
    group = {"targets": ["Linear"], "weights": json.loads(weights.model_dump_json()), "format": form}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    put(name, config, made, compressor.decompress(dict(made), scheme)["weight"])


for dtype in (torch.float32, torch.bfloat16):
    w = W.to(dtype)
    for bits in (4, 8):
        for symmetric in (True, False):
            args = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": 64}
            name = f"pack-{bits}-{symmetric}-{dtype}".replace(".", "_")
            compressed(name, "pack-quantized", w, w.unflatten(1, (-1, 64)), False, **args)
w = W.bfloat16()
blocks = w.view(2, 8, 2, 128).transpose(1, 2).flatten(2)
fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
compressed("float-tensor", "float-quantized", w, w.flatten(), False, strategy="tensor", **fp8)
compressed("float-channel", "float-quantized", w, w, True, strategy="channel", **fp8)
compressed("float-block", "float-quantized", w, blocks, False, strategy="block", block_structure=[8, 128], **fp8)
compressed("int-channel", "int-quantized", W, W, True, num_bits=8, type="int", symmetric=True, strategy="channel")
nvfp4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
compressed(
    "nvfp4", "nvfp4-pack-quantized", W, W.unflatten(1, (-1, 16)), False, scale_dtype=E4M3, zp_dtype=E4M3, **nvfp4
)

codes, zeros = torch.randint(0, 16, (256, 16)), torch.randint(0, 16, (4, 16))
scales = (torch.rand(4, 16) * 0.02 + 0.01).half()


def awq_words(x: Tensor) -> Tensor:
    """Eight columns a word, in AWQ's order."""
    ordered = x.view(len(x), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
    return (ordered << (4 * torch.arange(8))).sum(-1).to(torch.uint32).view(torch.int32)


awq = {"qweight": awq_words(codes), "qzeros": awq_words(zeros), "scales": scales}
converted = AutoAWQConverter(group_size=64).process({f"x.{name}": each for name, each in awq.items()})
scheme = QuantizationScheme(
    targets=["Linear"],
    weights=QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="group", group_size=64),
)
compressor = BaseCompressor.get_value_from_registry("pack-quantized")
wanted = compressor.decompress({name[2:]: each for name, each in converted.items()}, scheme)["weight"]
put("awq", {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, awq, wanted)

made, scale, second = NVFP4QTensor.quantize(w, 16)[:3]
wanted = made.dequantize(torch.bfloat16, scale=scale, double_scale=second, block_sizes={-1: 16})
modelopt = {"weight": made._quantized_data, "weight_scale": scale, "weight_scale_2": second.float()}
put("modelopt-nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, modelopt, wanted)


def auto_round(form: str, module: str, less: int) -> None:
    """The packers of auto-round, which import without the rest of it."""
    (folder,) = importlib.util.find_spec("auto_round_extension").submodule_search_locations
    package, tools = types.ModuleType("auto_round"), MagicMock()
    package.__path__ = [folder.removesuffix("_extension")]
    tools.get_packing_device = lambda device=None: "cpu"
    sys.modules |= {"datasets": MagicMock(), "auto_round": package, "auto_round.utils": tools}
    name = "auto_round.utils.bit_packing"
    spec = importlib.util.spec_from_file_location(name, f"{package.__path__[0]}/utils/bit_packing.py")
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    packer = importlib.import_module(f"auto_round_extension.torch.{module}")
    z, q = torch.randint(1, 16, (32, 4)), torch.randint(0, 16, (32, 256))
    s = (torch.rand(32, 4) * 0.02 + 0.01).half()
    linear = torch.nn.Linear(256, 32, bias=False)
    linear.weight.data = (q - z.repeat_interleave(64, 1)).float() * s.float().repeat_interleave(64, 1)
    made = packer.QuantLinear(4, 64, 256, 32, False)
    made.device = "cpu"
    made.pack(linear, s.float(), z.float(), None, device="cpu")
    tensors = {"qweight": made.qweight, "qzeros": made.qzeros, "scales": s.T}
    fields = {"bits": 4, "group_size": 64, "sym": False}
    put(form, {"quant_method": "auto-round", "packing_format": form, **fields}, tensors, linear.weight.data)
    version = {"quant_method": "gptq", "checkpoint_format": "gptq" if less else "gptq_v2"}
    put(f"gptq-{less}", fields | version, tensors, linear.weight.data)


auto_round("auto_round:auto_gptq", "qlinear_torch_zp", 1)
auto_round("auto_round:gptqmodel", "qlinear_torch", 0)

save_file(TENSORS, Path(__file__).parent / "libraries.safetensors", {"configs": json.dumps(CONFIGS)})
print(f"{len(CONFIGS)} weights")
