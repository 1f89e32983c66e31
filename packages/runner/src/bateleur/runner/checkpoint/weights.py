"""From checkpoint tensors to a decoder's weights: every mismatch found first, then every part copied."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bateleur.runner.checkpoint.names import Form, Names, Part
from bateleur.runner.checkpoint.slices import fill_share
from bateleur.runner.checkpoint.tensors import DTYPES, TensorEntry
from bateleur.runner.models.sharding import Share
from bateleur.runner.models.spec import ModelSpec

_LM_HEAD = "lm_head.weight"
_OTHER_PARTS = "visual|vision_tower|vision_model|audio_tower|multi_modal_projector|mm_projector"
UNUSED = re.compile(rf"mtp\..*|.*\brotary_emb\.inv_freq|(model\.)?({_OTHER_PARTS})\..*")
"""Draft heads; frequencies that old Llama checkpoints carry although the configuration implies them; parts of models
for images and audio, which trainers leave in the files of text models."""
_LISTED = 40
"""Weights that an error names."""


def resolve_tied(
    spec: ModelSpec, names: Names, tensors: Mapping[str, TensorEntry]
) -> tuple[ModelSpec, Names]:
    """Let the file decide about tied embeddings.

    A configuration may say "tied" although the file holds both tensors (NemotronH in transformers never ties): then
    both are read. If it holds one of them, under either name, that one is both.
    """
    if not spec.tie_word_embeddings:
        return spec, names
    (embedding,) = (name for name, part in names.items() if part.target == "embedding")
    if _LM_HEAD in tensors and embedding in tensors:
        return replace(spec, tie_word_embeddings=False), names
    absent = embedding if _LM_HEAD in tensors else _LM_HEAD
    kept = {name: part for name, part in names.items() if name != absent}
    if absent == embedding:
        kept[_LM_HEAD] = Part("embedding")
    return spec, kept


def checkpoint_dtype(tensors: Mapping[str, TensorEntry]) -> torch.dtype:
    """The floating-point type that most weights are stored in."""
    sizes: Counter[torch.dtype] = Counter()
    for entry in tensors.values():
        sizes[DTYPES.get(entry.dtype, torch.float32)] += math.prod(entry.shape)
    return sizes.most_common(1)[0][0]


def check_weights(
    folder: Path, what: str, weights: Mapping[str, Tensor], names: Names, tensors: Mapping[str, TensorEntry]
) -> None:
    """Raises ValueError that lists every tensor that is missing, surplus, misshapen, or no plain float.

    weights: those of `what`, which the tensors are to fill; on any device.
    """
    problems: list[str] = []
    for name, part in names.items():
        rows, *rest = _rows(weights, part).shape
        if part.transposed:
            rest[-2:] = rest[:-3:-1]
        shape = part.stored or ((rows, 1, *rest) if part.form is Form.CONV else (rows, *rest))
        entry = tensors.get(name)
        if entry is None:
            problems.append(f"missing   {name} {shape}")
        elif entry.shape != shape:
            problems.append(f"misshapen {entry.name} {entry.shape}, expected {shape}")
        elif entry.dtype not in DTYPES:
            problems.append(f"dtype     {entry.name} {entry.dtype}, expected one of {', '.join(DTYPES)}")
    problems += [
        f"surplus   {entry.name} {entry.shape}" for name, entry in tensors.items() if name not in names
    ]
    if problems:
        more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
        listed = "\n  ".join([*problems[:_LISTED], *more])
        raise ValueError(f"{folder}: {len(problems)} weights do not fit {what}:\n  {listed}")


def fill_weights(
    weights: Mapping[str, Tensor],
    names: Names,
    tensors: Mapping[str, TensorEntry],
    share: Share | None = None,
) -> None:
    """Copy every tensor, which `check_weights` has seen, to its place, dtype and device; one is in memory at a time.

    share: what `weights` are of those that the names mean; of tensors that are cut only that is read.
    """
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(tensors[name].file, []).append(name)
    for file, wanted in by_file.items():
        with file.open("rb") as opened:
            for name in wanted:
                part = names[name]
                if share is not None and part.target in share.once:
                    weights[part.target].zero_()
                elif share is not None and (cut := share.cuts.get(part.target)):
                    fill_share(weights[part.target], part, tensors[name], cut)
                else:
                    target = _rows(weights, part)
                    target.copy_(_as_weight(tensors[name].read(opened), part).reshape(target.shape))


def _as_weight(tensor: Tensor, part: Part) -> Tensor:
    """What a file holds as the weight it stands for."""
    tensor = part.form.read(tensor)
    tensor = tensor.transpose(-1, -2) if part.transposed else tensor
    if (order := part.row_order(tensor.shape[part.axis])) is not None:
        tensor = tensor.index_select(part.axis, order)
    if part.factors:
        tensor = tensor.float() * part.row_factors(len(tensor)).view(-1, *[1] * (tensor.ndim - 1))
    return tensor


def _rows(weights: Mapping[str, Tensor], part: Part) -> Tensor:
    weight = weights[part.target]
    weight = weight if part.expert is None else weight[part.expert]
    return weight if part.rows is None else weight[part.start : part.start + part.rows]
