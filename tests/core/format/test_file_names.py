"""Every file is told apart by its name, and no foreign one is taken for ours."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeckpt.core.format.file_names import (
    CheckpointFile,
    deleted_name,
    lease_name,
    parse_file_name,
    step_name,
    step_of,
)
from treeckpt.core.format.shard_header import shard_name
from treeckpt.core.format.timings import timings_name

ID = "0123456789abcdef"


@pytest.mark.parametrize(
    ("name", "owned"),
    [
        ("index.json", CheckpointFile("index")),
        ("pinned.json", CheckpointFile("pin")),
        (shard_name(ID, 3, 8, 0), CheckpointFile("shard", ID)),
        (shard_name(ID, 3, 8, 2), CheckpointFile("shard", ID)),
        (timings_name(ID), CheckpointFile("timings", ID)),
        (f"progress-00003.{ID}.json", CheckpointFile("progress", ID)),
        (deleted_name(ID), CheckpointFile("deleted", ID)),
        (lease_name(ID), CheckpointFile("lease")),
        (f".index.json.{ID}.tmp", CheckpointFile("temporary")),
        (f".{timings_name('f' * 16)}.{ID}.tmp", CheckpointFile("temporary", "f" * 16)),
        (f".progress-00003.{ID}.json.tmp", CheckpointFile("temporary", ID)),
    ],
)
def test_our_files_are_known(name, owned):
    assert parse_file_name(name) == owned


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "index.json.bak",
        "Index.json",
        f"notes.{ID}.json",
        f"timings.{ID}.json~",
        f".notes.txt.{ID}.tmp",
        f"..index.json.{ID}.tmp.{ID}.tmp",
        ".tmp",
        "index.json\n",
        f"timings.{ID.upper()}.json",
        "",
    ],
)
def test_others_are_not(name):
    assert parse_file_name(name) is None


@given(st.text(max_size=40))
def test_any_name_is_either(name):
    assert parse_file_name(name) is None or name.endswith((".json", ".safetensors", ".tmp"))


@given(st.integers(0, 10**18 - 1))
def test_steps_have_names_and_names_steps(step):
    assert step_of(step_name(step)) == step


def test_names_sort_as_steps_do():
    assert step_name(100) == "step_00000100"
    assert [step_of(name) for name in ("step_7", "step_x", "best", "step_٣", "step_00000001/")] == [7] + [None] * 4
