"""What makes the host wait for a value on the device.

This file stands in `bateleur.cudagraph` and in `bateleur.metadata.conformance`, since neither package imports the
other; a test holds that both are equal.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

_TAKES_MASKS = frozenset(
    f"aten::{name}"
    for name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
)
_UNTAGGED = frozenset({"aten::_linalg_check_errors"})

_READERS = ("numpy", "tolist", "cpu", "__array__", "__dlpack__", "__repr__", "__format__", "apply_", "map_")
READS: dict[Callable[..., Any], str] = {getattr(Tensor, name): f"Tensor.{name}" for name in _READERS}
"""Methods that read a CPU tensor's memory without an operator, or would copy it from a device; their names."""


def leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Arguments or results of an operator, its lists opened; schemas nest no deeper."""
    for value in values:
        yield from value if isinstance(value, list | tuple) else (value,)


@cache
def is_composite(func: OpOverload) -> bool:
    """Whether an operator is made of others, which are what is to be looked at (`func.decompose`)."""
    return func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


@cache
def _needs_values(func: OpOverload) -> bool:
    """Whether the result or its shape depends on values that the host must read first."""
    tags = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    return func._schema.name in _UNTAGGED or not tags.isdisjoint(func.tags)


def waits(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], on_device: Callable[[Tensor], bool]
) -> bool:
    """Whether the call waits for a value of a tensor that is `on_device`. `func` is not composite."""
    if func._schema.name in _TAKES_MASKS:
        names = (argument.name for argument in func._schema.arguments)
        return _waits_for_mask(dict(zip(names, args, strict=False)) | kwargs, on_device)
    if not _needs_values(func) or kwargs.get("output_size") is not None:
        return False  # with an output size, the host has nothing to learn
    return any(isinstance(v, Tensor) and on_device(v) for v in leaves((*args, *kwargs.values())))


def _waits_for_mask(arguments: dict[str, Any], on_device: Callable[[Tensor], bool]) -> bool:
    """A mask is counted, unless it is the one index and says where a single number of the host goes: a fill."""
    given = [index for index in arguments["indices"] if index is not None]
    value = arguments.get("values")
    fills = value is not None and value.numel() == 1 and value.device.type == "cpu" and not on_device(value)
    if fills and len(given) == 1 and not arguments.get("accumulate", False):
        return False
    return any(index.dtype in (torch.bool, torch.uint8) and on_device(index) for index in given)
