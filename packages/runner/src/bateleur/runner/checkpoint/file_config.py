"""A configuration that is read from its file, without transformers if transformers would not change it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any


class FileConfig:
    """Configuration fields as attributes: those of the file, else those of transformers.

    transformers is imported only when a field needs it, because the import takes longer than everything else in opening
    a small checkpoint.

    written: fields of the file, all in `Family.plain`.
    ask: returns the configuration object of transformers; called when first needed.
    """

    def __init__(self, written: Mapping[str, Any], ask: Callable[[], Any]) -> None:
        self._written, self._ask = written, ask

    def __getattr__(self, name: str) -> Any:
        value = self._written.get(name)
        if value is None or (name == "rope_parameters" and not _is_complete(value)):
            return getattr(self._asked, name)
        return value

    @cached_property
    def _asked(self) -> Any:
        return self._ask()


def _is_complete(rope: Mapping[str, Any]) -> bool:
    """Return whether transformers would add nothing to these rotary embedding parameters."""
    return rope.get("rope_type") == "default" and rope.get("rope_theta") is not None


def has_current_kinds(written: Mapping[str, Any], kinds: frozenset[str]) -> bool:
    """Return whether all lists of layer types use the current names. Older files have other names for some types."""
    listed = (written.get(name) or () for name in ("layers_block_type", "layer_types", "mtp_layers_block_type"))
    return all(kinds.issuperset(each) for each in listed)
