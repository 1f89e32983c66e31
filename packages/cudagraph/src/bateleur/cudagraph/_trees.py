"""Walking what a producer stages and what a body returns: dataclasses, mappings, tuples, lists, sets, plain objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from copy import copy
from dataclasses import fields, is_dataclass
from types import MemberDescriptorType
from typing import Any, cast

from torch import Tensor

from bateleur.cudagraph.execution import T

_BUILTIN = (Mapping, tuple, list, AbstractSet)


def tensors(tree: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a tree with its path, in a fixed order."""
    for where, node in _walk(tree, path):
        if isinstance(node, Tensor):
            yield where, node


def replace_tensors(tree: T, change: Callable[[Tensor], Tensor]) -> T:
    """A copy of a tree with `change(tensor)` in place of each tensor of its dicts, lists, tuples and dataclasses.

    Whatever else it holds, the copy shares.
    """
    made: Any = tree
    if isinstance(tree, Tensor):
        made = change(tree)
    elif isinstance(tree, list | tuple):
        parts = [replace_tensors(part, change) for part in tree]
        made = type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    elif isinstance(tree, dict):
        made = copy(tree)
        made.update((key, replace_tensors(part, change)) for key, part in tree.items())
    elif is_dataclass(tree) and not isinstance(tree, type):
        made = copy(tree)
        for field in fields(tree):
            object.__setattr__(made, field.name, replace_tensors(getattr(tree, field.name), change))
    return cast(T, made)


def remember(state: object, *, into_objects: bool = True) -> Callable[[object], str | None]:
    """Remember what `state` holds; the function returned tells of another state which lazily filled part it shares.

    It returns the path of a part of the other state that belongs to `state` too and has been filled or changed
    since, None where there is none. Tensors don't count: their contents are staged, not kept. Nor do the containers
    that plain objects hold unless `into_objects`: there a backend keeps what its eager parts make once.
    """
    before = [(node, list(_parts(node).values())) for _, node in _walk(state, "state", into_objects)]

    def shared(other: object) -> str | None:
        filled = {
            id(node) for node, parts in before if [*map(id, parts)] != [*map(id, _parts(node).values())]
        }
        nodes = _walk(other, "state", into_objects)
        return next((where for where, node in nodes if id(node) in filled), None)

    return shared


def _walk(node: object, path: str, into_objects: bool = False) -> Iterator[tuple[str, object]]:
    """Yield each container and leaf once. A plain object is yielded, and if asked the containers that it holds."""
    seen: dict[int, object] = {}  # held, or a part that is made anew could have the id of one that is gone
    stack = [(path, node)]
    while stack:
        where, node = stack.pop()
        if id(node) in seen:
            continue
        seen[id(node)] = node
        yield where, node
        plain = not isinstance(node, _BUILTIN) and not is_dataclass(node)
        if not plain or into_objects:
            parts = [(where + name, part) for name, part in _parts(node).items()]
            stack.extend(reversed([each for each in parts if not plain or isinstance(each[1], _BUILTIN)]))


def _parts(node: object) -> dict[str, object]:
    """What a container or object holds, by the text that selects it; empty for a leaf."""
    if isinstance(node, Mapping):
        return {f"[{key!r}]": part for key, part in node.items()}
    if isinstance(node, tuple | list | AbstractSet):
        return {f"[{index}]": part for index, part in enumerate(node)}
    parts = {f".{name}": part for name, part in getattr(node, "__dict__", {}).items()}
    for cls in type(node).__mro__:
        if "__slots__" in vars(cls):
            slots = (name for name, member in vars(cls).items() if isinstance(member, MemberDescriptorType))
            parts |= {f".{name}": getattr(node, name, None) for name in slots}
    return parts
