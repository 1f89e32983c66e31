"""Does a builder keep the contract? The bugs it is asked about have happened; each class of them has a letter."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bateleur.metadata.attention_metadata_builder import AttentionMetadataBuilder, BuildPhase, check_reads
from bateleur.metadata.common_attention_metadata import BatchShape, field_values
from bateleur.metadata.conformance._random_steps import Key, Step, StepMaker, keys_of
from bateleur.metadata.conformance._spy import NoSync, SpyBatch, device_tensors
from bateleur.metadata.conformance._tree import HOST_VALUE, contents, difference, leaves, mutable_containers
from bateleur.metadata.conformance.errors import ConformanceError, Violation
from bateleur.metadata.input_buffers import InputBuffers
from bateleur.metadata.step_inputs import BatchLimits, KVCacheGroup

Builder = AttentionMetadataBuilder[Any]


@dataclass(frozen=True, slots=True)
class BuilderReport:
    """What :func:`check_builder` looked at.

    Attributes:
        builder: name of its type.
        keys: padded sizes that were captured and replayed.
        num_builds: number of calls of ``build``.
        read: fields that ``build`` itself read; those in ``reads`` alone are its kernels'.
    """

    builder: str
    keys: tuple[str, ...]
    num_builds: int
    read: frozenset[str]


def check_builder(
    builder: Builder,
    limits: BatchLimits,
    *,
    groups: Sequence[KVCacheGroup] | None = None,
    group: int = 0,
    device: torch.device | str = "cpu",
    query_lens: Sequence[int] = (1, 2),
    fresh: Callable[[], Builder] | None = None,
) -> BuilderReport:
    """Hold ``builder`` to everything that stagers, graphs and drafters rely on.

    Args:
        builder: not used before.
        limits: of the batches to try; small and odd ones find the most.
        groups: KV-cache groups of the batches; default one with blocks of 4 tokens.
        group: the one to build for.
        device: where device fields live.
        query_lens: query lengths of the uniform batches its graphs are for: 1, and 1 + drafts.
        fresh: makes an equal builder that has built nothing; default a deep copy.

    Raises:
        ConformanceError: with every violation found; each starts with the letter of its class. A: padding shows
        contents of another batch. C: a captured address is not the one written later. D: a build depends on
        builds before it, or shares what may be filled lazily. E: a host scalar of a capture does not cover a
        batch of its key. G: a field is read that was not declared. L: the batch was written to. M: the host
        waits for the device, or decides something that the signature does not tell.
    """
    if groups is None:
        groups = (KVCacheGroup(4, -(-limits.max_model_len // 4)),)
    if not 0 <= group < len(groups):
        raise ValueError(f"group: {group} is not one of the {len(groups)} groups")
    try:
        check_reads(builder)
    except ValueError as error:
        raise ConformanceError(type(builder).__name__, [Violation("G", str(error))]) from error
    if fresh is None:
        fresh = partial(copy.deepcopy, copy.deepcopy(builder))
    buffers = InputBuffers(limits, groups, device, int(builder.seq_len_fill))
    run = _Run(builder, fresh, buffers, group, keys_of(builder.graph_support, limits, query_lens))
    run.check()
    if run.found:
        raise ConformanceError(type(builder).__name__, list(run.found.values()))
    names = tuple(str(key) for key in run.keys)
    return BuilderReport(type(builder).__name__, names, run.num_builds, frozenset(run.read))


@dataclass
class _Run:
    """One check: the buffers, the steps, and what was found."""

    builder: Builder
    fresh: Callable[[], Builder]
    buffers: InputBuffers
    group: int
    keys: list[Key]
    found: dict[tuple[str, str], Violation] = field(default_factory=dict)
    num_builds: int = 0
    read: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        limits = self.buffers.limits
        self.steps = StepMaker(limits, self.buffers.groups).steps_of(self.keys, per_key=3)
        views_of_all = BatchShape(0, 0, limits.max_num_reqs, limits.max_num_tokens, 1)
        self.whole = self.buffers.dummy(views_of_all)

    def check(self) -> None:
        book = dict(self.builder.addresses())
        self.check_orders([contents(self.build(self.fresh(), step)) for step in self.steps])
        for key in self.keys:
            self.check_key(key)
        self.check_phases()
        if dict(self.builder.addresses()) != book:
            self.note("C", "addresses() changed while it built")

    # -- one build -------------------------------------------------------------------------------------------

    def build(self, builder: Builder, what: Step | Key, phase: BuildPhase = BuildPhase.RUN) -> Any:
        """Stage a step, or a dummy batch that fills a key as a capture does; and build it under watch: fields read, the
        batch unchanged, no wait for the device.
        """
        self.buffers.poison()
        if isinstance(what, Step):
            batch = self.buffers.stage(what.rows, what.shape)
        else:
            filled = BatchShape.of(what.num_reqs, what.num_tokens, what.max_query_len)
            batch = self.buffers.dummy(filled, max_seq_len=self.buffers.limits.max_model_len)
        before = contents(field_values(self.whole))

        def read(name: str) -> None:
            self.read.add(name)
            if name not in builder.reads:
                self.note("G", f"build reads {name}, which is not in reads")

        def waits(operation: str) -> None:
            self.note("M", f"build waits for the device: {operation} on a value that only the device knows")

        try:
            with NoSync(device_tensors(batch), waits):
                meta = builder.build(SpyBatch(batch, read), self.group, phase)
                builder.signature(meta)
        except Exception as error:
            self.note("G", f"build or signature raised {type(error).__name__}: {error}", what)
            raise ConformanceError(type(builder).__name__, list(self.found.values())) from error
        self.num_builds += 1
        changed = difference(contents(field_values(self.whole)), before)
        if changed:
            self.note("L", f"build in phase {phase.value} wrote to {changed} of the batch")
            self.buffers.poison()
        return meta

    def compare(self, letter: str, meta: Any, expected: dict[str, Any], rule: str, what: Step | Key) -> None:
        path = difference(contents(meta), expected)
        if path:
            self.note(letter, f"{path} {rule}", what)

    def note(self, letter: str, text: str, where: Key | Step | None = None) -> None:
        """Remember a violation; the same one elsewhere adds nothing."""
        violation = Violation(letter, f"{text} ({where})" if where else text)
        self.found.setdefault((letter, text), violation)

    # -- several builds --------------------------------------------------------------------------------------

    def check_orders(self, expected: list[dict[str, Any]]) -> None:
        """Every build gives what a builder gives that has never built before, in whatever order they come."""
        count = len(self.steps)
        large_first = sorted(range(count), key=lambda i: -self.steps[i].shape.padded_tokens)
        shuffled = np.random.default_rng(1).permutation(count).tolist()
        for letter, order, history in (
            ("A", large_first, "larger batches"),
            ("D", large_first[::-1], "smaller batches"),
            ("D", shuffled, "other batches"),
        ):
            for index in order:
                step, rule = self.steps[index], f"depends on {history} built before"
                self.compare(letter, self.build(self.builder, step), expected[index], rule, step)

    def check_phases(self) -> None:
        """A new object for each build, and nothing in two of them that one could fill and the other find filled."""
        phases = (BuildPhase.WARMUP, BuildPhase.CAPTURE, BuildPhase.CAPTURE, BuildPhase.RUN)
        built = [self.build(self.builder, self.steps[0], phase) for phase in phases]
        if len({id(meta) for meta in built}) < len(built):
            self.note("D", "two builds return the same object")
        owner: dict[int, int] = {}
        for index, meta in enumerate(built):
            for path, container in mutable_containers(meta):
                first = owner.setdefault(id(container), index)
                if first != index and path:
                    kinds = f"{phases[first].value} and one for {phases[index].value}"
                    self.note("D", f"{path} is one mutable object in a build for {kinds}")

    def check_key(self, key: Key) -> None:
        """What a capture of ``key`` bakes holds for every batch that replays it."""
        for phase in (BuildPhase.WARMUP, BuildPhase.CAPTURE):
            expected = contents(self.build(self.fresh(), key, phase))
            captured = self.build(self.builder, key, phase)
            rule = f"of a build in phase {phase.value} depends on batches built before"
            self.compare("A", captured, expected, rule, key)
        signature = self.builder.signature(captured)
        if self.builder.signature(captured) != signature:
            self.note("E", "signature() of the same metadata differs from call to call")
        baked = dict(leaves(captured))
        self.check_owners(baked, key)
        for step in (step for step in self.steps if step.key == key):
            meta = self.build(self.builder, step)
            offered = self.builder.signature(meta)
            refusal = signature.admits(offered)
            if refusal:
                self.note("E", f"the signature of a capture refuses a batch of its key: {refusal}", step)
            now = {name: value for name, _, value in offered.items}
            told = {(value, now.get(name)) for name, _, value in signature.items}
            for letter, text in _changes(baked, dict(leaves(meta)), told):
                self.note(letter, text, key)

    def check_owners(self, baked: dict[str, Any], key: Key) -> None:
        """Every tensor lies in a buffer of the batch or of the builder."""
        owned = [*self.buffers.addresses().values(), *self.builder.addresses().values()]
        tensors = {path: leaf for path, leaf in baked.items() if isinstance(leaf, Tensor) and leaf.numel()}
        for path, leaf in tensors.items():
            first, last = leaf.untyped_storage().data_ptr(), leaf.data_ptr()
            if not any(first <= address <= last for address in owned):
                text = f"{path} is neither a view of the batch nor in a buffer that addresses() names"
                self.note("C", f"{text}, so a graph would read this step's tensor for ever", key)


def _changes(
    baked: dict[str, Any], later: dict[str, Any], told: set[tuple[Any, Any]]
) -> Iterator[tuple[str, str]]:
    """What a run must have like the capture of its key, and has not: tensors in the same places, and host values
    unless the signature tells both.
    """
    if baked.keys() != later.keys():
        yield "M", f"{min(baked.keys() ^ later.keys())} is only in one of a capture and a run of its key"
        return
    for path, leaf in baked.items():
        other = later[path]
        if type(leaf) is not type(other):
            kinds = f"{type(leaf).__name__} in a capture and {type(other).__name__} in a run"
            yield "M", f"{path} is a {kinds} of its key"
        elif isinstance(leaf, Tensor):
            baked_in, now = ((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (leaf, other))
            if (leaf.numel() or other.numel()) and baked_in != now:
                yield "C", f"{path} has another address, shape or stride in a run than in the capture"
        elif isinstance(leaf, HOST_VALUE) and leaf != other and (leaf, other) not in told:
            yield "M", f"{path} differs between a capture and a run, and the signature does not tell"
