"""Base class of all residual branches (attention, MLP, experts, recurrent): projections and names of weights.

These are plain classes. `nn.Module` looks parameters up in a second dictionary and wraps every call, and nothing is
trained here.
"""

from __future__ import annotations

from torch import Tensor

from bateleur.runner.models.grouped import GroupedProjection
from bateleur.runner.models.matrix import Projection


class ResidualBranch:
    """A residual branch: the computation between the norm of the residual stream and the sum with it.

    Constructors take a tensor `like` (any, M). The branch gets its width M, dtype and device.
    """

    @property
    def projections(self) -> dict[str, Projection | GroupedProjection]:
        """Projections of the branch by the names of their weights."""
        kinds = Projection, GroupedProjection
        return {name: value for name, value in vars(self).items() if isinstance(value, kinds)}

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors to load, by weight name."""
        found = {
            name: weight
            for proj, projection in self.projections.items()
            for name, weight in projection.tensors(proj).items()
        }
        biases = {name.replace("proj", "bias"): each.bias for name, each in self.projections.items()}
        return found | {name: bias for name, bias in biases.items() if bias is not None}
