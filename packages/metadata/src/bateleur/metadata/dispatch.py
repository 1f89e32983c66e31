"""One function in several forms, and what decides which of them runs; metadata, mamba and eagle use it.

reference  loops, in float64 where it is asked for: the specification, never chosen unasked.
torch      vectorised; on every device.
native     C, on a CPU with a compiler, for the arguments that it takes.
triton     on CUDA; imported with the first call, so that importing a package imports no Triton.
host       numpy, on a CPU outside of graphs, where the call is small and torch's dispatch is most of its time.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial, wraps
from importlib import import_module
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor
from torch.library import Library, infer_schema, register_fake
from torch.utils._python_dispatch import _get_current_dispatch_mode

from bateleur.metadata import native

F = TypeVar("F", bound=Callable[..., Any])


class Unsupported:
    """The type of `UNSUPPORTED`."""


UNSUPPORTED = Unsupported()
"""What a form returns for arguments that it does not take."""


def cdiv(x: int, y: int) -> int:
    """x / y, rounded up. On the host `triton.cdiv`, which kernels may call, takes a microsecond or more."""
    return -(-x // y)


@cache
def load(home: str) -> Any:
    """What `home`, "module:name", names; the first call imports the module."""
    module, _, name = home.partition(":")
    return getattr(import_module(module), name)


@dataclass(frozen=True, slots=True)
class Implementations(Generic[F]):
    """The forms of one function; all but `torch` as "module:name".

    `native` returns `UNSUPPORTED` for arguments that it does not take, and has done nothing then.
    """

    torch: F
    triton: str | None = None
    numpy: str | None = None
    native: str | None = None

    def on(self, where: Tensor, *, eager: bool = False) -> F:
        """The form for the device of `where`. eager: the caller's promise that no graph records the call.

        Triton launches on the current device of the thread. If `where` is on another GPU, its form makes that one
        current while it runs.
        """
        if where.is_cuda and self.triton is not None:
            form = load(self.triton)
            here = where.get_device() == torch.accelerator.current_device_index()
            return cast(F, form if here else partial(_on_device, where.device, form))
        if eager and self.numpy is not None and where.is_cpu:
            return cast(F, load(self.numpy))
        return self.torch


def define_op(
    library: Library,
    like: F,
    forms: Implementations[Any],
    *,
    mutates: Iterable[str],
    fake: Callable[..., Any],
    name: str | None = None,
) -> F:
    """Define the operator `torch.ops.<library>.<name>` with the signature of `like`, and return it.

    mutates: the arguments that it writes to. fake: its result without computing it. name: by default that of `like`.

    On CUDA float64 has the torch form: Triton kernels compute in float32.
    """
    name = name or like.__name__
    schema = infer_schema(like, mutates_args=tuple(mutates)).replace("SymInt", "int")
    library.define(name + schema)
    library.impl(name, forms.torch if forms.native is None else partial(run_on_cpu, forms), "CPU")
    library.impl(name, forms.torch if forms.triton is None else partial(_on_cuda, forms), "CUDA")
    register_fake(f"{library.ns}::{name}", fake, lib=library)
    return cast(F, getattr(getattr(torch.ops, library.ns), name).default)


def is_recording() -> bool:
    """Whether a dispatch mode of torch sees operators now, as while a graph is recorded."""
    return _get_current_dispatch_mode() is not None


def skip_dispatcher(operator: F, form: F) -> F:
    """`operator`, which is for a CPU alone, but while nothing records operators its form: dispatch takes 3 us."""

    @wraps(form)
    def call(*args: Any) -> Any:
        return (operator if is_recording() else form)(*args)

    return cast(F, call)


def run_on_cpu(forms: Implementations[Any], *args: Any) -> Any:
    """The result for tensors on a CPU: of the form in C if it takes the arguments, else of torch's."""
    if forms.native is not None and native.unavailable_reason() is None:
        found = load(forms.native)(*args)
        if found is not UNSUPPORTED:
            return found
    return forms.torch(*args)


def _on_cuda(forms: Implementations[Any], *args: Any) -> Any:
    return (forms.torch if args[0].dtype == torch.float64 else forms.on(args[0]))(*args)


def _on_device(device: torch.device, form: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.cuda.device(device):
        return form(*args, **kwargs)
