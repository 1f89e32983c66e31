"""Defines operators under `torch.ops.bateleur`: a torch form, a Triton kernel, and optionally a C kernel.

The torch form is the specification. CUDA runs the Triton kernel. A CPU runs the C kernel if it supports the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, cast

from torch.library import Library

from bateleur.metadata import dispatch

F = TypeVar("F", bound=Callable[..., Any])

FORMS: dict[str, dispatch.Implementations[Any]] = {}
"""The implementations of every operator, by name."""
_library = Library("bateleur", "FRAGMENT")
"""Owns the definitions; deleting it would delete the operators."""


def operator(
    module: str, fake: Callable[..., Any], *, mutates: Iterable[str] = (), native: str | None = None
) -> Callable[[F], F]:
    """Define an operator from its torch form. The operator has the signature and docstring of the torch form.

    module: module of `kernels` with a function of the same name. fake: computes the shapes of results. mutates: names
    of arguments that are written to. native: module of `native` with the C kernel; None if there is none.
    """

    def declare(form: F) -> F:
        name, models = form.__name__, "bateleur.runner.models"
        in_c = None if native is None else f"{models}.native.{native}:{name}"
        found = FORMS[name] = dispatch.Implementations(form, triton=f"{models}.kernels.{module}:{name}", native=in_c)
        dispatched = dispatch.define_op(_library, form, found, mutates=mutates, fake=fake)

        @wraps(form)
        def on_cpu(*args: Any, **options: Any) -> Any:
            return dispatch.run_on_cpu(FORMS[name], *args, **options)

        return dispatch.skip_dispatcher(dispatched, cast(F, on_cpu))

    return declare
