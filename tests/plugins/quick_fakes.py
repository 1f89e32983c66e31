"""Fake tensors at half the cost: results of operators are cached by their arguments.

`FakeTensorMode` caches results of torch's operators, but its lookup reads twenty attributes of each argument in Python,
and it does not cache other operators. An engine makes the same few hundred calls in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager


class Made(NamedTuple):
    """A tensor that a call returned: with its own memory, or with that of the leaf `of`."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    of: int | None


class Given(NamedTuple):
    """A leaf that a call returned unchanged."""

    leaf: int


Result = Made | Given | None
_KNOWN: dict[Any, tuple[type[list[Any] | tuple[Any, ...]] | None, list[Result]]] = {}
"""Results by operator and properties of the arguments: several, or one. No tensor is kept alive."""


class QuickFakes(FakeTensorMode):
    """Fake tensors together with real host tensors."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def result(self, func: Any, types: Any, args: Any, kwargs: Any, leaves: Sequence[Any]) -> Any:
        """Return the operator's result. `leaves` are all arguments, with those in lists."""
        key = _look(func, args, kwargs, leaves)
        if key is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if key not in _KNOWN:
            returned = super().__torch_dispatch__(func, types, args, kwargs)
            several = type(returned) in (list, tuple)
            seen = [_seen(each, leaves) for each in (returned if several else [returned])]
            if NotImplemented not in seen:
                _KNOWN[key] = type(returned) if several else None, seen
            return returned
        several, known = _KNOWN[key]
        made = [self._again(each, leaves) for each in known]
        return several(made) if several is not None else made[0]

    def _again(self, known: Result, leaves: Sequence[Any]) -> Any:
        if known is None:
            return None
        if type(known) is Given:
            return leaves[known.leaf]
        storage = None if known.of is None else leaves[known.of].untyped_storage()
        with in_kernel_invocation_manager(self):
            made = torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta")
            if storage is not None:
                made.set_(storage, known.offset, known.shape, known.stride)
        return FakeTensor(self, made, known.device)


def leaves_of(args: Iterable[Any]) -> list[Any]:
    """The arguments, with those in lists."""
    found: list[Any] = []
    for each in args:
        if type(each) in (list, tuple):
            found += leaves_of(each)
        else:
            found.append(each)
    return found


def _look(func: Any, args: Any, kwargs: Any, leaves: Sequence[Any]) -> Any:
    """What a call's result depends on, or None if it may depend on more."""
    if torch.Tag.inplace_view in func.tags:
        return None
    lists = [len(each) for each in (*args, *kwargs.values()) if type(each) in (list, tuple)]
    seen: list[Any] = [func, *kwargs, *lists]
    for leaf in leaves:
        if type(leaf) is FakeTensor:
            if leaf.constant is not None:
                return None
            seen += (leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.fake_device)
        elif isinstance(leaf, Tensor):
            seen += ("host", leaf.shape, leaf.stride(), leaf.dtype)
        elif leaf.__class__.__hash__ is None:
            return None
        else:
            seen += (leaf.__class__, leaf)
    return tuple(seen)


def _seen(returned: Any, leaves: Sequence[Any]) -> Any:
    """How to return the result again, or NotImplemented."""
    if returned is None:
        return None
    for index, leaf in enumerate(leaves):
        if leaf is returned:
            return Given(index)
    if type(returned) is not FakeTensor or returned.constant is not None:
        return NotImplemented
    memory = returned.untyped_storage()
    of = [i for i, leaf in enumerate(leaves) if type(leaf) is FakeTensor and _same(leaf, memory)]
    return Made(
        returned.shape,
        returned.stride(),
        returned.storage_offset(),
        returned.dtype,
        returned.device,
        of[0] if of else None,
    )


def _same(tensor: Tensor, memory: Any) -> bool:
    return tensor.untyped_storage()._cdata == memory._cdata
