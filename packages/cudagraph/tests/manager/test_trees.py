"""`_trees`: tensors of states and outputs, and lazy changes of shared parts."""

from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch

from bateleur.cudagraph._trees import named_tensors, replace_tensors, watch_lazy_changes

Pair = namedtuple("Pair", "left right")


class Plain:
    plan = None


class Slotted:
    __slots__ = ("__hidden", "plan")

    def hide(self):
        self.__hidden = 1


class Keeper:
    """A plain object that fills its containers and never replaces them."""

    def __init__(self):
        self.cache, self.names, self.steps = {}, set(), [[]]


@dataclass
class Data:
    plan: object = None


@dataclass(frozen=True, slots=True)
class Frozen:
    plan: object
    name: str


@dataclass(slots=True)
class Slim:
    plan: object = None


def test_tensors_come_in_order_with_their_paths_once_each():
    a, b, c, d = (torch.zeros(n) for n in range(4))
    tree = {"x": [a, None, 3], "y": (Pair(b, "text"), Data(c), Slim(a)), 7: d}
    assert [path for path, _ in named_tensors(tree, "out")] == [
        "out['x'][0]",
        "out['y'][0][0]",
        "out['y'][1].plan",
        "out[7]",
    ]
    assert [len(tensor) for _, tensor in named_tensors(tree)] == [0, 1, 2, 3]
    assert list(named_tensors(a, "out")) == [("out", a)]
    hidden = Plain()
    hidden.plan = a
    assert list(named_tensors([hidden])) == [], "tensors in plain objects are not found"


def test_parts_that_a_mapping_creates_on_access_are_all_found():
    """A freed object may have the same id as a later one."""

    class Lazy(Mapping):
        def __init__(self, depth):
            self.depth = depth

        def __getitem__(self, key):
            return Lazy(self.depth - 1) if key == "next" else torch.zeros(1)

        def __iter__(self):
            return iter(("next", "tensor") if self.depth else ("tensor",))

        def __len__(self):
            return 1 + bool(self.depth)

    assert sum(1 for _ in named_tensors(Lazy(50))) == 51


@pytest.mark.parametrize(
    ("make", "fill"),
    [
        (Plain, lambda node: setattr(node, "plan", 1)),
        (Data, lambda node: setattr(node, "plan", 1)),
        (Data, lambda node: setattr(node, "extra", 1)),
        (Slim, lambda node: setattr(node, "plan", 1)),
        (dict, lambda node: node.update(plan=1)),
        (lambda: {"plan": None}, lambda node: node.update(plan=1)),
        (list, lambda node: node.append(1)),
        (lambda: [1, 2], lambda node: node.pop()),
        (lambda: [[1], 2], lambda node: node.__setitem__(0, [1])),
        (set, lambda node: node.add(1)),
        (Slotted, lambda node: setattr(node, "plan", 1)),
        (Slotted, Slotted.hide),
    ],
)
@pytest.mark.parametrize("wrap", [lambda node: node, lambda node: {"a": (1, Data([node]))}])
def test_a_shared_part_that_changed_is_found(make, fill, wrap):
    node = make()
    shared = watch_lazy_changes(wrap(node))
    assert shared(wrap(node)) is None, "nothing has changed yet"
    fill(node)
    assert shared(wrap(make())) is None
    assert shared(wrap(node)) in ("state", "state['a'][1].plan[0]")


@pytest.mark.parametrize(
    ("fill", "where"),
    [
        (lambda node: node.cache.update(plan=1), ".cache"),
        (lambda node: node.names.add(1), ".names"),
        (lambda node: node.steps[0].append(1), ".steps[0]"),
    ],
)
def test_containers_in_plain_objects_are_found(fill, where):
    node = Keeper()
    shared, shallow = watch_lazy_changes([node]), watch_lazy_changes([node], into_objects=False)
    assert shared([node]) is None
    fill(node)
    assert shared([Keeper()]) is None
    assert shared([node]) == "state[0]" + where
    assert shallow([node]) is None


def test_changed_contents_of_tensors_do_not_count():
    buffer = torch.zeros(3)
    shared = watch_lazy_changes({"buffer": buffer})
    buffer.fill_(1)
    assert shared({"buffer": buffer}) is None


def test_tensors_are_replaced_in_a_copy_and_other_parts_are_shared():
    x, plain = torch.zeros(2), Plain()
    plain.plan = x
    tree = {"pair": Pair(x, (1, plain)), "data": [Data({"deep": x}), Slim(x), Frozen(x, "name")]}
    copied = replace_tensors(tree, lambda tensor: tensor + 1)
    assert {where for where, each in named_tensors(copied) if each.tolist() == [1, 1]} == {
        "['pair'][0]", "['data'][0].plan['deep']", "['data'][1].plan", "['data'][2].plan"
    }  # fmt: skip
    assert {type(copied["pair"]), type(copied["data"][2])} == {Pair, Frozen}
    assert copied["data"][2].name == "name"
    assert copied["pair"].right[1] is plain
    assert all(each is x for _, each in named_tensors(tree)), "the original tree is unchanged"
