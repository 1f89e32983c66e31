"""Reads a `config.json` into a `HeadSpec`, for each layout in which heads are published.

A head reads the target's hidden states at boundaries between layers (taps). Layouts count them differently. The EAGLE
repository, speculators and vLLM give the layer whose *input* is read, which is the number of the boundary. Some
trainers give the layer whose *output* is read, which is one less. A checkpoint does not say which, so the caller does
(`layer_ids`).
"""

from collections.abc import Collection
from typing import Any, Literal, NamedTuple

from bateleur.eagle.drafter import TargetNeeds
from bateleur.eagle.heads.fields import Fields
from bateleur.eagle.heads.spec import HeadSpec, TargetInfo

Layout = Literal["eagle", "eagle-wrapper", "speculators", "target"]
LayerIds = Literal["inputs", "outputs"]
_IDS = "eagle_aux_hidden_state_layer_ids"
_OUTPUT_IDS = "aux_hidden_states_layer_ids"
"""AngelSlim's field; it always counts outputs of layers."""
_MISTRAL_WINDOW = 4096
# speculators writes only what differs from the defaults of a Llama configuration.
_LLAMA_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}


class ParsedHeadConfig(NamedTuple):
    """A parsed `config.json` of a head. notes: remarks for `LoadReport`, such as boundaries chosen by default."""

    layout: Layout
    spec: HeadSpec
    notes: tuple[str, ...] = ()


class _Source(NamedTuple):
    """A configuration of any layout: fields `layer` with the sizes of the decoder layer, `head` with the options."""

    layout: Layout
    eagle3: bool
    layer: Fields
    head: Fields


def describe(
    config: dict[str, Any], names: Collection[str], target: TargetInfo, layer_ids: LayerIds
) -> ParsedHeadConfig:
    """Read the configuration of a head in any layout. names: tensor names without prefixes. layer_ids: see `load_head`.

    Raises:
        ValueError: the configuration is of no known layout, or a field is impossible or does not fit the target.
    """
    if layer_ids not in ("inputs", "outputs"):
        raise ValueError(f"layer_ids is {layer_ids!r}; it must be 'inputs' or 'outputs'")
    if config.get("quantization_config"):
        raise ValueError("quantization_config is set; quantised weights are not supported")
    source = _find(config, names)
    source.layer.choice("hidden_act", ("silu",), "silu")
    source.layer.choice("model_type", ("llama", "qwen2", "qwen3", "mistral"), "llama")
    _require_equal(source.layer, "vocab_size", target.vocab_size)
    sizes = _sizes(source, names, target)
    if source.eagle3:
        return _read_eagle3(source, sizes, target, layer_ids)
    return ParsedHeadConfig(source.layout, _read_eagle1(source, sizes, target))


def _find(config: dict[str, Any], names: Collection[str]) -> _Source:
    algorithm = config.get("speculators_model_type")
    if algorithm is not None:
        if algorithm not in ("eagle", "eagle3"):
            raise ValueError(f"speculators_model_type is {algorithm!r}; supported is 'eagle', 'eagle3'")
        head = Fields(config)
        layer = head.inner("transformer_layer_config")
        if layer.raw("model_type") in (None, "llama"):
            layer = Fields(config.get("transformer_layer_config") or {}, _LLAMA_DEFAULTS)
        return _Source("speculators", algorithm == "eagle3", layer, head)
    layout: Layout = "eagle"
    if config.get("model_type") == "eagle":
        layout = "eagle-wrapper"
        if not isinstance(config.get("model"), dict):
            raise ValueError(f"model is {config.get('model')!r}; a configuration of type 'eagle' wraps one")
        outer = {k: v for k, v in config.items() if k not in ("model", "model_type")}
        config = {**config["model"], **outer}
    fields = Fields(config)
    listed = config.get("architectures")
    named = " ".join(map(str, listed if isinstance(listed, list) else [])).lower()
    eagle3 = "eagle3" in named or "layers.0.hidden_norm.weight" in names
    if not eagle3 and "fc.weight" not in names:
        raise ValueError(
            f"architectures {config.get('architectures')} with {len(names)} tensors is no draft head: it is not named "
            "EAGLE-3, and has neither hidden_norm.weight (EAGLE-3) nor fc.weight (EAGLE-1)"
        )
    return _Source(layout, eagle3, fields, fields)


def _require_equal(fields: Fields, name: str, expected: int) -> None:
    if (size := fields.size(name)) != expected:
        raise ValueError(f"{name} is {size}; the target's is {expected}")


def _window(layer: Fields) -> int | None:
    """Return the sliding window of the first layer; None without one, also if `layer_types` names no sliding layer.

    Without `layer_types`, a Mistral layer has the window `sliding_window`, by default transformers' default. Another
    layer has it only if `use_sliding_window` is true.
    """
    types = layer.choices("layer_types", ("full_attention", "sliding_attention"))
    if len(set(types)) > 1:
        raise ValueError(f"layer_types is {types!r}; the layers of a head must be of one type")
    if not types and layer.raw("model_type") == "mistral":
        return layer.optional_size("sliding_window", _MISTRAL_WINDOW)
    windowed = types[0] == "sliding_attention" if types else layer.flag("use_sliding_window")
    return layer.size("sliding_window") if windowed else None


def _sizes(source: _Source, names: Collection[str], target: TargetInfo) -> dict[str, Any]:
    """Return the layer sizes that every EAGLE head has, as fields of `HeadSpec`. names: names of its tensors."""
    layer, heads = source.layer, source.layer.size("num_attention_heads")
    biased = {
        "fc": "fc.bias" in names,
        "attention": layer.flag("attention_bias") or "layers.0.self_attn.q_proj.bias" in names,
        "mlp": layer.flag("mlp_bias"),
    }
    return {
        "hidden_size": layer.size("hidden_size"),
        "vocab_size": target.vocab_size,
        "target_hidden_size": target.hidden_size,
        "num_layers": layer.size("num_hidden_layers", 1),
        "num_heads": heads,
        "num_kv_heads": layer.size("num_key_value_heads", heads),
        "head_dim": layer.head_dim(),
        "intermediate_size": layer.size("intermediate_size"),
        "norm_eps": layer.number("rms_norm_eps", 1e-6),
        "rope": layer.rope(),
        "max_positions": layer.optional_size("max_position_embeddings"),
        "sliding_window": _window(layer),
        "qk_norm": layer.raw("model_type") == "qwen3" or "layers.0.self_attn.q_norm.weight" in names,
        "biases": frozenset(name for name, has_bias in biased.items() if has_bias),
    }


def _read_eagle1(source: _Source, sizes: dict[str, Any], target: TargetInfo) -> HeadSpec:
    head, vocab = source.head, target.vocab_size
    if head.flag("fusion_bias"):
        sizes["biases"] |= {"fc"}
    for name in ("layernorms", "add_para_norm"):
        if head.flag(name):
            raise ValueError(f"{name} is true; EAGLE-1 heads with further norms are not supported")
    if (draft := head.raw("truncated_vocab_size")) not in (None, vocab):
        raise ValueError(f"truncated_vocab_size is {draft}; an EAGLE-1 head drafts all {vocab} tokens")
    _require_equal(source.layer, "hidden_size", target.hidden_size)
    return HeadSpec(kind="eagle1", draft_vocab_size=vocab, needs=TargetNeeds(hidden=True), **sizes)


def _read_eagle3(source: _Source, sizes: dict[str, Any], target: TargetInfo, layer_ids: LayerIds) -> ParsedHeadConfig:
    head, nested = source.head, source.head.inner("eagle_config")

    def switch(name: str, default: bool = False) -> bool:
        return nested.flag(name, head.flag(name, default))

    width = head.size("target_hidden_size", sizes["hidden_size"])
    if width != target.hidden_size:
        name = "target_hidden_size" if head.raw("target_hidden_size") else "hidden_size"
        raise ValueError(f"{name} is {width}; the target's hidden size is {target.hidden_size}")
    needs, notes = TargetNeeds(hidden=True), ["fed the final hidden state"]
    if switch("use_aux_hidden_state", True):
        taps, notes = _taps(head, nested, target, layer_ids)
        needs = TargetNeeds(taps)
    elif sizes["hidden_size"] != width:
        raise ValueError(
            f"hidden_size is {sizes['hidden_size']} and target_hidden_size {width}; without taps they must agree"
        )
    each, of_all = switch("fc_norm"), switch("norm_before_fc")
    if each and of_all:
        raise ValueError("norm_before_fc and fc_norm are both true; a head norms its taps in one way")
    spec = HeadSpec(
        kind="eagle3",
        draft_vocab_size=head.size("draft_vocab_size", sizes["vocab_size"]),
        needs=needs,
        recycle="post_norm" if switch("norm_output") else "pre_norm",
        tap_norm="each" if each else "all" if of_all else None,
        norm_before_residual=switch("norm_before_residual", source.layout == "speculators"),
        **sizes,
    )
    return ParsedHeadConfig(source.layout, spec, tuple(notes))


def _taps(head: Fields, nested: Fields, target: TargetInfo, layer_ids: LayerIds) -> tuple[tuple[int, ...], list[str]]:
    layers, shift = target.num_layers, 0 if layer_ids == "inputs" else 1
    found = nested.boundaries(_IDS, layers, shift=shift) or head.boundaries(_IDS, layers, shift=shift)
    if found is None and (found := head.boundaries(_OUTPUT_IDS, layers, shift=1)) is not None:
        shift = 1
    notes = []
    if found is None:
        found = (2, layers // 2, layers - 3)
        if not 2 < layers // 2 < layers - 3:
            raise ValueError(
                f"{_IDS} is missing, and the default of a target of {layers} layers, {found}, is no three "
                "ascending boundaries; the configuration must give them"
            )
        notes.append(f"{_IDS} is missing: the default")
    elif not shift and found == (1, layers // 2 - 1, layers - 4):
        notes.append(
            f"{_IDS} = {list(found)} are read as inputs of layers; as outputs they would be the default of a "
            f"target of {layers} layers (layer_ids='outputs')"
        )
    notes.append(f"taps the boundaries {', '.join(map(str, found))} of {layers}")
    count = head.optional_size("num_aux_hidden_states")
    if count is not None and count != len(found):
        raise ValueError(f"num_aux_hidden_states is {count}; the taps are {found}")
    return found, notes
