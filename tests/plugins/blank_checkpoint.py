"""Writes checkpoint folders of any size without weights: names and shapes are real, the data is a sparse file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bateleur.runner.checkpoint.mtp import _names as mtp_names
from bateleur.runner.checkpoint.names import Names, StorageForm, resolve_layout
from bateleur.runner.checkpoint.open import read_config
from bateleur.runner.models import HybridDecoder
from bateleur.runner.spec_decode.mtp_head import MtpHead

_WRITTEN = {torch.bfloat16: "BF16", torch.float32: "F32"}
_BYTES = {"BF16": 2, "F32": 4, "I32": 4, "U8": 1, "F8_E4M3": 1}
_MATRICES = re.compile(r"(?!.*(embed|norm|conv1d|\.gate\.|in_proj_[ab]\.|shared_expert_gate|lm_head|fc\.)).*weight")
"""Names of matrices that published files quantise."""
Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype, as safetensors names it, and shape by name."""


@dataclass(frozen=True)
class Quantized:
    """A format that matrices are stored in: `quantization_config`, and the tensors of a matrix (N, K) or (E, N, K)."""

    config: Mapping[str, Any]
    tensors: Callable[..., Tensors]
    names: re.Pattern[str] = _MATRICES


FORMATS = {
    "FP8 blocks": Quantized(
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        lambda n, k: {"weight": ("F8_E4M3", (n, k)), "weight_scale_inv": ("BF16", (-(-n // 128), -(-k // 128)))},
    ),
    "NVFP4": Quantized(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        lambda n, k: {
            "weight": ("U8", (n, k // 2)),
            "weight_scale": ("F8_E4M3", (n, k // 16)),
            "weight_scale_2": ("F32", ()),
        },
    ),
    "INT4": Quantized(
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 128}}},
        },
        lambda n, k: {"weight_packed": ("I32", (n, k // 8)), "weight_scale": ("BF16", (n, k // 128))},
    ),
    "MXFP4": Quantized(
        {"quant_method": "mxfp4"},
        lambda e, n, k: {"blocks": ("U8", (e, n, k // 32, 16)), "scales": ("U8", (e, n, k // 32))},
        re.compile(".*_blocks"),
    ),
}


def write_blank(
    folder: Path,
    fields: Mapping[str, Any],
    dtype: torch.dtype,
    *,
    mtp: bool = False,
    quantized: Quantized | None = None,
) -> Path:
    """Write `config.json` with ``fields``, and a `model.safetensors` of zeros that takes no disk space.

    mtp: include the family's head for multi-token prediction. quantized: how matrices are stored; None for `dtype`.
    """
    more = {} if quantized is None else {"quantization_config": quantized.config}
    (folder / "config.json").write_text(json.dumps(dict(fields) | more))
    family, config, _ = read_config(folder)
    spec = family.read_spec(config)
    target = HybridDecoder(spec, dtype=dtype, device="meta")
    apart = quantized is not None
    shapes = _shapes(family.fold(config, family.names(spec)), target.weights(), apart)
    if spec.tie_word_embeddings:
        del shapes["lm_head.weight"]
    if mtp:
        assert family.mtp is not None, family
        layers, branches = family.mtp.layers(config, spec)
        head = replace(spec, layers=layers, branches_per_layer=branches)
        shapes |= _shapes(mtp_names(family.names(head), family.mtp, head), MtpHead(head, target).weights(), apart)
    header, end = {}, 0
    for name, (written, shape) in _stored(shapes, _WRITTEN[dtype], quantized).items():
        start, end = end, end + prod(shape) * _BYTES[written]
        header[name] = {"dtype": written, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def _stored(shapes: Mapping[str, tuple[int, ...]], written: str, quantized: Quantized | None) -> Tensors:
    found: Tensors = {}
    for name, shape in shapes.items():
        if quantized is None or not quantized.names.fullmatch(name):
            found[name] = written, shape
        else:
            stem = re.sub("(weight|blocks)$", "", name)
            found |= {stem + part: each for part, each in quantized.tensors(*shape).items()}
    return found


def _shapes(names: Names, weights: Mapping[str, Tensor], apart: bool) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor in the file, by its name there. apart: in the layout of quantised files, mostly with a
    tensor for each expert.
    """
    if apart:
        names = resolve_layout(names, {other for part in names.values() for other in part.instead})
    found = {}
    for name, part in names.items():
        weight = weights.get(part.target)
        if weight is None:  # tied
            weight = weights["embedding"]
        weight = weight if part.expert is None else weight[part.expert]
        rows, *rest = (weight.shape[0] if part.rows is None else part.rows, *weight.shape[1:])
        found[name] = part.stored or ((rows, 1, *rest) if part.form is StorageForm.CONV else (rows, *rest))
    return found
