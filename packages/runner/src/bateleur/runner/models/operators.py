"""Defines operators under `torch.ops.bateleur`: a torch form, a Triton kernel, and optionally a C kernel.

The torch form is the specification. CUDA runs the Triton kernel. A CPU runs the C kernel if it supports the arguments.
"""

from bateleur.metadata.dispatch import OperatorRegistry

_registry = OperatorRegistry("bateleur.runner.models.kernels", "bateleur.runner.models.native")
operator = _registry.operator
FORMS = _registry.forms
"""The implementations of every operator, by name."""
