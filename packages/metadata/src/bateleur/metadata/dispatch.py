"""Defines operators, and selects implementations by device. Used by metadata, mamba, eagle and runner.

torch: vectorised, on every device. native: C, on a CPU with a compiler, for supported arguments. triton: on CUDA;
imported at the first call, so that importing a package does not import Triton.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial, wraps
from importlib import import_module
from inspect import signature
from typing import Any, Generic, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.library import Library, infer_schema, register_fake
from torch.utils._python_dispatch import _get_current_dispatch_mode

from bateleur.metadata import native

F = TypeVar("F", bound=Callable[..., Any])
Fake: TypeAlias = Callable[..., Any] | str | None
"""Implementation of an operator for fake tensors, or the name of the argument that has the shape and dtype of the
result; None for no result."""


class Unsupported:
    """Type of :data:`UNSUPPORTED`, which a C implementation returns for arguments that it does not support."""


UNSUPPORTED = Unsupported()
"""Returned by a native implementation for arguments that it does not support."""


def cdiv(x: int, y: int) -> int:
    """Return x / y, rounded up. ``triton.cdiv`` takes a microsecond or more on the host."""
    return -(-x // y)


@cache
def next_power_of_2(size: int) -> int:
    """Return the least power of two that is at least `size` >= 1.

    ``triton.next_power_of_2`` would take five Python calls each time that a kernel is launched.
    """
    return 1 << (size - 1).bit_length()


@cache
def load(path: str) -> Any:
    """Import and return the object at "module:name"."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


@dataclass(slots=True)
class Implementations(Generic[F]):
    """Implementations of one function. ``triton`` and ``native``: "module:name", loaded at the first call. ``native``
    returns :data:`UNSUPPORTED`, without side effects, for arguments that it does not support.
    """

    torch: F
    triton: str | None = None
    native: str | None = None

    def on(self, where: Tensor) -> F:
        """Return the implementation for the device of the tensor ``where``. Triton launches on the current device; if
        ``where`` is on another GPU, the returned function makes that GPU current while it runs.
        """
        if where.is_cuda and self.triton is not None:
            form = load(self.triton)
            here = where.get_device() == torch.accelerator.current_device_index()
            return cast(F, form if here else partial(_on_device, where.device, form))
        return self.torch


def define_op(
    library: Library,
    like: F,
    forms: Implementations[Any],
    *,
    mutates: Iterable[str],
    fake: Fake,
    name: str | None = None,
) -> F:
    """Define the operator ``torch.ops.<library>.<name>`` with the signature of ``like`` and return it.

    mutates: names of the arguments that it writes to. fake: function for meta tensors, or name of an argument with the
    result's shape and dtype; None: no result. name: by default the name of ``like``. On CUDA, float64 uses the torch
    implementation, because Triton kernels compute in float32.
    """
    name = name or like.__name__
    schema = infer_schema(like, mutates_args=tuple(mutates)).replace("SymInt", "int")
    assert fake is not None or schema.endswith("-> ()"), f"{name}: fake is None; an operator with a result needs one"
    library.define(name + schema)
    library.impl(name, partial(run_on_cpu, forms), "CPU")
    library.impl(name, forms.torch if forms.triton is None else partial(_on_cuda, forms), "CUDA")
    register_fake(f"{library.ns}::{name}", fake if callable(fake) else _result_like(fake, like), lib=library)
    return cast(F, getattr(getattr(torch.ops, library.ns), name).default)


def _result_like(argument: str | None, form: Callable[..., Any]) -> Callable[..., Tensor | None]:
    position = None if argument is None else list(signature(form).parameters).index(argument)

    def fake(*args: Any) -> Tensor | None:
        return None if position is None else args[position].new_empty(args[position].shape)

    return fake


class OperatorRegistry:
    """Defines the operators of a package under ``torch.ops.bateleur``. ``forms``: their implementations by name.

    triton, native: packages whose modules have the Triton and the C implementations.
    """

    def __init__(self, triton: str, native: str) -> None:
        self.forms: dict[str, Implementations[Any]] = {}
        self._triton, self._native = triton, native
        self._library = Library("bateleur", "FRAGMENT")  # owns the definitions; deleting it would delete the operators

    def operator(
        self, triton: str, fake: Fake = None, *, mutates: Iterable[str] = (), native: str | None = None
    ) -> Callable[[F], F]:
        """Decorate the torch implementation of an operator. The operator has its name, signature and docstring.

        triton, native: modules with functions of the same name, the Triton and the C implementation; None if there is
        none in C. fake, mutates: as in :func:`define_op`. Calls skip torch's dispatcher on a CPU.
        """

        def declare(form: F) -> F:
            name = form.__name__
            in_c = None if native is None else f"{self._native}.{native}:{name}"
            forms = self.forms[name] = Implementations(form, f"{self._triton}.{triton}:{name}", in_c)
            dispatched = define_op(self._library, form, forms, mutates=mutates, fake=fake)
            return skip_dispatcher(dispatched, cast(F, wraps(form)(partial(run_on_cpu, forms))))

        return declare


def skip_dispatcher(operator: F, form: F) -> F:
    """Return a function that calls ``form`` if its first positional argument is on a CPU and no dispatch mode is
    active, else ``operator``. On a CPU, torch's dispatcher takes 3 to 6 us per call (measured).
    """

    @wraps(form)
    def call(*args: Any, **options: Any) -> Any:
        direct = args and args[0].is_cpu and _get_current_dispatch_mode() is None
        return (form if direct else operator)(*args, **options)

    return cast(F, call)


def run_on_cpu(forms: Implementations[Any], *args: Any, **options: Any) -> Any:
    """Call the native implementation of ``forms``, or torch's if there is none that supports the arguments."""
    if forms.native is not None and native.unavailable_reason() is None:
        found = load(forms.native)(*args, **options)
        if found is not UNSUPPORTED:
            return found
    return forms.torch(*args, **options)


def _on_cuda(forms: Implementations[Any], *args: Any) -> Any:
    return (forms.torch if args[0].dtype == torch.float64 else forms.on(args[0]))(*args)


def _on_device(device: torch.device, form: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.cuda.device(device):
        return form(*args, **kwargs)
