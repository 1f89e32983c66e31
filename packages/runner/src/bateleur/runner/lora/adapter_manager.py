"""Loads and unloads LoRA adapters, and counts the requests that use each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from bateleur.runner.checkpoint.names import Names
from bateleur.runner.checkpoint.open import Checkpoint
from bateleur.runner.config.engine_config import LoRAConfig
from bateleur.runner.distributed.agreement import run_on_all_ranks
from bateleur.runner.distributed.ranks import ALONE, Ranks
from bateleur.runner.errors import AdaptersBusy
from bateleur.runner.lora.adapter_file import CONFIG, WEIGHTS, Prefixes, read_adapter
from bateleur.runner.lora.adapter_pool import AdapterPool
from bateleur.runner.models import HybridDecoder
from bateleur.runner.utils.arguments import folder, shown, text

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The LoRA adapter of a request, as in vLLM.

    Attributes:
        lora_name: name of the adapter; one name means one adapter until it is unloaded.
        lora_int_id: accepted as in vLLM, but not used: adapters are identified by name.
        lora_path: folder that PEFT wrote. It is read when the first request uses the adapter.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""

    def __post_init__(self) -> None:
        """Check the types. Raises ValueError."""
        text("lora_name", self.lora_name)
        if self.lora_path != "":
            text("lora_path", folder("lora_path", self.lora_path))


@dataclass(slots=True)
class _Loaded:
    slot: int
    folder: Path
    digest: bytes
    """Digest of both files. Prefix keys start from it, so adapters never share prefixes."""
    num_requests: int = 0
    last_use: int = 0


class AdapterManager:
    """Loads LoRA adapters into adapter slots. If all slots are taken, the least recently used idle one is replaced."""

    def __init__(
        self,
        pool: AdapterPool,
        names: Names,
        shapes: Mapping[str, tuple[int, ...]],
        other_prefixes: Prefixes,
        ranks: Ranks = ALONE,
    ) -> None:
        """names, shapes, other_prefixes: see `read_adapter`. ranks: ranks that load every adapter together."""
        self.pool, self._ranks = pool, ranks
        self._names, self._shapes, self._prefixes = names, shapes, other_prefixes
        self._loaded: dict[str, _Loaded] = {}
        self._num_uses = 0

    @classmethod
    def of(
        cls, config: LoRAConfig, checkpoint: Checkpoint, model: HybridDecoder, max_num_tokens: int
    ) -> AdapterManager | None:
        """Return a manager for this rank's part of a model; None without `enable_lora`."""
        if not config.enable_lora:
            return None
        names = checkpoint.names
        pool = AdapterPool(model, names, config.max_loras, config.max_lora_rank, max_num_tokens)
        whole = HybridDecoder(checkpoint.spec, dtype=model.dtype, device="meta").weights()
        shapes = {name: tuple(weight.shape) for name, weight in whole.items()}
        return cls(pool, names, shapes, checkpoint.other_prefixes, model.ranks)

    @property
    def loaded(self) -> dict[str, Path]:
        """Folders of the LoRA adapters on the device, by name."""
        return {name: each.folder for name, each in self._loaded.items()}

    def load(self, adapter: LoRARequest) -> None:
        """Read a LoRA adapter into an adapter slot, unless it is loaded already.

        Raises:
            ValueError: the folder is no adapter that fits (see `read_adapter`), the name is taken by another folder,
                or unfinished requests use all slots.
        """
        source = Path(adapter.lora_path)
        known = self._loaded.get(adapter.lora_name)
        if known is not None and (known.folder == source or not adapter.lora_path):
            return
        if known is not None:
            raise ValueError(f"lora_name={shown(adapter.lora_name)}: is loaded from {known.folder}; unload it first")
        if not adapter.lora_path:
            raise ValueError(f"lora_name={shown(adapter.lora_name)}: is not loaded; give its folder as lora_path")
        try:
            matrices = read_adapter(source, self._names, self._shapes, self._prefixes, self.pool.max_rank)
            digest = _digest(source)
        except OSError as error:
            raise ValueError(f"lora_path={source}: {error}") from error
        slot = self._free_slot()
        self.pool.fill(slot, matrices)
        self._loaded[adapter.lora_name] = _Loaded(slot, source, digest)

    def unload(self, name: str) -> None:
        """Unload an adapter and free its slot. Raises ValueError if it is not loaded, or unfinished requests use it."""
        known = self._loaded.get(name)
        if known is None:
            raise ValueError(f"lora_name={shown(name)}: is not loaded; loaded are {', '.join(self._loaded) or 'none'}")
        if known.num_requests:
            raise ValueError(
                f"lora_name={shown(name)}: {known.num_requests} unfinished requests use it; abort them first"
            )
        del self._loaded[name]

    def acquire(self, adapter: LoRARequest) -> tuple[int, bytes]:
        """Load the adapter if necessary, and count one more request that uses it.

        Return its adapter slot and its digest.
        """
        self.load(adapter)
        known = self._loaded[adapter.lora_name]
        self._num_uses += 1
        known.num_requests, known.last_use = known.num_requests + 1, self._num_uses
        return known.slot, known.digest

    def release(self, name: str) -> None:
        """Count one request less that uses the adapter, because it has ended."""
        self._loaded[name].num_requests -= 1

    def acquire_all(self, adapters: Sequence[LoRARequest]) -> list[tuple[int, bytes]]:
        """Call `acquire` for these adapters on every rank, all or none. Raises on all ranks the ValueError of one."""
        before = {name: each.num_requests for name, each in self._loaded.items()}
        try:
            return run_on_all_ranks(self._ranks, lambda: [self.acquire(each) for each in adapters])
        except ValueError:
            for name, each in self._loaded.items():
                each.num_requests = before.get(name, 0)
            raise

    def load_everywhere(self, adapter: LoRARequest) -> None:
        """Load an adapter on every rank, see `load`. Raises on all ranks the ValueError of one."""
        run_on_all_ranks(self._ranks, lambda: self.load(adapter))

    def unload_everywhere(self, name: str) -> None:
        """Unload an adapter on every rank, see `unload`. Raises on all ranks the ValueError of one."""
        run_on_all_ranks(self._ranks, lambda: self.unload(name))

    def recount(self, names: Iterable[str]) -> None:
        """Set the number of requests that use each adapter, after an interruption. names: adapter of each request."""
        counts = Counter(names)
        for name, each in self._loaded.items():
            each.num_requests = counts[name]

    def _free_slot(self) -> int:
        taken = {each.slot for each in self._loaded.values()}
        free = [slot for slot in range(1, self.pool.num_slots + 1) if slot not in taken]
        if free:
            return free[0]
        idle = {name: each.last_use for name, each in self._loaded.items() if not each.num_requests}
        if not idle:
            raise AdaptersBusy(
                f"max_loras={self.pool.num_slots}: unfinished requests use all slots; raise max_loras, or wait"
            )
        return self._loaded.pop(min(idle, key=idle.__getitem__)).slot


def _digest(folder: Path) -> bytes:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for name in (CONFIG, WEIGHTS):
        digest.update((folder / name).read_bytes())
    return digest.digest()
