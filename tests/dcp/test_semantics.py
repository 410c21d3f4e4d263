"""Where treeckpt.dcp does what torch.distributed.checkpoint does, and where not: treeckpt/dcp/DIFFERENCES.md by rows.

Rows about several ranks are in tests/multirank/dcp_cases.py.
"""

from __future__ import annotations

import io
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import treeckpt as tc
import treeckpt.dcp

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage", "ignore:Detected an existing", "ignore:The argument"
)
Form = tuple[Callable[..., Any], Callable[..., Any]]


def _save_to_storage(state: Any, *, checkpoint_id: Any, **options: Any) -> Any:
    return dcp.save(state, storage_writer=treeckpt.dcp.Writer(checkpoint_id), **options)


def _load_from_storage(state: Any, *, checkpoint_id: Any, **options: Any) -> None:
    dcp.load(state, storage_reader=treeckpt.dcp.Reader(checkpoint_id), **options)


FORMS: dict[str, Form] = {
    "dcp": (dcp.save, dcp.load),
    "treeckpt": (treeckpt.dcp.save, treeckpt.dcp.load),
    "storage": (_save_to_storage, _load_from_storage),
}
OURS = ("treeckpt", "storage")
each = pytest.mark.parametrize("form", FORMS)


def reload(form: str, path: Path, saved: Any, target: Any, **options: Any) -> Any:
    """The target after it is loaded from what was saved."""
    save, load = FORMS[form]
    save(saved, checkpoint_id=path)
    load(target, checkpoint_id=path, **options)
    return target


def training_state(seed: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    return {
        "model": {"w": torch.rand(4, 3, generator=random), "half": torch.rand(5, generator=random).bfloat16()},
        "optimizer": {
            "state": {"w": {"step": torch.tensor(float(seed))}},
            "param_groups": [{"lr": seed / 8, "p": ["w"]}],
        },
        "values": [1, 2.5, "text", seed],
        "pair": (torch.full((2,), float(seed)), seed),
        "mixed": [torch.full((3,), float(seed)), {"n": seed}],
        "nothing": None,
        "empty": [],
    }


@each
def test_a_state_dict_comes_back_in_place(form: str, tmp_path: Path) -> None:
    target = training_state(1)
    tensor = target["model"]["w"]
    reload(form, tmp_path / "one", training_state(8), target)
    expected = training_state(8)
    assert target["model"]["w"] is tensor
    assert torch.equal(tensor, expected["model"]["w"]) and torch.equal(target["pair"][0], expected["pair"][0])
    assert torch.equal(target["model"]["half"], expected["model"]["half"])
    assert target["optimizer"]["state"]["w"]["step"] == 8 and target["mixed"][0].tolist() == [8.0] * 3
    assert target["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    assert [target[key] for key in ("values", "nothing", "empty")] == [expected["values"], None, []]
    assert target["mixed"][1] == {"n": 8} and target["pair"][1] == 8


@each
def test_names_of_flat_and_nested_state_dicts_are_the_same(form: str, tmp_path: Path) -> None:
    nested = reload(form, tmp_path / "one", {"a.b": torch.ones(2), "a.c": 3}, {"a": {"b": torch.zeros(2), "c": 0}})
    assert nested["a"]["b"].tolist() == [1, 1] and nested["a"]["c"] == 3
    flat = reload(form, tmp_path / "two", {"a": [torch.ones(2), {"b": 3}]}, {"a.0": torch.zeros(2), "a.1.b": 0})
    assert flat["a.0"].tolist() == [1, 1] and flat["a.1.b"] == 3


@each
def test_two_entries_of_one_name_are_refused(form: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"a\.b"):
        FORMS[form][0]({"a.b": 1, "a": {"b": 2}}, checkpoint_id=tmp_path / "one")


@each
def test_a_list_of_values_is_one_value(form: str, tmp_path: Path) -> None:
    assert reload(form, tmp_path / "one", {"v": [1, (2, 3)]}, {"v": [0]}) == {"v": [1, (2, 3)]}


@each
def test_a_value_below_an_integer_key(form: str, tmp_path: Path) -> None:
    found = reload(form, tmp_path / "one", {"state": {0: {"step": 5}}}, {"state": {0: {"step": 1}}})
    through_dcp = {
        0: {"step": 1},
        "0": {"step": 5},
    }  # DCP's planner, which the storage is called by, makes a second key
    assert found["state"] == ({0: {"step": 5}} if form == "treeckpt" else through_dcp)


@each
def test_missing_entries_are_refused_and_further_ones_ignored(form: str, tmp_path: Path) -> None:
    assert reload(form, tmp_path / "one", {"a": 1, "b": 2}, {"a": 0}) == {"a": 1}
    target = {"a": torch.zeros(2), "lacking": torch.zeros(2)}
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: lacking"):
        reload(form, tmp_path / "two", {"a": torch.ones(2)}, target)
    assert target["a"].tolist() == [0, 0]
    reload(form, tmp_path / "two", {"a": torch.ones(2)}, target, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert target["a"].tolist() == [1, 1] and target["lacking"].tolist() == [0, 0]


@each
def test_a_tied_target_that_is_not_in_the_file_is_missing(form: str, tmp_path: Path) -> None:
    tied = torch.zeros(2)
    with pytest.raises(CheckpointException, match="Missing key"):
        reload(form, tmp_path / "one", {"a": torch.ones(2)}, {"a": tied, "b": tied})


@each
def test_another_size_is_refused(form: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="Size mismatch between saved"):
        reload(form, tmp_path / "one", {"a": torch.ones(2)}, {"a": torch.zeros(3)})


@each
def test_numbers_are_cast_but_only_dcp_cuts_off_fractions(form: str, tmp_path: Path) -> None:
    assert reload(form, tmp_path / "one", {"a": torch.ones(2)}, {"a": torch.zeros(2).half()})["a"].tolist() == [1, 1]
    fractions, target = {"a": torch.tensor([0.5, 1.5])}, {"a": torch.zeros(2, dtype=torch.int8)}
    if form == "dcp":
        assert reload(form, tmp_path / "two", fractions, target)["a"].tolist() == [0, 1]
    else:
        with pytest.raises(CheckpointException, match=r"a dtype that holds numbers of float32, found torch\.int8"):
            reload(form, tmp_path / "two", fractions, target)


class _Counter:
    """A stateful object that notes the order of calls."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls, self.count = name, calls, 0

    def state_dict(self) -> dict[str, Any]:
        self.calls.append(f"ask {self.name}")
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append(f"give {self.name}")
        self.count = state["count"]


@each
def test_stateful_objects_at_the_top_are_asked_and_given_in_sorted_order(form: str, tmp_path: Path) -> None:
    calls: list[str] = []
    state = {name: _Counter(name, calls) for name in ("c", "a", "b")}
    state["a"].count = 5
    save, load = FORMS[form]
    save(state, checkpoint_id=tmp_path / "one")
    # when it saves, DCP asks in the order of the dict, in which ranks may differ
    assert calls == [f"ask {name}" for name in ("abc" if form == "treeckpt" else "cab")]
    state["a"].count = 0
    calls.clear()
    load(state, checkpoint_id=tmp_path / "one")
    assert state["a"].count == 5
    assert calls == [*(f"ask {name}" for name in "abc"), *(f"give {name}" for name in "abc")]


@each
def test_a_stream_of_bytes_comes_back_as_one(form: str, tmp_path: Path) -> None:
    found = reload(form, tmp_path / "one", {"stream": io.BytesIO(b"bytes")}, {"stream": None})
    assert found["stream"].getvalue() == b"bytes"


class _Custom:
    pass


@each
def test_only_values_of_unknown_kinds_are_pickled(form: str, tmp_path: Path) -> None:
    state = {"plain": [1, 2.5, None, "text", torch.float32], "custom": _Custom()}
    assert type(reload(form, tmp_path / "one", state, {"custom": 0})["custom"]) is _Custom
    if form != "dcp":
        for name, pickled in (("plain", False), ("custom", True)):
            target = {name: None}
            reader = treeckpt.dcp.Reader(tmp_path / "one", allow_pickle=False)
            load = treeckpt.dcp.load if form == "treeckpt" else dcp.load
            if pickled:
                with pytest.raises(CheckpointException, match="without running code"):
                    load(target, storage_reader=reader)
            else:
                load(target, storage_reader=reader)
                assert target["plain"] == state["plain"]


@each
def test_a_flipped_bit_is_an_error_that_names_file_and_bytes(form: str, tmp_path: Path) -> None:
    save, load = FORMS[form]
    save({"a": torch.ones(1000)}, checkpoint_id=tmp_path / "one")
    [shard] = (tmp_path / "one").glob("*.distcp" if form == "dcp" else "*.safetensors")
    data = bytearray(shard.read_bytes())
    data[data.index(torch.ones(100).numpy().tobytes()) + 2] ^= 1
    shard.write_bytes(data)
    target = {"a": torch.zeros(1000)}
    if form == "dcp":
        load(target, checkpoint_id=tmp_path / "one")
        assert target["a"][0] != 1
    else:
        with pytest.raises(CheckpointException, match=rf"{shard.name}.*bytes"):
            load(target, checkpoint_id=tmp_path / "one")


@each
def test_errors_are_checkpoint_exceptions_with_the_cause(form: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        FORMS[form][1]({"a": 0}, checkpoint_id=tmp_path / "none")
    assert list(caught.value.failures) == [0]
    if form == "treeckpt":
        assert isinstance(caught.value.failures[0][0], tc.CheckpointNotFound)
    with pytest.raises(CheckpointException):
        FORMS[form][0]({"a": lambda: 0}, checkpoint_id=tmp_path / "one")


def test_the_error_of_a_missing_path_is_printed_without_frames_of_this_package(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        treeckpt.dcp.load({"a": 0}, checkpoint_id=tmp_path / "none", no_dist=True)
    [(error, frames)] = caught.value.failures.values()
    assert isinstance(error, tc.CheckpointNotFound) and not frames and error.__traceback__ is not None
    printed = "".join(traceback.format_exception(caught.value))
    assert printed.count("Traceback") == 2 and "ended_together" not in printed.partition("CheckpointException")[2]
    assert "FileNotFoundError" not in printed and printed.count(str(error)) == 1


def test_the_error_of_a_state_dict_is_printed_with_its_frames_and_causes(tmp_path: Path) -> None:
    class Broken:
        def state_dict(self) -> Any:
            try:
                return {}["mine"]
            except KeyError as error:
                raise ValueError("no state") from error

        def load_state_dict(self, state: Any) -> None: ...

    with pytest.raises(CheckpointException) as caught:
        treeckpt.dcp.load({"a": Broken()}, checkpoint_id=tmp_path / "none", no_dist=True)
    printed = "".join(traceback.format_exception(caught.value))
    assert "KeyError: 'mine'" in printed and 'raise ValueError("no state")' in str(caught.value)


@each
def test_metadata_says_what_was_saved(form: str, tmp_path: Path) -> None:
    found = FORMS[form][0](training_state(8), checkpoint_id=tmp_path / "one")
    tensor = found.state_dict_metadata["model.w"]
    assert (tensor.size, tensor.properties.dtype) == (torch.Size([4, 3]), torch.float32)
    assert found.planner_data["optimizer.param_groups.0.lr"] == ("optimizer", "param_groups", 0, "lr")
    assert list(found.state_dict_metadata) == list(training_state(8)["model"] and found.planner_data)


@pytest.mark.parametrize("form", OURS)
def test_a_checkpoint_at_the_path_is_replaced_unless_the_writer_refuses(form: str, tmp_path: Path) -> None:
    path = tmp_path / "one"
    reload(form, path, {"a": 1}, {"a": 0})
    assert reload(form, path, {"a": 2}, {"a": 0}) == {"a": 2}
    save = treeckpt.dcp.save if form == "treeckpt" else dcp.save
    with pytest.raises(CheckpointException, match="expected no checkpoint, found one"):
        save({"a": 3}, storage_writer=treeckpt.dcp.Writer(path, overwrite=False))
    assert tc.load(path) == {"a": 2}


@pytest.mark.parametrize("form", OURS)
def test_a_directory_of_dcp_is_replaced_and_its_data_files_stay(form: str, tmp_path: Path) -> None:
    FORMS["dcp"][0]({"a": torch.ones(3)}, checkpoint_id=tmp_path)
    save, load = FORMS[form]
    save({"a": torch.zeros(3)}, checkpoint_id=tmp_path)
    assert not (tmp_path / ".metadata").exists() and len(list(tmp_path.glob("*.distcp"))) == 1
    target = {"a": torch.ones(3)}
    load(target, checkpoint_id=tmp_path)
    assert not target["a"].any()


@pytest.mark.parametrize("form", OURS)
def test_a_marker_is_there_only_where_it_is_asked_for(form: str, tmp_path: Path) -> None:
    save = treeckpt.dcp.save if form == "treeckpt" else dcp.save
    for marker in (True, False):
        save({"a": 3}, storage_writer=treeckpt.dcp.Writer(tmp_path / "one", marker=marker))
        assert (tmp_path / "one" / ".metadata").exists() is marker
        assert tc.load(tmp_path / "one") == {"a": 3} and tc.verify(tmp_path / "one").ok


def test_storages_of_dcp_are_taken_for_their_path_also_as_positional_arguments(tmp_path: Path) -> None:
    treeckpt.dcp.save({"a": 1}, dcp.FileSystemWriter(tmp_path / "one"))
    assert tc.load(tmp_path / "one") == {"a": 1}
    target = {"a": 0}
    treeckpt.dcp.load(target, dcp.FileSystemReader(tmp_path / "one"))
    assert target == {"a": 1}


def test_what_dcp_has_written_still_loads(tmp_path: Path) -> None:
    dcp.save(training_state(8), checkpoint_id=tmp_path / "one")
    for form in OURS:
        target = training_state(1)
        FORMS[form][1](target, checkpoint_id=tmp_path / "one")
        assert target["optimizer"]["param_groups"][0]["lr"] == 1.0 and target["mixed"][0].tolist() == [8.0] * 3
    treeckpt.dcp.save({"a": 1}, checkpoint_id=tmp_path / "one")
    assert not (tmp_path / "one" / ".metadata").exists() and tc.load(tmp_path / "one") == {"a": 1}


def test_files_of_other_formats_load_by_their_names(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(3)}, "step": 5}, tmp_path / "one.pt")
    for form in OURS:
        target = {"model.w": torch.zeros(3), "step": 0}
        FORMS[form][1](target, checkpoint_id=tmp_path / "one.pt")
        assert target["model.w"].tolist() == [1, 1, 1] and target["step"] == 5


@pytest.mark.parametrize("form", ["dcp", "treeckpt"])
def test_a_path_that_no_storage_knows_is_refused(form: str) -> None:
    for act in FORMS[form]:
        with pytest.raises(RuntimeError, match="Cannot detect"):
            act({"a": 1}, checkpoint_id="abc://abc.abc")
        with pytest.raises(RuntimeError, match="must be specified"):
            act({"a": 1}, checkpoint_id=None)


def test_both_forms_save_one_tree(tmp_path: Path) -> None:
    for form in OURS:
        FORMS[form][0](training_state(8), checkpoint_id=tmp_path / form)
        found = tc.load(tmp_path / form)
        assert list(found) == list(training_state(8))
        assert found["optimizer"]["param_groups"] == training_state(8)["optimizer"]["param_groups"]
        assert found["mixed"][1] == {"n": 8} and type(found["pair"]) is tuple


@pytest.mark.parametrize("form", OURS)
def test_marks_of_treeckpt_may_be_in_a_state_dict(form: str, tmp_path: Path) -> None:
    if form == "treeckpt":
        state = {
            "own": tc.PerRank({"n": 1}),
            "best": tc.FromRank(3),
            "rows": tc.Sharded(torch.ones(2, 2), (2, 2), (0, 0)),
        }
        treeckpt.dcp.save(state, checkpoint_id=tmp_path / "one")
        target = {"own": None, "best": None, "rows": torch.zeros(2, 2)}
        treeckpt.dcp.load(target, checkpoint_id=tmp_path / "one")
        assert target["own"] == tc.PerRank({"n": 1}) and target["best"] == 3 and target["rows"].sum() == 4
    else:
        tc.save(tmp_path / "one", {"rows": tc.Sharded(torch.ones(2, 2), (2, 2), (0, 0)), "n": (1, 2)})
        target = {"rows": torch.zeros(2, 2), "n": None}
        dcp.load(target, storage_reader=treeckpt.dcp.Reader(tmp_path / "one"))
        assert target["rows"].sum() == 4 and target["n"] == (1, 2)


class _OwnPlanner(DefaultSavePlanner):
    """A planner that changes what is written."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return super().transform_object(write_item, object * 2)


class _OwnLoadPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        super().load_bytes(read_item, value)
        self.original_state_dict["seen"] = read_item.dest_index.fqn


def test_planners_of_other_classes_plan(tmp_path: Path) -> None:
    treeckpt.dcp.save({"a": torch.ones(2), "b": 3}, checkpoint_id=tmp_path / "one", planner=_OwnPlanner())
    target: dict[str, Any] = {"a": torch.zeros(2), "b": 0}
    treeckpt.dcp.load(target, checkpoint_id=tmp_path / "one", planner=_OwnLoadPlanner())
    assert target["a"].tolist() == [2, 2] and target["b"] == 6


def test_a_planner_that_does_not_flatten_has_dicts_as_values(tmp_path: Path) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False)
    treeckpt.dcp.save({"a": torch.ones(2), "b": {"c": 3}}, checkpoint_id=tmp_path / "one", planner=planner)
    target: dict[str, Any] = {"a": torch.zeros(2), "b": 0}
    treeckpt.dcp.load(target, checkpoint_id=tmp_path / "one", planner=DefaultLoadPlanner(False, False))
    assert target["a"].tolist() == [1, 1] and target["b"] == {"c": 3}


# arguments of a storage -----------------------------------------------------------------------------------------------
def test_overwrite_is_taken_from_its_place_among_dcps_arguments(tmp_path: Path) -> None:
    dcp.save({"n": 1}, storage_writer=treeckpt.dcp.Writer(tmp_path))
    writer = treeckpt.dcp.Writer(tmp_path, True, True, 1, 10_000_000, False, False)
    with pytest.raises(CheckpointException, match="already exists"):
        dcp.save({"n": 2}, storage_writer=writer)
    assert tc.load(tmp_path) == {"n": 1}


@pytest.mark.parametrize(
    ("storage", "misspelt"), [(treeckpt.dcp.Writer, "overwrit"), (treeckpt.dcp.Reader, "allow_pickles")]
)
def test_an_argument_that_dcps_storage_does_not_have_is_refused(storage: Any, misspelt: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=misspelt):
        storage(tmp_path, **{misspelt: False})


def test_the_versions_of_modules_are_put_on_the_dict_that_is_loaded_into(tmp_path: Path) -> None:
    def state(version: int) -> Any:
        found = torch.nn.Linear(2, 2).state_dict()
        found._metadata = {"": {"version": version}}  # type: ignore[attr-defined]
        return {"model": found, "step": 1}

    for form, expected in (("dcp", 7), ("treeckpt", 3), ("storage", 7)):
        target = state(7)
        reload(form, tmp_path / form, state(3), target)
        assert target["model"]._metadata == {"": {"version": expected}}
