"""Base of all residual branches: projections, and names of weights.

Plain classes instead of `nn.Module`, which looks parameters up in a second dictionary and wraps every call; nothing is
trained.
"""

from __future__ import annotations

from torch import Tensor

from bateleur.runner.models.grouped import GroupedProjection
from bateleur.runner.models.matrix import Projection


class Branch:
    """The part of a residual branch after its norm, between input and output projections.

    Constructors take a tensor `like` (any, M), whose width, dtype and device the branch gets.
    """

    @property
    def projections(self) -> dict[str, Projection | GroupedProjection]:
        """Projections by the names of their weights."""
        kinds = Projection, GroupedProjection
        return {name: value for name, value in vars(self).items() if isinstance(value, kinds)}

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors to load, by name."""
        found = {
            name: weight
            for proj, projection in self.projections.items()
            for name, weight in projection.tensors(proj).items()
        }
        biases = {name.replace("proj", "bias"): each.bias for name, each in self.projections.items()}
        return found | {name: bias for name, bias in biases.items() if bias is not None}
