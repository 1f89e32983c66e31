"""Files of a head that lie: refused by name, with the value and the rule, before anything is drafted."""

import json
import re
import struct
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bateleur.eagle.heads import load_head

KINDS = "it must be a list of 'full_attention', 'sliding_attention'"
NUMBER = "it must be a finite number above 0, in float32"
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"layer_types": 5}, f"layer_types is 5; {KINDS}"),
    ({"layer_types": True}, f"layer_types is True; {KINDS}"),
    ({"layer_types": "full_attention"}, f"layer_types is 'full_attention'; {KINDS}"),
    ({"layer_types": [[]]}, f"layer_types is [[]]; {KINDS}"),
    ({"layer_types": {"0": "full_attention"}}, f"layer_types is {{'0': 'full_attention'}}; {KINDS}"),
    ({"layer_types": ["linear_attention"]}, f"layer_types is ['linear_attention']; {KINDS}"),
    ({"rms_norm_eps": 1e300}, f"rms_norm_eps is 1e+300; {NUMBER}"),
    ({"rms_norm_eps": 1e-320}, f"rms_norm_eps is 1e-320; {NUMBER}"),
    ({"rope_theta": 1e-320}, f"rope_theta is 1e-320; {NUMBER}"),
    ({"partial_rotary_factor": 1.7e308}, f"partial_rotary_factor is 1.7e+308; {NUMBER}"),
    (
        {"rope_scaling": {"rope_type": "linear", "factor": 1e-30}, "rope_theta": 1e-30},
        "rope_theta is 1e-30; scaled, lanes turn by ",
    ),
]


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
@pytest.mark.parametrize(("fields", "message"), FIELDS, ids=[message for _, message in FIELDS])
def test_fields_that_lie(checkpoints: Any, kind: str, fields: dict[str, Any], message: str) -> None:
    """These were errors of other kinds, or turned lanes by infinity."""
    config, w = getattr(checkpoints, kind)()
    with pytest.raises(ValueError, match=re.escape(message)):
        checkpoints.load({**config, **fields}, w)


STORED = [torch.int8, torch.int64, torch.bool, torch.uint16, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_weights_that_are_no_plain_floats(checkpoints: Any, kind: str, dtype: torch.dtype) -> None:
    """Quantised weights without their scales were converted as if they were the weights."""
    config, w = getattr(checkpoints, kind)()
    for name in w.keys() - {"d2t", "t2d"}:
        with pytest.raises(ValueError, match=rf"unexpected dtypes: {name} is {dtype} and must be one of"):
            checkpoints.load(config, {**w, name: w[name].to(dtype)})


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.float16, torch.uint64], ids=str)
def test_a_vocabulary_map_of_no_whole_numbers(checkpoints: Any, dtype: torch.dtype) -> None:
    config, w = checkpoints.eagle3()
    with pytest.raises(ValueError, match=f"d2t is {dtype}; it must hold whole numbers"):
        checkpoints.load(config, {**w, "d2t": w["d2t"].to(dtype)})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32], ids=str)
def test_a_vocabulary_map_of_narrow_numbers(checkpoints: Any, dtype: torch.dtype) -> None:
    config, w = checkpoints.eagle3()
    plain, _ = checkpoints.load(config, w)
    head, _ = checkpoints.load(config, {**w, "d2t": w["d2t"].to(dtype)})
    assert head.target_ids.tolist() == plain.target_ids.tolist()


@pytest.mark.parametrize("first", [-1, 40, 2**40, 2**63 - 1, -(2**63)])
def test_a_vocabulary_map_out_of_range(checkpoints: Any, first: int) -> None:
    config, w = checkpoints.eagle3()
    w["d2t"][-1] = first - (checkpoints.Vd - 1) if abs(first) < 2**50 else first
    with pytest.raises(ValueError, match=r"draft id i stands for i \+ d2t\[i\], which must be different ids"):
        checkpoints.load(config, w)


@pytest.mark.parametrize("length", [41, 39, 0])
def test_a_mask_of_another_length(checkpoints: Any, length: int) -> None:
    config, w = checkpoints.eagle3()
    w["t2d"] = torch.cat((w["t2d"], torch.zeros(1, dtype=torch.bool)))[:length]
    with pytest.raises(ValueError, match=rf"and t2d \({length},\) marks others of 40"):
        checkpoints.load(config, w)


def test_a_weight_in_two_shards(checkpoints: Any) -> None:
    """The last one won."""
    folder = checkpoints.write(*checkpoints.eagle3(), form="safetensors-shards")
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    other = sorted(name for name, file in weight_map.items() if file == "one.part")[0]
    save_file({other: torch.zeros(3)}, folder / "third.part")
    index = {"weight_map": {**weight_map, "more": "third.part"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"third\.part: {other} is in another shard, too"):
        load_head(folder, checkpoints.target, dtype=torch.float32, device="cpu")


def test_a_dtype_that_torch_has_not(checkpoints: Any) -> None:
    folder = checkpoints.write(*checkpoints.eagle3())
    header = {"fc.weight": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(3))
    with pytest.raises(ValueError, match=r"model\.safetensors: fc\.weight cannot be read: Dtype not under"):
        load_head(folder, checkpoints.target, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_a_file_cut_anywhere(checkpoints: Any, kind: str) -> None:
    folder = checkpoints.write(*getattr(checkpoints, kind)())
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"model\.safetensors: is no complete safetensors file"):
            load_head(folder, checkpoints.target, dtype=torch.float32, device="cpu")
