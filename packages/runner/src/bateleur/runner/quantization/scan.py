"""Groups the tensors of a file by the quantised module that they belong to."""

import re
from collections.abc import Mapping, Sequence

from bateleur.runner.quantization.module import ACTIVATIONS, Module
from bateleur.runner.utils.tensor_files import TensorEntry

_CODES = ("weight", "weight_packed", "qweight", "blocks")
_SIDES = (
    *("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale"),
    *("weight_zero_point", "weight_g_idx", "weight_shape", "qzeros", "scales", "g_idx"),
)
_REFUSED = {
    "pre_quant_scale": "activations would have to be scaled by it",
    **dict.fromkeys(("absmax", "quant_map", "SCB"), "bitsandbytes is not supported"),
    **dict.fromkeys(("weight_bitmask", "compressed"), "sparse weights are not supported"),
}
_PLAIN = ("F64", "F32", "F16", "BF16")
_JOINED = re.compile(r"(?P<base>.+?)_(?P<part>(?:weight_)?(?:scale(?:_inv|_2)?|global_scale)|input_scale)")
"""Names of scales of a parameter that has no `.weight`: `experts.gate_up_proj_scale_inv`."""
_MXFP4 = re.compile(r"(?P<base>.+)_(?P<part>blocks|scales)")
"""Names of gpt-oss: `experts.gate_up_proj_blocks`."""


def find_modules(
    tensors: Mapping[str, TensorEntry], spellings: Sequence[tuple[str, str]] = ()
) -> tuple[dict[str, Module], set[str]]:
    """Return quantised modules by the name of their plain weight, and the names of all their tensors.

    spellings: pairs of equivalent prefixes (in other files, ours); a module gets names with both.
    """
    grouped: dict[str, dict[str, str]] = {}
    for name, entry in tensors.items():
        stem, _, last = name.rpartition(".")
        if last in _REFUSED:
            raise ValueError(f"{entry.name}: {_REFUSED[last]}")
        part = last if last in (*_CODES, *_SIDES, *ACTIVATIONS) else None
        if part is None and (joined := _JOINED.fullmatch(name)) and joined["base"] in tensors:
            stem, part = joined["base"], joined["part"]
            part = part if part.startswith(("weight_", "input_")) else f"weight_{part}"
            grouped.setdefault(stem, {})["weight"] = stem
        if part is None and (joined := _MXFP4.fullmatch(name)) and f"{joined['base']}_blocks" in tensors:
            stem, part = joined["base"], joined["part"]
        if part is not None:
            grouped.setdefault(stem, {})[part] = name
    modules, used = {}, set[str]()
    for stem, names in grouped.items():
        parts = {part: tensors[name] for part, name in names.items()}
        codes = [parts[name] for name in _CODES if name in parts]
        if not codes or not (any(name in parts for name in _SIDES) or codes[0].dtype not in _PLAIN):
            continue
        bare = names.get("weight") == stem or len(codes[0].shape) == 3
        end = "_blocks" if "blocks" in parts else "" if bare else ".weight"
        modules[stem + end] = Module(_names(stem, codes[0].name, spellings), parts)
        used |= {*names.values()}
    return modules, used


def _names(stem: str, stored: str, spellings: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return all names of a module: in the file (`stored`), here (`stem`), and with prefixes that other tools write."""
    own = stored.rpartition(".")[0] if stored.rpartition(".")[2] in _CODES else stored.removesuffix("_blocks")
    found = [own, stem]
    for one, other in (*spellings, ("model.", "backbone."), ("model.", "model.language_model.")):
        for name in (own, stem):
            for first, second in ((one, other), (other, one)):
                if name.startswith(first):
                    found.append(second + name.removeprefix(first))
    return tuple(dict.fromkeys(found))
