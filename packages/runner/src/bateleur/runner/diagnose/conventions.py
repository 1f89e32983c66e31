"""How the checkpoint of a draft head could have been meant, besides what it declares."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from bateleur.eagle.heads import Head
from bateleur.eagle.heads.eagle3 import Eagle3Head
from bateleur.runner.spec_decode.mtp_head import MtpHead

H = TypeVar("H", Eagle3Head, MtpHead)


@dataclass(frozen=True, slots=True)
class Convention:
    """One reading of a checkpoint."""

    name: str
    cause: str
    """What is wrong if this one is better: "features", "norm" or "vocabulary"; "" for the reading as declared."""
    boundaries: tuple[int, ...]
    """What the head is fed; one behind the last boundary is the state after the final norm."""
    head: Head


def conventions(head: Head, num_layers: int) -> list[Convention]:
    """How the head could have been meant; first what its checkpoint declares."""
    needs, after_norm = head.spec.needs, num_layers + 1
    declared = (*needs.taps, after_norm) if needs.hidden else needs.taps
    found = [Convention("as declared", "", declared, head)]

    def add(name: str, cause: str, meant: Head = head, boundaries: tuple[int, ...] = declared) -> None:
        if (boundaries, meant) not in [(other.boundaries, other.head) for other in found]:
            found.append(Convention(name, cause, boundaries, meant))

    if needs.hidden:
        add("fed the state before the final norm", "norm", boundaries=(*needs.taps, num_layers))
    elif needs.taps:
        for name, taps in _other_taps(needs.taps, num_layers).items():
            add(name, "features", boundaries=taps)
    if isinstance(head, Eagle3Head):
        normed = not head.spec.norm_before_residual
        other = _respecified(head, norm_before_residual=normed)
        other.first = copy.copy(head.first)
        # The layer took the switch from the specification when it was made.
        vars(other.first)["_norm_before_residual"] = normed
        add(f"first residual from the {'normed' if normed else 'plain'} hidden state", "norm", other)
        recycle = "post_norm" if head.spec.recycle == "pre_norm" else "pre_norm"
        add("norm_output the other way round", "norm", _respecified(head, recycle=recycle))
    if isinstance(head, MtpHead):
        add("recycles what its final norm reads", "norm", _respecified(head, recycle="pre_norm"))
        other_way = copy.copy(head)
        other_way.embedding_first = False
        add("the hidden state before the embedding", "features", other_way)
    if (ids := head.target_ids) is not None:
        offsets = ids - torch.arange(len(ids), device=ids.device)
        # Real tables of frequent tokens have neighbours among the ids, where offsets repeat and ids never do.
        if bool((offsets.diff() > 0).all()) and int(offsets[0]) >= 0:
            raw = copy.copy(head)
            raw.target_ids = offsets
            add("d2t holds ids, not offsets", "vocabulary", raw)
    return found


def _other_taps(taps: tuple[int, ...], num_layers: int) -> dict[str, tuple[int, ...]]:
    usual = (2, num_layers // 2, num_layers - 3)
    found: dict[str, tuple[int, ...]] = {
        "layer ids are outputs of layers: taps + 1": tuple(min(tap + 1, num_layers) for tap in taps),
        "taps - 1": tuple(max(tap - 1, 0) for tap in taps),
        "taps in ascending order": tuple(sorted(taps)),
    }
    if len(taps) == 3 and 2 < usual[1] < usual[2]:
        found["taps of the usual default"] = usual
    return found


def _respecified(head: H, **changes: object) -> H:
    other = copy.copy(head)
    other.spec = replace(head.spec, **changes)  # type: ignore[arg-type]
    return other
