"""Configuration fields of mixture-of-experts layers and their routers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.models.spec import ExpertsLayer, Layer, MlpLayer, RouterSpec
from bateleur.runner.utils.arguments import Integer

_FIELDS = {"num_experts": "num_experts", "top_k": "num_experts_per_tok", "intermediate_size": "moe_intermediate_size"}
LOCAL_FIELDS = {"num_experts": "num_local_experts", "intermediate_size": "intermediate_size"}
"""Fields of GraniteMoeHybrid and gpt-oss."""
_SCORES = ("scoring_func", "moe_router_activation_func")
"""Fields of some files that transformers does not read."""


def at_least_1(fields: ConfigFields, name: str) -> int:
    """Return a size field. Raises ValueError for 0, which configurations of models without experts have."""
    return Integer(1)(fields.called(name), fields[name])


def read_experts(fields: ConfigFields, router: RouterSpec, names: Mapping[str, str] = {}, **more: Any) -> ExpertsLayer:
    """Read a layer of experts. names: config fields of sizes, if not `_FIELDS`. more: arguments of `ExpertsLayer`.

    Raises ValueError if the configuration has other scores than the router, or more experts per token than exist.
    """
    for name in _SCORES:
        if fields.raw(name) is not None:
            fields.choice(name, (router.scores,))
    names = {**_FIELDS, **names}
    sizes: dict[str, Any] = {ours: at_least_1(fields, name) for ours, name in names.items()}
    top, among = sizes["top_k"], sizes["num_experts"]
    most = among // router.num_groups * router.top_groups
    if top > most:
        of, named, tops = (fields.called(name) for name in (names["num_experts"], "n_group", names["top_k"]))
        groups = f"topk_group = {router.top_groups} of {named} = {router.num_groups} groups of "
        where = f"{groups if router.num_groups > 1 else ''}{of} = {among}"
        raise ValueError(f"{tops} is {top}; it must be at most {most}: {where}")
    return ExpertsLayer(**sizes, router=router, **more)


def sparse_layers(fields: ConfigFields, count: int, mlp: MlpLayer, experts: ExpertsLayer) -> tuple[Layer, ...]:
    """Return `count` branches: `mlp` in `mlp_only_layers` and off `decoder_sparse_step`, else `experts`."""
    dense, step = fields["mlp_only_layers"], fields["decoder_sparse_step"]
    if bad := [i for i in dense if i >= count]:
        raise ValueError(f"mlp_only_layers holds {bad[0]}; it must be in [0, num_hidden_layers = {count})")
    return tuple(mlp if i in dense or (i + 1) % step else experts for i in range(count))


def sigmoid_router(fields: ConfigFields, num_experts: str) -> RouterSpec:
    """Read the router of NemotronH and Kimi. num_experts: name of the field with the number of experts."""
    count, groups, top = (at_least_1(fields, name) for name in (num_experts, "n_group", "topk_group"))
    fields.divides("n_group", num_experts)
    if top > groups:
        raise ValueError(f"topk_group is {top}; it must be at most {fields.called('n_group')} = {groups}")
    if groups > 1 and count < 2 * groups:
        of = fields.called(num_experts)
        raise ValueError(f"{fields.called('n_group')} is {groups}; a group needs two of {of} = {count}")
    return RouterSpec(
        scores="sigmoid",
        normalised=fields["norm_topk_prob"],
        sum_eps=1e-20,
        scale=fields["routed_scaling_factor"],
        corrected=True,
        num_groups=groups,
        top_groups=top,
    )
