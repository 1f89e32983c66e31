"""Walking whatever a builder returns: dataclasses, tuples, lists and dicts of tensors, arrays and host values."""

from __future__ import annotations

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
    """A copy of every leaf's value by path: arrays with shape and dtype, host values as they are."""
    return {path: _copied(leaf) for path, leaf in leaves(meta)}


def difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """The path of the first leaf that differs, NaN being equal to itself; None if all are equal."""
    for path in {**expected, **found}:
        if path not in found or path not in expected or not _same(found[path], expected[path]):
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


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().to("cpu", copy=True)
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _same(found: Any, expected: Any) -> bool:
    if type(found) is not type(expected):
        return False
    if isinstance(found, Tensor):
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return False
        equal: Tensor = (found == expected) | ((found != found) & (expected != expected))
        return bool(equal.all())
    if isinstance(found, np.ndarray):
        return found.dtype == expected.dtype and np.array_equal(found, expected)
    return bool(found == expected) if isinstance(found, (*HOST_VALUE, torch.dtype)) else True
