"""Every layout a head is published in, written with random weights and loaded back; and every refusal."""

import json
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bateleur.eagle.heads import DenseAttend, Head, TargetInfo, load_head
from bateleur.eagle.heads.weights import linear

Config = dict[str, Any]
Tensors = dict[str, Tensor]
Case = tuple[Config, Tensors]


def outputs(lab: Any, head: Head) -> tuple[Tensor, ...]:
    """What a head makes of fixed inputs."""
    generator = torch.Generator().manual_seed(5)
    features = [
        torch.randn(6, head.spec.target_hidden_size, generator=generator, dtype=torch.float64)
        for _ in range(max(1, len(head.spec.needs.taps)))
    ]
    ids = torch.randint(0, lab.V, (6,), generator=generator)
    out, fed = head.forward(ids, head.fuse(features), torch.arange(6), DenseAttend(head.spec))
    return out, fed, head.logits(out)


def renamed(tensors: Tensors, *rules: tuple[str, str]) -> Tensors:
    result = {}
    for name, tensor in tensors.items():
        for theirs, ours in rules:
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
        result[name] = tensor
    return result


def speculators(config: Config, algorithm: str, **fields: Any) -> Config:
    head = {"architectures": ["Speculator"], "model_type": "speculators", "speculators_model_type": algorithm}
    layer = {k: v for k, v in config.items() if k not in ("architectures", "draft_vocab_size", "eagle_config")}
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    outer = {"speculators_config": {"algorithm": algorithm, "proposal_methods": methods}}
    return {**head, **outer, "transformer_layer_config": layer, **fields}


def eagle3_as_speculators(lab: Any) -> Case:
    config, w = lab.eagle3()
    fields = {"draft_vocab_size": lab.Vd, "target_hidden_size": None, "norm_before_residual": False}
    fields["eagle_aux_hidden_state_layer_ids"] = [2, 5, 10]
    return speculators(config, "eagle3", **fields), renamed(w, ("midlayer.", "layers.0."))


def eagle1_as_speculators(lab: Any) -> Case:
    config, w = lab.eagle1()
    return speculators(config, "eagle"), renamed(w, ("layers.0.", "transformer."), ("fc.", "fusion_fc."))


def eagle1_as_wrapper(lab: Any) -> Case:
    config, w = lab.eagle1()
    wrapper = {"architectures": ["EAGLEModel"], "model_type": "eagle", "truncated_vocab_size": lab.V}
    return {**wrapper, "model": config}, renamed(w, ("layers.", "model.layers."))


def eagle3_as_wrapper(lab: Any) -> Case:
    config, w = lab.eagle3()
    wrapper = {"architectures": ["Eagle3LlamaForCausalLM"], "model_type": "eagle"}
    inner = {k: v for k, v in config.items() if k not in ("architectures", "eagle_config")}
    return {**wrapper, "model": inner, "eagle_config": config["eagle_config"]}, w


LAYOUTS: dict[str, tuple[str, str, Callable[[Any], Case]]] = {
    "eagle3": ("eagle", "eagle3", lambda lab: lab.eagle3()),
    "eagle1": ("eagle", "eagle1", lambda lab: lab.eagle1()),
    "eagle3 speculators": ("speculators", "eagle3", eagle3_as_speculators),
    "eagle1 speculators": ("speculators", "eagle1", eagle1_as_speculators),
    "eagle3 wrapper": ("eagle-wrapper", "eagle3", eagle3_as_wrapper),
    "eagle1 wrapper": ("eagle-wrapper", "eagle1", eagle1_as_wrapper),
}


@pytest.mark.parametrize("form", ["safetensors", "safetensors-shards"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_in_every_form_is_the_same_head(checkpoints: Any, name: str, form: str) -> None:
    """Bit for bit the head of the plain layout, and every tensor of the folder accounted for."""
    lab = checkpoints
    layout, kind, make = LAYOUTS[name]
    state = lab._generator.get_state()
    config, w = make(lab)
    lab._generator.set_state(state)
    plain, _ = lab.load(*getattr(lab, kind)())
    head, report = lab.load(config, w, form=form)
    assert (report.layout, report.kind, head.spec.kind) == (layout, kind, kind)
    for found, expected in zip(outputs(lab, head), outputs(lab, plain), strict=True):
        assert torch.equal(found, expected)
    assert (head.target_ids is None) == (kind != "eagle3")
    assert set(report.own) | set(report.unused) == {n.removeprefix("model.") for n in w}
    assert report.unused == (("t2d",) if kind == "eagle3" else ())
    assert report.shared == (("embed_tokens",) if kind == "eagle3" else ("embed_tokens", "lm_head"))


def test_the_report_is_readable(checkpoints: Any) -> None:
    _, report = checkpoints.load(*checkpoints.eagle3())
    assert str(report).splitlines() == [
        f"{report.path}: eagle3 head in the eagle layout",
        "  14 own tensors",
        "  shared with the target: embed_tokens",
        "  unused: t2d",
        "  taps the boundaries 2, 5, 10 of 10",
    ]


def test_speculators_norm_before_residual_is_the_default_only_there(checkpoints: Any) -> None:
    config, w = eagle3_as_speculators(checkpoints)
    del config["norm_before_residual"]
    assert checkpoints.load(config, w)[0].spec.norm_before_residual
    assert not checkpoints.load(*checkpoints.eagle3())[0].spec.norm_before_residual


def test_speculators_leaves_out_what_llama_has_by_default(checkpoints: Any) -> None:
    config, w = eagle3_as_speculators(checkpoints)
    for name in ("rms_norm_eps", "rope_theta", "max_position_embeddings", "model_type"):
        del config["transformer_layer_config"][name]
    spec = checkpoints.load(config, w)[0].spec
    assert (spec.norm_eps, spec.max_positions, spec.rope.inv_freq[1]) == (1e-6, 2048, 10000 ** (-1 / 3))
    del config["transformer_layer_config"]["intermediate_size"]
    with pytest.raises(ValueError, match=r"layers.0.mlp.gate_proj.weight is \(20, 16\) and must be \(11008, 16\)"):
        checkpoints.load(config, w)
    config["transformer_layer_config"]["model_type"] = "qwen3"
    with pytest.raises(ValueError, match="intermediate_size is None; it must be a whole number in"):
        checkpoints.load(config, w)


# -- D1: boundaries ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 7}, 7),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "mistral", "sliding_window": 7, "layer_types": ["full_attention"]}, None),
        ({"model_type": "qwen2", "sliding_window": 7}, None),
        ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True}, 7),
        ({"sliding_window": 7, "layer_types": ["sliding_attention"]}, 7),
    ],
)
def test_each_family_says_in_its_own_way_whether_there_is_a_window(
    checkpoints: Any, fields: Config, window: int | None
) -> None:
    config, w = checkpoints.eagle3()
    head, _ = checkpoints.load({**config, **fields}, w)
    assert head.spec.sliding_window == window


def test_d1_ids_are_boundaries_in_the_order_given(checkpoints: Any) -> None:
    """Golden hidden states: boundary l of this target holds l everywhere, so `fc` shows what its parts are fed."""
    lab = checkpoints
    config, w = lab.eagle3((10, 0, 4))
    for i in range(3):
        w["fc.weight"][:, i * lab.Ht : (i + 1) * lab.Ht] = 100.0**i / lab.Ht
    head, report = lab.load(config, w)
    boundaries = [torch.full((1, lab.Ht), float(i)) for i in range(lab.L + 1)]
    fused = head.fuse([boundaries[tap] for tap in head.spec.needs.taps])
    assert torch.allclose(fused, torch.full_like(fused, 10 + 0 * 100 + 4 * 10000))
    assert "taps the boundaries 10, 0, 4 of 10" in report.notes


def test_d1_ids_counted_as_outputs_are_one_less_than_boundaries(checkpoints: Any) -> None:
    config, w = checkpoints.eagle3((1, 4, 6))
    head, report = checkpoints.load(config, w, layer_ids="outputs")
    assert head.spec.needs.taps == (2, 5, 7)
    head, report = checkpoints.load(config, w)
    assert head.spec.needs.taps == (1, 4, 6)
    assert "as outputs they would be the default" in report.notes[0]
    with pytest.raises(ValueError, match="layer_ids is 'middle'; it must be 'inputs' or 'outputs'"):
        checkpoints.load(config, w, layer_ids="middle")
    config, w = checkpoints.eagle3((1, 4, 10))
    with pytest.raises(ValueError, match=r"counted as outputs of layers.*each from 0 to 10"):
        checkpoints.load(config, w, layer_ids="outputs")


def test_d1_angelslim_always_counts_outputs(checkpoints: Any) -> None:
    config, w = checkpoints.eagle3()
    config |= {"eagle_config": None, "aux_hidden_states_layer_ids": [1, 4, 6]}
    head, report = checkpoints.load(config, w)
    assert head.spec.needs.taps == (2, 5, 7)
    assert report.notes == ("taps the boundaries 2, 5, 7 of 10",)


def test_d1_default_taps_and_targets_too_small_for_them(checkpoints: Any) -> None:
    config, w = checkpoints.eagle3()
    config["eagle_config"] = {}
    head, report = checkpoints.load(config, w)
    assert head.spec.needs.taps == (2, 5, 7)
    assert report.notes[0] == "eagle_aux_hidden_state_layer_ids is missing: the default"
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": []}
    assert checkpoints.load(config, w)[0].spec.needs.taps == (2, 5, 7), "none named is none given"
    with pytest.raises(ValueError, match=r"target of 5 layers, \(2, 2, 2\), is no three ascending boundaries"):
        checkpoints.load(config, w, target=checkpoints.make_target(num_layers=5))


# -- D3: what is shared -----------------------------------------------------------------------------------------------


def test_d3_own_ends_are_used_and_copies_are_not_kept(checkpoints: Any) -> None:
    lab = checkpoints
    config, w = lab.eagle1()
    w["embed_tokens.weight"] = lab.target.embedding.to(torch.float32).to(torch.float64)
    w["lm_head.weight"] = lab.target.lm_head.clone()
    w["lm_head.weight"][3] += 1
    head, report = lab.load(config, w)
    assert report.shared == ()
    w["embed_tokens.weight"] = lab.target.embedding
    again, report = lab.load(config, w)
    assert report.shared == ("embed_tokens",)
    assert again.vocabulary.embedding is lab.target.embedding  # type: ignore[attr-defined]
    h = lab.random(2, lab.H)
    assert torch.equal(head.logits(h)[:, 3], (h @ (lab.target.lm_head[3] + 1)).float())


def test_matrices_lie_as_they_are_read(checkpoints: Any) -> None:
    """Own weights are the head's own memory, contiguous and aligned."""
    lab = checkpoints
    config, w = lab.eagle1()
    w["embed_tokens.weight"] = lab.random(lab.V, lab.H)
    weights: list[Tensor] = []

    def project(weight: Tensor, bias: Tensor | None) -> Any:
        weights.append(weight)
        return lambda x: x @ weight.T

    head, _ = lab.load(config, w, dtype=torch.float32, project=project)
    assert head.vocabulary.embedding.is_contiguous()  # type: ignore[attr-defined]
    count = len(weights)
    lab.load(config, w, project=project)
    assert len(weights) == 2 * count
    assert all(weight.is_contiguous() and weight.data_ptr() % 64 == 0 for weight in weights[count:])


def test_d3_a_shared_lm_head_is_multiplied_with_once(checkpoints: Any) -> None:
    """By the target's own product, which may have laid it out in its own way; no second one is made."""
    lab, shapes = checkpoints, []
    config, w = lab.eagle1()
    h = lab.random(2, lab.H)

    def project(weight: Tensor, bias: Tensor | None) -> Any:
        shapes.append(tuple(weight.shape))
        return linear(weight, bias)

    target = replace(lab.target, output=lambda x: x @ lab.target.lm_head.T * 2)
    head, report = lab.load(config, w, target=target, project=project)
    assert "lm_head" in report.shared
    count = len(shapes)
    assert torch.equal(head.logits(h), (h @ lab.target.lm_head.T * 2).float())
    lab.load(config, w, project=project)
    assert len(shapes) == count + count + 1
    assert shapes[count] == (lab.V, lab.H), "without one, the first to be made"


def test_d3_a_missing_lm_head_of_fewer_tokens_is_an_error(checkpoints: Any) -> None:
    config, w = checkpoints.eagle3()
    del w["lm_head.weight"]
    with pytest.raises(ValueError, match=r"missing weights: lm_head.weight \(12, 16\)$"):
        checkpoints.load(config, w)


def test_d3_the_whole_vocabulary_may_share_the_lm_head(checkpoints: Any) -> None:
    config, w = checkpoints.eagle3()
    del config["draft_vocab_size"]
    head, report = checkpoints.load(config, {k: v for k, v in w.items() if k not in ("lm_head.weight", "d2t", "t2d")})
    assert report.shared == ("embed_tokens", "lm_head")
    assert head.target_ids is None
    assert head.spec.draft_vocab_size == checkpoints.V


# -- D4: offsets ------------------------------------------------------------------------------------------------------


def test_d4_d2t_holds_offsets(checkpoints: Any) -> None:
    config, w = checkpoints.eagle3()
    head, _ = checkpoints.load(config, w)
    assert head.target_ids is not None
    assert head.target_ids.dtype == torch.int64
    assert head.target_ids.tolist() == w["t2d"].nonzero().flatten().tolist()


def test_d4_zeros_are_the_first_tokens(checkpoints: Any) -> None:
    config, w = checkpoints.eagle3()
    w["d2t"] = torch.zeros(checkpoints.Vd, dtype=torch.int64)
    w["t2d"] = torch.arange(checkpoints.V) < checkpoints.Vd
    head, _ = checkpoints.load(config, w)
    assert head.target_ids is not None
    assert head.target_ids.tolist() == list(range(checkpoints.Vd))


def test_d4_a_table_of_the_whole_vocabulary_is_no_table(checkpoints: Any) -> None:
    """Nothing is looked up where both vocabularies are the same."""
    lab = checkpoints
    config, w = lab.eagle3()
    config["draft_vocab_size"] = lab.V
    w["lm_head.weight"] = lab.random(lab.V, lab.H)
    w["d2t"] = torch.zeros(lab.V, dtype=torch.int64)
    w["t2d"] = torch.ones(lab.V, dtype=torch.bool)
    assert lab.load(config, w)[0].target_ids is None


def test_d4_ids_in_place_of_offsets_are_refused(checkpoints: Any) -> None:
    config, w = checkpoints.eagle3()
    ids = torch.arange(checkpoints.Vd) + w["d2t"]
    w["d2t"] = ids
    with pytest.raises(ValueError, match=r"d2t gives the target ids .* must be different ids within 0 \.\. 39"):
        checkpoints.load(config, w)
    # Small ids stay in range: only the mask tells.
    w["d2t"] = torch.arange(checkpoints.Vd) + 1
    w["t2d"] = torch.isin(torch.arange(checkpoints.V), w["d2t"])
    with pytest.raises(ValueError, match=r"and t2d \(40,\) marks others of 40; d2t seems to hold target ids"):
        checkpoints.load(config, w)


def test_d4_ids_twice_are_refused(checkpoints: Any) -> None:
    config, w = checkpoints.eagle3()
    table = torch.cat((torch.tensor([5, 5]), torch.arange(10, 10 + checkpoints.Vd - 2)))
    w["d2t"] = table - torch.arange(checkpoints.Vd)
    del w["t2d"]
    with pytest.raises(ValueError, match=r"d2t gives the target ids .* must be different ids"):
        checkpoints.load(config, w)


@pytest.mark.parametrize("whole", [False, True])
def test_d4_ids_in_any_order_are_the_same_head(checkpoints: Any, whole: bool) -> None:
    lab = checkpoints
    config, w = lab.eagle3()
    if whole:
        config["draft_vocab_size"] = lab.V
        w |= {"lm_head.weight": lab.random(lab.V, lab.H), "t2d": torch.ones(lab.V, dtype=torch.bool)}
        w["d2t"] = torch.zeros(lab.V, dtype=torch.int64)
    ids = torch.arange(len(w["d2t"])) + w["d2t"]
    head, _ = lab.load(config, w)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    w["lm_head.weight"], w["d2t"] = w["lm_head.weight"][order], ids[order] - torch.arange(len(ids))
    mixed, _ = lab.load(config, w)
    h = lab.random(5, lab.H)
    assert torch.equal(mixed.target_ids, ids[order])
    assert torch.equal(mixed.logits(h), head.logits(h)[:, order])


# -- D6: names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rules", [(("midlayer.", "layers.0."),), (("midlayer.", "model.midlayer."), ("fc.", "model.fc."))]
)
def test_d6_other_names_of_the_one_layer(checkpoints: Any, rules: tuple[tuple[str, str], ...]) -> None:
    config, w = checkpoints.eagle3()
    head, _ = checkpoints.load(config, w)
    other, _ = checkpoints.load(config, renamed(w, *rules))
    for found, expected in zip(outputs(checkpoints, other), outputs(checkpoints, head), strict=True):
        assert torch.equal(found, expected)


# -- refusals ---------------------------------------------------------------------------------------------------------


def refuse(lab: Any, case: Case, *messages: str, target: TargetInfo | None = None, form: str = "safetensors") -> None:
    folder = lab.write(*case, form)
    with pytest.raises(ValueError, match=re.escape(str(folder))) as caught:
        load_head(folder, target or lab.target, dtype=torch.float32, device="cpu")
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_every_missing_weight_is_an_error_that_names_it(checkpoints: Any, kind: str) -> None:
    config, w = getattr(checkpoints, kind)()
    for name in w.keys() - {"t2d"}:
        if (kind, name) == ("eagle1", "fc.weight"):
            continue  # without it nothing tells an EAGLE-1 head from a Llama model
        rest = {k: v for k, v in w.items() if k != name}
        refuse(checkpoints, (config, rest), f"missing weights: {name} {tuple(w[name].shape)}")


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_every_misshapen_weight_is_an_error_with_both_shapes(checkpoints: Any, kind: str) -> None:
    config, w = getattr(checkpoints, kind)()
    for name in w.keys() - {"t2d"}:
        shape = tuple(w[name].shape)
        longer = (shape[0] + 1, *shape[1:])
        wrong = {**w, name: torch.zeros(longer, dtype=w[name].dtype)}
        refuse(checkpoints, (config, wrong), f"unexpected shapes: {name} is {longer} and must be {shape}")


def test_all_problems_are_listed_at_once(checkpoints: Any) -> None:
    config, w = checkpoints.eagle3()
    del w["norm.weight"], w["midlayer.mlp.up_proj.weight"]
    w["fc.weight"] = w["fc.weight"][:, :-1]
    w["mask_hidden"] = torch.zeros(1, 48)
    refuse(
        checkpoints,
        (config, w),
        "missing weights: midlayer.mlp.up_proj.weight (20, 16), norm.weight (16,)",
        "unexpected shapes: fc.weight is (16, 47) and must be (16, 48)",
        "weights of no known use: mask_hidden",
    )


def test_the_same_weight_twice(checkpoints: Any) -> None:
    config, w = checkpoints.eagle3()
    w["layers.0.hidden_norm.weight"] = w["midlayer.hidden_norm.weight"].clone()
    refuse(checkpoints, (config, w), "are the same weight, layers.0.hidden_norm.weight")


EAGLE3_FIELDS: list[tuple[Config, str]] = [
    ({"hidden_size": None}, "hidden_size is None; it must be a whole number in"),
    ({"hidden_size": True}, "hidden_size is True; it must be a whole number in"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be a whole number in"),
    ({"num_key_value_heads": 3}, "num_kv_heads is 3; it must divide num_heads = 4"),
    ({"head_dim": None, "num_attention_heads": 6}, "without head_dim it must divide hidden_size = 16"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0; it must be a finite number above 0"),
    ({"rope_theta": "big"}, "rope_theta is 'big'; it must be a finite number above 0"),
    ({"rope_scaling": 4}, "rope_scaling is 4; it must be an object"),
    (
        {"rope_scaling": {"rope_type": "longrope"}},
        "rope_type is 'longrope'; supported is 'default', 'linear', 'llama3', 'yarn'",
    ),
    (
        {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 8}, "rope_theta": 1},
        "rope_theta is 1; with YaRN it must be another number",
    ),
    ({"rope_scaling": {"rope_type": "yarn", "mscale": 1.0}}, "mscale is 1.0; YaRN is supported without it"),
    ({"partial_rotary_factor": 0.5}, "3 of head_dim = 6 lanes rotate; it must be an even number of lanes"),
    (
        {"rope_scaling": {"rope_type": "llama3", "high_freq_factor": 1.0, "original_max_position_embeddings": 8}},
        "high_freq_factor is 1.0; it must be above low_freq_factor = 1.0",
    ),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is 'silu'"),
    ({"model_type": "gemma"}, "model_type is 'gemma'; supported is 'llama', 'qwen2', 'qwen3', 'mistral'"),
    ({"vocab_size": 41}, "vocab_size is 41; the target's is 40"),
    ({"draft_vocab_size": 41}, "draft_vocab_size is 41; a head drafts at least one and at most vocab_size = 40"),
    ({"target_hidden_size": 24}, "target_hidden_size is 24; the target's hidden size is 16"),
    ({"fc_norm": "yes"}, "fc_norm is 'yes'; it must be true or false"),
    ({"fc_norm": True, "norm_before_fc": True}, "norm_before_fc and fc_norm are both true"),
    ({"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4; the taps are (2, 5, 10)"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "the layers of a head must be of one type"),
    ({"layer_types": ["sliding_attention"]}, "sliding_window is None; it must be a whole number in"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is set; quantised weights are not supported"),
    ({"eagle_config": []}, "eagle_config is []; it must be an object"),
    (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 2, 4]}},
        "eagle_aux_hidden_state_layer_ids is [2, 2, 4]; it must be distinct boundaries of a target of 10 layers",
    ),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 11]}}, "each from 0 to 10"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "2"}}, "it must be distinct boundaries"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, "5"]}}, "it must be distinct boundaries"),
]


@pytest.mark.parametrize(("fields", "message"), EAGLE3_FIELDS, ids=[m for _, m in EAGLE3_FIELDS])
def test_an_impossible_field_is_refused(checkpoints: Any, fields: Config, message: str) -> None:
    config, w = checkpoints.eagle3()
    refuse(checkpoints, ({**config, **fields}, w), message)


def test_an_impossible_eagle1_is_refused(checkpoints: Any) -> None:
    lab = checkpoints
    config, w = lab.eagle1()
    refuse(lab, ({**config, "add_para_norm": True}, w), "add_para_norm is true; EAGLE-1 heads with further norms")
    refuse(lab, ({**config, "truncated_vocab_size": 7}, w), "truncated_vocab_size is 7; an EAGLE-1 head drafts all 40")
    refuse(lab, (config, w), "hidden_size is 16; the target's is 24", target=lab.make_target(hidden=24))
    refuse(lab, ({**config, "model_type": "eagle"}, w), "model is None; a configuration of type 'eagle' wraps one")
    other = speculators(config, "medusa")
    refuse(lab, (other, w), "speculators_model_type is 'medusa'; supported is 'eagle', 'eagle3'")
    del w["fc.weight"]
    refuse(lab, (config, w), "['LlamaForCausalLM'] with 8 tensors is no draft head")
    config, w = lab.eagle1()
    refuse(lab, (speculators(config, "eagle", fusion_bias=True), w), "missing weights: fc.bias (16,)")
    biased = {**config, "attention_bias": True, "mlp_bias": True}
    refuse(lab, (biased, w), "self_attn.q_proj.bias (24,)", "self_attn.v_proj.bias (12,)", "mlp.down_proj.bias (16,)")


def test_d5_a_narrow_head_must_bring_its_embedding(checkpoints: Any) -> None:
    lab = checkpoints
    target = lab.make_target(hidden=24)
    config, w = lab.eagle3()
    config["target_hidden_size"] = 24
    w["fc.weight"] = lab.random(lab.H, 72)
    refuse(lab, (config, w), "missing weights: embed_tokens.weight (40, 16)", target=target)
    config["eagle_config"] = {"use_aux_hidden_state": False}
    refuse(lab, (config, w), "hidden_size is 16 and target_hidden_size 24; without taps they must agree", target=target)
    del config["target_hidden_size"]
    refuse(lab, (config, w), "hidden_size is 16; the target's hidden size is 24", target=target)


def test_d2t_of_fractions_is_refused(checkpoints: Any) -> None:
    config, w = checkpoints.eagle3()
    w["d2t"] = w["d2t"].double()
    refuse(checkpoints, (config, w), "d2t is torch.float64; it must hold whole numbers")


# -- files ------------------------------------------------------------------------------------------------------------


def test_folders_that_hold_no_head(checkpoints: Any, tmp_path: Path) -> None:
    def load(path: Path) -> None:
        load_head(path, checkpoints.target, dtype=torch.float32, device="cpu")

    with pytest.raises(ValueError, match=r"nothing: holds no config\.json; a draft head is a folder"):
        load(tmp_path / "nothing")
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: cannot be read as JSON"):
        load(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json: holds list; it must hold a JSON object"):
        load(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"broken: holds no model\.safetensors, single or sharded"):
        load(folder)
    (folder / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"model\.safetensors: is no complete safetensors file"):
        load(folder)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": []}))
    with pytest.raises(ValueError, match="weight_map must map tensor names to file names"):
        load(folder)
    for name in ("gone.safetensors", "../broken/config.json"):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ValueError, match=f"{name}' is not a file in this folder"):
            load(folder)


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_a_pickle_is_refused_unread(checkpoints: Any, tmp_path: Path, name: str) -> None:
    config, w = checkpoints.eagle3()
    folder = checkpoints.write(config, w)
    (folder / "model.safetensors").unlink()
    torch.save({**w, "trap": Trap(tmp_path / "sprung")}, folder / name, pickle_module=pickle)
    with pytest.raises(ValueError, match=f"{name}: a pickle, which is never read; weights are read from model.saf"):
        load_head(folder, checkpoints.target, dtype=torch.float32, device="cpu")
    assert not (tmp_path / "sprung").exists()


def test_safetensors_is_asked_for_by_name(checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoints.write(*checkpoints.eagle3())
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ValueError, match=r"needs the package safetensors \(pip install 'bateleur-eagle\[check"):
        load_head(folder, checkpoints.target, dtype=torch.float32, device="cpu")


def test_importing_heads_is_light(modules_of: Callable[[str], list[str]]) -> None:
    heavy = {"safetensors", "transformers", "triton"}
    assert not [name for name in modules_of("eagle.heads") if name.split(".")[0] in heavy]


def test_target_info_refuses_tensors_of_other_sizes(checkpoints: Any) -> None:
    target = checkpoints.target
    fields = {name: getattr(target, name) for name in TargetInfo.__slots__}
    for name in ("embedding", "lm_head"):
        with pytest.raises(ValueError, match=rf"{name} has shape .*; vocab_size = 40 and hidden_size = 16 ask for"):
            TargetInfo(**{**fields, name: fields[name][1:]})
