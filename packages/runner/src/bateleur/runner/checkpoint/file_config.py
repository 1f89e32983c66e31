"""A configuration as its file states it, without importing transformers where that would change nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any


class FileConfig:
    """Fields of a configuration, as attributes: those of the file; transformers is asked for what it does not say.

    Importing transformers takes longer than all else that opens a small checkpoint.

    written: fields of a file in which each of them means what it says, see `Family.plain`.
    ask: makes the object that transformers has for the file; called when first needed.
    """

    def __init__(self, written: Mapping[str, Any], ask: Callable[[], Any]) -> None:
        self._written, self._ask = written, ask

    def __getattr__(self, name: str) -> Any:
        value = self._written.get(name)
        if value is None or (name == "rope_parameters" and not _says_all(value)):
            return getattr(self._asked, name)
        return value

    @cached_property
    def _asked(self) -> Any:
        return self._ask()


def _says_all(rope: Mapping[str, Any]) -> bool:
    """Whether nothing would be added to these parameters of rotary embedding."""
    return rope.get("rope_type") == "default" and rope.get("rope_theta") is not None


def states_kinds(written: Mapping[str, Any], kinds: frozenset[str]) -> bool:
    """Whether every list of layers has names of these kinds only; older files have other names for some."""
    listed = (
        written.get(name) or () for name in ("layers_block_type", "layer_types", "mtp_layers_block_type")
    )
    return all(kinds.issuperset(each) for each in listed)
