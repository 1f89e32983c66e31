"""Loads a draft head from a folder."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bateleur.eagle.heads.config import LayerIds, Layout, describe
from bateleur.eagle.heads.eagle import Eagle1Head, Eagle3Head
from bateleur.eagle.heads.layers import Vocabulary
from bateleur.eagle.heads.spec import Head, HeadSpec, Project, TargetInfo
from bateleur.eagle.heads.weights import Weights, linear

_SAFETENSORS = "model.safetensors"
_PICKLE = "pytorch_model.bin"
# t2d is the mask of the targets of d2t; verifier_* and inv_freq duplicate other fields.
_HARMLESS = re.compile(r"t2d|verifier_(norm|lm_head)\.weight|.*rotary_emb\.inv_freq")
# The EAGLE-3 repository names its one layer differently; speculators has other names for EAGLE-1.
_PREFIXES = (("midlayer.", "layers.0."), ("transformer.", "layers.0."), ("fusion_fc.", "fc."))
_BUILD: dict[str, Callable[..., Head]] = {"eagle1": Eagle1Head, "eagle3": Eagle3Head}


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Where each weight of a head came from, by its name in the checkpoint.

    own, shared: taken from the checkpoint, and from the target (`embed_tokens`, `lm_head`).
    unused: in the checkpoint and known to be unnecessary, such as the mask `t2d`.
    notes: remarks, such as boundaries chosen by default.
    num_parameters, num_bytes: of `own`, without tensors that equal the target's; bytes in the dtype of the head.
    """

    path: Path
    layout: Layout
    kind: str
    own: tuple[str, ...]
    shared: tuple[str, ...]
    unused: tuple[str, ...]
    notes: tuple[str, ...] = ()
    num_parameters: int = 0
    num_bytes: int = 0

    def __str__(self) -> str:
        """Return a summary of a few lines."""
        lines = [
            f"{self.path}: {self.kind} head in the {self.layout} layout",
            f"  {len(self.own)} own tensors",
            f"  shared with the target: {', '.join(self.shared) or 'nothing'}",
            f"  unused: {', '.join(self.unused) or 'nothing'}",
        ]
        return "\n".join(lines + [f"  {note}" for note in self.notes])


def load_head(
    path: str | Path,
    target: TargetInfo,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    layer_ids: LayerIds = "inputs",
    project: Project = linear,
) -> tuple[Head, LoadReport]:
    """Load the draft head in a folder; returns the head, and where its weights came from.

    Layouts: the EAGLE repository (EAGLE-1 and EAGLE-3), the `eagle` wrapper configuration, and speculators (`eagle`,
    `eagle3`). Weights are `model.safetensors`, single or sharded; a pickle is never read.

    Args:
        path: the folder.
        target: sizes that the head must fit, and tensors that it may share; they are not copied.
        dtype: dtype of the head's own weights and of its arithmetic.
        device: device of the head's own weights; the target's must be on it, too.
        layer_ids: whether `eagle_aux_hidden_state_layer_ids` counts inputs or outputs of layers (see `heads.config`).
        project: creates the functions that multiply with the head's own matrices.

    Raises:
        ValueError: an unknown layout, a size that does not fit, or weights that are missing, have a wrong shape or are
            unknown (all are listed).
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: holds no config.json; a draft head is a folder with config.json and weights")
    config, files = _read_json(folder / "config.json"), _open_tensors(folder)
    try:
        tensors = _renamed(files)
        described = describe(config, tensors.keys(), target, layer_ids)
        spec = described.spec
        stored_name = _stored_names(files.keys())
        weights = Weights(tensors, dtype=dtype, device=device, stored_name=stored_name, project=project)
        vocabulary, shared = _vocabulary(spec, weights, target)
        target_ids = _target_ids(spec, weights, tensors)
        head = _BUILD[spec.kind](spec, weights, vocabulary, target_ids)
        unused = weights.check(lambda name: _HARMLESS.fullmatch(name) is not None)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    held = [size for name, size in weights.own.items() if name.split(".")[-2:][0] not in shared]
    return head, LoadReport(
        path=folder,
        layout=described.layout,
        kind=spec.kind,
        own=tuple(sorted(weights.own)),
        shared=shared,
        unused=unused,
        notes=described.notes,
        num_parameters=sum(count for count, _ in held),
        num_bytes=sum(size for _, size in held),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ValueError naming the file if it holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        where = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"{path}: cannot be read as JSON{where}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds {type(value).__name__}; it must hold a JSON object")
    return value


def _open_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder's `model.safetensors`, single or sharded, by name. Files are mapped, not read.

    Raises:
        ValueError: no file, a missing shard, or a damaged file. A pickle is refused by name, because reading one may
            run code.
    """
    if (folder / _SAFETENSORS).is_file():
        return _open_safetensors(folder / _SAFETENSORS)
    index = folder / f"{_SAFETENSORS}.index.json"
    if index.is_file():
        tensors: dict[str, Tensor] = {}
        for file in _shards(index):
            opened = _open_safetensors(file)
            if twice := sorted(tensors.keys() & opened.keys()):
                raise ValueError(f"{file}: {twice[0]} is in another shard, too")
            tensors |= opened
        return tensors
    for name in (_PICKLE, f"{_PICKLE}.index.json"):
        if (folder / name).is_file():
            raise ValueError(f"{folder / name}: a pickle, which is never read; weights are read from {_SAFETENSORS}")
    raise ValueError(f"{folder}: holds no {_SAFETENSORS}, single or sharded")


def _shards(index: Path) -> list[Path]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index}: weight_map must map tensor names to file names")
    names, there = sorted(set(weight_map.values())), {file.name for file in index.parent.iterdir()}
    if missing := [name for name in names if name not in there]:
        raise ValueError(f"{index}: {missing[0]!r} is not a file in this folder")
    return [index.parent / name for name in names]


def _open_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ValueError(
            f"{file}: reading it needs the package safetensors (pip install 'bateleur-eagle[checkpoints]')"
        ) from error
    found, name = {}, None
    try:
        tensors: Any = safe_open(file, framework="pt")
        for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
            found[name] = tensors.get_tensor(name)
    except (OSError, SafetensorError) as error:
        what = "is no complete safetensors file" if name is None else f"{name} cannot be read: {error}"
        raise ValueError(f"{file}: {what}") from error
    return found


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the same tensors under the names of `_plain_name`. Raises `ValueError` if two get the same name."""
    origin: dict[str, str] = {}
    for name in tensors:
        if (first := origin.setdefault(_plain_name(name), name)) != name:
            raise ValueError(f"{first} and {name} are the same weight, {_plain_name(name)}")
    return {plain: tensors[name] for plain, name in origin.items()}


def _plain_name(name: str) -> str:
    """Return a tensor name without prefixes such as `model.`, which differ between checkpoint layouts."""
    while name.startswith("model."):
        name = name.removeprefix("model.")
    for theirs, ours in _PREFIXES:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _stored_names(names: Collection[str]) -> Callable[[str], str]:
    """Return a function that adds the prefixes of this checkpoint to the name of a missing tensor, for messages."""
    rules = [(ours, theirs) for theirs, ours in _PREFIXES if any(theirs in name for name in names)]

    def stored_name(name: str) -> str:
        ours, theirs = next((rule for rule in rules if name.startswith(rule[0])), ("", ""))
        return theirs + name.removeprefix(ours)

    return stored_name


def _vocabulary(spec: HeadSpec, weights: Weights, target: TargetInfo) -> tuple[Vocabulary, tuple[str, ...]]:
    """Return embedding and `lm_head`, each the head's own if it has one, and names of those shared with the target.

    An own tensor that equals the target's is dropped, and the target's is shared. With a vocabulary-parallel target
    it is kept, because each rank sees only its shard of the target's.
    """
    whole = target.vocab_size, target.hidden_size
    used: dict[str, Tensor] = {}
    shared: list[str] = []
    for name, rows, theirs in (
        ("embed_tokens", spec.vocab_size, target.embedding),
        ("lm_head", spec.draft_vocab_size, target.lm_head),
    ):
        shape, full = (rows, spec.hidden_size), f"{name}.weight"
        used[name] = weights.take(full, *shape) if full in weights or whole != shape else theirs
        # Many checkpoints contain a copy of the target's tensor; it is not kept twice.
        copied = target.shard is None and not used[name].is_meta and _same(used[name], theirs)
        if used[name] is theirs or copied:
            used[name] = theirs
            shared.append(name)
    shares_embedding, shares_head = "embed_tokens" in shared, "lm_head" in shared
    output = target.output if shares_head and target.output else weights.project(used["lm_head"], None)
    vocabulary = Vocabulary(
        used["embed_tokens"],
        output,
        used["lm_head"].dtype,
        embed=target.embed if shares_embedding else None,
        shard=target.shard if shares_head else None,
    )
    return vocabulary, tuple(shared)


def _same(tensor: Tensor, target: Tensor) -> bool:
    return tensor.shape == target.shape and torch.equal(tensor.to(target), target)


def _target_ids(spec: HeadSpec, weights: Weights, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Return the target id of each draft id, (Vd,); None if each equals its draft id. `d2t` holds offsets, not ids."""
    size, vocab = spec.draft_vocab_size, spec.vocab_size
    if spec.kind != "eagle3" or ("d2t" not in weights and size == vocab):
        return None
    offsets = weights.integers("d2t", size)
    if offsets.is_meta:
        return None
    ids = torch.arange(size) + offsets
    ascending, mask = ids.sort().values, tensors.get("t2d")
    wrong = None
    if int(ascending[0]) < 0 or int(ascending[-1]) >= vocab or bool((ascending.diff() == 0).any()):
        wrong = f"which must be different ids within 0 .. {vocab - 1}"
    elif mask is not None and (mask.shape != (vocab,) or not torch.equal(mask.bool().nonzero().flatten(), ascending)):
        wrong = f"and t2d {tuple(mask.shape)} marks others of {vocab}"
    if wrong is not None:
        if int(offsets[0]) >= 0 and int(offsets[-1]) < vocab and bool((offsets.diff() > 0).all()):
            wrong += f"; d2t seems to hold target ids, not offsets: subtract 0 .. {size - 1}"
        raise ValueError(
            f"d2t gives the target ids {ids[:3].tolist()} .. {ids[-3:].tolist()}; draft id i stands for i + d2t[i], "
            f"{wrong}"
        )
    return None if not offsets.any() and size == vocab else ids.to(weights.device)
