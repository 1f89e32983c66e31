"""How an operator is defined under `torch.ops.bateleur`: in `torch` and `triton` modules beside each other."""

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


def operator(form: F, *, mutates: Iterable[str], like: str | None = None) -> F:
    """The operator with the signature of its torch form, whose Triton form is the namesake in the module beside it.

    mutates: the arguments that it writes to. like: the argument that its result has the shape of; None for no result.
    """
    name, module = form.__name__, form.__module__.rpartition(".")[0]
    forms = FORMS[name] = Forms(form, triton=f"{module}.triton:{name}")
    position = None if like is None else list(inspect.signature(form).parameters).index(like)

    def fake(*args: Any) -> Tensor | None:
        return None if position is None else args[position].new_empty(args[position].shape)

    return define(_library, form, forms, mutates=mutates, fake=fake)
