"""Options as dataclass fields: default, check and help text (the docstring under the field) in one place."""

import ast
import inspect
import textwrap
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any

from bateleur.runner.utils.arguments import Check


def option(default: Any, check: Check, *, hashed: bool = True) -> Any:
    """Return a field for a `Checked` dataclass. hashed: whether the field is part of the hash; a mapping can't be."""
    return field(default=default, hash=None if hashed else False, metadata={"check": check})


class Checked:
    """Base class of frozen dataclasses of `option`s. It checks and converts the values when an object is created."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, each.name, each.metadata["check"](each.name, getattr(self, each.name)))


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a configuration class, for signatures and command lines."""

    name: str
    type: str  # the annotation as written
    default: Any
    help: str  # the docstring under the field, on one line


@cache
def options_of(config: type) -> tuple[Option, ...]:
    """Return the fields of a configuration class in order, inherited ones included, with their docstrings."""
    helps: dict[str, str] = {}
    for kind in filter(is_dataclass, config.__mro__[::-1]):
        helps |= _docstrings(kind)
    options = []
    for each in fields(config):
        assert each.default is not MISSING, "every option has a default"
        options.append(Option(each.name, str(each.type), each.default, helps[each.name]))
    return tuple(options)


def _docstrings(config: type) -> dict[str, str]:
    """Return the docstrings under the fields of a class, by field. Python drops them, so the source is parsed."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(config))).body
    assert isinstance(definition, ast.ClassDef)
    found, last = {}, ""
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            last = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and last:
            found[last] = " ".join(str(node.value.value).split())
    return found
