"""How layers declare an operator under `torch.ops.bateleur`: its torch form, and the Triton kernel that CUDA gets.

The torch form is the specification, and what runs on a CPU; beside it on CUDA stands one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, cast

from torch import Tensor
from torch.library import Library

from bateleur.metadata import forms

F = TypeVar("F", bound=Callable[..., Any])

FORMS: dict[str, forms.Forms[Any]] = {}
"""The forms of every operator, by its name."""
_library = Library("bateleur", "FRAGMENT")
"""Owns the definitions; dropping it would drop the operators."""


def operator(
    home: str, fake: Callable[..., Any], *, mutates: Iterable[str] = (), direct: bool = False
) -> Callable[[F], F]:
    """Of its torch form, whose signature and documentation are the operator's.

    home: the module of `kernels` where its namesake launches the kernel. fake: its result without computing it.
    mutates: the arguments that it writes to. direct: on a CPU call the torch form without the dispatcher, which
    takes 1.4 us.
    """

    def declare(form: F) -> F:
        triton = f"bateleur.runner.models.kernels.{home}:{form.__name__}"
        both = FORMS[form.__name__] = forms.Forms(form, triton=triton)
        dispatched = forms.define(_library, form, both, mutates=mutates, fake=fake)

        @wraps(form)
        def call(first: Tensor, *rest: Any) -> Any:
            return (FORMS[form.__name__].torch if first.is_cpu else dispatched)(first, *rest)

        return cast(F, call) if direct else dispatched

    return declare
