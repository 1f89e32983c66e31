"""The branch of many feed-forward networks, of which each token takes a few.

Shapes: T tokens of all requests in one row, M hidden size, L width of the experts (M, or a latent one), E experts, K of
them for a token, S places (a token with one of its experts; T * K), F intermediate size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bateleur.runner.models.branch import Branch
from bateleur.runner.models.context import LayerStep
from bateleur.runner.models.grouped import GroupedProjection, empty_grouped
from bateleur.runner.models.matrix import Projection, empty_projection
from bateleur.runner.models.mlp import Mlp, activate
from bateleur.runner.models.router import route
from bateleur.runner.models.spec import ExpertsLayer

ROUTED = ("up_proj", "down_proj")
"""The weights that are one matrix for each expert."""


class Grouping(NamedTuple):
    """Places sorted by expert, found on the device: how many an expert has nobody on the host knows."""

    order_S: Tensor
    """Of sorted places, where they were: token * K + its expert's rank."""
    ends_E: Tensor
    """int32: the places of expert e end there, and begin where those of e - 1 end."""

    @classmethod
    def of(cls, experts_TK: Tensor, every_E: Tensor) -> Grouping:
        """every_E: the numbers of all experts, int64."""
        sorted_S, order_S = experts_TK.flatten().sort(stable=True)
        return cls(order_S, torch.searchsorted(sorted_S, every_E, right=True, out_int32=True))


class Experts(Branch):
    """Routed experts, and what all tokens take beside them. The router is float32 in any dtype."""

    def __init__(self, spec: ExpertsLayer, like: Tensor) -> None:
        self.spec = spec
        hidden, inner, count = like.shape[1], spec.intermediate_size, spec.num_experts
        width = spec.latent_size or hidden
        exact = like.new_empty(0, hidden, dtype=torch.float32)
        self._every_E = torch.arange(count, device=like.device)
        self.router_proj = empty_projection(count, hidden, exact)
        self._correction_E = exact.new_empty(count) if spec.router.corrected else None
        self.up_proj = empty_grouped(count, 2 * inner if spec.gated else inner, width, like)
        self.down_proj = empty_grouped(count, width, inner, like)
        if spec.latent_size is not None:
            self.latent_in_proj = empty_projection(width, hidden, like, bias=spec.latent_bias)
            self.latent_out_proj = empty_projection(hidden, width, like, bias=spec.latent_bias)
        self._shared = None if spec.shared is None else Mlp(spec.shared, like)
        if spec.shared_gate:
            self.shared_gate_proj = empty_projection(1, hidden, like)

    @property
    def projections(self) -> dict[str, Projection | GroupedProjection]:
        """By the names of their weights; those of the shared expert begin with `shared_`."""
        shared = {} if self._shared is None else self._shared.projections
        return super().projections | {f"shared_{name}": each for name, each in shared.items()}

    def weights(self) -> dict[str, Tensor]:
        """Tensors to be loaded, by name."""
        found = super().weights()
        return found if self._correction_E is None else found | {"correction": self._correction_E}

    def forward(self, x_TM: Tensor, step: LayerStep) -> Tensor:
        """The weighted sum of the experts of each token, and of what all take: (T, M)."""
        logits_TE = self.router_proj(x_TM.float())
        weights_TK, experts_TK = route(logits_TE, self.spec.router, self.spec.top_k, self._correction_E)
        if self.spec.latent_size is None:
            y_TM = self._routed(x_TM, weights_TK, experts_TK)
        else:
            y_TM = self.latent_out_proj(self._routed(self.latent_in_proj(x_TM), weights_TK, experts_TK))
        if self._shared is None:
            return y_TM
        shared_TM = self._shared.forward(x_TM, step)
        if self.spec.shared_gate:
            shared_TM.mul_(self.shared_gate_proj(x_TM).sigmoid_())
        return y_TM.add_(shared_TM)

    def warm_up(self, num_tokens: int) -> None:
        """Load the kernels of steps of up to `num_tokens`, so that no prompt waits for the first of its length."""
        for projection in (self.up_proj, self.down_proj):
            projection.warm_up(num_tokens * self.spec.top_k)

    def _routed(self, x_TL: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        order_S, ends_E = Grouping.of(experts_TK, self._every_E)
        x_SL = x_TL.index_select(0, order_S // self.spec.top_k)
        inner_SF = activate(self.up_proj(x_SL, ends_E), self.spec)
        y_SL = self.down_proj(inner_SF, ends_E)
        # Back in the order of tokens: each has its sum taken over the best expert first, whoever stands beside it.
        y_SL = torch.empty_like(y_SL).index_copy_(0, order_S, y_SL)
        y_TKL = y_SL.view(*weights_TK.shape, -1)
        return (y_TKL * weights_TK.unsqueeze(-1)).sum(1).to(x_TL.dtype)
