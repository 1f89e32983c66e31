"""How an operator is declared under `torch.ops.bateleur`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import Tensor
from torch.library import Library

from bateleur.metadata.dispatch import Implementations, define_op

F = TypeVar("F", bound=Callable[..., Any])

FORMS: dict[str, Implementations[Any]] = {}
"""The forms of every operator, by its name."""
_library = Library("bateleur", "FRAGMENT")
"""Owns the definitions; dropping it would drop the operators."""


def operator(
    *, mutates: Iterable[str] = (), like: str | None = None, native: str | None = None
) -> Callable[[F], F]:
    """Of its form in torch's operators, whose signature and documentation are the operator's.

    The Triton form is the namesake in the module `triton` of its folder, the form in C that in a module of `native`.

    mutates: the arguments that it writes to. like: the argument that its result has the shape of; None for no result.
    native: the module of the form in C, if there is one.
    """

    def declare(form: F) -> F:
        name, folder = form.__name__, form.__module__
        in_c = None if native is None else f"bateleur.mamba.ops.native.{native}:{name}"
        forms = FORMS[name] = Implementations(form, triton=f"{folder}.triton:{name}", native=in_c)
        position = None if like is None else list(inspect.signature(form).parameters).index(like)

        def fake(*args: Any) -> Tensor | None:
            return None if position is None else args[position].new_empty(args[position].shape)

        return define_op(_library, form, forms, mutates=mutates, fake=fake)

    return declare
