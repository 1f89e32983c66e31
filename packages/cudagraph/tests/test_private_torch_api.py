"""Undocumented behaviour of torch that the package needs. A torch version that changes it fails here."""

from __future__ import annotations

import ctypes
import gc
import weakref

import torch

from bateleur.cudagraph._capture_tracker import TorchDispatchMode, changes_views, writes
from bateleur.cudagraph._memory import storage_at

aten = torch.ops.aten
CPU = torch.device("cpu")


def test_the_names_exist() -> None:
    assert isinstance(aten.add.Tensor, torch._ops.OpOverload)
    assert isinstance(torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey)
    assert callable(aten.linear.default.decompose)
    assert isinstance(aten.lift_fresh.default, torch._ops.OpOverload)
    assert isinstance(TorchDispatchMode, type)
    assert {"dynamic_output_shape", "data_dependent_output", "inplace_view"} <= set(dir(torch.Tag))
    if torch.version.cuda is not None:
        assert callable(torch._C._cuda_endAllocateToPool)
        assert callable(torch._C._cuda_releasePool)


def test_written_arguments_of_operators() -> None:
    for func in (aten.unsqueeze_.default, aten.set_.source_Storage, aten.resize_.default):
        assert changes_views(func)
        assert writes(func) == ()
    assert not changes_views(aten.add_.Tensor)
    assert writes(aten.add_.Tensor) == ((0, "self"),)
    assert writes(aten.add.out) == ((3, "out"),)
    assert writes(aten.add.Tensor) == writes(aten.view.default) == ()


def test_a_storage_has_one_python_object_as_long_as_a_tensor_views_it() -> None:
    tensor = torch.ones(4)
    view = tensor[1:]
    assert tensor.untyped_storage() is view.untyped_storage()
    number = id(tensor.untyped_storage())
    ref = weakref.ref(tensor.untyped_storage())
    del tensor
    gc.collect()
    assert ref() is view.untyped_storage()
    assert id(view.untyped_storage()) == number
    module = torch.nn.Linear(4, 4)  # only C++ references the storage
    held = weakref.ref(module.weight.untyped_storage())
    gc.collect()
    assert held() is module.weight.untyped_storage()
    del view, module
    gc.collect()
    assert ref() is None
    assert held() is None


def test_memory_by_address() -> None:
    tensor = torch.arange(4, dtype=torch.int32)
    storage = storage_at(tensor.data_ptr(), 16, CPU)
    view = torch.empty(0, dtype=torch.int32).set_(storage, 1, (2,), (2,))
    view.mul_(10)
    assert tensor.tolist() == [0, 10, 2, 30]
    ref = weakref.ref(tensor.untyped_storage())
    del tensor
    assert ref() is None, "the storage does not keep it alive"
    assert storage_at(0, 0, CPU).nbytes() == 0
    buffer = (ctypes.c_char * 4)(b"a", b"b", b"c", b"d")
    assert list(torch.empty(0, dtype=torch.uint8).set_(storage_at(ctypes.addressof(buffer), 4, CPU))) == [*b"abcd"]
