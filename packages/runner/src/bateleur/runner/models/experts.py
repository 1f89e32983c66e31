"""Mixture of experts: each token takes a few of many feed-forward networks.

Shapes: T tokens, A tokens of all ranks that share experts, M hidden size, L width of the experts, E experts, K experts
of a token, S pairs of token and expert (T * K), F intermediate size.
"""

import torch
from torch import Tensor

from bateleur.runner.distributed.expert_parallel import ExpertParallel
from bateleur.runner.models.context import LayerStep
from bateleur.runner.models.grouped import GroupedProjection, empty_grouped
from bateleur.runner.models.matrix import Projection, empty_projection
from bateleur.runner.models.mlp import Mlp, ResidualBranch, activate
from bateleur.runner.models.router import add_shared, combine, route, sort_places
from bateleur.runner.models.spec import ExpertsLayer

ROUTED = ("up_proj", "down_proj")
"""Weights with one matrix for each expert."""


class Experts(ResidualBranch):
    """Routed experts, and an optional shared expert that all tokens take. The router computes in float32."""

    def __init__(self, spec: ExpertsLayer, like: Tensor, exchange: ExpertParallel | None = None) -> None:
        """exchange: sends tokens to ranks with other experts; None if all are here. like: see `ResidualBranch`."""
        self.spec, self._exchange = spec, exchange
        hidden, inner, count = like.shape[1], spec.intermediate_size, spec.num_experts
        width, rows = spec.latent_size or hidden, 2 * inner if spec.gated else inner
        exact = like.new_empty(0, hidden, dtype=torch.float32)
        self.router_proj = empty_projection(count, hidden, exact, bias=spec.router.bias)
        self.correction = exact.new_empty(count) if spec.router.corrected else None
        self.up_proj = empty_grouped(spec.num_own, rows, width, like)
        self.down_proj = empty_grouped(spec.num_own, width, inner, like)
        if spec.bias:
            self.up_proj.bias = like.new_empty(spec.num_own, rows)
            self.down_proj.bias = like.new_empty(spec.num_own, width)
        if spec.latent_size is not None:
            self.latent_in_proj = empty_projection(width, hidden, like, bias=spec.latent_bias)
            self.latent_out_proj = empty_projection(hidden, width, like, bias=spec.latent_bias)
        self._shared = None if spec.shared is None else Mlp(spec.shared, like)
        if spec.shared_gate:
            self.shared_gate_proj = empty_projection(1, hidden, like)

    @property
    def projections(self) -> dict[str, Projection | GroupedProjection]:
        """Projections by the names of their weights. Names for the shared expert begin with `shared_`."""
        shared = {} if self._shared is None else self._shared.projections
        return super().projections | {f"shared_{name}": each for name, each in shared.items()}

    def forward(self, x_TM: Tensor, step: LayerStep) -> Tensor:
        """Return the weighted sum of each token's experts, plus the shared expert: (T, M)."""
        spec = self.spec
        weights_TK, experts_TK = route(self.router_proj(x_TM.float()), spec.router, spec.top_k, self.correction)
        shared_TM = None if self._shared is None else self._shared.forward(x_TM, step)
        gate_T1 = self.shared_gate_proj(x_TM) if spec.shared_gate else None
        if spec.latent_size is None:
            return self._routed(x_TM, weights_TK, experts_TK, shared_TM, gate_T1)
        y_TM = self.latent_out_proj(self._routed(self.latent_in_proj(x_TM), weights_TK, experts_TK, None, None))
        return add_shared(y_TM, shared_TM, gate_T1)

    def _routed(
        self, x_TL: Tensor, weights_TK: Tensor, experts_TK: Tensor, shared_TL: Tensor | None, gate_T1: Tensor | None
    ) -> Tensor:
        if self._exchange is not None:
            return add_shared(self._of_all_ranks(self._exchange, x_TL, weights_TK, experts_TK), shared_TL, gate_T1)
        token_S, sorted_index_S, expert_ends_E = sort_places(experts_TK, self.spec.num_experts)
        return combine(self._products(x_TL, token_S, expert_ends_E), sorted_index_S, weights_TK, shared_TL, gate_T1)

    def _products(self, x_TL: Tensor, token_S: Tensor, expert_ends_E: Tensor) -> Tensor:
        """Return the experts' outputs (S, L) for S pairs (token, expert), sorted by expert. L: width of x and outputs.

        token_S, expert_ends_E: token of each pair, end of each expert's pairs. Rows after the last end are arbitrary.
        """
        gate_up_SF, expert_S = self.up_proj(x_TL.index_select(0, token_S), expert_ends_E), None
        if self.up_proj.bias is not None and self.down_proj.bias is not None:
            sorted_index_S = torch.arange(len(token_S), dtype=torch.int32, device=expert_ends_E.device)
            expert_S = torch.searchsorted(expert_ends_E, sorted_index_S, right=True).clamp_(max=len(expert_ends_E) - 1)
            gate_up_SF = gate_up_SF.add_(self.up_proj.bias.index_select(0, expert_S))
        y_SL = self.down_proj(activate(gate_up_SF, self.spec), expert_ends_E)
        if expert_S is None or self.down_proj.bias is None:
            return y_SL
        return y_SL.add_(self.down_proj.bias.index_select(0, expert_S))

    def _of_all_ranks(self, exchange: ExpertParallel, x_TL: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Return the weighted sum (T, L) of each token's experts. Each rank runs its experts on tokens of all ranks."""
        assert self.spec.own is not None
        x_AL, weights_AK, experts_AK = exchange.gather(x_TL, weights_TK, experts_TK)
        (first, end), count = self.spec.own, self.spec.num_own
        elsewhere_AK = (experts_AK < first) | (experts_AK >= end)
        own_AK = (experts_AK - first).masked_fill_(elsewhere_AK, count)  # sorted after all others
        token_S, sorted_index_S, expert_ends_E = sort_places(own_AK, count + 1)
        y_SL = self._products(x_AL, token_S, expert_ends_E[:count])
        missing_S = torch.arange(len(token_S), device=y_SL.device) >= expert_ends_E[count - 1]
        y_SL.masked_fill_(missing_S.unsqueeze(1), 0.0)
        return exchange.sum_parts(combine(y_SL, sorted_index_S, weights_AK, None, None), len(x_TL))
