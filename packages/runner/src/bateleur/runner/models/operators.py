"""How layers declare an operator under `torch.ops.bateleur`: its torch form, a Triton kernel, perhaps a kernel in C.

The torch form is the specification. CUDA has the Triton kernel; a CPU has the C kernel for what it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, cast

from torch import Tensor
from torch.library import Library

from bateleur.metadata import dispatch

F = TypeVar("F", bound=Callable[..., Any])

FORMS: dict[str, dispatch.Implementations[Any]] = {}
"""The forms of every operator, by its name."""
_library = Library("bateleur", "FRAGMENT")
"""Owns the definitions; dropping it would drop the operators."""


def operator(
    home: str,
    fake: Callable[..., Any],
    *,
    mutates: Iterable[str] = (),
    direct: bool = False,
    native: str | None = None,
) -> Callable[[F], F]:
    """Of its torch form, whose signature and documentation are the operator's.

    home: the module of `kernels` where its namesake launches the kernel. fake: its result without computing it.
    mutates: the arguments that it writes to. direct: call its form on a CPU without the dispatcher, which takes 1.4 us.
    native: the module of `native` whose namesake is the form in C, if there is one.
    """

    def declare(form: F) -> F:
        name, models = form.__name__, "bateleur.runner.models"
        in_c = None if native is None else f"{models}.native.{native}:{name}"
        found = FORMS[name] = dispatch.Implementations(
            form, triton=f"{models}.kernels.{home}:{name}", native=in_c
        )
        dispatched = dispatch.define_op(_library, form, found, mutates=mutates, fake=fake)

        @wraps(form)
        def call(first: Tensor, *rest: Any) -> Any:
            if first.is_cpu and not dispatch.is_recording():
                return dispatch.run_on_cpu(FORMS[name], first, *rest)
            return dispatched(first, *rest)

        return cast(F, call) if direct else dispatched

    return declare
