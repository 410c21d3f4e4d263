"""A diff of two indexes names every difference, and nothing else."""

from collections import OrderedDict

import numpy as np
import pytest

from tests.helpers.samples import MESH, gpt_state, write_checkpoint
from treeckpt._core.sharding.placements import MeshLayout, Replicate, Shard
from treeckpt._core.tree.value_codec import encode_value
from treeckpt._inspect.diff import Added, Changed, Moved, Removed, diff
from treeckpt._loading.run_load import inspect as read_index


def tree(**changes):
    model = {"a.weight": np.zeros((64, 8), np.float32), "b.weight": np.zeros((64, 8), np.float32)}
    return {"model": model, "step": 1, "lr": 0.1} | changes


@pytest.fixture
def indexes(tmp_path):
    def make(*trees, **options):
        return [write_checkpoint(tmp_path / f"{n}", t, **options) for n, t in enumerate(trees)]

    return make


def test_equal_trees_have_no_difference(indexes):
    a, b = indexes(gpt_state(layers=1), gpt_state(layers=1))
    assert diff(a, b).changes == ()
    assert diff(a, b).same == len(a.leaves)


def test_metadata_sidecar_files_and_containers_that_differ_are_named(indexes, tmp_path):
    for name, digit in (("a", "1"), ("b", "2")):
        files = {"t": digit.encode(), "same": b"s"}
        write_checkpoint(tmp_path / name, tree(), metadata={"commit": digit, "x": 1}, files=files)
    a, b = read_index(tmp_path / "a"), read_index(tmp_path / "b")
    assert diff(a, a).also == () and diff(a, b).changes == ()
    assert diff(a, b).also == ("custom metadata commit", "sidecar file t")
    c, d = indexes({"w": [1, 2]}, {"w": (1, 2)})
    assert diff(c, d).also == ("containers, by kind or by the order of keys",)


def test_what_is_beside_the_leaves_is_told_before_and_after_with_entries_of_dicts_apart(tmp_path):
    for name, lr, world in (("a", 0.1, 4), ("b", 0.2, 8)):
        own = {"b": 1} if name == "b" else {"a": True}
        config = encode_value({"optimizer": {"lr": lr}, "n": 1}, "")
        metadata = {"config": config, "metrics": encode_value(own, ""), "seed": 1.0 if lr > 0.1 else 1}
        write_checkpoint(tmp_path / name, tree(), metadata=metadata, world=world)
    a, b = read_index(tmp_path / "a"), read_index(tmp_path / "b")
    rows = {row.name: (row.what, row.before, row.after) for row in diff(a, b).beside}
    metadata = {name.removeprefix("custom metadata "): row for name, row in rows.items() if "metadata" in name}
    assert rows["ranks"] == ("changed", "4", "8") and metadata == {
        "config/optimizer/lr": ("changed", "0.1", "0.2"), "metrics/a": ("removed", "True", ""),
        "metrics/b": ("added", "", "1"), "seed": ("changed", "1", "1.0"), "config/n": ("same", "1", "1"),
    }  # fmt: skip
    assert [row.what for row in diff(a, b).beside][-1] == "same" and diff(a, a).also == ()


def test_versions_of_modules_that_differ_are_named_by_the_state_dict_that_has_them(indexes):
    def with_version(version, kind=list):
        state = OrderedDict(w=1)
        state._metadata = {"": {"version": version}}
        return {"model": state, "x": kind((1, 2))}

    a, b, c = indexes(with_version(1), with_version(2), with_version(2, tuple))
    named = "versions of modules or other attributes of model"
    assert diff(a, a).also == () and diff(a, b).also == (named,)
    assert diff(a, c).also == (named, "containers, by kind or by the order of keys")
    assert diff(a, b).changes == ()


def test_values_are_compared_with_their_types(indexes):
    a, b = indexes(tree(), tree(step=True))
    assert diff(a, b).changes == (Changed("step", "value", "int 1", "bool True"),)


def test_shape_and_dtype_and_kind(indexes):
    a, b = indexes(tree(x=np.zeros(3, np.float32), y=1), tree(x=np.zeros(4, np.int64), y=np.zeros(1, np.int8)))
    assert diff(a, b).changes == (
        Changed("x", "shape", "[3]", "[4]"),
        Changed("x", "dtype", "float32", "int64"),
        Changed("y", "kind", "value int 1", "array int8 [1]"),
    )


def test_layouts_are_compared(tmp_path):
    def layout(*placements):
        return lambda path, array: MeshLayout(MESH, placements) if array.ndim == 2 else None

    a = write_checkpoint(tmp_path / "a", tree(), layouts=layout(Shard(0), Replicate()))
    b = write_checkpoint(tmp_path / "b", tree(), layouts=layout(Shard(0), Shard(1)))
    found = diff(a, b)
    assert [(c.path, c.aspect) for c in found.changes] == [("model/a.weight", "layout"), ("model/b.weight", "layout")]
    assert "tp: Shard(1)" in found.changes[0].after
    assert found.count("layout") == 2


def test_added_and_removed(indexes):
    a, b = indexes(tree(old=3), tree(new="text"))
    assert diff(a, b).changes == (Added("new", "value str 'text'"), Removed("old", "value int 3"))


def test_a_renamed_wrapper_is_a_move_of_each_leaf(indexes):
    before = tree()
    after = tree(model={f"module.{name}": array for name, array in before["model"].items()})
    a, b = indexes(before, after)
    assert diff(a, b).changes == (
        Moved("model/a.weight", "model/module.a.weight"),
        Moved("model/b.weight", "model/module.b.weight"),
    )


def test_leaves_without_a_common_end_are_not_called_moved(indexes):
    a, b = indexes(tree(x=np.zeros(5)), tree(y=np.zeros(5)))
    assert {type(c) for c in diff(a, b).changes} == {Added, Removed}


def test_ambiguous_partners_are_not_called_moved(indexes):
    one, two = {"p": {"w": np.zeros(5)}}, {"q": {"w": np.zeros(5)}, "r": {"w": np.zeros(5)}}
    a, b = indexes(tree(**one), tree(**two))
    assert [type(c) for c in diff(a, b).changes] == [Removed, Added, Added]


def test_the_last_name_alone_may_tell_where_a_leaf_went(indexes):
    a, b = indexes(tree(p={"w": np.zeros(5)}), tree(q={"w": np.zeros(5)}))
    assert diff(a, b).changes == (Moved("p/w", "q/w"),)


def test_the_longest_common_end_tells_where_a_leaf_went(indexes):
    one = {"p": {"x": {"w": np.zeros(5)}, "y": {"w": np.zeros(5)}}}
    two = {"q": {"y": {"w": np.zeros(5)}, "x": {"w": np.zeros(5)}}}
    a, b = indexes(tree(**one), tree(**two))
    assert set(diff(a, b).changes) == {Moved("p/x/w", "q/x/w"), Moved("p/y/w", "q/y/w")}
