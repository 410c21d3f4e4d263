"""New leaves go into the containers that a tree has; what cannot is named."""

import collections
import dataclasses

import numpy as np
import pytest

from treeckpt._core.tree.containers import PerRank
from treeckpt._core.tree.flatten import update_in_place
from treeckpt._core.tree.keyed_table import KeyedTable

OLD, NEW = np.zeros(2), np.ones(2)


@dataclasses.dataclass
class Open:
    x: object
    y: object = 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: object


Pair = collections.namedtuple("Pair", "a b")


def update(tree, new, **options):
    return update_in_place(tree, new, is_value=lambda leaf: isinstance(leaf, int), **options)


@pytest.mark.parametrize(
    ("tree", "new"),
    [
        ({"a": 1, "b": OLD}, {"a": 2, "b": NEW}),
        ([1, 2], [1, 3]),
        (collections.OrderedDict(a=1), collections.OrderedDict(a=2)),
        (collections.deque([1, 2], 5), collections.deque([3, 2], 5)),
        (Open(1, [2]), Open(3, [4])),
        ({"a": {"b": [Open(OLD)]}}, {"a": {"b": [Open(NEW)]}}),
        ({"a": [1, 2]}, {"a": [1, 2, 3]}),
        ({"a": (1, 2)}, {"a": (1, 3)}),
        ({"a": Pair(1, (2, 3))}, {"a": Pair(1, (2, 4))}),
        ([Frozen(1)], [Frozen(2)]),
        ([Frozen((1, 2))], [Frozen((1, 3))]),
        ({"a": (1, 2)}, {"a": (1, 2, 3)}),
        ({"a": {"b": 1}}, {"a": {"c": 1}}),
        ({"a": [1]}, {"a": 5}),
        ({"a": 5}, {"a": [1]}),
        ([PerRank({"a": 1})], [PerRank({"a": 2})]),
        ({"a": ()}, {"a": ()}),
    ],
)
def test_a_tree_whose_containers_can_change_becomes_the_new_one(tree, new):
    before = repr(tree)
    assert update(tree, new, dry=True) == [] and repr(tree) == before
    assert update(tree, new) == [] and repr(tree) == repr(new)


def test_containers_stay_the_same_objects():
    inner, many, few = {"x": 1}, [1, 2], collections.deque([1], 4)
    tree = {"inner": inner, "many": many, "few": few, "open": (shell := Open(1))}
    assert update(tree, {"inner": {"x": 2}, "many": [5], "few": collections.deque([7, 8], 4), "open": Open(9)}) == []
    assert tree["inner"] is inner and tree["many"] is many and tree["few"] is few and tree["open"] is shell
    assert (inner, many, list(few), shell.x) == ({"x": 2}, [5], [7, 8], 9)


def test_containers_whose_leaves_stay_are_not_made_anew():
    pair = Pair(1, OLD)
    tree = {"pair": pair}
    assert update(tree, {"pair": Pair(1, OLD)}) == [] and tree["pair"] is pair
    assert update(pair, pair) == []


def test_arrays_in_containers_that_cannot_change_are_named_by_their_paths():
    pair, frozen = Pair(1, OLD), Frozen(OLD)
    tree = {"t": (pair, 5), "f": [frozen]}
    found = [("t/0/a", 2), ("t/0/b", NEW), ("f/0/x", NEW)]
    for dry in (True, False):
        assert update(tree, {"t": (Pair(2, NEW), 5), "f": [Frozen(NEW)]}, dry=dry) == found
    assert tree["t"][0] is pair and tree["f"][0] is frozen


def test_values_beside_arrays_in_a_tuple_are_named_and_lists_in_it_change():
    tree = (OLD, [1], 7)
    assert update(tree, (OLD, [2], 8)) == [("2", 8)]
    assert tree[1] == [2] and tree[2] == 7


def test_a_root_that_cannot_change_is_named_by_the_empty_path():
    assert update((1, 2), (1, 3)) == [("", (1, 3))]
    assert update({"a": 1}, {"b": 1}) == [("", {"b": 1})]
    assert update(1, 2) == [("", 2)]
    assert update(Frozen(1), Frozen(2)) == [("", Frozen(2))]


def test_what_is_each_ranks_own_is_named_without_its_number():
    assert update({"own": PerRank(OLD)}, {"own": PerRank(NEW)}) == [("own/~rank*", NEW)]
    assert update([PerRank((OLD,))], [PerRank((NEW,))]) == [("0/~rank*/0", NEW)]


def table(ids, scale):
    return KeyedTable(np.array(ids), {"w": np.ones((len(ids), 2)) * scale}, scalars={"n": scale, "more": (scale, OLD)})


def test_a_table_takes_new_rows_and_stays_itself():
    old, new = table([1, 2], 3), table([5, 6, 7], 4)
    tree, scalars = {"emb": old}, old.scalars
    stuck = [("emb/scalars/more/0", 4)]
    assert update(tree, {"emb": new}, dry=True) == stuck
    assert old.ids.tolist() == [1, 2] and len(old.slots["w"]) == 2 and scalars["n"] == 3
    assert update(tree, {"emb": new}) == stuck
    assert tree["emb"] is old and old.scalars is scalars and scalars["n"] == 4
    assert old.ids is new.ids and old.slots["w"] is new.slots["w"]


def test_a_table_in_place_of_another_container_is_put_there():
    tree = {"emb": {"ids": 1}}
    assert update(tree, {"emb": (new := table([1], 1))}) == [] and tree["emb"] is new
