"""`offload` keeps what a reader of `torch.save` would get; `empty_like` makes memory of the same kinds."""

from __future__ import annotations

import collections
import copy
import gc
import io
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.nn import Buffer, Parameter

import treeckpt as tc

OFFLOADS: dict[str, dict[str, bool]] = {
    "plain": {},
    "pinned": {"pin": True},
    "shared": {"share": True},
    "both": {"pin": True, "share": True},
}


class Own(torch.Tensor):
    """A subclass with memory of its own, and attributes."""


class Slotted(torch.Tensor):
    """A subclass with an attribute in a slot."""

    __slots__ = ("scale",)


class Wrapper(torch.Tensor):
    """A subclass without memory of its own, which does not say of what tensors it is made."""

    elem: torch.Tensor

    @staticmethod
    def __new__(cls, elem: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, elem.shape, dtype=elem.dtype, device=elem.device)
        made.elem = elem
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = [arg.elem if isinstance(arg, Wrapper) else arg for arg in args]
        return func(*inner, **(kwargs or {}))


def as_saved(tree: Any) -> Any:
    """What a reader of `torch.save` gets."""
    file = io.BytesIO()
    torch.save(tree, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=False)


def plain(leaf: Any) -> torch.Tensor:
    leaf = leaf.elem if isinstance(leaf, Wrapper) else leaf
    tensor = torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf.detach().as_subclass(torch.Tensor)
    return tensor.resolve_conj().resolve_neg()


def behaves_as(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Writes to each leaf of both, and compares what all others show then."""
    assert list(found) == list(expected)
    for name, leaf in expected.items():
        assert type(found[name]) is type(leaf), name
        assert getattr(found[name], "requires_grad", None) == getattr(leaf, "requires_grad", None), name
    for name in expected:
        for tree in (found, expected):
            leaf = tree[name]
            if isinstance(leaf, np.ndarray):
                leaf[...] = 7
            else:
                (leaf.elem if isinstance(leaf, Wrapper) else leaf.detach()).fill_(7)
        for other in expected:
            assert torch.equal(plain(found[other]), plain(expected[other])), f"{other} after a write to {name}"
        for tree in (found, expected):
            for count, leaf in enumerate(tree.values()):
                if isinstance(leaf, np.ndarray):
                    leaf[...] = count
                else:
                    (leaf.elem if isinstance(leaf, Wrapper) else leaf.detach()).fill_(count)


def overlapping() -> dict[str, dict[str, Any]]:
    base, matrix = torch.arange(12.0), torch.arange(24.0).view(4, 6)
    number, weight = torch.randn(4, dtype=torch.complex64), Parameter(torch.arange(6.0))
    own = torch.arange(6.0).as_subclass(Own)
    inner = torch.arange(4.0)
    return {
        "rows that overlap": {"a": base[:8], "b": base[4:], "c": base[5:6]},
        "through a third": {"a": base[:4], "b": base[3:9], "c": base[8:]},
        "columns": {"left": matrix[:, :4], "right": matrix[:, 2:], "row": matrix[1]},
        "transposed": {"w": matrix, "t": matrix.t(), "flat": matrix.view(-1)},
        "other dtype": {"w": base, "bytes": base.view(torch.uint8)[3:], "ints": base.view(torch.int32)[1:]},
        "expanded": {"one": base[:1], "many": base[:1].expand(5), "all": base},
        "conjugate": {"z": number, "conj": number.conj()[1:], "all": number.conj()},
        "negative": {"imag": number.conj().imag, "real": torch.view_as_real(number)},
        "parameter": {"w": weight, "data": weight.detach(), "head": weight.detach()[:2].requires_grad_()},
        "tied": {"w": weight, "again": weight, "data": weight.detach()},
        "subclass": {"own": own, "same": own, "view": own.as_subclass(torch.Tensor)[2:]},
        "wrapper": {"wrapper": Wrapper(inner), "inner": inner, "part": inner[1:]},
        "apart": {"a": base[:4].clone(), "b": base[:4].clone()},
    }  # fmt: skip


@pytest.mark.parametrize("memory", OFFLOADS)
@pytest.mark.parametrize("name", overlapping())
def test_arrays_that_overlap_behave_as_those_that_torch_saved(name: str, memory: str) -> None:
    """pytorch-state_dict_utils, lines 5-6: the stager, as `torch.save`, keeps ties and views."""
    tree = overlapping()[name]
    found = tc.trees.offload(tree, **OFFLOADS[memory])
    # torch.save refuses tensors of several dtypes in one storage
    expected = copy.deepcopy(tree) if name == "other dtype" else as_saved(tree)
    for key, leaf in expected.items():
        assert torch.equal(plain(found[key]), plain(leaf))
    before = {key: plain(leaf).clone() for key, leaf in tree.items()}
    behaves_as(found, expected)
    assert all(torch.equal(plain(tree[key]), leaf) for key, leaf in before.items()), "the original is as it was"


@pytest.mark.parametrize("memory", OFFLOADS)
def test_arrays_of_numpy_and_torch_in_one_memory_share_it_again(memory: str) -> None:
    base = torch.arange(12.0)
    array = np.arange(12.0)
    tree = {"t": base[2:], "n": base.numpy()[:5], "reversed": array[::-1], "some": array[3:6]}
    found = tc.trees.offload(tree, **OFFLOADS[memory])
    assert {name: type(leaf) for name, leaf in found.items()} == {name: type(leaf) for name, leaf in tree.items()}
    assert all(np.array_equal(np.asarray(found[name]), np.asarray(leaf)) for name, leaf in tree.items())
    found["n"][2:] = -1
    assert found["t"].tolist() == [-1, -1, -1, *range(5, 12)] and base[2] == 2
    found["reversed"][:] = -2
    assert found["some"].tolist() == [-2, -2, -2] and array[3] == 3


def test_only_what_leaves_show_of_a_storage_is_copied() -> None:
    """pytorch-state_dict_utils, lines 6-7: the stager copies the whole storage of a view."""
    large = torch.zeros(1 << 20)
    views = {"a": large[8:16], "b": large[12:20], "far": large[-4:]}
    assert StateDictStager().stage(views)["a"].untyped_storage().nbytes() == large.nbytes
    found = tc.trees.offload(views)
    assert found["a"].untyped_storage().nbytes() == found["b"].untyped_storage().nbytes() == 48
    assert found["a"].untyped_storage().data_ptr() == found["b"].untyped_storage().data_ptr()
    assert found["far"].untyped_storage().nbytes() == 16
    shared = tc.trees.offload(views, share=True)
    assert shared["far"].untyped_storage().nbytes() == 128, "one block, each array on a multiple of 64 bytes"


def test_a_tensor_keeps_its_class_and_its_attributes() -> None:
    """pytorch-state_dict_utils, lines 23-24: tensor subclasses, and attributes of tensors."""
    inner = torch.ones(3)
    own, slotted = torch.arange(3.0).as_subclass(Own), torch.arange(3.0).as_subclass(Slotted)
    own.note, own.scale, own.names = "text", inner, {"list": [inner, 5]}  # pyright: ignore
    slotted.scale = inner
    parameter, buffer = Parameter(torch.ones(2)), Buffer(torch.ones(2), persistent=False)
    parameter.tag, parameter.tied = "x", own  # pyright: ignore[reportAttributeAccessIssue]
    grad = torch.arange(3.0).as_subclass(Own).requires_grad_()
    tree = {"own": own, "inner": inner, "slotted": slotted, "p": parameter, "b": buffer, "grad": grad,
            "wrapper": Wrapper(inner)}  # fmt: skip
    found, expected = tc.trees.offload(tree), as_saved(tree)
    for one in (found, expected):
        assert {name: type(leaf) for name, leaf in one.items()} == {name: type(leaf) for name, leaf in tree.items()}
        assert one["own"].note == "text" and one["own"].names["list"][1] == 5 and one["p"].tag == "x"
        assert one["grad"].requires_grad and not one["own"].requires_grad
        for attribute in (one["own"].scale, one["own"].names["list"][0], one["slotted"].scale, one["wrapper"].elem):
            assert attribute is not inner
            attribute.fill_(4)
            assert one["inner"].tolist() == [4, 4, 4]
            one["inner"].zero_()
    assert found["grad"].is_leaf and found["p"].tied is found["own"] and found["own"].scale is found["inner"]
    assert isinstance(found["b"], Buffer) and found["b"].persistent is False
    assert found["own"].names is not own.names and inner.tolist() == [1, 1, 1]
    parameter.itself = parameter  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(tc.TreeError, match=r"p\.itself: .*attribute of itself"):
        tc.trees.offload({"p": parameter})
    del parameter.itself
    parameter.lock = threading.Lock()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(tc.TreeError, match=r"p\.lock: expected a value that copy.deepcopy takes"):
        tc.trees.offload({"p": parameter})


def test_one_container_at_two_places_is_one_again() -> None:
    """pytorch-state_dict_utils, lines 21-22: as `copy.deepcopy`, which the stager follows."""
    weight = torch.ones(2)
    one, values = {"w": weight, "n": [1, {"deep": weight}]}, [1, 2, {3}]
    pair = (one, values)
    tree = {
        "a": one,
        "b": [one, pair],
        "c": pair,
        "v": values,
        "w": weight,
        "equal": {"w": weight, "n": [1, {"deep": weight}]},
    }
    found, expected = tc.trees.offload(tree), as_saved(tree)
    for tree_ in (found, expected):
        assert tree_["a"] is tree_["b"][0] is tree_["c"][0] and tree_["b"][1] is tree_["c"]
        assert tree_["v"] is tree_["c"][1] and tree_["v"][2] == {3}
        assert tree_["equal"] is not tree_["a"] and tree_["equal"]["w"] is tree_["w"] is tree_["a"]["w"]
    assert found["a"] is not one and found["v"] is not values and found["v"][2] is not values[2]
    model = torch.nn.Linear(2, 2)
    held = {"model": model, "sparse": torch.eye(2).to_sparse()}
    moved: Any = tc.trees.offload({"a": held, "b": [held], "model": model})
    assert moved["a"] is moved["b"][0] and moved["a"]["sparse"].is_sparse
    both = moved["a"]["model"]["weight"], moved["model"]["weight"]
    assert both[0].data_ptr() == both[1].data_ptr(), "the state is asked at each place, and shows the same memory"
    empty: Any = tc.trees.empty_like(tree)
    assert empty["a"] is empty["b"][0] and empty["v"] is empty["c"][1]


def test_a_state_dict_keeps_its_metadata() -> None:
    """pytorch-state_dict_utils, lines 5-22: `_metadata` has the versions of modules."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    state: Any = model.state_dict()
    for given, found in ((state, tc.trees.offload(state)), (model, tc.trees.offload({"m": model})["m"])):
        assert type(found) is collections.OrderedDict
        assert found._metadata == state._metadata and found._metadata is not state._metadata
        assert not any(leaf is before for leaf, before in zip(found.values(), state.values(), strict=True)), given
    found = tc.trees.offload(state)
    found._metadata["1"]["version"] = 1
    assert state._metadata["1"]["version"] == 2
    torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).load_state_dict(found)


def test_who_is_not_to_have_the_copy_gets_specs() -> None:
    """pytorch-state_dict_utils, lines 563-633: `ranks_only`, where the others get an empty dict."""
    tree = {"w": Parameter(torch.ones(2, 3)), "own": torch.ones(2).as_subclass(Own), "n": np.ones(3), "v": [5, {1}],
            "p": tc.Sharded(torch.ones(2), (4,), (2,)), "s": torch.eye(2).to_sparse()}  # fmt: skip
    found = tc.trees.offload(tree, ranks=[], pin=True, share=True)
    assert found["w"] == tc.ArraySpec((2, 3), "float32", requires_grad=True, kind="parameter")
    assert found["own"] == tc.ArraySpec((2,), "float32") and found["p"] == tc.ArraySpec((4,), "float32")
    assert found["n"] == tc.ArraySpec((3,), "float64", kind="numpy") and found["v"] == [5, {1}]
    assert found["v"][1] is not tree["v"][1]
    store = tc.MemoryStore()
    tc.save(store, {name: tree[name] for name in ("w", "n", "s")})
    loaded = tc.load(store, {name: found[name] for name in ("w", "n", "s")})
    assert torch.equal(loaded["w"], tree["w"]) and torch.equal(loaded["s"].to_dense(), torch.eye(2))
    copied = tc.trees.offload(tree, ranks=[0], pin=True, share=True)
    assert type(copied["own"]) is Own and copied["w"].is_shared() and torch.equal(copied["w"], tree["w"])


@pytest.mark.parametrize("options", OFFLOADS.values(), ids=OFFLOADS)
def test_empty_memory_is_of_the_kind_that_is_asked_for(options: dict[str, bool]) -> None:
    """pytorch-state_dict_utils, lines 1151-1288: `_create_cpu_state_dict` with pin_memory and share_memory."""
    weight = Parameter(torch.ones(4, 3, device="meta"))
    tree = {"w": weight, "tied": weight, "scalar": torch.tensor(2.5), "none": torch.empty(0, 3), "n": np.ones(3),
            "spec": tc.ArraySpec((2, 2), "bfloat16"), "s": torch.eye(3).to_sparse(), "v": [1, {2}],
            "p": tc.Sharded([torch.ones(1), torch.ones(1)], (4,), [(0,), (2,)])}  # fmt: skip
    found = tc.trees.empty_like(tree, **options)
    assert type(found["w"]) is Parameter and found["w"].shape == (4, 3) and found["w"].device.type == "cpu"
    assert found["tied"] is found["w"] and found["scalar"].shape == () and found["none"].shape == (0, 3)
    assert found["spec"].dtype == torch.bfloat16 and found["n"].dtype == np.float64 and found["v"] == [1, {2}]
    assert torch.equal(found["s"].indices(), tree["s"].indices()) and found["p"].offset == tree["p"].offset
    assert not isinstance(found["s"].to_dense(), tc.ArraySpec)
    tensors = [found["w"], found["scalar"], found["spec"], *found["p"].locals]
    assert all(tensor.is_shared() == bool(options.get("share")) for tensor in tensors)
    one = len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert one == bool(options), "one block for all"
    tc.trees.copy_into({"w": torch.ones(4, 3)}, {"w": found["w"]})
    assert found["w"].sum() == 12


def test_values_of_unknown_kinds_are_copied_deep_without_type_check() -> None:
    """pytorch-state_dict_utils, lines 549-558."""

    class Config:
        def __init__(self, weight: torch.Tensor) -> None:
            self.weight, self.sizes = weight, [1, 2]

    weight = torch.ones(2)
    config = Config(weight)
    tree = {"config": config, "again": config, "w": weight}
    for act in (tc.trees.offload, tc.trees.empty_like):
        found: Any = act(tree, type_check=False)
        assert type(found["config"]) is Config and found["config"] is found["again"] is not config
        assert found["config"].sizes == [1, 2] and found["config"].sizes is not config.sizes
        with pytest.raises(tc.TreeError, match="type_check=False"):
            act(tree)
    assert tc.trees.offload(tree, type_check=False)["config"].weight is not weight
    moved: Any = tc.trees.offload(tree, type_check=False)
    assert moved["config"].weight is moved["w"], "the copy that the tree has"
    with pytest.raises(tc.TreeError, match=r"lock: expected a value that copy.deepcopy takes"):
        tc.trees.offload({"lock": threading.Lock()}, type_check=False)


def test_a_tensor_without_its_memory_is_named() -> None:
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(tc.TreeError, match="w: expected a tensor with all its memory, 16 bytes"):
        tc.trees.offload({"w": freed})


@pytest.mark.filterwarnings("ignore:Sparse CSR")  # torch says once that it may change
@pytest.mark.parametrize("memory", OFFLOADS)
def test_copies_are_on_the_host_whatever_the_default_device_is(memory: str, tmp_path: Path) -> None:
    w = torch.arange(12.0).view(3, 4)
    tree = {"w": w, "view": w[1:, 1:], "apart": torch.ones(6)[::2], "coo": w.to_sparse(), "csr": w.to_sparse_csr()}
    if memory != "plain":
        del tree["coo"], tree["csr"]
    with torch.device("meta"):
        copied = tc.trees.offload(tree, **OFFLOADS[memory])
        tc.save(tmp_path / "c", tree)
        loaded = tc.load(tmp_path / "c")
    for name, leaf in tree.items():
        assert torch.equal(copied[name].to_dense(), leaf.to_dense())
        assert torch.equal(loaded[name].to_dense(), leaf.to_dense())


def test_copies_are_freed_as_soon_as_nobody_has_them() -> None:
    note = torch.ones(3).as_subclass(Own)
    note.scale = torch.ones(1)  # pyright: ignore[reportAttributeAccessIssue]
    tree = {"w": torch.ones(2), "piece": tc.Sharded(torch.ones(2), (4,), 0), "own": note}
    gc.disable()
    try:
        copied = tc.trees.offload(tree)
        left = [weakref.ref(leaf) for leaf in (copied["w"], copied["piece"].local, copied["own"])]
        del copied
        assert [one() for one in left] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("act", [tc.trees.offload, tc.trees.gather, tc.trees.broadcast, tc.trees.empty_like])
def test_buffers_of_bytes_come_back_with_their_position(act: Any) -> None:
    """pytorch-state_dict_utils, lines 379-391: io.BytesIO is a value, as numbers and text are."""
    for length in (3, 10_000):
        given = io.BytesIO(b"x" * length)
        given.seek(2)
        found = act({"extra": given})["extra"]
        assert type(found) is io.BytesIO and found.tell() == 2 and found.getvalue() == given.getvalue()
        assert act is tc.trees.broadcast or found is not given
    assert tc.trees.distribute({"extra": given}, {"extra": io.BytesIO()}, src=0)["extra"].getvalue() == given.getvalue()
    into = {"extra": io.BytesIO()}
    tc.trees.copy_into({"extra": given}, into)
    assert into["extra"].getvalue() == given.getvalue()
