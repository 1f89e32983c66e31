"""How layers declare an operator under `torch.ops.bateleur`: its torch form, and the Triton kernel that CUDA gets.

The torch form is the specification, and what runs on a CPU; beside it on CUDA stands one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch.library import Library

from bateleur.metadata import forms

F = TypeVar("F", bound=Callable[..., Any])

FORMS: dict[str, forms.Forms[Any]] = {}
"""The forms of every operator, by its name."""
_library = Library("bateleur", "FRAGMENT")
"""Owns the definitions; dropping it would drop the operators."""


def operator(home: str, fake: Callable[..., Any], *, mutates: Iterable[str] = ()) -> Callable[[F], F]:
    """Of its torch form, whose signature and documentation are the operator's.

    home: the module of `kernels` where its namesake launches the kernel. fake: its result without computing it.
    mutates: the arguments that it writes to.
    """

    def declare(form: F) -> F:
        triton = f"bateleur.runner.models.kernels.{home}:{form.__name__}"
        both = FORMS[form.__name__] = forms.Forms(form, triton=triton)
        return forms.define(_library, form, both, mutates=mutates, fake=fake)

    return declare
