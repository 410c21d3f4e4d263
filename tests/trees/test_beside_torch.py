"""torch.distributed._state_dict_utils and its stager beside `treeckpt.trees`: the same calls, on one rank."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed import _state_dict_utils as torch_utils
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.nn import Parameter

import treeckpt as tc


class Pair(NamedTuple):
    first: Any
    second: Any


def state() -> dict[str, Any]:
    return {
        "w": torch.arange(6.0).view(2, 3),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "values": [1, 2.5, "text", b"bytes", None, True],
        "nested": {"list": [torch.ones(2), (torch.zeros(1), 3)]},
    }


def test_a_copy_to_the_host_is_no_alias() -> None:
    """pytorch-state_dict_utils, lines 566-575 and 893-1005: on the host torch gives the tensors themselves."""
    tree = state()
    theirs, found = torch_utils._offload_state_dict_to_cpu(tree), tc.trees.offload(tree)
    assert tc.trees.same_structure(found, theirs)
    assert theirs["w"] is tree["w"] and found["w"] is not tree["w"] and torch.equal(found["w"], tree["w"])
    tree["w"].zero_()
    assert not theirs["w"].any() and found["w"].any()


def test_containers_keep_their_classes() -> None:
    """pytorch-state_dict_utils, lines 392-546: a dict, a list and a tuple are all that torch gives back."""
    tree = {"pair": Pair(torch.ones(1), 2), "ordered": collections.OrderedDict(b=1, a=2), 3: {"none": [{}, [], ()]}}
    theirs, found = torch_utils._offload_state_dict_to_cpu(tree), tc.trees.offload(tree)
    assert type(theirs["pair"]) is tuple and type(theirs["ordered"]) is dict
    assert type(found["pair"]) is Pair and type(found["ordered"]) is collections.OrderedDict
    assert found[3] == theirs[3] == {"none": [{}, [], ()]}


@pytest.mark.parametrize("leaf", [1 + 2j, {1, 2}, range(3), torch.float32, slice(1)], ids=str)
def test_values_that_torch_refuses_are_values(leaf: Any) -> None:
    """pytorch-state_dict_utils, lines 549-558: numbers, text, bytes, None and buffers are all that torch takes."""
    with pytest.raises(ValueError, match="Unexpected value type"):
        torch_utils._offload_state_dict_to_cpu({"a": leaf})
    assert tc.trees.offload({"a": leaf}) == torch_utils._iterate_state_dict(
        {"a": leaf}, *[torch_utils._identity_func] * 3, type_check=False
    )


@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_copy_into_another_state_dict_fills_its_tensors(*, non_blocking: bool) -> None:
    """pytorch-state_dict_utils, lines 577-630 and 1008-1148: the companion's tensors are filled."""
    tree = state()
    theirs, ours = (tc.trees.empty_like(tree) for _ in range(2))
    theirs["values"], ours["values"] = [0] * 6, [0] * 6
    kept = ours["w"], ours["nested"]["list"][1][0]
    result = torch_utils._copy_state_dict(tree, {**theirs, "values": tree["values"]}, non_blocking=non_blocking)
    tc.trees.copy_into(tree, ours, non_blocking=non_blocking)
    assert torch.equal(result["w"], ours["w"])
    assert ours["w"] is kept[0] and ours["nested"]["list"][1][0] is kept[1]
    assert ours["values"] == result["values"] == tree["values"] and ours["scalar"] == 2.5


def test_a_copy_into_another_structure_changes_nothing() -> None:
    """pytorch-state_dict_utils, lines 392-422 and 475-490: CompanionMismatch, once keys before it are filled."""
    tree = {"a": torch.ones(2), "b": {"x": torch.ones(2)}}
    theirs, ours = ({"a": torch.zeros(2), "b": {"y": torch.zeros(2)}} for _ in range(2))
    with pytest.raises(torch_utils.CompanionMismatch):
        torch_utils._copy_state_dict(tree, theirs)
    with pytest.raises(tc.MismatchError, match=r"b/y: expected the same leaves in both trees"):
        tc.trees.copy_into(tree, ours)
    assert theirs["a"].tolist() == [1, 1] and ours["a"].tolist() == [0, 0]
    with pytest.raises(tc.MismatchError, match=r"w: expected shape \(3,\), found \(1,\)"):
        tc.trees.copy_into({"w": torch.ones(1)}, {"w": torch.zeros(3)})
    broadcast = {"w": torch.zeros(3)}
    torch_utils._copy_state_dict({"w": torch.ones(1)}, broadcast)
    assert broadcast["w"].tolist() == [1, 1, 1], "torch broadcasts what has another shape"


def test_empty_memory_keeps_scalars_and_attributes_of_tensors() -> None:
    """pytorch-state_dict_utils, lines 1205-1288: shape and dtype; torch loses Parameters and formats of memory."""
    tree = state() | {
        "p": Parameter(torch.ones(2, 3)),
        "last": torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last),
    }
    theirs: Any = torch_utils._create_cpu_state_dict(tree, share_memory=True)
    found = tc.trees.empty_like(tree, share=True)
    for name in ("w", "scalar", "empty", "p", "last"):
        assert (found[name].shape, found[name].dtype) == (theirs[name].shape, theirs[name].dtype)
    assert found["w"].is_shared() and theirs["w"].is_shared() and found["scalar"].is_shared()
    assert type(found["p"]) is Parameter and type(theirs["p"]) is torch.Tensor
    assert found["last"].is_contiguous(memory_format=torch.channels_last) and theirs["last"].is_contiguous()
    assert found["values"] == theirs["values"]


@pytest.mark.parametrize(
    ("changed", "same"),
    [({}, True), ({"w": torch.ones(3, 2)}, False), ({"w": torch.ones(2, 3).int()}, False), ({"more": 1}, False)],
)
def test_structures_are_compared_as_torch_compares_them(changed: dict[str, Any], *, same: bool) -> None:
    """pytorch-state_dict_utils, lines 1433-1547: keys, sizes and dtypes; treeckpt says which differ."""
    tree = {"w": torch.zeros(2, 3), "nested": {"list": [torch.ones(2)]}}
    other = tree | changed
    assert torch_utils._check_state_dict_similarity(tree, other) is same
    found = tc.trees.same_structure(tree, other)
    assert bool(found) is same and all(any(name in line for line in found.differences) for name in changed)


def test_names_are_those_of_torch_and_come_back_with_like() -> None:
    """pytorch-state_dict_utils, lines 2148-2393: names joined by dots, and a mapping back; empty containers go."""
    tree = {"a": [torch.ones(1), {"b": 2}], "c": {0: 5, "d": (6, 7)}, "e.f": 8}
    names, mapping = torch_utils._flatten_state_dict(tree)
    found = tc.trees.flatten_names(tree)
    assert list(found) == list(names) and all(found[name] is names[name] for name in names)
    theirs: Any = torch_utils._unflatten_state_dict(names, mapping)
    assert theirs["a"] == tree["a"] and theirs["c"] == {"0": 5, "d": [6, 7]}, "keys become text, tuples lists"
    assert tc.trees.unflatten_names(found, tree) == tree
    assert tc.trees.unflatten_names({name: found[name] for name in ("a.0", "a.1.b")}) == {"a": tree["a"]}
    empty: dict[str, Any] = {"x": {}, "y": [], "z": 1}
    assert list(torch_utils._flatten_state_dict(empty)[0]) == list(tc.trees.flatten_names(empty)) == ["z"]
    assert tc.trees.unflatten_names(tc.trees.flatten_names(empty), empty) == empty
    for clash in ({"a.b": 1, "a": {"b": 2}}, {0: 1, "0": 2}):
        with pytest.raises(ValueError, match="duplicated flatten key"):
            torch_utils._flatten_state_dict(clash)
        with pytest.raises(tc.TreeError, match="a name of its own"):
            tc.trees.flatten_names(clash)


def test_a_later_copy_leaves_an_earlier_one_as_it_is() -> None:
    """pytorch-state_dict_utils, lines 6-7: the stager keeps a copy for each storage, and fills it again."""
    weight = torch.zeros(3)
    stager = StateDictStager(share_memory=True)
    theirs = [stager.stage({"w": weight})["w"]]
    found = [tc.trees.offload({"w": weight}, share=True)["w"]]
    weight.fill_(1)
    theirs.append(stager.stage({"w": weight})["w"])
    found.append(tc.trees.offload({"w": weight}, share=True)["w"])
    assert [one.tolist() for one in theirs] == [[1, 1, 1]] * 2
    assert [one.tolist() for one in found] == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("kind", ["sparse", "csr", "meta"])
def test_tensors_that_the_stager_refuses_are_copied(kind: str) -> None:
    """pytorch-state_dict_utils, lines 6-7: the stager goes through storages, which these do not have."""
    leaf = torch.empty(2, device="meta") if kind == "meta" else torch.eye(3)
    leaf = {"sparse": leaf.to_sparse, "csr": leaf.to_sparse_csr, "meta": lambda: leaf}[kind]()
    with pytest.raises((RuntimeError, NotImplementedError)):
        StateDictStager().stage({"a": leaf})
    found = tc.trees.offload({"a": leaf})["a"]
    assert found is not leaf and found.layout == leaf.layout and found.is_meta == leaf.is_meta
    assert leaf.is_meta or torch.equal(found.to_dense(), leaf.to_dense())


def test_a_parameter_stays_one() -> None:
    """pytorch-state_dict_utils, lines 21-23: the stager makes plain tensors of Parameters."""
    tree = {"w": Parameter(torch.ones(2)), "frozen": Parameter(torch.ones(2), requires_grad=False)}
    theirs, found = StateDictStager().stage(tree), tc.trees.offload(tree)
    assert not theirs["w"].requires_grad and type(theirs["w"]) is torch.Tensor
    assert type(found["w"]) is Parameter and found["w"].requires_grad and not found["frozen"].requires_grad
