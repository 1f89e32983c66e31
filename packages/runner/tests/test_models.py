"""Logits compared with transformers, which computes the whole prompt in one float32 forward pass."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny import FAMILIES

from bateleur.metadata.backends.paged import TritonBackend
from bateleur.runner.checkpoint.open import load_model, open_checkpoint
from bateleur.runner.models import HybridDecoder

MROPE = {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 1]}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_5_text", {"rope_parameters": MROPE | {"mrope_interleaved": True}}),
    (
        "qwen3_5_text",
        {"rope_parameters": MROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    ("kimi_linear", {"v_head_dim": 24, "linear_num_heads": 1, "linear_head_dim": 20, "n_shared_experts": 2}),
    ("kimi_linear", {"num_attention_heads": 1, "num_key_value_heads": 1, "linear_conv_kernel_dim": 2}),
    ("kimi_linear", {"num_local_experts": 8, "n_group": 4, "topk_group": 2, "norm_topk_prob": False}),
    ("olmo_hybrid", {"linear_allow_neg_eigval": False, "linear_num_key_heads": 1, "attention_bias": True}),
    ("olmo_hybrid", {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}, "num_key_value_heads": 3}),
    ("qwen3_next", {"norm_topk_prob": False, "linear_num_key_heads": 2, "mlp_only_layers": [1]}),
    ("qwen3_next", {"decoder_sparse_step": 1, "linear_num_key_heads": 6, "linear_value_head_dim": 12}),
    ("qwen3_5_moe_text", {"num_experts_per_tok": 1, "linear_num_key_heads": 1, "tie_word_embeddings": True}),
    ("qwen3_5_text", {"attention_bias": True, "linear_num_key_heads": 2, "linear_conv_kernel_dim": 3}),
    ("qwen3_5_text", {"tie_word_embeddings": True, "linear_num_key_heads": 6, "num_key_value_heads": 3}),
    ("qwen3_5_text", {"linear_num_key_heads": 1, "linear_num_value_heads": 5, "linear_conv_kernel_dim": 2}),
    ("qwen3_5_text", {"layer_types": ["linear_attention"] * 4, "linear_key_head_dim": 20, "linear_value_head_dim": 8}),
    ("qwen3_5_text", {"layer_types": ["full_attention"] * 4, "head_dim": 16}),
    ("nemotron_h", {"use_bias": True, "mlp_bias": True, "n_groups": 1, "head_dim": 24, "mlp_hidden_act": "silu"}),
    ("nemotron_h", {"use_conv_bias": False, "n_groups": 2, "mamba_num_heads": 10, "mamba_head_dim": 8}),
    ("nemotron_h", {"time_step_min": 0.6, "time_step_limit": (0.1, 0.2), "conv_kernel": 3, "sliding_window": 3}),
    ("nemotron_h", {"layers_block_type": ["linear_attention", "mlp"] * 3, "tie_word_embeddings": True}),
    ("nemotron_h", {"layers_block_type": ["full_attention", "mlp"] * 3, "num_key_value_heads": 6}),
    ("bamba", {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False}),
    ("bamba", {"time_step_limit": (0.3, 0.9), "tie_word_embeddings": True, "mamba_n_groups": 3}),
    ("bamba", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}}),
    ("granitemoehybrid", {"position_embedding_type": "rope", "num_key_value_heads": 1}),
    ("granitemoehybrid", {"time_step_limit": (0.2, 1.1), "attention_bias": True, "mamba_proj_bias": True}),
    ("granitemoehybrid", {"tie_word_embeddings": True, "mamba_n_groups": 3, "mamba_conv_bias": False}),
    (
        "falcon_h1",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "mamba_n_groups": 1,
        },
    ),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_d_conv": 2}),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_conv_bias": False, "tie_word_embeddings": True}),
    (
        "falcon_h1",
        {
            "time_step_limit": (0.2, 1.1),
            "mamba_d_ssm": 80,
            "mamba_n_heads": 10,
            "mamba_d_head": 8,
            "mamba_n_groups": 5,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
        },
    ),
    ("nemotron_h-experts", {"moe_latent_size": 20, "mlp_bias": True, "n_group": 1, "topk_group": 1}),
    ("nemotron_h-experts", {"norm_topk_prob": False, "num_experts_per_tok": 8, "mlp_hidden_act": "silu"}),
    ("granitemoehybrid-experts", {"num_experts_per_tok": 7, "tie_word_embeddings": True}),
    ("granitemoehybrid-experts", {"num_local_experts": 1, "num_experts_per_tok": 1}),
    ("lfm2", {"conv_bias": True, "conv_L_cache": 4, "num_key_value_heads": 1, "block_ffn_dim_multiplier": 1.3}),
    ("lfm2", {"conv_L_cache": 2, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True}),
    ("lfm2", {"layer_types": ["conv"] * 5, "block_multiple_of": 256}),
    ("lfm2_moe", {"conv_bias": True, "use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 6}),
    ("qwen3", {"use_sliding_window": False, "layer_types": None}),
    ("qwen2", {"layer_types": None, "max_window_layers": 3, "sliding_window": 4}),
    ("mistral", {"sliding_window": None}),
    ("qwen3_moe", {"norm_topk_prob": False, "attention_bias": True, "use_sliding_window": True, "sliding_window": 6}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": None, "num_experts_per_tok": 1}),
    ("smollm3", {"no_rope_layers": None, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("olmo3", {"attention_bias": True, "layer_types": None, "rope_parameters": None, "num_key_value_heads": 6}),
    ("gemma3_text", {"rope_parameters": None, "layer_types": None, "tie_word_embeddings": True}),
    ("gemma3_text", {"attention_bias": True, "num_key_value_heads": 6, "query_pre_attn_scalar": 168}),
    ("mamba2", {"use_bias": True, "use_conv_bias": False, "n_groups": 1, "tie_word_embeddings": True}),
    ("mamba2", {"time_step_limit": (0.3, 0.9), "residual_in_fp32": False, "n_groups": 3, "conv_kernel": 2}),
    ("gpt_oss", {"attention_bias": False, "tie_word_embeddings": True, "layer_types": None}),
    ("gpt_oss", {"num_experts_per_tok": 1, "num_key_value_heads": 6, "sliding_window": 3}),
    ("phi3", {"sliding_window": None, "tie_word_embeddings": True, "rope_parameters": None}),
    (
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.5, 2.0],
                "long_factor": [2.0, 2.5, 3.0],
            },
        },
    ),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 16}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
]


def prompt(model: Any, length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, model.config.vocab_size, (length,), generator=generator).tolist()
    return ids


def expected(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0].float()
    return logits


def assert_close(actual: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert actual.shape == wanted.shape
    assert actual.dtype == torch.float32
    error = (actual - wanted).abs().max() / wanted.abs().max()
    assert error < tolerance, f"relative to the largest logit: {error:.2e}"


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest, tiny_checkpoint: Any) -> tuple[HybridDecoder, Any]:
    """Our model and theirs, from one folder."""
    path, model = tiny_checkpoint(request.param)
    return load_model(open_checkpoint(path), torch.float32, "cpu"), model


def test_the_oracle_has_something_to_say(pair: tuple[HybridDecoder, Any]) -> None:
    logits = expected(pair[1], prompt(pair[1], 20))
    assert logits.abs().max() > 0.5
    assert logits.argmax(-1).unique().numel() > 5


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 23, 40])
def test_whole_prompt(pair: tuple[HybridDecoder, Any], driver: Any, length: int) -> None:
    ours, theirs = pair
    tokens = prompt(theirs, length)
    assert_close(driver.Driver(ours).run(tokens, [length]), expected(theirs, tokens))


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_variants_whole_and_chunked(tiny_checkpoint: Any, driver: Any, family: str, overrides: dict[str, Any]) -> None:
    path, theirs = tiny_checkpoint(family, **overrides)
    ours = load_model(open_checkpoint(path), torch.float32, "cpu")
    tokens = prompt(theirs, 29)
    wanted = expected(theirs, tokens)
    assert_close(driver.Driver(ours).run(tokens, [29]), wanted)
    assert_close(driver.Driver(ours).run(tokens, [11, 2, 1, 7, 1, 1, 6]), wanted)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8, 13, 22])
def test_every_chunk_size(pair: tuple[HybridDecoder, Any], driver: Any, size: int) -> None:
    ours, theirs = pair
    tokens = prompt(theirs, 23)
    chunks = [size] * (23 // size) + [23 % size] * bool(23 % size)
    assert_close(driver.Driver(ours).run(tokens, chunks), expected(theirs, tokens))


def test_a_backend_that_rotates_by_itself(pair: tuple[HybridDecoder, Any], driver: Any) -> None:
    """CUDA's default takes queries and keys before rotation; on a CPU its operators run as torch forms."""
    ours, theirs = pair
    tokens = prompt(theirs, 23)
    run = driver.Driver(ours)
    run.backend = TritonBackend()
    run.builder = run.backend.builder()
    assert_close(run.run(tokens, [11, 1, 1, 10]), expected(theirs, tokens))


def test_every_split_of_a_short_prompt(pair: tuple[HybridDecoder, Any], driver: Any) -> None:
    ours, theirs = pair
    tokens = prompt(theirs, 6)
    wanted = expected(theirs, tokens)
    run = driver.Driver(ours)
    for cuts in range(1 << 5):
        chunks, length = [], 1
        for at in range(5):
            if cuts >> at & 1:
                chunks.append(length)
                length = 0
            length += 1
        assert_close(run.run(tokens, [*chunks, length]), wanted)


def test_ragged_batch_of_decodes_and_prefills(pair: tuple[HybridDecoder, Any], driver: Any) -> None:
    ours, theirs = pair
    prompts = [prompt(theirs, length, seed=length) for length in (17, 3, 30, 11)]
    run = driver.Driver(ours)
    a, b, c, d = prompts
    # The large batch comes before the small ones, so that anything left over from it would show.
    run.step([(0, a[:9]), (1, b[:1]), (2, c[:20])])
    run.step([(1, b[1:2]), (0, a[9:12]), (2, c[20:27]), (3, d[:2])])
    run.step([(2, c[27:28]), (0, a[12:13]), (3, d[2:9])], pad_reqs=2, pad_tokens=5)
    run.step([(0, a[13:14]), (3, d[9:10]), (2, c[28:29])])
    run.step([(3, d[10:11]), (2, c[29:30]), (0, a[14:15]), (1, b[2:3])], pad_reqs=3, pad_tokens=3)
    run.step([(0, a[15:17])])
    for row, tokens in enumerate(prompts):
        assert_close(run.take(row), expected(theirs, tokens))


@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear", "olmo_hybrid"])
def test_prompts_longer_than_a_chunk(tiny_checkpoint: Any, driver: Any, family: str) -> None:
    """A chunk of a delta-rule scan has 64 tokens."""
    path, theirs = tiny_checkpoint(family)
    ours = load_model(open_checkpoint(path), torch.float32, "cpu")
    tokens = prompt(theirs, 150)
    wanted = expected(theirs, tokens)
    for chunks in ([150], [70, 1, 79], [64, 86]):
        assert_close(driver.Driver(ours, max_model_len=150).run(tokens, chunks), wanted)


def test_a_slot_taken_over_starts_from_nothing(pair: tuple[HybridDecoder, Any], driver: Any) -> None:
    ours, theirs = pair
    run = driver.Driver(ours)
    run.run(prompt(theirs, 31, seed=1), [20, 11])
    tokens = prompt(theirs, 2, seed=2)
    assert_close(run.run(tokens, [1, 1]), expected(theirs, tokens))


@pytest.mark.parametrize(
    ("family", "overrides"), [*((family, {}) for family in FAMILIES), ("nemotron_h", {"residual_in_fp32": True})]
)
def test_bfloat16_is_as_near_as_transformers(
    tiny_checkpoint: Any, driver: Any, family: str, overrides: dict[str, Any]
) -> None:
    path, theirs = tiny_checkpoint(family, **overrides)
    ours = load_model(open_checkpoint(path), torch.bfloat16, "cpu")
    assert ours.spec.residual_in_fp32 == (bool(overrides) or family == "mamba2")
    exact = {n: w.dtype for n, w in ours.weights().items() if n.rpartition(".")[2] in ("A", "D", "dt_bias")}
    assert set(exact.values()) <= {torch.float32}
    rounded, run = copy.deepcopy(theirs).to(torch.bfloat16), driver.Driver(ours)
    our_errors, their_errors = [], []
    for seed in range(24 if "moe" in family else 6):
        tokens = prompt(theirs, 23, seed)
        wanted = expected(theirs, tokens)
        our_errors.append((run.run(tokens, [9, 1, 1, 12]) - wanted).norm(dim=-1))
        their_errors.append((expected(rounded, tokens) - wanted).norm(dim=-1))
    # Of the tokens in the middle: a few go to other experts once anything is rounded, and then differ by far.
    assert 0.0 < torch.cat(our_errors).median() < 1.15 * torch.cat(their_errors).median()


def test_only_gemma_rounds_its_multiplier_to_the_dtype(tiny_checkpoint: Any) -> None:
    """As transformers does: sqrt(48) = 6.928 is 6.9375 in bfloat16."""
    for family, wanted in (("gemma3_text", 6.9375), ("granite", 3.3)):
        path, _ = tiny_checkpoint(family, **({"embedding_multiplier": 3.3} if family == "granite" else {}))
        model = load_model(open_checkpoint(path), torch.bfloat16, "cpu")
        assert model._multiplier == wanted


def test_rotary_table_grows_and_keeps_its_rows(tiny_checkpoint: Any) -> None:
    path, _ = tiny_checkpoint("llama")
    model = load_model(open_checkpoint(path), torch.float32, "cpu")
    (table,) = model._tables.values()
    table.reserve(10)
    positions = torch.tensor([0, 3, 9])
    before = [part.clone() for part in table.at(positions)]
    model.reserve_positions(5000)
    after = table.at(torch.tensor([0, 3, 9, 4999]))
    assert all(torch.equal(x, y[:3]) for x, y in zip(before, after, strict=True))
    address = table.at(positions)[0].untyped_storage().nbytes()
    model.reserve_positions(4000)
    assert table.at(positions)[0].untyped_storage().nbytes() == address


def test_meta_device_costs_nothing(tiny_checkpoint: Any) -> None:
    path, theirs = tiny_checkpoint("nemotron_h")
    spec = open_checkpoint(path).spec
    model = HybridDecoder(spec, dtype=torch.bfloat16, device="meta")
    assert all(weight.is_meta for weight in model.weights().values())
    assert sum(w.numel() for w in model.weights().values()) == sum(p.numel() for p in theirs.parameters())
