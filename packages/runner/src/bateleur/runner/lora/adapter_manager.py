"""LoRA adapters: their matrices on the device, and a manager that loads them and counts the requests of each."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.runner.checkpoint.names import Names
from bateleur.runner.checkpoint.open import Checkpoint
from bateleur.runner.config.engine_config import LoRAConfig
from bateleur.runner.distributed.agreement import run_on_all_ranks
from bateleur.runner.distributed.ranks import ALONE, Ranks
from bateleur.runner.errors import AdaptersBusy
from bateleur.runner.lora.adapter_file import CONFIG, WEIGHTS, LowRank, read_adapter
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.lora import LoraWeights
from bateleur.runner.models.sharding import Cut
from bateleur.runner.utils.arguments import folder, shown, text
from bateleur.runner.utils.device import pinned

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The LoRA adapter of a request, as in vLLM, but identified by its name alone."""

    lora_name: str
    """One name means one adapter until it is unloaded."""
    lora_int_id: int = 1
    """Accepted as in vLLM, but not used: adapters are identified by name."""
    lora_path: str = ""
    """Folder that PEFT wrote. It is read when the first request uses the adapter."""

    def __post_init__(self) -> None:
        text("lora_name", self.lora_name)
        if self.lora_path != "":
            text("lora_path", folder("lora_path", self.lora_path))


class AdapterPool:
    """LoRA matrices of up to `num_slots` adapters, in adapter slots 1 to `num_slots`. Slot 0 means no adapter."""

    def __init__(self, model: HybridDecoder, names: Names, num_slots: int, max_rank: int, max_num_tokens: int) -> None:
        """Attach zero matrices to every projection of `model` (this rank's part) that an adapter may change.

        names: see `Checkpoint.names`. num_slots: `max_loras`. max_rank: `max_lora_rank`, the largest low rank of one
        module; q, k and v are three modules of a projection. max_num_tokens: tokens of the largest step, with padding.
        """
        self.num_slots, self.max_rank = num_slots, max_rank
        self._cuts = model.share.cuts
        num_modules, like = Counter(part.target for part in names.values()), model.embedding
        self.weights: dict[str, LoraWeights] = {}
        """By name of the projection."""
        for name, projection in model.adaptable_projections.items():
            lanes = max_rank * num_modules[name]
            a = like.new_zeros(num_slots + 1, lanes, projection.num_columns)
            b = like.new_zeros(num_slots + 1, projection.num_rows, lanes)
            self.weights[name] = projection.lora = LoraWeights(a, b)
        self.token_slots = torch.zeros(max_num_tokens, dtype=torch.int32, device=model.device)
        """(max_num_tokens,) slot of each token of a step."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the LoRA matrices of all slots."""
        return sum(each.a_ARK.nbytes + each.b_ANR.nbytes for each in self.weights.values())

    def stage(self, num_tokens: int, slots: NDArray[np.int32] | None) -> Tensor:
        """Upload the adapter slots of a step's tokens (None: all 0). Return (num_tokens,) int32, with 0 for padding."""
        staged = pinned((num_tokens,), torch.int32, self.token_slots.device).zero_()
        if slots is not None:
            staged.numpy()[: len(slots)] = slots
        return self.token_slots[:num_tokens].copy_(staged, non_blocking=True)

    def poison(self) -> None:
        """Set the slot of all tokens to the highest adapter slot, which is wrong for most of them.

        `stage` must overwrite it before each step. So checks find steps that read slots of an earlier step.
        """
        self.token_slots.fill_(self.num_slots)

    def fill(self, slot: int, matrices: Mapping[str, LowRank]) -> None:
        """Write an adapter to an adapter slot that no running request uses. matrices: from `read_adapter`."""
        for name, weights in self.weights.items():
            weights.a_ARK[slot].zero_()
            weights.b_ANR[slot].zero_()
            if name in matrices:
                cut = self._cuts.get(name, {})
                a, b = (_own(each, axis, cut) for each, axis in zip(matrices[name], (1, 0), strict=True))
                weights.a_ARK[slot, : len(a)].copy_(a)
                weights.b_ANR[slot, :, : len(a)].copy_(b)


def _own(matrix: Tensor, axis: int, cut: Cut) -> Tensor:
    ranges = cut.get(axis)
    return matrix if ranges is None else torch.cat([matrix.narrow(axis, a, b - a) for a, b in ranges], axis)


@dataclass(slots=True)
class _Loaded:
    folder: Path
    digest: bytes
    """Digest of both files. Prefix keys start from it, so adapters never share prefixes."""
    matrices: Mapping[str, LowRank]
    slot: int = 0
    """0 if it has none: requests wait for one."""
    num_requests: int = 0
    """Unfinished requests."""
    num_holders: int = 0
    """Requests among them that do not wait for the slot."""
    last_use: int = 0


class AdapterManager:
    """Loads adapters into the slots of a pool. If all slots are taken, the least recently used idle one is replaced.

    A request gets the slot of its adapter from `assign`, and holds it until it ends.
    """

    def __init__(self, pool: AdapterPool, read: Callable[[Path], Mapping[str, LowRank]], ranks: Ranks = ALONE) -> None:
        """read: reads the adapter in a folder, see `read_adapter`. ranks: ranks that load every adapter together."""
        self.pool, self._read_files, self._ranks = pool, read, ranks
        self._loaded: dict[str, _Loaded] = {}
        self._num_uses = 0

    @classmethod
    def of(cls, config: LoRAConfig, checkpoint: Checkpoint, model: HybridDecoder, max_num_tokens: int) -> Self | None:
        """Return a manager for this rank's part of a model; None without `enable_lora`."""
        if not config.enable_lora:
            return None
        names, most = checkpoint.names, config.max_lora_rank
        whole = HybridDecoder(checkpoint.spec, dtype=model.dtype, device="meta").weights()
        shapes = {name: tuple(weight.shape) for name, weight in whole.items()}
        read = partial(read_adapter, names=names, shapes=shapes, prefixes=checkpoint.other_prefixes, max_rank=most)
        return cls(AdapterPool(model, names, config.max_loras, most, max_num_tokens), read, model.ranks)

    @property
    def loaded(self) -> dict[str, Path]:
        """Folders of the loaded adapters, by adapter name."""
        return {name: each.folder for name, each in self._loaded.items()}

    def load(self, adapter: LoRARequest) -> None:
        """Read a LoRA adapter into an adapter slot on every rank, unless it is loaded already.

        Raises ValueError on all ranks if the folder is no adapter that fits (see `read_adapter`), the name is taken by
        another folder, or unfinished requests use all slots.
        """
        run_on_all_ranks(self._ranks, lambda: self._load(adapter))

    def _load(self, adapter: LoRARequest) -> None:
        if not self._read(adapter).slot and not self._place(adapter.lora_name):
            self._drop_unused()
            raise AdaptersBusy(
                f"max_loras={self.pool.num_slots}: unfinished requests use all slots; raise max_loras, or wait"
            )

    def _read(self, adapter: LoRARequest) -> _Loaded:
        """Return an adapter by its name. Reads its files at the first use, but gives it no slot."""
        source, named = Path(adapter.lora_path), f"lora_name={shown(adapter.lora_name)}"
        known = self._loaded.get(adapter.lora_name)
        if known is None and not adapter.lora_path:
            raise ValueError(f"{named}: is not loaded; give its folder as lora_path")
        if known is None:
            try:
                matrices = self._read_files(source)
                digest = blake2b(digest_size=_DIGEST_BYTES)
                for name in (CONFIG, WEIGHTS):
                    digest.update((source / name).read_bytes())
            except OSError as error:
                raise ValueError(f"lora_path={source}: {error}") from error
            known = self._loaded[adapter.lora_name] = _Loaded(source, digest.digest(), matrices)
        elif adapter.lora_path and known.folder != source:
            raise ValueError(f"{named}: is loaded from {known.folder}; unload it first")
        return known

    def unload(self, name: str) -> None:
        """Free the slot of an adapter on every rank. Raises ValueError if it is not loaded, or in use."""
        run_on_all_ranks(self._ranks, lambda: self._unload(name))

    def _unload(self, name: str) -> None:
        known = self._loaded.get(name)
        if known is None:
            raise ValueError(f"lora_name={shown(name)}: is not loaded; loaded are {', '.join(self._loaded) or 'none'}")
        if known.num_requests:
            raise ValueError(
                f"lora_name={shown(name)}: {known.num_requests} unfinished requests use it; abort them first"
            )
        del self._loaded[name]

    def acquire(self, adapters: Sequence[LoRARequest]) -> list[bytes]:
        """Read adapters on all ranks if needed, count a waiting request for each, and return digests of their files.

        This needs no free slots. If one rank raises ValueError (see `load`), all do, and no request is counted.
        """
        try:
            known = run_on_all_ranks(self._ranks, lambda: [self._read(each) for each in adapters])
        except ValueError:
            self._drop_unused()
            raise
        for each in known:
            each.num_requests += 1
        return [each.digest for each in known]

    def assign(self, waiting: Sequence[str]) -> list[int]:
        """Give slots to waiting requests, first come, first served. Returns the slot of each; 0 if it still waits.

        waiting: adapter name of each request, in service order. If a request gets no slot, the requests after it in
        this order get none either if they use the least recently used adapter that has a slot. So no new requests use
        this adapter, its slot becomes free when its running requests end, and no request waits forever.
        """
        slots, blocked = list[int](), False
        for name in waiting:
            known = self._loaded[name]
            oldest = min((each.last_use for each in self._loaded.values() if each.slot), default=0)
            served = self._place(name) if not known.slot else not blocked or known.last_use > oldest
            if served:
                self._num_uses += 1
                known.num_holders, known.last_use = known.num_holders + 1, self._num_uses
            blocked |= not served
            slots.append(known.slot if served else 0)
        return slots

    def release(self, name: str, *, held: bool) -> None:
        """Count a request of the adapter as ended. held: whether the request had a slot."""
        known = self._loaded[name]
        known.num_requests -= 1
        known.num_holders -= held
        self._drop_unused()

    def recount(self, requests: Iterable[tuple[str, bool]]) -> None:
        """Recount the requests of each adapter after an interrupted step.

        requests: adapter name of each request, and whether it runs, so that its adapter must stay in its slot.
        """
        counts = Counter(requests)
        for name, each in self._loaded.items():
            each.num_holders = counts[name, True]
            each.num_requests = each.num_holders + counts[name, False]
        self._drop_unused()

    def _drop_unused(self) -> None:
        self._loaded = {name: each for name, each in self._loaded.items() if each.slot or each.num_requests}

    def _place(self, name: str) -> bool:
        """Load an adapter into a free slot or an idle adapter's slot. Returns False if there is no such slot."""
        every = self._loaded.values()
        free = set(range(1, self.pool.num_slots + 1)) - {each.slot for each in every}
        if not free:
            idle = [each for each in every if each.slot and not each.num_holders]
            if not idle:
                return False
            victim = min(idle, key=lambda each: each.last_use)
            free, victim.slot = {victim.slot}, 0
        known, slot = self._loaded[name], min(free)
        self.pool.fill(slot, known.matrices)
        known.slot = slot
        self._drop_unused()
        return True
