"""The attributes of an OrderedDict, as the metadata of state dicts: stored, merged, renamed, taken from another."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec
import pytest

from treeckpt._core.sharding.int_runs import encode_runs
from treeckpt._core.tree.dict_attributes import (
    DictAttributes,
    ModuleMetadata,
    metadata_of,
    renamed_modules,
    take_metadata,
)
from treeckpt._core.tree.flatten import flatten, replace_leaves, unflatten, update_metadata
from treeckpt._core.tree.merge import merge, merge_sources
from treeckpt._core.tree.structure import OrderedDictNode, Structure, paths_of
from treeckpt.errors import FormatError, MismatchError, TreeError


def state_dict(entries: dict[Any, Any], **attributes: Any) -> Any:
    made = OrderedDict(entries)
    vars(made).update(attributes)
    return made


def stored(tree: Any) -> Structure:
    """The structure of a tree, as the index has it."""
    return msgspec.json.decode(msgspec.json.encode(flatten(tree)[0]), type=OrderedDictNode)


def rebuilt(structure: Structure) -> Any:
    return unflatten(structure, iter([path for path, _ in paths_of(structure)]), resolve=lambda name: OrderedDict)


METADATA = OrderedDict({"": {"version": 1}, "0": {"version": 2}, "1": {"version": 1, "assign_to_params_buffers": True}})


def test_metadata_comes_back_equal_and_in_order_with_a_dict_of_its_own_for_each_module() -> None:
    found = rebuilt(stored(state_dict({"0.weight": 1}, _metadata=METADATA)))._metadata
    assert found == METADATA and type(found) is OrderedDict
    found[""]["assign_to_params_buffers"] = True  # as load_state_dict does
    assert "assign_to_params_buffers" not in found["0"]


def test_the_metadata_of_a_hundred_thousand_modules_takes_little_more_than_their_names() -> None:
    names = [f"layers.{i}" for i in range(100_000)]
    node = flatten(state_dict({}, _metadata=OrderedDict((name, {"version": 1}) for name in names)))[0]
    assert len(msgspec.json.encode(node)) < sum(len(name) + 3 for name in names) + 200


@pytest.mark.parametrize("metadata", [None, 5, {"": 1}, {1: 2}, {"": None, "a": (1, 2), "b": {"c": {"d": [1.5]}}}, {}])
def test_any_value_can_be_in_place_of_metadata(metadata: Any) -> None:
    assert rebuilt(stored(state_dict({"w": 1}, _metadata=metadata)))._metadata == metadata


def test_other_attributes_come_back_as_torch_save_gives_them() -> None:
    found = rebuilt(stored(state_dict({"w": 1}, _metadata=METADATA, note=["a", 1], _other=None)))
    assert vars(found) == {"_metadata": METADATA, "note": ["a", 1], "_other": None}


def test_an_ordered_dict_of_a_generic_alias_has_no_attributes_to_store() -> None:
    tree = OrderedDict[str, int](w=1)
    assert vars(tree)  # __orig_class__
    structure = flatten(tree)[0]
    assert isinstance(structure, OrderedDictNode) and structure.attributes is None


@pytest.mark.parametrize(
    ("attributes", "named"),
    [
        ({"_metadata": {"a.b": {"version": object()}}}, "model._metadata['a.b']"),
        ({"note": object()}, "model.note"),
        ({"keys": 1}, "'keys'"),
        ({"_metadata": {"\udc00": 1}}, "model._metadata"),
        ({"_metadata": {"": {"version": 1}, "\udc00": {"version": 1}}}, "model._metadata"),
    ],
)
def test_what_cannot_be_stored_is_an_error_that_names_it(attributes: dict[str, Any], named: str) -> None:
    with pytest.raises(TreeError) as caught:
        flatten({"model": state_dict({"w": 1}, **attributes)})
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "attributes",
    [
        [[["a"], [1], [[0, 0, 1 << 20]]], None],
        [[["a"], [1], [[1]]], None],
        [[["a", "b"], [1], [[0]]], None],
        [None, ["dict", ["keys", 1]]],
        [None, ["dict", [1, 1]]],
        [None, 5],
        [[["a"], [["no such kind", []]], [[0]]], None],
    ],
)
def test_attributes_that_no_ordered_dict_has_are_refused(attributes: Any) -> None:
    document = msgspec.json.encode(["OrderedDict", attributes, ["w"], [None]])
    with pytest.raises(FormatError):
        rebuilt(msgspec.json.decode(document, type=OrderedDictNode))


def test_a_node_without_attributes_is_read() -> None:
    node = msgspec.json.decode(b'["OrderedDict", null, ["w"], [null]]', type=OrderedDictNode)
    assert vars(rebuilt(node)) == {}


def test_a_tree_with_other_leaves_has_a_copy_of_the_metadata() -> None:
    tree = {"model": state_dict({"0.weight": 1}, _metadata=OrderedDict({"0": {"version": 2}}), note=1)}
    found: Any = replace_leaves(tree, iter([5]))
    found["model"]._metadata["0"]["assign_to_params_buffers"] = True
    assert found["model"] == {"0.weight": 5} and found["model"].note == 1
    assert tree["model"]._metadata == {"0": {"version": 2}}


def test_the_metadata_of_the_parts_of_a_model_on_several_ranks_is_joined() -> None:
    first, second = (
        flatten({"model": state_dict({f"{n}.weight": 1}, _metadata={"": {"version": 1}, n: {"version": 1 + int(n)}})})[
            0
        ]
        for n in "01"
    )
    whole: Any = rebuilt(merge(first, second))
    assert whole["model"]._metadata == {"": {"version": 1}, "0": {"version": 1}, "1": {"version": 2}}
    assert list(whole["model"]) == ["0.weight", "1.weight"]


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        ({"_metadata": {"0": {"version": 1}}}, {"_metadata": {"0": {"version": 2}}}, "model._metadata['0']"),
        ({"_metadata": {"0": {"version": 1}}}, {"_metadata": {"0": {"version": True}}}, "model._metadata['0']"),
        ({"note": 1}, {"note": 2}, "model.note"),
    ],
)
def test_ranks_with_contradicting_metadata_are_refused_by_name(
    one: dict[str, Any], other: dict[str, Any], named: str
) -> None:
    first, second = (flatten({"model": state_dict({"w": 1}, **given)})[0] for given in (one, other))
    with pytest.raises(MismatchError) as caught:
        merge(first, second)
    assert named in str(caught.value) and "on every rank" in str(caught.value)


def test_metadata_is_kept_where_only_one_rank_has_it() -> None:
    first, second = (flatten({"w": state_dict({"a": 1}, **given)})[0] for given in ({}, {"_metadata": METADATA}))
    for pair in ((first, second), (second, first)):
        found: Any = rebuilt(merge(*pair))
        assert found["w"]._metadata == METADATA


def test_of_two_checkpoints_the_later_one_has_its_metadata_also_over_a_dict() -> None:
    plain = flatten({"model": {"0.weight": 1}})[0]
    first, second = (
        flatten({"model": state_dict({"0.weight": 1}, _metadata={"0": {"version": n}})})[0] for n in (1, 2)
    )
    for pair, version in (((first, second), 2), ((plain, second), 2), ((second, plain), 2)):
        found: Any = rebuilt(merge_sources(*pair))
        assert found["model"]._metadata == {"0": {"version": version}}


NAMES = {"": 1, "enc": 2, "enc.a": 3, "enc.a.act": 4, "enc.b": 5, "act": 6}
KEYS = ["enc.a.weight", "enc.a.bias", "enc.b.weight"]


@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        ({key: key for key in KEYS}, NAMES),
        (
            {key: f"module.{key}" for key in KEYS},
            {
                "module": 1,
                "module.enc": 2,
                "module.enc.a": 3,
                "module.enc.a.act": 4,
                "module.enc.b": 5,
                "module.act": 6,
            },
        ),
        ({key: key.removeprefix("enc.") for key in KEYS}, {"": 2, "a": 3, "a.act": 4, "b": 5}),
        (
            {"enc.a.weight": "enc.c.weight", "enc.a.bias": "enc.c.bias", "enc.b.weight": "enc.b.weight"},
            {"": 1, "enc": 2, "enc.c": 3, "enc.c.act": 4, "enc.b": 5, "act": 6},
        ),
        (
            {"enc.a.weight": "enc.b.weight", "enc.a.bias": "enc.b.bias", "enc.b.weight": "enc.a.weight"},
            {"": 1, "enc": 2, "enc.b": 3, "enc.b.act": 4, "enc.a": 5, "act": 6},
        ),
        ({"enc.b.weight": "enc.b.kernel"}, {"": 1, "enc": 2, "enc.b": 5, "act": 6}),
        ({}, {}),
    ],
)
def test_the_names_of_modules_follow_renamed_entries(moves: dict[str, str], expected: dict[str, int]) -> None:
    assert renamed_modules(NAMES, KEYS, list(moves.items())) == expected


def test_the_metadata_of_a_wrapper_gives_way_to_that_of_the_module_whose_entries_take_its_name() -> None:
    stored = {"": 1, "module": 2, "module.0": 3}
    assert renamed_modules(stored, ["module.0.weight"], [("module.0.weight", "0.weight")]) == {"": 2, "0": 3}


def test_a_module_has_the_metadata_of_the_state_dict_that_its_entries_come_from() -> None:
    here, saved = {"": 1, "a": 1, "b": 1, "old": 1}, {"": 2, "a": 2, "b": 2, "new": 2}
    assert take_metadata(here, {"a"}, saved, {"b"}) == {"": 2, "a": 1, "b": 2, "new": 2, "old": 1}
    assert take_metadata(here, (), saved, {"old"}) == {"": 2, "a": 2, "b": 2, "new": 2}
    assert take_metadata(None, {"a"}, saved, {"b"}) == {"": 2, "b": 2, "new": 2}


def test_a_loaded_tree_has_the_saved_metadata_wherever_it_has_an_ordered_dict() -> None:
    saved = flatten({"models": [state_dict({"w": 1}, _metadata={"": {"version": 2}})], "other": {"x": {"y": 1}}})[0]
    tree: Any = {"models": [state_dict({"w": 1}, _metadata={"": {"version": 7}})], "other": {"x": {"y": 1}}}
    update_metadata(tree, saved, {"models/0/w": True, "other/x/y": True})
    assert tree["models"][0]._metadata == {"": {"version": 2}}
    plain: Any = {"models": [{"w": 1}]}
    update_metadata(plain, saved, {"models/0/w": True})
    update_metadata({"models": 5}, saved, {"models": True})
    assert plain == {"models": [{"w": 1}]}


def test_the_values_of_modules_are_stored_once() -> None:
    found = metadata_of({"a": 1, "b": True, "c": 1, "d": 1.0})
    assert found.values == (1, True, 1.0) and [type(v) for v in found.values] == [int, bool, float]
    assert found.by_name() == {"a": 1, "b": True, "c": 1, "d": 1.0}


def test_a_large_value_that_many_modules_have_is_stored_for_each_and_comes_back() -> None:
    local = {"version": 1, "config": "x" * 200}
    metadata = OrderedDict((f"layers.{i}", dict(local)) for i in range(10))
    structure = stored(state_dict({"w": 1}, _metadata=metadata))
    assert isinstance(structure, OrderedDictNode) and structure.attributes is not None
    structure.attributes.check("model")
    assert structure.attributes.metadata is not None and len(structure.attributes.metadata.values) == 10
    assert rebuilt(structure)._metadata == metadata


def test_a_file_cannot_multiply_a_large_value_by_the_number_of_modules() -> None:
    names = tuple(f"{i}" for i in range(1000))
    attributes = DictAttributes(ModuleMetadata(names, ("x" * 10_000,), encode_runs([0] * len(names))))
    with pytest.raises(FormatError, match="at most 128 bytes"):
        attributes.check("model")
