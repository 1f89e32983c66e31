"""What every residual branch has: projections, and the names of its weights.

Plain classes rather than `nn.Module`: a module looks parameters up in a second dictionary and wraps every call, and
nothing here trains.
"""

from __future__ import annotations

from torch import Tensor

from bateleur.runner.models.grouped import GroupedProjection
from bateleur.runner.models.matrix import Projection


class Branch:
    """What a residual branch does after its norm, between projections into it and out of it.

    Each is made `like` a tensor (any, M): of its width, its dtype and on its device.
    """

    @property
    def projections(self) -> dict[str, Projection | GroupedProjection]:
        """By the names of their weights."""
        kinds = Projection, GroupedProjection
        return {name: value for name, value in vars(self).items() if isinstance(value, kinds)}

    def weights(self) -> dict[str, Tensor]:
        """Tensors to be loaded, by name."""
        found = {name: projection.weight for name, projection in self.projections.items()}
        biases = {name.replace("proj", "bias"): each.bias for name, each in self.projections.items()}
        return found | {name: bias for name, bias in biases.items() if bias is not None}
