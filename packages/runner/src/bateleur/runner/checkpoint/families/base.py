"""What a model family tells the checkpoint reader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import Names
from bateleur.runner.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Family:
    """One Hugging Face model type: how its configuration and its weight names are read."""

    model_type: str
    architecture: str
    """The causal-language-model class, as `architectures` in config.json names it."""
    read_spec: Callable[[ConfigFields], ModelSpec]
    """Raises ValueError for impossible or unsupported settings."""
    names: Callable[[ModelSpec], Names]
    other_prefixes: tuple[tuple[str, str], ...] = ()
    """(other, ours): prefixes of tensor names that some files have in place of those in `names`."""
    needs: tuple[str, ...] = ()
    """Fields of which a configuration must have one, as a library's layers would stand in for them."""
