"""Walking whatever a builder returns: dataclasses, tuples, lists and dicts of tensors, arrays and host values."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

HOST_VALUE = (int, float, str, np.generic)
"""Types of plain numbers, strings and flags."""


def leaves(node: Any) -> Iterator[tuple[str, Any]]:
    """(path, value) of everything that is not a container; objects of unknown types count as values."""
    return ((path, each) for path, each in _walk(node) if _children(each) is None)


def mutable_containers(node: Any) -> Iterator[tuple[str, Any]]:
    """(path, container) of everything that could be filled later: lists, dicts, sets, dataclasses not frozen."""
    for path, each in _walk(node):
        parameters = getattr(each, "__dataclass_params__", None)
        fixed = isinstance(each, tuple | frozenset) or (parameters is not None and parameters.frozen)
        if _children(each) is not None and not fixed:
            yield path, each


def contents(meta: Any) -> dict[str, Any]:
    """What every leaf holds, by path, to compare: arrays with shape and dtype, bit for bit; host values as they are."""
    return {path: _held(leaf) for path, leaf in leaves(meta)}


def difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """The path of the first leaf that differs; None if all are equal."""
    for path in {**expected, **found}:
        if found.get(path) != expected.get(path):
            return path or "the metadata"
    return None


def _walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    yield path, node
    for name, child in _children(node) or ():
        yield from _walk(child, f"{path}.{name}" if path else str(name))


def _children(node: Any) -> Iterable[tuple[Any, Any]] | None:
    """What a container holds, by name; None for a value. Sets hold nothing that has a place."""
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    if isinstance(node, dict):
        return node.items()
    if isinstance(node, tuple | list):
        return zip(getattr(node, "_fields", None) or range(len(node)), node, strict=True)
    return () if isinstance(node, set | frozenset) else None


def _held(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, Tensor):
        data = leaf.detach().cpu().flatten().view(torch.uint8).numpy()
        return Tensor, leaf.dtype, leaf.shape, data.tobytes()
    if isinstance(leaf, np.ndarray):
        return np.ndarray, leaf.dtype, leaf.shape, leaf.tobytes()
    return (type(leaf), leaf) if isinstance(leaf, (*HOST_VALUE, torch.dtype)) else (type(leaf),)
