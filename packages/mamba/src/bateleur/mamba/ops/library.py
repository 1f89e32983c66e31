"""How an operator is declared under `torch.ops.bateleur`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import Tensor
from torch.library import Library

from bateleur.metadata.forms import Forms, define

F = TypeVar("F", bound=Callable[..., Any])

FORMS: dict[str, Forms[Any]] = {}
"""The forms of every operator, by its name."""
_library = Library("bateleur", "FRAGMENT")
"""Owns the definitions; dropping it would drop the operators."""


def operator(*, mutates: Iterable[str] = (), like: str | None = None) -> Callable[[F], F]:
    """Of its form in torch's operators, whose signature and documentation are the operator's.

    The Triton form is the namesake in the module `triton` of its folder.

    mutates: the arguments that it writes to. like: the argument that its result has the shape of; None for no result.
    """

    def declare(form: F) -> F:
        forms = FORMS[form.__name__] = Forms(form, triton=f"{form.__module__}.triton:{form.__name__}")
        position = None if like is None else list(inspect.signature(form).parameters).index(like)

        def fake(*args: Any) -> Tensor | None:
            return None if position is None else args[position].new_empty(args[position].shape)

        return define(_library, form, forms, mutates=mutates, fake=fake)

    return declare
