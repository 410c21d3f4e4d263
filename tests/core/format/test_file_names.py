"""Every file is told apart by its name, and no foreign one is taken for ours."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeckpt._core.format.files import (
    CheckpointFile,
    check_step,
    damaged_name,
    deleted_name,
    final_name,
    is_step_name,
    lease_name,
    lock_name,
    parse_file_name,
    step_name,
    step_of,
    stored_name,
    verdict_name,
    writer_tag,
)
from treeckpt._core.format.shard_header import shard_name
from treeckpt._core.format.timings import timings_name
from treeckpt.errors import TreeError

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
        (verdict_name(ID), CheckpointFile("verdict", ID)),
        (f".{verdict_name(ID)}.{'f' * 16}.tmp", CheckpointFile("temporary", ID)),
        (deleted_name(ID, "f" * 16), CheckpointFile("deleted", ID)),
        (lock_name("deleting", ID), CheckpointFile("deleting")),
        (lock_name("repairing", ID), CheckpointFile("repairing")),
        (f".{lock_name('deleting', ID)}.{'f' * 16}.tmp", CheckpointFile("temporary")),
        (stored_name(ID, "config.json"), CheckpointFile("sidecar", ID)),
        (stored_name(ID, f"x.{ID}.damaged"), CheckpointFile("sidecar", ID)),
        (f".{stored_name(ID, 'config.json')}.{'f' * 16}.tmp", CheckpointFile("temporary", ID)),
        (lease_name(ID), CheckpointFile("lease")),
        (f".index.json.{ID}.tmp", CheckpointFile("temporary")),
        (f".{timings_name('f' * 16)}.{ID}.tmp", CheckpointFile("temporary", "f" * 16)),
        (f".progress-00003.{ID}.json.tmp", CheckpointFile("temporary", ID)),
        (damaged_name("index.json", ID), CheckpointFile("damaged")),
        (damaged_name(shard_name("f" * 16, 3, 8), ID), CheckpointFile("damaged", "f" * 16)),
        (f".{damaged_name('index.json', ID)}.{ID}.tmp", CheckpointFile("temporary")),
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
        f"index.json.{ID}.damaged.{ID}.damaged",
        f"notes.txt.{ID}.damaged",
        f"index.json.{ID[1:]}.damaged",
        f"lease.{ID}0.json",
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


def test_a_temporary_file_names_its_writer_and_the_file_it_becomes():
    temporary = f".index.json.{ID}.tmp"
    assert (final_name(temporary), writer_tag(temporary)) == ("index.json", ID[:8])
    assert (final_name(".index.json.tmp"), writer_tag(".index.json.tmp")) == ("index.json", "")
    assert (final_name("index.json"), writer_tag("index.json")) == ("index.json", "")


@pytest.mark.parametrize("step", [0, 7, np.int64(7), 10**18 - 1])
def test_a_step_is_any_integer_of_at_most_18_digits(step):
    assert check_step(step) == step and type(check_step(step)) is int


@pytest.mark.parametrize(
    ("step", "expected", "found"),
    [
        (True, "an integer", "True"),
        (np.bool_(True), "an integer", "True"),
        (1.0, "an integer", "1.0"),
        ("7", "an integer", "'7'"),
        (None, "an integer", "None"),
        (-1, "a step, 0 or more", "-1"),
        (10**18, "a step, at most 999999999999999999", "1000000000000000000"),
        (10**24 - 1, "a step, at most 999999999999999999", "9" * 24),
        (10**24, "a step, at most 999999999999999999", "a number of more than 24 digits"),
        (-(10**24), "a step, 0 or more", "a number of more than 24 digits"),
    ],
)
def test_other_steps_are_refused(step, expected, found):
    with pytest.raises(TreeError) as caught:
        check_step(step)
    assert (caught.value.path, caught.value.expected) == ("step", expected) and found in caught.value.found


def test_names_of_steps_have_a_number_of_any_width_up_to_18_digits():
    names = ("step_00000007", "step_7", "step_123456789", "step_0000000123456789", "best", "step_1234567890123456789")
    assert [is_step_name(name) for name in names] == [True, True, True, True, False, False]
