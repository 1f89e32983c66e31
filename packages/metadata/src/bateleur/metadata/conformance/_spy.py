"""Test doubles: a batch that records which fields are read, and a mode that detects host-device syncs."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bateleur.metadata.common_attention_metadata import CommonAttentionMetadata, field_values
from bateleur.metadata.conformance._host_sync import HOST_READS, is_composite, waits_for_device
from bateleur.metadata.fields import FIELDS
from bateleur.metadata.seq_len_bound import SeqLenBound

Note = Callable[[str], None]

_FIELD_OF = {field.bound_attr or name: name for name, field in FIELDS.items()}
"""Field name by attribute of a batch or of its length bound."""


class _Spy:
    """Copy of a batch, or of its :class:`SeqLenBound`, that records reads of fields."""

    def __init__(self, original: Any, note: Note) -> None:
        values = {field.name: getattr(original, field.name) for field in dataclasses.fields(original)}
        for name, value in (values | {"_original": original, "_note": note}).items():
            object.__setattr__(self, name, value)

    def __getattribute__(self, name: str) -> Any:
        if name in _FIELD_OF:
            object.__getattribute__(self, "_note")(_FIELD_OF[name])
        return object.__getattribute__(self, name)


class _SpyBound(_Spy, SeqLenBound):
    pass


class SpyBatch(_Spy, CommonAttentionMetadata):
    """A batch that records which fields are read."""

    def __init__(self, batch: CommonAttentionMetadata, note: Note) -> None:
        super().__init__(batch, note)
        object.__setattr__(self, "seq_len_bound", _SpyBound(batch.seq_len_bound, note))

    def unpadded(self) -> CommonAttentionMetadata:
        return SpyBatch(self._original.unpadded(), self._note)


def device_tensors(batch: CommonAttentionMetadata) -> list[Tensor]:
    """Return the tensors of a batch whose values only the device knows."""
    values = field_values(batch)
    return _tensors([values[name] for name, field in FIELDS.items() if not field.on_host])


class NoSync(TorchDispatchMode):
    """Context that calls ``note`` with the name of each operation that would make the host wait for a device value.

    Device values are ``tensors`` and all tensors computed from them. The detection works on a CPU too.
    """

    def __init__(self, tensors: Iterable[Tensor], note: Note) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.note = note
        self._storages: dict[int, Any] = {}  # keeps the storages alive, so that no address is reused
        self._host_reads = _HostReads(self)
        self.spread(list(tensors))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: else the first use of a mode imports the compiler, which takes seconds."""
        return False

    def __enter__(self) -> Any:
        self._host_reads.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._host_reads.__exit__(*error)  # type: ignore[no-untyped-call]

    def reaches(self, values: Any) -> bool:
        return any(each.untyped_storage().data_ptr() in self._storages for each in _tensors(values))

    def spread(self, values: Any) -> None:
        self._storages |= {each.untyped_storage().data_ptr(): each.untyped_storage() for each in _tensors(values)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        if not self.reaches((args, kwargs)):
            return out
        name = func._schema.name
        if waits_for_device(func, args, kwargs, self.reaches) or _leaves_device(name, args, out):
            self.note(name.replace("aten::", "aten."))
        given = {spec.name: arg for spec, arg in zip(func._schema.arguments, args, strict=False)} | kwargs
        written = [spec.name for spec in func._schema.arguments if spec.alias_info and spec.alias_info.is_write]
        self.spread([out, *(given.get(name) for name in written)])
        return out


class _HostReads(TorchFunctionMode):
    """Calls ``note`` of a `NoSync` for reads of device values by methods without operator, like ``tolist``."""

    def __init__(self, watch: NoSync) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOST_READS and self._watch.reaches(args[:1]):
            self._watch.note(HOST_READS[func])
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


def _leaves_device(name: str, args: Any, out: Any) -> bool:
    copies = name in ("aten::_to_copy", "aten::copy_") and out.device.type == "cpu"
    return copies and any(each.device.type != "cpu" for each in _tensors(args))


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor) and each.numel()]
