"""Configuration fields of mixture-of-experts layers and their routers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.models.spec import ExpertsLayer, Layer, MlpLayer, RouterSpec
from bateleur.runner.utils.arguments import Integer

EXPERT_FIELDS = {
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "intermediate_size": "moe_intermediate_size",
}
"""Default field names of the sizes of a layer of experts."""
_AT_LEAST_1 = Integer(1)
_SCORES = ("scoring_func", "moe_router_activation_func")
"""Fields of some files that transformers does not read."""


def at_least_1(fields: ConfigFields, name: str) -> int:
    """Return a size field. Raises ValueError for 0, which configurations of models without experts have."""
    return _AT_LEAST_1(fields.called(name), fields[name])


def read_experts(
    fields: ConfigFields, router: RouterSpec, names: Mapping[str, str] = EXPERT_FIELDS, **more: Any
) -> ExpertsLayer:
    """Read a mixture-of-experts layer. names: config field of each size. more: further arguments of `ExpertsLayer`.

    Raises ValueError if the configuration has other scores than the router, or more experts per token than exist.
    """
    for name in _SCORES:
        if fields.raw(name) is not None:
            fields.choice(name, (router.scores,))
    sizes: dict[str, Any] = {ours: at_least_1(fields, name) for ours, name in names.items()}
    top, among = sizes["top_k"], sizes["num_experts"]
    most = among // router.num_groups * router.top_groups
    if top > most:
        of, named, tops = (fields.called(name) for name in (names["num_experts"], "n_group", names["top_k"]))
        groups = f"topk_group = {router.top_groups} of {named} = {router.num_groups} groups of "
        where = f"{groups if router.num_groups > 1 else ''}{of} = {among}"
        raise ValueError(f"{tops} is {top}; it must be at most {most}: {where}")
    return ExpertsLayer(**sizes, router=router, **more)


def sparse_layers(
    fields: ConfigFields, blocks: Sequence[Layer], mlp: MlpLayer, experts: ExpertsLayer
) -> tuple[Layer, ...]:
    """Return the blocks, each followed by `experts` or by `mlp`.

    It is `mlp` for blocks in `mlp_only_layers`, and for blocks i (from 1) not divisible by `decoder_sparse_step`.
    """
    dense, step = fields["mlp_only_layers"], fields["decoder_sparse_step"]
    if bad := [i for i in dense if i >= len(blocks)]:
        raise ValueError(f"mlp_only_layers holds {bad[0]}; it must be in [0, num_hidden_layers = {len(blocks)})")
    feeds = (mlp if i in dense or (i + 1) % step else experts for i in range(len(blocks)))
    return tuple(layer for pair in zip(blocks, feeds, strict=True) for layer in pair)


def sigmoid_router(fields: ConfigFields, num_experts: str) -> RouterSpec:
    """Read the router of NemotronH and Kimi: sigmoid scores, `e_score_correction_bias`, and groups of experts.

    num_experts: name of the field with the number of experts.
    """
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
