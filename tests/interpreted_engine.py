"""The engine with the Triton kernels of all packages instead of the torch implementations generates the same tokens.

`test_interpreted.py` runs this file in a process with Triton's interpreter, on a CPU. It shows that the engine's
arguments (strides, dtypes, addresses, padded rows, order of steps) are what the kernels expect. It does not test
compilation, streams or graphs. bfloat16 is not tested: the interpreter multiplies such matrices as integers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.library import Library

from bateleur.eagle import geometry
from bateleur.eagle.native.chain import NativeChain
from bateleur.mamba.ops import FORMS
from bateleur.mamba.planners import FORMS as MAMBA_PLANNERS
from bateleur.metadata.backends.paged import TritonBackend
from bateleur.metadata.dispatch import Implementations, load
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.models.operators import FORMS as LAYERS
from eagle_doubles.drafters import ScriptedDrafter

VOCAB = 160
PLANNERS = ("step", "copy", "replay", "fold")
ATTENTION = {
    "rotate_and_write_kv": "rotate_and_write_kv",
    "attention_work": "attention_work",
    "triton_paged_attention": "paged_attention",
}

PREFIXES = {"enable_prefix_caching": True, "mamba_block_size": 8}
PROMPTS = [[(7 * i + 13 * j) % 150 + 3 for j in range(n)] for i, n in enumerate((5, 17, 1))]
PARAMS = [SamplingParams(temperature=t, seed=3 + i, max_tokens=7, ignore_eos=True) for i, t in enumerate((0, 0.8, 0.8))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid with small sizes, most of them not powers of two."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    torch.manual_seed(0)
    config = NemotronHConfig(
        vocab_size=VOCAB,
        hidden_size=40,
        layers_block_type=["linear_attention", "full_attention", "mlp", "linear_attention"],
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=56,
        mamba_num_heads=4,
        mamba_head_dim=12,
        ssm_state_size=16,
        n_groups=2,
        conv_kernel=4,
        chunk_size=8,
        max_position_embeddings=256,
    )
    model = NemotronHForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.uniform_(-2, 0.5)  # slowly decaying states
            elif name.endswith("conv1d.weight"):
                weight.normal_(0, 0.5)
            elif weight.dim() == 2:
                weight.normal_(0, 1.3 * weight.shape[1] ** -0.5)
    folder = tmp_path_factory.mktemp("hybrid")
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def make(checkpoint: Path) -> Callable[..., LLM]:
    def build(**settings: Any) -> LLM:
        common: dict[str, Any] = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True}
        common |= {"max_model_len": 48, "max_num_seqs": 3, "max_num_batched_tokens": 18, "block_size": 8}
        return LLM(settings.pop("model", checkpoint), **(common | settings))

    return build


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Counter[str]]]:
    """Call it to use the kernels until the test ends. Returns the number of calls of each kernel by name."""
    library = Library("bateleur", "IMPL")
    calls: Counter[str] = Counter()

    def counted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return kernel(*args, **options)

        return call

    def put() -> Counter[str]:
        attention = import_module("bateleur.metadata.kernels.cuda_ops")
        operators = {name: load(forms.triton or "") for name, forms in (FORMS | LAYERS).items()}
        operators |= {name: getattr(attention, form) for name, form in ATTENTION.items()}
        for name, kernel in operators.items():
            library.impl(name, counted(name, kernel), "CPU", allow_override=True)
        # A CPU calls these without the dispatcher.
        for name, forms in (FORMS | LAYERS).items():
            monkeypatch.setattr(forms, "torch", counted(name, operators[name]))
            monkeypatch.setattr(forms, "native", None)
        monkeypatch.setattr(TritonBackend, "unsupported_reason", lambda *_, **__: None)

        for name in PLANNERS:
            form = load(MAMBA_PLANNERS[f"plan_{name}"].triton or "")
            monkeypatch.setitem(MAMBA_PLANNERS, f"plan_{name}", Implementations(counted(f"plan_{name}", form)))

        monkeypatch.setattr(NativeChain, "fits", lambda *_: False)
        for name, forms in geometry.FORMS.items():
            monkeypatch.setitem(geometry.FORMS, name, Implementations(counted(name, load(forms.triton or ""))))
        verify = import_module("bateleur.eagle.rejection_sampler")
        coupled = Implementations(counted("verify", load(verify.COUPLED.triton)))
        monkeypatch.setattr(verify, "COUPLED", coupled)
        return calls

    yield put
    library._destroy()


def talk(llm: LLM) -> list[list[int]]:
    """The texts of two turns. The second one continues the first, from pages that decoding published."""
    vocab_size, texts = llm.engine.model.spec.vocab_size, list[list[int]]()
    for turn in range(2):
        prompts = [[*text, 9] for text in texts] if turn else PROMPTS
        prompts = [[token % vocab_size for token in prompt] for prompt in prompts]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS)
        texts = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
    return texts


def scripted(texts: list[list[int]], right: int, vocab_size: int = VOCAB) -> ScriptedDrafter:
    """Drafts of 3 tokens, the first `right` of which are those of the texts."""

    def script(tokens: Sequence[int]) -> list[int]:
        return next((text[len(tokens) :] for text in texts if text[: len(tokens)] == list(tokens)), [])

    return ScriptedDrafter(script, 3, right, vocab_size)


@pytest.mark.filterwarnings("ignore:kv_cache_dtype is fp8, and the checkpoint has no k_scale:RuntimeWarning")
@pytest.mark.parametrize(
    ("policy", "drafts", "kv_cache_dtype"),
    [
        ("slots", "none", "auto"),
        ("slots", "scripted", "auto"),
        ("fold", "scripted", "auto"),
        ("fold", "head", "auto"),
        ("fold", "head", "fp8"),
    ],
)
def test_the_tokens_are_those_of_the_torch_forms(
    make: Callable[..., LLM],
    make_head: Callable[..., Path],
    by_triton: Callable[[], Counter[str]],
    policy: str,
    drafts: str,
    kv_cache_dtype: str,
) -> None:
    """A row near its end has no drafts, so FOLD's kernels run without drafts, too."""
    cache = {"kv_cache_dtype": kv_cache_dtype}
    expected = talk(make(**cache))
    settings: dict[str, Any] = {"mamba_state_policy": policy, **PREFIXES, **cache}
    if drafts == "scripted":
        settings |= {"num_speculative_tokens": 3, "drafter": scripted(expected, 2)}
    elif drafts == "head":
        settings["draft"] = make_head(hidden_size=40, vocab_size=VOCAB, head_dim=16, taps=(1, 2, 3))
        settings["num_speculative_tokens"] = 2
    calls = by_triton()
    llm = make(attention_backend="triton", **settings)
    assert talk(llm) == expected
    assert llm.get_metrics().num_cached_tokens >= 8 + 16
    assert set(calls) == kernels_of(policy, drafts)


EXPERTS = ("route_tokens", "sort_places", "combine", "activation")
OTHERS = {
    "short_conv": ("lfm2", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}),
    "gated_delta": (
        "qwen3_5_moe_text",
        {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "kimi_delta": (
        "kimi_linear",
        {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
         "mlp_layer_types": ["dense", "dense"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "policy", "own"),
    [
        ("gated_delta", "fold", {"delta_scan_varlen", "delta_replay_update", "delta_fold_ring", *EXPERTS, "gate"}),
        ("kimi_delta", "slots", {"delta_scan_varlen", "delta_state_update", "join_heads"}),
        ("short_conv", "fold", {"fold_window"}),
        ("short_conv", "slots", {"copy_states"}),
    ],
)
def test_other_recurrences_say_the_tokens_of_their_torch_forms(
    make: Callable[..., LLM],
    tiny: Callable[..., Path],
    by_triton: Callable[[], Counter[str]],
    name: str,
    policy: str,
    own: set[str],
) -> None:
    """Two of three drafts are right, with shared prefixes."""
    family, config = OTHERS[name]
    folder = tiny(family, **config)
    plain = make(model=folder)
    texts = talk(plain)
    drafter = scripted(texts, 2, plain.engine.model.spec.vocab_size)
    calls = by_triton()
    llm = make(
        model=folder, attention_backend="triton", mamba_state_policy=policy, num_speculative_tokens=3,
        drafter=drafter, **PREFIXES,
    )  # fmt: skip
    assert talk(llm) == texts
    assert own <= set(calls)
    others = FORMS.keys() - own - {"causal_conv1d_varlen", "causal_conv1d_update", "copy_states", "gated_rms_norm"}
    assert not others & set(calls)
    assert llm.get_metrics().num_cached_tokens >= 8 + 16


def test_a_nan_in_a_state_ends_its_request_alone(
    make: Callable[..., LLM], by_triton: Callable[[], Counter[str]]
) -> None:
    """NaNs with the bits of CUDA's own, in half precision: TF32 products round their inputs."""
    calls = by_triton()
    llm = make(attention_backend="triton", dtype="float16", mamba_state_policy="fold")
    expected = [
        o.outputs[0].token_ids for o in llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS)
    ]
    names = [llm.add_request({"prompt_token_ids": prompt}, p) for prompt, p in zip(PROMPTS, PARAMS, strict=True)]
    while not llm.engine.scheduler.batch:  # until all prompts are computed
        llm.step()
    states = llm.engine.runner.model_state
    slots = torch.from_numpy(states.state_table)  # row r of the request table belongs to request r
    for _, ssm in states.caches.states:
        ssm.view(torch.int32)[slots[1].long()] = 0x7FFFFFFF
    found = {}
    while llm.has_unfinished_requests:
        found |= {output.request_id: output.outputs[0] for output in llm.step()}
    assert calls["replay_update"]
    assert found[names[1]].finish_reason == "error"
    assert [found[names[i]].token_ids for i in (0, 2)] == [expected[i] for i in (0, 2)]


def kernels_of(policy: str, drafts: str) -> set[str]:
    """The kernels that an engine of this kind calls at least once."""
    expected = {
        "causal_conv1d_varlen",
        "causal_conv1d_update",
        "ssd_scan_varlen",
        "gated_rms_norm",
        "rms_norm",
        "add_rms_norm",
        "activation",
        *ATTENTION,
    }
    expected |= {"plan_step"} if policy == "slots" else {"plan_replay", "plan_fold", "replay_update", "fold_ring"}
    if policy == "slots":
        expected.add("selective_state_update")
    if drafts != "none":
        expected.add("verify")
        expected |= {"plan_copy", "copy_states"} if policy == "slots" else set()
    return expected | set(geometry.FORMS) if drafts == "head" else expected
