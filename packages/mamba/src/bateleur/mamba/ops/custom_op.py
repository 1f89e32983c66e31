"""Registers operators under `torch.ops.bateleur`."""

import inspect
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any, TypeVar, cast

from torch import Tensor
from torch.library import Library

from bateleur.metadata.dispatch import Implementations, define_op, run_on_cpu, skip_dispatcher

F = TypeVar("F", bound=Callable[..., Any])

FORMS: dict[str, Implementations[Any]] = {}
"""The forms (torch, C, Triton) of every operator, by name."""
_library = Library("bateleur", "FRAGMENT")
"""Owns the operators: they are unregistered when it is deleted."""


def operator(
    *, mutates: Iterable[str] = (), like: str | None = None, triton: str, native: str | None = None
) -> Callable[[F], F]:
    """Decorate the torch form of an operator, and register the operator with its signature and docstring.

    Args:
        mutates: names of the arguments that the operator writes to.
        like: name of the argument that has the shape and dtype of the result; None for no result.
        triton, native: names of the modules of `ops.triton` and `ops.native` with the Triton and the C form, which have
            the name of the operator; None if there is no C form.
    """

    def declare(form: F) -> F:
        name, home = form.__name__, "bateleur.mamba.ops"
        forms = FORMS[name] = Implementations(
            form, f"{home}.triton.{triton}:{name}", None if native is None else f"{home}.native.{native}:{name}"
        )
        position = None if like is None else list(inspect.signature(form).parameters).index(like)

        def fake(*args: Any) -> Tensor | None:
            return None if position is None else args[position].new_empty(args[position].shape)

        dispatched = define_op(_library, form, forms, mutates=mutates, fake=fake)
        return skip_dispatcher(dispatched, cast(F, wraps(form)(partial(run_on_cpu, forms))))

    return declare
