"""Writes checkpoint folders of any size without weights: names and shapes are real, the data is a sparse file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bateleur.runner.checkpoint.mtp import _names as mtp_names
from bateleur.runner.checkpoint.names import Form, Names
from bateleur.runner.checkpoint.open import read_config
from bateleur.runner.models import HybridDecoder
from bateleur.runner.spec_decode.mtp_head import MtpHead

_WRITTEN = {torch.bfloat16: "BF16", torch.float32: "F32"}


def write_blank(folder: Path, fields: Mapping[str, Any], dtype: torch.dtype, *, mtp: bool = False) -> Path:
    """Write `config.json` with ``fields``, and a `model.safetensors` of zeros that takes no disk space.

    mtp: include the family's head for multi-token prediction.
    """
    (folder / "config.json").write_text(json.dumps(dict(fields)))
    family, config, _ = read_config(folder)
    spec = family.read_spec(config)
    target = HybridDecoder(spec, dtype=dtype, device="meta")
    shapes = _shapes(family.fold(config, family.names(spec)), target.weights())
    if spec.tie_word_embeddings:
        del shapes["lm_head.weight"]
    if mtp:
        assert family.mtp is not None, family
        layers, branches = family.mtp.layers(config, spec)
        head = replace(spec, layers=layers, branches_per_layer=branches)
        shapes |= _shapes(mtp_names(family.names(head), family.mtp, head), MtpHead(head, target).weights())
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _WRITTEN[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def _shapes(names: Names, weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor in the file, by its name there."""
    found = {}
    for name, part in names.items():
        weight = weights.get(part.target)
        if weight is None:  # tied
            weight = weights["embedding"]
        weight = weight if part.expert is None else weight[part.expert]
        rows, *rest = (weight.shape[0] if part.rows is None else part.rows, *weight.shape[1:])
        found[name] = part.stored or ((rows, 1, *rest) if part.form is Form.CONV else (rows, *rest))
    return found
