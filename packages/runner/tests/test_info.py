"""What `bateleur info` counts."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from tiny import FAMILIES

from bateleur.metadata.backends.flashinfer import FlashInferBackend
from bateleur.metadata.backends.paged import NativeBackend, TritonBackend
from bateleur.runner import LLM
from bateleur.runner.checkpoint.open import load_model, open_checkpoint
from bateleur.runner.config.resolve import choose_backend, describe_backend
from bateleur.runner.diagnose.checkpoint_facts import checkpoint_table, describe_checkpoint, format_bytes
from bateleur.runner.models import native


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_counts_agree_with_the_loaded_model(tiny_checkpoint: Any, tiny: Any, family: str, dtype: str) -> None:
    path, theirs = tiny_checkpoint(family)
    facts = describe_checkpoint(path, dtype=dtype)
    computed = torch.float32 if dtype == "auto" else torch.bfloat16
    loaded = load_model(open_checkpoint(path), computed, "cpu").weights().values()
    assert facts["parameters"] == tiny.num_weights(theirs)
    assert facts["weight_bytes"] == sum(w.numel() * w.element_size() for w in loaded)
    assert facts["parameters"] == sum(part["parameters"] for part in facts["parts"].values())
    assert facts["dtype"] == str(computed).removeprefix("torch.")
    assert facts["stored_dtype"] == "float32"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ["fold", "slots"])
def test_counts_are_those_of_the_tensors(tiny_checkpoint: Any, family: str, policy: str) -> None:
    """What an engine for two requests allocates: weights, and pages, rings and windows with those of nobody."""
    path, _ = tiny_checkpoint(family)
    options: dict[str, Any] = {"mamba_state_policy": policy, "max_num_seqs": 2, "skip_tokenizer_init": True}
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_backend": "recorded"}  # nothing is packed
    llm = LLM(path, device="cpu", dtype="float32", max_model_len=64, **options, **graphs)
    engine, plan = llm.engine, llm.cache_plan
    facts = describe_checkpoint(path, dtype="float32", max_model_len=64, mamba_state_policy=policy)
    assert facts["weight_bytes"] == sum(weight.nbytes for weight in engine.model.weights().values())
    assert facts["kv_bytes_per_token"] * plan.num_blocks * plan.block_size == sum(
        t.nbytes for pair in engine.caches.kv for t in pair
    )
    pool = engine.caches.pool
    assert (pool is None) == (facts["mamba_page_bytes"] == 0)
    if pool is None:
        return
    layers = range(len(pool.specs))
    slots = 1 + 2 * facts["mamba_pages_per_request"]
    states = [state for i in layers if (state := pool.layer(i)[1]) is not None]
    assert slots * facts["mamba_state_bytes"] == sum(state.nbytes for state in states)
    assert slots * facts["mamba_page_bytes"] == sum(t.nbytes for t in [pool.layer(i)[0] for i in layers] + states)
    rings = [each for i in layers if (each := pool.rings(i)) is not None]
    assert 3 * facts["mamba_window_bytes"] == sum(each.request_conv.nbytes for each in rings)
    assert 3 * facts["mamba_ring_bytes"] == sum(t.nbytes for each in rings for t in each.entries)


def test_nemotron_h_by_hand(tiny_checkpoint: Any) -> None:
    facts = describe_checkpoint(tiny_checkpoint("nemotron_h")[0], dtype="bfloat16", mamba_state_policy="fold")
    assert {kind: part["layers"] for kind, part in facts["parts"].items()} == {
        "mamba": 2,
        "mlp": 2,
        "attention": 2,
        "embeddings": 0,
    }
    # Two layers of keys and values, 2 heads of 16 in two bytes.
    assert facts["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    # Two layers: three inputs of 6*12 + 2*3*16 channels in two bytes, as a page and request_conv, 6 * 12 * 16 states in
    # four, and a ring of 16 tokens: x and B in two bytes, a step for each head in four.
    window, ring = 3 * (72 + 96) * 2, 16 * ((72 + 3 * 16) * 2 + 6 * 4)
    page = window + 6 * 12 * 16 * 4
    assert facts["mamba_page_bytes"] == 2 * page
    assert facts["mamba_state_bytes"] == 2 * 6 * 12 * 16 * 4
    assert (facts["mamba_ring_bytes"], facts["mamba_window_bytes"]) == (2 * ring, 2 * window)
    assert facts["mamba_state_bytes_per_request"] == 2 * (page + window + ring)
    assert facts["parts"]["mlp"]["parameters"] == 2 * (2 * 56 * 40 + 40)


def test_active_weights_by_hand(tiny_checkpoint: Any) -> None:
    facts = describe_checkpoint(tiny_checkpoint("nemotron_h-experts")[0], dtype="bfloat16")
    # Two layers of 12 experts, each up and down 24 x 40 in two bytes, of which a token takes 3; beside them a router
    # with its correction in four bytes, a shared MLP of 36 and a norm.
    others = 12 * (40 + 1) * 4 + 2 * 36 * 40 * 2 + 40 * 2
    part = facts["parts"]["experts"]
    assert (part["layers"], part["weight_bytes"]) == (2, 2 * (12 * 2 * 24 * 40 * 2 + others))
    assert part["active_bytes"] == 2 * (3 * 2 * 24 * 40 * 2 + others)
    assert facts["weight_bytes"] - facts["active_bytes"] == part["weight_bytes"] - part["active_bytes"]
    table = checkpoint_table(facts)
    assert max(len(line) for line in table.splitlines()[1:]) <= 80
    assert f"active weights per token   {facts['active_bytes']:>16,} bytes" in table
    assert "active" not in checkpoint_table(describe_checkpoint(tiny_checkpoint("nemotron_h")[0]))


def test_a_model_without_mamba_layers(tiny_checkpoint: Any) -> None:
    facts = describe_checkpoint(tiny_checkpoint("llama")[0])
    assert facts["mamba_state_bytes_per_request"] == 0
    assert "mamba" not in facts["parts"]


def test_tied_embeddings_count_once(tiny_checkpoint: Any) -> None:
    path, theirs = tiny_checkpoint("llama", tie_word_embeddings=True)
    facts = describe_checkpoint(path)
    assert facts["tied_embeddings"]
    assert facts["parameters"] == sum(p.numel() for p in theirs.parameters())


def test_table_and_json(tiny_checkpoint: Any) -> None:
    path, _ = tiny_checkpoint("nemotron_h")
    facts = describe_checkpoint(path)
    assert json.loads(json.dumps(facts))["parts"]["mamba"]["layers"] == 2
    table = checkpoint_table(facts)
    assert max(len(line) for line in table.splitlines()[1:]) <= 80
    for text in ("NemotronHForCausalLM", str(path), f"{facts['parameters']:,}", f"{facts['weight_bytes']:,} bytes"):
        assert text in table
    assert f"{facts['kv_bytes_per_token']:,} bytes" in table
    assert f"{facts['mamba_state_bytes_per_request']:,} bytes" in table
    assert f"{facts['mamba_page_bytes']:,} bytes, {facts['kept_states']} per 256 tokens" in table


def test_unknown_dtype_and_folder(tiny_checkpoint: Any, tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="dtype is 'int4'"):
        describe_checkpoint(tiny_checkpoint("llama")[0], dtype="int4")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        describe_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (16_240_000, "16.2 MB"), (3e15, "3000.0 TB")]
)
def test_sizes_for_people(count: float, text: str) -> None:
    assert format_bytes(math.floor(count)) == text


@pytest.mark.parametrize(
    ("family", "sizes", "tokens"),
    [
        ("nemotron_h", {}, 64),  # requests of up to 256 tokens
        ("bamba", {"max_model_len": 100}, 16),
        ("granitemoehybrid", {"block_size": 4, "mamba_block_size": 12}, 12),
        ("llama", {}, 16),
        ("llama", {"block_size": 4, "mamba_block_size": 12}, 4),
    ],
)
def test_prefix_hits_are_those_of_the_engine(
    tiny_checkpoint: Any, family: str, sizes: dict[str, int], tokens: int
) -> None:
    path, _ = tiny_checkpoint(family)
    facts = describe_checkpoint(path, **sizes)
    assert facts["hit_granularity"] == tokens
    assert f"prefix hit granularity     {tokens:>16,} tokens" in checkpoint_table(facts)
    options: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": True, "skip_tokenizer_init": True}
    prefixes = LLM(path, device="cpu", **options, **sizes).engine.scheduler.prefixes
    assert prefixes is not None
    assert prefixes.granularity == tokens


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"mamba_block_size": 24}, "mamba_block_size is 24; it must be a multiple of block_size = 16"),
        ({"mamba_block_size": 512}, "mamba_block_size is 512; it must be at most max_model_len - 2 = 254"),
    ],
)
def test_sizes_that_the_engine_refuses(tiny_checkpoint: Any, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe_checkpoint(tiny_checkpoint("nemotron_h")[0], **sizes)


def test_prompt_lookup_costs_the_tokens_of_a_request(tiny_checkpoint: Any) -> None:
    path, _ = tiny_checkpoint("nemotron_h")
    facts = describe_checkpoint(path, draft="ngram", max_model_len=100)
    assert facts["draft_tokens_bytes_per_request"] == 4 * 101
    assert f"lookup tokens per request  {404:>16,} bytes" in checkpoint_table(facts)
    options: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 100, "skip_tokenizer_init": True}
    llm = LLM(path, device="cpu", draft="ngram", **options)
    assert llm.cache_plan.draft_bytes == 3 * 404


def test_which_attention_backend_serves_is_told(tiny_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = tiny_checkpoint("llama")
    monkeypatch.setattr(NativeBackend, "missing_requirement", lambda *_: "there is no gcc")
    assert describe_checkpoint(path, device="cpu")["attention"] == "torch; not native: there is no gcc"
    monkeypatch.setattr(NativeBackend, "missing_requirement", lambda *_: None)
    assert "attention                  native" in checkpoint_table(describe_checkpoint(path, device="cpu")).splitlines()
    assert describe_checkpoint(path, device="cpu", attention_backend="torch")["attention"] == "torch, as requested"
    with pytest.raises(ValueError, match=r"^attention_backend is 'triton'; triton: device cpu is not CUDA"):
        describe_checkpoint(path, device="cpu", attention_backend="triton")
    for backend in (TritonBackend, FlashInferBackend):
        monkeypatch.setattr(backend, "missing_requirement", lambda *_: None)
        monkeypatch.setattr(backend, "min_capability", None)
    # Installed as it may be, nothing chooses it.
    dtype, cuda, spec = torch.bfloat16, torch.device("cuda"), open_checkpoint(path).spec
    assert choose_backend("auto", cuda, dtype, spec).name == "triton"
    only = "flashinfer only if requested: close tokens may change with the batch"
    assert describe_backend("auto", spec, dtype, cuda) == f"triton; {only}"
    assert describe_backend("flashinfer", spec, dtype, cuda) == "flashinfer, as requested"
    with_sinks = open_checkpoint(tiny_checkpoint("gpt_oss")[0]).spec
    assert describe_backend("auto", with_sinks, dtype, cuda) == "triton"
    with pytest.raises(ValueError, match=r"^attention_backend is 'flashinfer'; flashinfer: attention sinks are not"):
        describe_backend("flashinfer", with_sinks, dtype, cuda)


def test_whose_kernels_run_on_a_cpu_is_told(tiny_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = tiny_checkpoint("llama")
    for reason, told in ((None, "compiled for this processor"), ("no gcc", "torch's own: no gcc")):
        monkeypatch.setattr(native, "unavailable_reason", lambda reason=reason: reason)
        facts = describe_checkpoint(path, device="cpu")
        assert facts["cpu_kernels"] == told
        assert f"CPU kernels                {told}" in checkpoint_table(facts)
