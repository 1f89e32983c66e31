"""Walks through the nested containers in the state that a captured function reads, and in the output that it returns.

Containers are dataclasses, mappings, tuples, lists and sets. Plain objects are leaves, except for `watch_lazy_changes`.
"""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from copy import copy
from dataclasses import fields, is_dataclass
from types import MemberDescriptorType
from typing import Any, cast

from torch import Tensor

from bateleur.cudagraph.execution import T

_BUILTIN = (Mapping, tuple, list, AbstractSet)


def named_tensors(tree: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of nested containers once, with its path below `path`, in a fixed order; skip plain objects."""
    for where, node in _walk(tree, path):
        if isinstance(node, Tensor):
            yield where, node


def replace_tensors(tree: T, change: Callable[[Tensor], Tensor]) -> T:
    """Return a copy of a tree (dicts, lists, tuples, dataclasses) with `change(tensor)` in place of each tensor."""
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


def watch_lazy_changes(state: object, *, into_objects: bool = True) -> Callable[[object], str | None]:
    """Watch for values that a warm-up computes lazily and caches in `state`, so that a capture would not compute them.

    Remembers the containers and objects in `state`, with the items of each. The returned function takes a state that
    was staged later. It returns the path of the first container or object that is in both states and whose items have
    changed since this call, or None. Contents of tensors do not count, because staging a batch overwrites them.

    into_objects: also look at containers that plain objects hold. False for PIECEWISE graph keys, because the eager
        parts of an attention backend may cache values there.
    """
    before = [(node, list(_children(node).values())) for _, node in _walk(state, "state", into_objects)]

    def changed_part_of(other: object) -> str | None:
        changed = {
            id(node) for node, children in before if [*map(id, children)] != [*map(id, _children(node).values())]
        }
        nodes = _walk(other, "state", into_objects)
        return next((where for where, node in nodes if id(node) in changed), None)

    return changed_part_of


def _walk(node: object, path: str, into_objects: bool = False) -> Iterator[tuple[str, object]]:
    """Yield each container and leaf of a tree once, with its path below `path`. A plain object is a leaf; with
    `into_objects`, the containers that it holds follow.
    """
    seen: dict[int, object] = {}  # keeps nodes alive, so that no new object gets the id of a freed one
    stack = [(path, node)]
    while stack:
        where, node = stack.pop()
        if id(node) in seen:
            continue
        seen[id(node)] = node
        yield where, node
        plain = not isinstance(node, _BUILTIN) and not is_dataclass(node)
        if not plain or into_objects:
            children = [(where + name, child) for name, child in _children(node).items()]
            stack.extend(reversed([each for each in children if not plain or isinstance(each[1], _BUILTIN)]))


def _children(node: object) -> dict[str, object]:
    """Return the items of a container or object, by the path suffix that selects each. Empty for a leaf."""
    if isinstance(node, Mapping):
        return {f"[{key!r}]": child for key, child in node.items()}
    if isinstance(node, tuple | list | AbstractSet):
        return {f"[{index}]": child for index, child in enumerate(node)}
    children = {f".{name}": child for name, child in getattr(node, "__dict__", {}).items()}
    for cls in type(node).__mro__:
        if "__slots__" in vars(cls):
            slots = (name for name, member in vars(cls).items() if isinstance(member, MemberDescriptorType))
            children |= {f".{name}": getattr(node, name, None) for name in slots}
    return children
