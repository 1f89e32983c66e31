"""Alternative interpretations of a draft head's checkpoint, for example with other feature layers or another norm."""

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
    """One interpretation of a draft head's checkpoint."""

    name: str
    cause: str
    """The error of the checkpoint's config if this one is better: "features", "norm", "vocabulary"; "" as declared."""
    boundaries: tuple[int, ...]
    """Layers whose input the head gets. `num_layers` is the last hidden state, `num_layers` + 1 that after the norm."""
    head: Head


def conventions(head: Head, num_layers: int) -> list[Convention]:
    """Return all interpretations of a head. The first is the one that its checkpoint declares."""
    needs, after_norm = head.spec.needs, num_layers + 1
    declared = (*needs.taps, after_norm) if needs.hidden else needs.taps
    found = [Convention("as declared", "", declared, head)]

    def add(name: str, cause: str, variant: Head = head, boundaries: tuple[int, ...] = declared) -> None:
        if (boundaries, variant) not in [(other.boundaries, other.head) for other in found]:
            found.append(Convention(name, cause, boundaries, variant))

    if needs.hidden:
        add("input: hidden state before the final norm", "norm", boundaries=(*needs.taps, num_layers))
    elif needs.taps:
        for name, taps in _other_taps(needs.taps, num_layers).items():
            add(name, "features", boundaries=taps)
    if isinstance(head, Eagle3Head):
        normed = not head.spec.norm_before_residual
        other = _respecified(head, norm_before_residual=normed)
        other.first = copy.copy(head.first)
        # The layer copied the switch from the spec when it was constructed.
        vars(other.first)["_norm_before_residual"] = normed
        add(f"first residual from the {'normed' if normed else 'plain'} hidden state", "norm", other)
        recycle = "post_norm" if head.spec.recycle == "pre_norm" else "pre_norm"
        add("norm_output inverted", "norm", _respecified(head, recycle=recycle))
    if isinstance(head, MtpHead):
        add("next pass gets the hidden state before the final norm", "norm", _respecified(head, recycle="pre_norm"))
        swapped = copy.copy(head)
        swapped.embedding_first = False
        add("hidden state before embedding in the input", "features", swapped)
    if (ids := head.target_ids) is not None:
        offsets = ids - torch.arange(len(ids), device=ids.device)
        # A real d2t has neighbouring token ids, for which offsets repeat. So strictly growing offsets can only be ids.
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
        found["default taps"] = usual
    return found


def _respecified(head: H, **changes: object) -> H:
    other = copy.copy(head)
    other.spec = replace(head.spec, **changes)  # type: ignore[arg-type]
    return other
