"""Doubles for what a builder touches: a batch that notes which fields are read, and torch without host syncs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bateleur.metadata.batch import CommonAttentionMetadata, field_values
from bateleur.metadata.bounds import SeqLenBound
from bateleur.metadata.conformance._sync import READS, is_composite, waits
from bateleur.metadata.fields import FIELDS, Home

Note = Callable[[str], None]

_ARRAYS = frozenset(name for name, field in FIELDS.items() if not field.part)
_PARTS = {field.part: name for name, field in FIELDS.items() if field.part}


class SpyBound(SeqLenBound):
    """A bound that notes which of its halves are read."""

    def __init__(self, bound: SeqLenBound, note: Note) -> None:
        object.__setattr__(self, "_note", note)
        super().__init__(bound.upper, bound.exact)

    def __getattribute__(self, name: str) -> Any:
        if name in _PARTS:
            object.__getattribute__(self, "_note")(_PARTS[name])
        return object.__getattribute__(self, name)

    def __post_init__(self) -> None:
        """Nothing to check: the halves are a batch's."""


class SpyBatch(CommonAttentionMetadata):
    """A batch that notes which fields of the table are read. Its values are the original's own."""

    def __init__(self, batch: CommonAttentionMetadata, note: Note) -> None:
        values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        values["seq_len_bound"] = SpyBound(batch.seq_len_bound, note)
        super().__init__(**values)
        object.__setattr__(self, "_batch", batch)
        object.__setattr__(self, "_note", note)

    def __getattribute__(self, name: str) -> Any:
        if name in _ARRAYS:
            object.__getattribute__(self, "_note")(name)
        return object.__getattribute__(self, name)

    def __post_init__(self) -> None:
        """Nothing to check: the batch was."""

    def unpadded(self) -> CommonAttentionMetadata:
        """A spy on the sliced batch: slicing alone reads nothing."""
        return SpyBatch(
            object.__getattribute__(self, "_batch").unpadded(), object.__getattribute__(self, "_note")
        )


def device_tensors(batch: CommonAttentionMetadata) -> list[Tensor]:
    """The tensors of a batch whose values the host does not know."""
    values = field_values(batch)
    fields = [name for name, field in FIELDS.items() if field.home is Home.DEVICE]
    return [each for name in fields for each in (values[name] if FIELDS[name].per_group else (values[name],))]


class NoSync:
    """While it lasts, notes every operation that would make the host wait for a value on the device.

    Values on the device are the given tensors and whatever is computed from them. So it works on CPU too, where
    nothing waits.
    """

    def __init__(self, tensors: Iterable[Tensor], note: Note) -> None:
        taint = _Taint(tensors)
        self._modes: tuple[Any, ...] = (_Functions(taint, note), _Operators(taint, note))

    def __enter__(self) -> None:
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _Taint:
    """Storages with values of the device; held, so that no address is used twice."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.numel()}

    def reaches(self, values: Any) -> bool:
        return any(each.untyped_storage().data_ptr() in self._storages for each in _tensors(values))

    def add(self, values: Any) -> None:
        for each in _tensors(values):
            self._storages[each.untyped_storage().data_ptr()] = each.untyped_storage()


class _Functions(TorchFunctionMode):
    """Reads that never reach an operator, like ``tolist`` on CPU."""

    def __init__(self, taint: _Taint, note: Note) -> None:
        super().__init__()
        self._taint, self._note = taint, note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS and self._taint.reaches(args[:1]):
            self._note(READS[func])
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    """Operators whose result the host must know, and the spread of device values through the others."""

    def __init__(self, taint: _Taint, note: Note) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._taint, self._note = taint, note

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: the first use of a mode would otherwise import the compiler, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        if not self._taint.reaches((args, kwargs)):
            return out
        name = func._schema.name
        if waits(func, args, kwargs, self._taint.reaches) or _leaves_device(name, args, out):
            self._note(name.replace("aten::", "aten."))
        self._taint.add(out)
        given = {spec.name: arg for spec, arg in zip(func._schema.arguments, args, strict=False)} | kwargs
        for spec in func._schema.arguments:
            if spec.alias_info is not None and spec.alias_info.is_write:
                self._taint.add(given.get(spec.name))
        return out


def _leaves_device(name: str, args: Any, out: Any) -> bool:
    to_host = isinstance(out, Tensor) and out.device.type == "cpu"
    return (
        name in ("aten::_to_copy", "aten::copy_")
        and to_host
        and any(t.device.type != "cpu" for t in _tensors(args))
    )


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values] if values.numel() else []
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [tensor for value in values for tensor in _tensors(value)]
