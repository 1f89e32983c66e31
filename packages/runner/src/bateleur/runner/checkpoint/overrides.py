"""Fields that replace those of config.json (`hf_overrides`)."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from bateleur.runner.utils.arguments import refuse


def overridden(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` with those of `overrides` in place of their own; objects are merged field by field.

    If the file has `rope_parameters`, then `rope_theta` and `rope_scaling`, their older names, replace fields there.
    Raises ValueError for values that JSON does not have.
    """
    try:
        plain = json.loads(json.dumps(dict(overrides), default=_plain))
    except (TypeError, ValueError, RecursionError):
        refuse("hf_overrides", overrides, "an object as JSON has them")
    return _merged(fields, plain)


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError


def _merged(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(fields)
    for name, value in _renamed(fields.get("rope_parameters"), overrides).items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if both else value
    return merged


def _renamed(rotary: object, overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the overrides with `rope_theta` and `rope_scaling` as fields of `rope_parameters`.

    rotary: `rope_parameters` of the file. transformers would ignore `rope_theta` if the file has them, and drop all of
    them, `rope_theta` included, if `rope_scaling` is given.
    """
    if not isinstance(rotary, dict):
        return overrides
    given, moved = dict(overrides), dict[str, Any]()
    if any(isinstance(each, dict) for each in rotary.values()):
        if (theta := given.get("rope_theta")) is not None:
            refuse("rope_theta", theta, "absent: rope_parameters has one for each type of layers")
        return overrides
    if "rope_scaling" in given and isinstance(given["rope_scaling"], dict | None):
        scaling = given.pop("rope_scaling") or {"rope_type": "default"}
        moved = {"rope_type" if name == "type" else name: value for name, value in scaling.items()}
    if given.get("rope_theta") is not None:
        moved["rope_theta"] = given["rope_theta"]
    own = given.get("rope_parameters", {})
    return {**given, "rope_parameters": moved | own} if moved and isinstance(own, dict) else overrides
