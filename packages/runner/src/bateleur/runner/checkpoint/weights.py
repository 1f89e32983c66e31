"""Fills a decoder's weights from checkpoint tensors, after all mismatches are reported."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bateleur.runner.checkpoint.names import Names, StorageForm, WeightPart, embedding_name
from bateleur.runner.checkpoint.quantized import Matrices, QuantizedEntry, fill_quantized
from bateleur.runner.models.sharding import Cut, WeightShard
from bateleur.runner.models.spec import ModelSpec
from bateleur.runner.utils.tensor_files import DTYPES, TensorEntry

_LM_HEAD = "lm_head.weight"
_OTHER_PARTS = "visual|vision_tower|vision_model|audio_tower|multi_modal_projector|mm_projector"
UNUSED = re.compile(rf"mtp\..*|.*\brotary_emb\.inv_freq|(model\.)?({_OTHER_PARTS})\..*")
"""Tensors that are not needed: MTP heads, frequencies in old Llama checkpoints, and image and audio parts that trainers
leave in files of text models."""
_LISTED = 40
"""Maximum number of weights in an error message."""


def resolve_tied(spec: ModelSpec, names: Names, tensors: Mapping[str, TensorEntry]) -> tuple[ModelSpec, Names]:
    """Return spec and names after deciding by the tensors of the file whether embedding and output projection are tied.

    If the configuration ties them but the file has both (as NemotronH's), both are read, as if not tied. If the
    file has one, it is used for both.
    """
    if not spec.tie_word_embeddings:
        return spec, names
    embedding = embedding_name(names)
    if _LM_HEAD in tensors and embedding in tensors:
        return replace(spec, tie_word_embeddings=False), names
    absent = embedding if _LM_HEAD in tensors else _LM_HEAD
    kept = {name: part for name, part in names.items() if name != absent}
    if absent == embedding:
        kept[_LM_HEAD] = WeightPart("embedding")
    return spec, kept


def checkpoint_dtype(tensors: Mapping[str, TensorEntry]) -> torch.dtype:
    """Return the floating-point dtype of most weights."""
    sizes: Counter[torch.dtype] = Counter()
    for entry in (each for each in tensors.values() if not each.quantized):
        sizes[DTYPES.get(entry.dtype, torch.float32)] += math.prod(entry.shape)
    return sizes.most_common(1)[0][0] if sizes else torch.bfloat16


def check_weights(
    folder: Path, what: str, weights: Mapping[str, Tensor], names: Names, tensors: Mapping[str, TensorEntry]
) -> None:
    """Raise ValueError that lists all tensors that are missing, surplus, misshapen, or of an unsupported dtype.

    what: name of the model in messages. weights: its weights, on any device, which the tensors will fill.
    """
    problems: list[str] = []
    for name, part in names.items():
        weight = weights[part.target] if part.expert is None else weights[part.target][part.expert]
        rows, *rest = part.rows or len(weight), *weight.shape[1:]
        if part.transposed:
            rest[-2:] = rest[:-3:-1]
        shape = part.stored or ((rows, 1, *rest) if part.form is StorageForm.CONV else (rows, *rest))
        entry = tensors.get(name)
        if entry is None:
            problems.append(f"missing   {name} {shape}")
        elif entry.shape != shape:
            problems.append(f"misshapen {entry.name} {entry.shape}, expected {shape}")
        elif entry.dtype not in DTYPES:
            problems.append(f"dtype     {entry.name} {entry.dtype}, expected one of {', '.join(DTYPES)}")
    problems += [f"surplus   {entry.name} {entry.shape}" for name, entry in tensors.items() if name not in names]
    if problems:
        more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
        listed = "\n  ".join([*problems[:_LISTED], *more])
        raise ValueError(f"{folder}: {len(problems)} weights do not fit {what}:\n  {listed}")


def fill_weights(
    weights: Mapping[str, Tensor],
    names: Names,
    tensors: Mapping[str, TensorEntry],
    share: WeightShard,
    quantized: Matrices,
) -> None:
    """Copy all tensors to the weights, one at a time. share: this rank's part of the weights.

    quantized: projections that keep codes and scales, by the names of their weights, which are not among `weights`.
    """
    for name in sorted(names, key=lambda name: tensors[name].file):
        part, entry = names[name], tensors[name]
        cut = share.cuts.get(part.target, {})
        if part.target in quantized:
            fill_quantized(quantized[part.target], part, entry, cut)
        elif part.target in share.once:
            weights[part.target].zero_()
        else:
            _fill(weights[part.target], part, entry, cut)


def _fill(weight: Tensor, part: WeightPart, entry: TensorEntry, cut: Cut) -> None:
    """Copy this rank's slice of one tensor into its `weight`. cut: this rank's ranges of the whole weight, by axis."""
    shift, target = 0, weight
    if part.expert is not None:
        (first, end), *_ = cut.get(0, ((0, len(weight)),))
        if not first <= part.expert < end:
            return
        shift, target = 1, weight[part.expert - first]
    factors = part.row_factors(entry.shape[0]) if part.factors else None
    if isinstance(entry, QuantizedEntry) and factors is not None:  # in float32, before it is rounded
        stored, factors = entry.multiplied(factors), None
    else:
        stored = entry.mapped()
    stored = stored.transpose(-1, -2) if part.transposed else stored
    columns = {axis - shift: ranges for axis, ranges in cut.items() if axis > shift}
    if not columns:
        stored = stored.reshape(-1, *target.shape[1:])
    order = part.row_order(stored.shape[part.axis])
    if order is not None and part.axis:
        columns.setdefault(part.axis, ((0, stored.shape[part.axis]),))
    for (first, end), own in part.own_rows(cut.get(shift), len(stored)):
        tensor = stored[first:end] if order is None or part.axis else stored[order[first:end]]
        for axis, ranges in columns.items():
            lines = torch.arange(stored.shape[axis]) if order is None or axis != part.axis else order
            tensor = tensor.index_select(axis, torch.cat([lines[a:b] for a, b in ranges]))
        tensor = part.form.read(tensor.to(target.dtype) if entry.quantized else tensor)
        if factors is not None:
            tensor = tensor.float() * factors[first:end].view(-1, *[1] * (tensor.ndim - 1))
        target[own[0] : own[1]].copy_(tensor)
