"""Options are written once: signature, configurations and help texts follow from the fields."""

import inspect
from enum import Enum

import pytest
import torch

from bateleur.cudagraph import CudaGraphMode, ReplayChecks
from bateleur.eagle import Rule
from bateleur.mamba import MambaCacheMode, StatePolicy
from bateleur.runner import LLM
from bateleur.runner.config.engine_config import (
    CacheConfig,
    EngineConfig,
    GraphConfig,
    ModelConfig,
    SpeculativeConfig,
    all_options,
)
from bateleur.runner.utils.device import DTYPES


def test_every_option_has_a_text_and_a_name_of_its_own() -> None:
    names = [option.name for option in all_options()]
    assert len(set(names)) == len(names) > 20
    for option in all_options():
        assert option.help.endswith("."), option.name
        assert "\n" not in option.help


def test_the_signature_of_llm_is_that_of_the_options() -> None:
    shown = inspect.signature(LLM).parameters
    assert [*shown] == [option.name for option in all_options()]
    assert shown["model"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert shown["block_size"].default == CacheConfig().block_size == 16


def test_options_find_their_part() -> None:
    config = EngineConfig.of(model="m", max_num_seqs=3, block_size=4, draft="d", cudagraph_mode="FULL")
    parts = (config.model.model, config.scheduler.max_num_seqs, config.cache.block_size)
    assert parts == ("m", 3, 4)
    assert (config.speculative.num_drafts, config.graphs.cudagraph_mode) == (4, "FULL")


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"max_num_seq is no argument of LLM; did you mean max_num_seqs\?"):
        LLM(max_num_seq=4)


@pytest.mark.parametrize(
    ("kind", "part", "name"),
    [
        (CudaGraphMode, GraphConfig, "cudagraph_mode"),
        (ReplayChecks, GraphConfig, "cudagraph_checks"),
        (MambaCacheMode, CacheConfig, "mamba_cache_mode"),
        (StatePolicy, CacheConfig, "mamba_state_policy"),
        (Rule, SpeculativeConfig, "speculative_rule"),
    ],
)
def test_names_are_those_of_the_enumerations(kind: type[Enum], part: type, name: str) -> None:
    """The configuration repeats the names, so that it does not import torch."""
    for member in kind:
        spelled = member.value if isinstance(member.value, str) else member.name
        assert getattr(part(**{name: member}), name) is member
        assert getattr(part(**{name: spelled}), name) == spelled
    with pytest.raises(ValueError, match=f"{name} is 'most'; it must be one of ") as refused:
        part(**{name: "most"})
    assert len(str(refused.value).split("one of ")[1].split(", ")) == len(kind)


@pytest.mark.parametrize("dtype", ["float8", "int8", torch.int8, torch.float64, "AUTO", ""])
def test_dtypes_are_those_of_the_device(dtype: object) -> None:
    for name, known in DTYPES.items():
        assert ModelConfig(dtype=name).dtype == ModelConfig(dtype=known).dtype == name
    with pytest.raises(ValueError, match=f"dtype is .*; it must be one of auto, {', '.join(DTYPES)}$"):
        ModelConfig(dtype=dtype)  # type: ignore[arg-type]
