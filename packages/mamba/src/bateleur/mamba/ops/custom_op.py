"""Registers operators under `torch.ops.bateleur`."""

from bateleur.metadata.dispatch import OperatorRegistry

_registry = OperatorRegistry("bateleur.mamba.ops.triton", "bateleur.mamba.ops.native")
operator = _registry.operator
FORMS = _registry.forms
"""The forms (torch, C, Triton) of every operator, by name."""
