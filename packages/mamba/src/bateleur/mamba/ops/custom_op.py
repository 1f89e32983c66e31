"""Registers operators under `torch.ops.bateleur`."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import Tensor
from torch.library import Library

from bateleur.metadata.dispatch import Implementations, define_op

F = TypeVar("F", bound=Callable[..., Any])

FORMS: dict[str, Implementations[Any]] = {}
"""The forms (torch, C, Triton) of every operator, by name."""
_library = Library("bateleur", "FRAGMENT")
"""Owns the operators: they are unregistered when it is deleted."""


def operator(*, mutates: Iterable[str] = (), like: str | None = None, native: str | None = None) -> Callable[[F], F]:
    """Decorate the torch form of an operator, and register the operator with its signature and docstring.

    The Triton form is the function of the same name in the module `triton` of the same package.

    Args:
        mutates: names of the arguments that the operator writes to.
        like: name of the argument that has the shape and dtype of the result; None for no result.
        native: name of the module of `ops.native` with the C form; None if there is none.
    """

    def declare(form: F) -> F:
        name, folder = form.__name__, form.__module__
        native_form = None if native is None else f"bateleur.mamba.ops.native.{native}:{name}"
        forms = FORMS[name] = Implementations(form, triton=f"{folder}.triton:{name}", native=native_form)
        position = None if like is None else list(inspect.signature(form).parameters).index(like)

        def fake(*args: Any) -> Tensor | None:
            return None if position is None else args[position].new_empty(args[position].shape)

        return define_op(_library, form, forms, mutates=mutates, fake=fake)

    return declare
