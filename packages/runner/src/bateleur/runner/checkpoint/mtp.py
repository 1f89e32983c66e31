"""Multi-token prediction (MTP) heads in the files of their target model.

A head joins the embedding of a token and the target's final hidden state, and runs layers on the result. These
layers have the types and the tensor names of the target's layers, with `mtp.` instead of the model's prefix.
"""

from dataclasses import replace

from bateleur.runner.checkpoint.families import FAMILIES
from bateleur.runner.checkpoint.families.base import MtpNames
from bateleur.runner.checkpoint.kv_cache import read_kv_scales
from bateleur.runner.checkpoint.names import Names, WeightPart, embedding_name, resolve_layout
from bateleur.runner.checkpoint.open import Checkpoint, read_config
from bateleur.runner.models.spec import ModelSpec
from bateleur.runner.utils.arguments import refuse
from bateleur.runner.utils.json_file import errors_in

_PREFIX = "mtp."


def read_mtp(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint of the MTP head alone: its layers and tensors in place of the target's.

    The head's tensors fill the weights `token_norm`, `hidden_norm`, `fc_proj`, `final_norm`, and those of the layers.
    Raises ValueError if the target has no supported head.
    """
    path = checkpoint.path
    file = path / "config.json"
    family, fields, _ = read_config(path, checkpoint.overrides)
    if family.mtp is None:
        known = ", ".join(sorted(name for name, each in FAMILIES.items() if each.mtp is not None))
        raise ValueError(
            f"{file}: model_type is {family.model_type!r}; draft 'mtp' needs an MTP head, as files of {known} have"
        )
    tensors = {name: entry for name, entry in checkpoint.unused.items() if name.startswith(_PREFIX)}
    with errors_in(file):
        layers, branches = family.mtp.layers(fields, checkpoint.spec)
    if not tensors:
        refuse("draft", "mtp", f"a folder, or None: {path} has no tensors with the prefix {_PREFIX!r}")
    spec = replace(checkpoint.spec, layers=layers, branches_per_layer=branches)
    if not spec.attention or spec.recurrent:
        kinds = ", ".join(dict.fromkeys(type(each).__name__ for each in spec.mixers))
        raise ValueError(
            f"{file}: the layers of the MTP head are {kinds}; supported are heads with attention and without "
            "recurrent states, which could not drop rejected tokens"
        )
    names = _names(family.names(spec), family.mtp, spec)
    spec, scales = read_kv_scales(spec, names, tensors)
    tensors = {name: entry for name, entry in tensors.items() if name not in scales}
    return replace(checkpoint, spec=spec, names=resolve_layout(names, tensors), tensors=tensors)


def _names(theirs: Names, mtp: MtpNames, spec: ModelSpec) -> Names:
    stem = embedding_name(theirs).rsplit(".", 2)[0] + "."
    names: Names = {f"{_PREFIX}{mtp.fc}.weight": WeightPart("fc_proj")}
    for name, part in theirs.items():
        if part.target == "final_norm":
            final = mtp.final_norm.format(last=spec.num_layers - 1)
            norms = {mtp.token_norm: "token_norm", mtp.hidden_norm: "hidden_norm", final: "final_norm"}
            names |= {f"{_PREFIX}{norm}.weight": replace(part, target=target) for norm, target in norms.items()}
        elif part.target not in ("embedding", "lm_head"):
            names |= _moved({name: part}, stem)
    return names


def _moved(names: Names, stem: str) -> Names:
    """Replace the prefix `stem` by `mtp.` in tensor names, also in those of `WeightPart.instead`."""
    return {
        _PREFIX + name.removeprefix(stem): replace(part, instead=_moved(dict(part.instead), stem))
        for name, part in names.items()
    }
