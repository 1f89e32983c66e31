"""Opens a Hugging Face checkpoint folder and loads its model."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bateleur.runner.checkpoint.families import FAMILIES, Family
from bateleur.runner.checkpoint.field_rules import check_fields, token_ids
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.kv_cache import declared_kv_cache, read_kv_scales
from bateleur.runner.checkpoint.names import Names, cut_evenly, resolve_layout, with_prefix
from bateleur.runner.checkpoint.overrides import overridden
from bateleur.runner.checkpoint.quantized import Matrices, quantize_projections, with_quantized
from bateleur.runner.checkpoint.weights import UNUSED, check_weights, checkpoint_dtype, fill_weights, resolve_tied
from bateleur.runner.distributed.ranks import ALONE, Ranks
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.spec import ModelSpec
from bateleur.runner.quantization.config import check_method, read_quantization
from bateleur.runner.utils.arguments import folder, refuse, shown
from bateleur.runner.utils.device import DTYPES, explain_out_of_memory, free_main_memory
from bateleur.runner.utils.json_file import errors_in, read_json
from bateleur.runner.utils.tensor_files import TensorEntry, list_tensors

Device = torch.device | str
_KINDS = frozenset(("linear_attention", "full_attention", "mlp", "moe", "conv"))
"""Kinds of layers in current versions of transformers; older files have other names for some."""
_FOREIGN = ("image_token_id", "image_token_index", "video_token_id")
"""Fields that name placeholder tokens of images and videos."""
_LONGEST_REASON = 240
"""Maximum characters of an error of transformers in ours."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint folder with a supported configuration and complete weights. Nothing is loaded yet.

    tied: whether the configuration ties embedding and output projection, whatever the files have. dtype: dtype of most
    weights in the files. tensors: tensors by the names that `names` uses. unused: tensors that the model does not need.
    overrides, dequantize: see `open_checkpoint`. other_prefixes: (prefix in some files, prefix in `names` for it).
    """

    path: Path
    spec: ModelSpec
    tied: bool
    dtype: torch.dtype
    names: Names
    tensors: Mapping[str, TensorEntry]
    unused: Mapping[str, TensorEntry]
    """Known tensors that the model does not need, such as those of an MTP head (`mtp.*`)."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields that replace those of `config.json`."""
    dequantize: bool = False
    """Whether quantised weights are converted to the dtype of the model when they are loaded."""
    other_prefixes: tuple[tuple[str, str], ...] = ()


def open_checkpoint(
    path: str | Path, overrides: Mapping[str, Any] | None = None, *, dequantize: bool = False, method: str | None = None
) -> Checkpoint:
    """Read a folder's `config.json` and the headers of its weights.

    overrides: fields that replace those of the file. dequantize: whether quantised weights become plain ones at
    loading. method: quantisation method that the checkpoint must have; None for any. Raises ValueError if the folder is
    no supported checkpoint, a size is invalid, a file is damaged, or weights are missing, surplus or misshapen (all are
    listed).
    """
    path = Path(folder("model", path))
    if not os.path.isdir(path):  # isdir accepts names that are too long
        raise ValueError(
            f"{path}: is no folder; it must be a folder with config.json and safetensors weights. Fetch a model of the "
            "Hub with `hf download NAME --local-dir DIR`"
        )
    family, fields, written = read_config(path, overrides)
    foreign = tuple((written[name], name) for name in _FOREIGN if isinstance(written.get(name), int))
    with errors_in(path / "config.json"):
        declared = replace(family.read_spec(fields), foreign_tokens=foreign)
        named = family.fold(fields, family.names(declared))
    spec = replace(declared, eos_token_ids=_eos_token_ids(path, declared))
    reader = read_quantization(path, written)
    if method is not None:
        check_method(method, reader)
    spec = replace(spec, kv_cache_dtype=declared_kv_cache(path, written))
    stored = with_prefix(list_tensors(path, family.other_prefixes), named)
    spec, scales = read_kv_scales(spec, named, stored)
    with errors_in(path):
        found = with_quantized(stored, reader, family.other_prefixes, named)
    known = {name: entry for name, entry in found.items() if name not in scales and not UNUSED.fullmatch(name)}
    laid_out = cut_evenly(resolve_layout(named, known), known)
    tensors = {name: entry for name, entry in known.items() if entry.named or name in laid_out}
    unused = {name: entry for name, entry in found.items() if name not in tensors}
    spec, names = resolve_tied(spec, laid_out, tensors)
    weights = HybridDecoder(spec, dtype=torch.float32, device="meta").weights()
    check_weights(path, spec.architecture, weights, names, tensors)
    return Checkpoint(
        path=path,
        spec=spec,
        tied=declared.tie_word_embeddings,
        dtype=checkpoint_dtype(tensors),
        names=names,
        tensors=tensors,
        unused=unused,
        overrides=dict(overrides or {}),
        dequantize=dequantize,
        other_prefixes=family.other_prefixes,
    )


def load_model(
    checkpoint: Checkpoint, dtype: torch.dtype, device: Device, ranks: Ranks = ALONE, data_ranks: Ranks = ALONE
) -> HybridDecoder:
    """Load the decoder, or this rank's part of it, in `dtype` on `device`.

    Parameters of recurrences and routers are float32 in any case. Quantised matrices stay quantised unless
    `Checkpoint.dequantize` is set. ranks, data_ranks: tensor-parallel or data-parallel ranks, see `HybridDecoder`.
    Raises ValueError before reading if there is not enough memory.
    """
    described, _ = describe_model(checkpoint, dtype, "meta", ranks, data_ranks)
    size = sum(weight.nbytes for weight in described.weights().values())
    if torch.device(device).type == "cpu" and size > (free := free_main_memory()):
        stored = sum(entry.num_bytes for entry in checkpoint.tensors.values())
        raise ValueError(
            f"{checkpoint.path}: its weights are {stored} bytes in files, and in {dtype} take {size}; "
            f"{free} bytes of memory are free"
        )
    with explain_out_of_memory(model=checkpoint.path, dtype=dtype, weight_bytes=size):
        model, quantized = describe_model(checkpoint, dtype, device, ranks, data_ranks)
        weights = model.weights()
    fill_weights(weights, checkpoint.names, checkpoint.tensors, model.share, quantized)
    twice = checkpoint.tied and not model.ties_lm_head and not model.output.pieces
    if twice and torch.equal(model.lm_head, model.embedding):
        model.tie_lm_head()
    return model


def describe_model(
    checkpoint: Checkpoint, dtype: torch.dtype, device: Device, ranks: Ranks = ALONE, data_ranks: Ranks = ALONE
) -> tuple[HybridDecoder, Matrices]:
    """Return the uninitialised decoder, and its projections that stay quantised. Arguments: see `load_model`."""
    model = HybridDecoder(checkpoint.spec, dtype=dtype, device=device, ranks=ranks, data_ranks=data_ranks)
    if checkpoint.dequantize:
        return model, {}
    return model, quantize_projections(model.matrices, checkpoint.names, checkpoint.tensors, model.share)


def resolve_dtype(dtype: object, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in: as given, or for "auto" float32 on a CPU and the checkpoint's dtype on CUDA."""
    if dtype != "auto":
        return DTYPES[str(dtype)]
    return torch.float32 if device.type == "cpu" or checkpoint.dtype not in DTYPES.values() else checkpoint.dtype


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Log only errors of transformers inside the `with` block.

    Warnings of transformers are not needed, because `check_fields` and `load_tokenizer` do their own checks.
    """
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def read_config(path: Path, overrides: Mapping[str, Any] | None = None) -> tuple[Family, ConfigFields, dict[str, Any]]:
    """Return the family of a checkpoint, its config fields as transformers completes them, and the contents of
    config.json with the fields of `overrides` in place of its own.

    Raises ValueError for an invalid field or an unsupported model.
    """
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"{path}: has no config.json; it must be a Hugging Face checkpoint")
    fields = read_json(file)
    with errors_in(f"{file}{' with hf_overrides' * bool(overrides)}"):
        fields = overridden(fields, overrides) if overrides else fields
        check_fields(fields)
        family = _family(fields)
        own = fields if family.inside is None else fields.get(family.inside)
        return family, ConfigFields(_config(path, family, fields, bool(overrides)), own), fields


def _family(config: Mapping[str, Any]) -> Family:
    kind = config.get("model_type")
    family = FAMILIES.get(str(kind))
    own_code = config.get("auto_map") or {}
    if not isinstance(own_code, dict | list):
        refuse("auto_map", own_code, "an object")
    unrun = ", whose own code is never run" if own_code else ""
    if family is None:
        raise ValueError(f"model_type is {kind!r}{unrun}; supported are {', '.join(sorted(FAMILIES))}")
    architectures = config.get("architectures") or [family.architecture]
    if family.architectures.isdisjoint(architectures):
        raise ValueError(f"architectures is {architectures}{unrun}; supported is {family.architecture!r}")
    own = config
    if family.inside is not None:
        own = config.get(family.inside) or {}
        if not isinstance(own, dict):
            refuse(family.inside, own, "an object")
        check_fields(own)
    for i, kind in enumerate(own.get("layer_types") or () if family.kinds else ()):
        if kind not in family.kinds:
            raise ValueError(f"layer_types[{i}] is {kind!r}; supported are {', '.join(family.kinds)}")
    if family.needs and all(own.get(name) is None for name in family.needs):
        raise ValueError(f"{' or '.join(family.needs)} is missing; it says what the layers are")
    return family


def _config(path: Path, family: Family, written: Mapping[str, Any], overridden: bool) -> Any:
    """Return an object with the fields of the text model's configuration as attributes.

    It is a `FileConfig` if `written` has only fields that transformers passes through unchanged (`Family.plain`),
    otherwise the configuration object of transformers. path: folder of the checkpoint. written: contents of
    config.json. overridden: whether fields of `written` differ from the file.
    """

    def ask() -> Any:
        if not overridden:
            config = _ask_transformers(path, written)
        else:
            with TemporaryDirectory() as folder:
                (Path(folder) / "config.json").write_text(json.dumps(written))
                config = _ask_transformers(Path(folder), written)
        if family.inside is None:
            return config
        own = getattr(config, family.inside)
        own.tie_word_embeddings = bool(own.tie_word_embeddings or config.tie_word_embeddings)
        return own

    listed = (written.get(name) or () for name in ("layers_block_type", "layer_types", "mtp_layers_block_type"))
    current = all(_KINDS.issuperset(each) for each in listed)
    return FileConfig(written, ask) if current and family.plain.issuperset(written) else ask()


def _ask_transformers(path: Path, fields: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    try:
        with quiet_transformers():
            return AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its validators raise various exceptions, also about fields that are not read here
        named = re.search(r"field '(\w+)'", str(error))
        about = f"{named[1]} is {shown(fields.get(named[1]))}; " if named else ""
        last = str(error).strip().rpartition("\n")[2].strip()
        why = "" if named or not last else f": {last[:_LONGEST_REASON]}"
        raise ValueError(f"{about}transformers refuses it, with a {type(error).__name__}{why}") from error


def _eos_token_ids(path: Path, spec: ModelSpec) -> tuple[int, ...]:
    by_file = {path / "config.json": spec.eos_token_ids}
    file = path / "generation_config.json"
    if file.is_file():
        value = read_json(file).get("eos_token_id")
        with errors_in(file):
            by_file[file] = token_ids("eos_token_id", value)
    for where, ids in by_file.items():
        if unknown := [i for i in ids if i >= spec.vocab_size]:
            raise ValueError(f"{where}: eos_token_id holds {unknown[0]}; the vocabulary has {spec.vocab_size} tokens")
    return tuple(dict.fromkeys(i for ids in by_file.values() for i in ids))


class FileConfig:
    """Fields of a configuration as attributes: those of the file, else those of transformers, which is slow to import.

    written: fields of the file, all in `Family.plain`. ask: returns the configuration object of transformers.
    """

    def __init__(self, written: Mapping[str, Any], ask: Callable[[], Any]) -> None:
        self._written, self._ask = written, cache(ask)

    def __getattr__(self, name: str) -> Any:
        value = self._written.get(name)
        if name == "rope_parameters" and value is not None:  # others are completed by transformers
            complete = value.get("rope_type") == "default" and value.get("rope_theta") is not None
            value = value if complete else None
        return getattr(self._ask(), name) if value is None else value
