"""Checks that a metadata builder keeps its contract. Each class of violation has a letter."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bateleur.metadata.attention_metadata_builder import AttentionMetadataBuilder, BuildPhase, check_reads
from bateleur.metadata.common_attention_metadata import BatchShape, field_values
from bateleur.metadata.conformance._random_steps import GraphKey, Step, StepMaker, keys_of
from bateleur.metadata.conformance._spy import NoSync, SpyBatch, device_tensors
from bateleur.metadata.conformance.errors import ConformanceError, Violation
from bateleur.metadata.input_buffers import InputBuffers
from bateleur.metadata.step_inputs import BatchLimits, KVCacheGroup

Builder = AttentionMetadataBuilder[Any]

_HOST_VALUE = (int, float, str, np.generic)  # plain numbers, strings and bools


@dataclass(frozen=True, slots=True)
class BuilderReport:
    """Result of :func:`check_builder`.

    builder: name of its class. keys: padded sizes that were captured and replayed. num_builds: number of calls of
    ``build``. read: batch fields that ``build`` read. The builder's ``reads`` may name more fields, which only its
    kernels read.
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
    """Check ``builder`` on random batches, replaying every graph size that it may be captured for.

    Args:
        builder: a builder that has built nothing yet.
        limits: limits of the batches. Small, odd numbers detect the most violations.
        groups, group: KV-cache groups of the batches, and the one to build for; default: one with blocks of 4 tokens.
        query_lens: query lengths of uniform batches with graphs: 1, and 1 + drafts.
        fresh: returns a new, equal builder; default is a deep copy.

    Raises:
        ConformanceError: with every violation and its letter. A: padding shows contents of another batch. C: a captured
            address differs from that of a later batch. D: a build depends on earlier builds, or two builds share a
            mutable object. E: the signature of a capture (``builder.signature``, the host scalars that kernels read)
            does not admit a batch of the same padded size. G: an undeclared field is read, or a call raised. L: the
            batch was written to. M: the host waits for the device, or a host value of the metadata changes after the
            capture and is not in the signature.
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
    """State of one `check_builder` call. ``found``: violations by letter and text. ``read``: fields read so far."""

    builder: Builder
    fresh: Callable[[], Builder]
    buffers: InputBuffers
    group: int
    keys: list[GraphKey]
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
        self.check_orders([_contents(self.build(self.fresh(), step)) for step in self.steps])
        for key in self.keys:
            self.check_key(key)
        self.check_phases()
        if dict(self.builder.addresses()) != book:
            self.note("C", "addresses() changed while it built")

    def build(self, builder: Builder, what: Step | GraphKey, phase: BuildPhase = BuildPhase.RUN) -> Any:
        """Stage a step, or a dummy batch of a graph key as for a capture, and build its metadata. Reports undeclared
        reads, writes to the batch and waits for the device.
        """
        self.buffers.poison()
        if isinstance(what, Step):
            batch = self.buffers.stage(what.rows, what.shape)
        else:
            filled = BatchShape.of(what.num_reqs, what.num_tokens, what.max_query_len)
            batch = self.buffers.dummy(filled, max_seq_len=self.buffers.limits.max_model_len)
        before = _contents(field_values(self.whole))

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
        changed = _difference(_contents(field_values(self.whole)), before)
        if changed:
            self.note("L", f"build in phase {phase.value} wrote to {changed} of the batch")
            self.buffers.poison()
        return meta

    def compare(self, letter: str, meta: Any, expected: dict[str, Any], rule: str, what: Step | GraphKey) -> None:
        path = _difference(_contents(meta), expected)
        if path:
            self.note(letter, f"{path} {rule}", what)

    def note(self, letter: str, text: str, where: GraphKey | Step | None = None) -> None:
        """Record a violation. A text is recorded once only. ``where``: the graph key or step that showed it."""
        violation = Violation(letter, f"{text} ({where})" if where else text)
        self.found.setdefault((letter, text), violation)

    def check_orders(self, expected: list[dict[str, Any]]) -> None:
        """Check that the result of a build does not depend on earlier builds, in several orders of the steps.

        expected: contents of the metadata of each step, built by a new builder.
        """
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
        """Check that builds for a run and for a capture return new objects that share no mutable object."""
        phases = (BuildPhase.WARMUP, BuildPhase.CAPTURE, BuildPhase.CAPTURE, BuildPhase.RUN)
        built = [self.build(self.builder, self.steps[0], phase) for phase in phases]
        if len({id(meta) for meta in built}) < len(built):
            self.note("D", "two builds return the same object")
        owner: dict[int, int] = {}
        for index, meta in enumerate(built):
            for path, container in _mutable_containers(meta):
                first = owner.setdefault(id(container), index)
                if first != index and path:
                    kinds = f"{phases[first].value} and one for {phases[index].value}"
                    self.note("D", f"{path} is one mutable object in a build for {kinds}")

    def check_key(self, key: GraphKey) -> None:
        """Check that the captured values of ``key`` hold for every batch that replays it."""
        for phase in (BuildPhase.WARMUP, BuildPhase.CAPTURE):
            expected = _contents(self.build(self.fresh(), key, phase))
            captured = self.build(self.builder, key, phase)
            rule = f"of a build in phase {phase.value} depends on batches built before"
            self.compare("A", captured, expected, rule, key)
        signature = self.builder.signature(captured)
        if self.builder.signature(captured) != signature:
            self.note("E", "signature() of the same metadata differs from call to call")
        baked = dict(_leaves(captured))
        self.check_owners(baked, key)
        for step in (step for step in self.steps if step.key == key):
            meta = self.build(self.builder, step)
            offered = self.builder.signature(meta)
            refusal = signature.admits(offered)
            if refusal:
                self.note("E", f"the signature of a capture refuses a batch of its key: {refusal}", step)
            now = {name: value for name, _, value in offered.items}
            in_signature = {(value, now.get(name)) for name, _, value in signature.items}
            for letter, text in _changes(baked, dict(_leaves(meta)), in_signature):
                self.note(letter, text, key)

    def check_owners(self, baked: dict[str, Any], key: GraphKey) -> None:
        """Check that every tensor among the captured values ``baked`` is in a buffer of the batch or of the builder."""
        owned = [*self.buffers.addresses().values(), *self.builder.addresses().values()]
        tensors = {path: leaf for path, leaf in baked.items() if isinstance(leaf, Tensor) and leaf.numel()}
        for path, leaf in tensors.items():
            first, last = leaf.untyped_storage().data_ptr(), leaf.data_ptr()
            if not any(first <= address <= last for address in owned):
                text = f"{path} is neither a view of the batch nor in a buffer that addresses() names"
                self.note("C", f"{text}, so a graph would read the tensor of the captured step at every replay", key)


def _changes(
    baked: dict[str, Any], later: dict[str, Any], in_signature: set[tuple[Any, Any]]
) -> Iterator[tuple[str, str]]:
    """Yield (letter, text) of each violation. C: a moved tensor. M: a changed host value missing from the signature.

    The signature is ``builder.signature``: the host scalars that kernels read.
    baked, later: values in the metadata of a capture, and of a batch that replays it, by path.
    in_signature: (captured, later) value of each scalar in the signature. Its scalars have other names than the
    metadata, so a changed value counts as present if its (captured, later) pair is.
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
        elif isinstance(leaf, _HOST_VALUE) and leaf != other and (leaf, other) not in in_signature:
            yield "M", f"{path} differs between a capture and a run, and the signature does not tell"


def _leaves(node: Any) -> Iterator[tuple[str, Any]]:
    return ((path, each) for path, each in _walk(node) if _children(each) is None)


def _mutable_containers(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, container) of lists, dicts, sets, and dataclasses that are not frozen."""
    for path, each in _walk(node):
        parameters = getattr(each, "__dataclass_params__", None)
        fixed = isinstance(each, tuple | frozenset) or (parameters is not None and parameters.frozen)
        if _children(each) is not None and not fixed:
            yield path, each


def _contents(meta: Any) -> dict[str, Any]:
    """Return the contents of every leaf by path: bytes, shape and dtype of arrays; host values as they are."""
    return {path: _held(leaf) for path, leaf in _leaves(meta)}


def _difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    for path in {**expected, **found}:
        if found.get(path) != expected.get(path):
            return path or "the metadata"
    return None


def _walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    yield path, node
    for name, child in _children(node) or ():
        yield from _walk(child, f"{path}.{name}" if path else str(name))


def _children(node: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return (name, child) pairs of a dataclass, dict, tuple or list; () for a set (has no order); None for others."""
    if is_dataclass(node) and not isinstance(node, type):
        return [(each.name, getattr(node, each.name)) for each in fields(node)]
    if isinstance(node, dict):
        return node.items()
    if isinstance(node, tuple | list):
        return zip(getattr(node, "_fields", None) or range(len(node)), node, strict=True)
    return () if isinstance(node, set | frozenset) else None


def _held(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, Tensor):
        data = leaf.detach().cpu().flatten().view(torch.uint8).numpy()
        return Tensor, leaf.dtype, leaf.shape, data.tobytes()
    if isinstance(leaf, np.ndarray):
        return np.ndarray, leaf.dtype, leaf.shape, leaf.tobytes()
    return (type(leaf), leaf) if isinstance(leaf, (*_HOST_VALUE, torch.dtype)) else (type(leaf),)
