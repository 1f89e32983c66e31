"""Traversal of metadata objects: dataclasses, tuples, lists and dicts of tensors, arrays and host values."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

HOST_VALUE = (int, float, str, np.generic)
"""Types of plain numbers, strings and bools."""


def leaves(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of everything that is not a container. Objects of unknown types are values."""
    return ((path, each) for path, each in _walk(node) if _children(each) is None)


def mutable_containers(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, container) of lists, dicts, sets, and dataclasses that are not frozen."""
    for path, each in _walk(node):
        parameters = getattr(each, "__dataclass_params__", None)
        fixed = isinstance(each, tuple | frozenset) or (parameters is not None and parameters.frozen)
        if _children(each) is not None and not fixed:
            yield path, each


def contents(meta: Any) -> dict[str, Any]:
    """Return comparable contents of every leaf by path: bytes, shape and dtype of arrays; host values as they are."""
    return {path: _held(leaf) for path, leaf in leaves(meta)}


def difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """Return the path of the first leaf that differs, or None."""
    for path in {**expected, **found}:
        if found.get(path) != expected.get(path):
            return path or "the metadata"
    return None


def _walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    yield path, node
    for name, child in _children(node) or ():
        yield from _walk(child, f"{path}.{name}" if path else str(name))


def _children(node: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the named children of a container, or None for a value. Sets have none, because their order is
    undefined.
    """
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
