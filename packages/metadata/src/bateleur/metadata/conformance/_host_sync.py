"""Finds operators and methods that make the host wait for a value on the device.

This file exists twice, in `bateleur.cudagraph` and `bateleur.metadata.conformance`, because neither package imports the
other. Both copies must be equal.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

_ACCEPTS_MASKS = frozenset(
    f"aten::{name}"
    for name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
)

_READ_METHODS = ("numpy", "tolist", "cpu", "__array__", "__dlpack__", "__repr__", "__format__", "apply_", "map_")
HOST_READS: dict[Callable[..., Any], str] = {getattr(Tensor, name): f"Tensor.{name}" for name in _READ_METHODS}
"""Methods that read the memory of a CPU tensor without an operator, or copy a device tensor to the host. By name."""


def flatten(values: Iterable[Any]) -> Iterator[Any]:
    """Yield arguments or results of an operator, lists item by item. Operator schemas nest no deeper."""
    for value in values:
        yield from value if isinstance(value, list | tuple) else (value,)


@cache
def is_composite(func: OpOverload) -> bool:
    """Return whether an operator consists of other operators, which `func.decompose` calls."""
    return func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


@cache
def _needs_values(func: OpOverload) -> bool:
    """Return whether an operator's result, or its shape, depends on values that the host must read first."""
    tags = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    return func._schema.name == "aten::_linalg_check_errors" or not tags.isdisjoint(func.tags)


def waits_for_device(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], on_device: Callable[[Tensor], bool]
) -> bool:
    """Return whether a call of the operator `func` makes the host wait for a value on the device.

    func: must not be composite. For a composite operator, ask for each operator that it calls; see `is_composite`.
    on_device: returns whether a tensor counts as one on the device.
    """
    if func._schema.name in _ACCEPTS_MASKS:
        names = (argument.name for argument in func._schema.arguments)
        return _waits_for_mask(dict(zip(names, args, strict=False)) | kwargs, on_device)
    if not _needs_values(func) or kwargs.get("output_size") is not None:
        return False  # with output_size given, the host knows the shape
    return any(isinstance(v, Tensor) and on_device(v) for v in flatten((*args, *kwargs.values())))


def _waits_for_mask(arguments: dict[str, Any], on_device: Callable[[Tensor], bool]) -> bool:
    """Return whether indexing by a mask makes the host wait for the number of selected elements. If the mask is the
    only index and the assigned value is one number on the host, torch calls `masked_fill`, which does not wait.

    arguments: arguments of the indexing operator, by name.
    """
    given = [index for index in arguments["indices"] if index is not None]
    value = arguments.get("values")
    fills = value is not None and value.numel() == 1 and value.device.type == "cpu" and not on_device(value)
    if fills and len(given) == 1 and not arguments.get("accumulate", False):
        return False
    return any(index.dtype in (torch.bool, torch.uint8) and on_device(index) for index in given)
