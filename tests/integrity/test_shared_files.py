"""Damage of a checkpoint that shares files, and of the one that has them x everything that is done with it.

Each gives the bytes that were saved, or an error that names what is damaged; nothing that is needed is deleted.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

import treeckpt as tc
from tests.helpers.corruption import flip
from tests.helpers.world import reseal, reseal_shard
from treeckpt import dcp
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._loading.flatten import flatten_store
from treeckpt._runs.run import RunDirectory
from treeckpt.convert import convert
from treeckpt.policy import Last

HOME, SHARER, LAST = "step_00000001", "step_00000002", "step_00000003"
NUMBERS = 70_000
"""Of the frozen array: more than a block of it."""


def state(step: int) -> dict[str, Any]:
    frozen = torch.nn.Parameter(torch.arange(NUMBERS).float(), requires_grad=False)
    return {"frozen": frozen, "trained": torch.full((100,), float(step)), "step": step}


def assert_right(tree: Any, step: int) -> None:
    expected = state(step)
    assert tree["step"] == step
    assert torch.equal(tree["frozen"], expected["frozen"]) and torch.equal(tree["trained"], expected["trained"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose steps 2 and 3 share a file of step 1."""
    run = tmp_path_factory.mktemp("shared") / "run"
    with tc.Manager(run, keep=None, incremental=True, background=False) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
    assert set(tc.inspect(run / LAST).shared_names.values()) == {HOME}
    return run


def shared_file(run: Path) -> Path:
    [name] = tc.inspect(run / SHARER).shared_names
    return run / HOME / name


def own_file(run: Path, step: str) -> Path:
    [file] = (run / step).glob("shard-00000-*")
    return file


# the damage -----------------------------------------------------------------------------------------------------------
def change(file: Path, made: Callable[[bytes], bytes]) -> None:
    file.write_bytes(made(file.read_bytes()))


def header_of(data: bytes) -> int:
    return int.from_bytes(data[:8], "little") + 8


def at_text(text: bytes, off: int = 3) -> Callable[[Path], None]:
    return lambda run: change(shared_file(run), lambda data: flip(data, data.index(text) + off))


def missing(run: Path) -> None:
    shared_file(run).unlink()


def directory_in_place(run: Path) -> None:
    file = shared_file(run)
    file.unlink()
    file.mkdir()


def of_another_save(run: Path) -> None:
    tree = state(9) | {"frozen": torch.nn.Parameter(torch.zeros(NUMBERS), requires_grad=False)}
    for at in (1, 2):
        tc.save(run.parent / "other" / f"{at}", tree, **({"base": run.parent / "other" / "1"} if at > 1 else {}))
    [file] = (run.parent / "other" / "2").glob("shard-00000.001-*")
    shutil.copyfile(file, shared_file(run))


def saved_anew(run: Path) -> None:
    shutil.rmtree(run / HOME)
    tree = state(1) | {"frozen": torch.nn.Parameter(torch.zeros(NUMBERS), requires_grad=False)}
    tc.save(run / HOME, tree, step=1)


def home_is_a_file(run: Path) -> None:
    shutil.rmtree(run / HOME)
    (run / HOME).write_bytes(b"x")


def other_index(run: Path) -> None:
    shutil.copyfile(run / SHARER / INDEX_NAME, run / HOME / INDEX_NAME)


def references(made: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Changes what the indexes of both sharers say, with seals that fit."""

    def act(run: Path) -> None:
        for step in (SHARER, LAST):
            reseal(run / step, lambda document: made(document["index"]["references"]))

    return act


def home_named(name: str) -> Callable[[Path], None]:
    return references(lambda found: found["homes"][0].__setitem__(0, name))


def in_header(text: str) -> Callable[[Path], None]:
    """Changes what the headers of both sharers say to be shared, with seals that fit."""

    def act(run: Path) -> None:
        for step in (SHARER, LAST):
            reseal_shard(own_file(run, step), lambda header: header["__metadata__"].__setitem__("shared", text))

    return act


def torn(step: str) -> Callable[[Path], None]:
    return lambda run: change(run / step / INDEX_NAME, lambda data: data[: len(data) // 2])


DAMAGE: dict[str, Callable[[Path], None]] = {
    "nothing": lambda run: None,
    "length": lambda run: change(shared_file(run), lambda data: flip(data, 1)),
    "seal": at_text(b'"seal":"', 10),
    "checksums": at_text(b'"hashes":"', 12),
    "entries": at_text(b'"data_offsets"'),
    "first byte": lambda run: change(shared_file(run), lambda data: flip(data, header_of(data))),
    "last byte": lambda run: change(shared_file(run), lambda data: flip(data, len(data) - 1)),
    "cut short": lambda run: change(shared_file(run), lambda data: data[:-1]),
    "goes on": lambda run: change(shared_file(run), lambda data: data + b"x"),
    "empty": lambda run: change(shared_file(run), lambda data: b""),
    "missing": missing,
    "a directory in its place": directory_in_place,
    "of another save": of_another_save,
    "other shard of the home": lambda run: own_file(run, HOME).unlink(),
    "index of the home missing": lambda run: (run / HOME / INDEX_NAME).unlink(),
    "index of the home torn": torn(HOME),
    "index of the home of another": other_index,
    "home missing": lambda run: shutil.rmtree(run / HOME),
    "home saved anew": saved_anew,
    "home is a file": home_is_a_file,
    "index torn": torn(LAST),
    "index missing": lambda run: (run / LAST / INDEX_NAME).unlink(),
    "index, one bit": lambda run: change(run / LAST / INDEX_NAME, lambda data: flip(data, data.index(b'"homes"') + 12)),
    "home named above": home_named(".."),
    "home named absolutely": home_named("/etc"),
    "home is itself": home_named(LAST),
    "home is long": home_named("x" * 300),
    "home with NUL": home_named("a\0b"),
    "home of no directory": home_named("step_00000099"),
    "no homes": references(lambda found: found.update(homes=[])),
    "home twice": references(lambda found: found["homes"].append(found["homes"][0])),
    "column home": references(lambda found: found.update(home=[[0, 0, 2]])),
    "column home too large": references(lambda found: found.update(home=[[7, 0, 2]])),
    "column part": references(lambda found: found.update(home_part=[[5, 0, 2]])),
    "column stayed": references(lambda found: found.update(stayed=[[2, 0, 99]])),
    "header, one bit": lambda run: change(own_file(run, LAST), lambda data: flip(data, data.index(b'"shared"') + 16)),
    "header shares nothing": in_header(""),
    "header is no list": in_header('{"a": 1}'),
    "header leads away": in_header('[[["../x", "0123456789abcdef"], 1, 1, 0, 280000, 4096]]'),
}


# what is done ---------------------------------------------------------------------------------------------------------
def load(run: Path) -> None:
    assert_right(tc.load(run / LAST), 3)


def load_into(run: Path) -> None:
    tree = state(0)
    tc.load_into(run / LAST, tree)
    assert_right(tree, 3)


def load_like(run: Path) -> None:
    assert_right(tc.load(run / LAST, state(0), read=tc.ReadOptions(copy=True)), 3)


def verify(run: Path) -> None:
    if tc.verify(run / LAST):
        load(run)


def repair(run: Path) -> None:
    if tc.verify(run / LAST, repair=True):
        load(run)


def rebuild(run: Path) -> None:
    tc.rebuild_index(run / LAST, replace=True)
    load(run)


def flatten(run: Path) -> None:
    flatten_store(tc.LocalStore(run / LAST))
    assert not tc.inspect(run / LAST).shared_names
    load(run)
    shutil.rmtree(run / HOME, ignore_errors=True)
    load(run)


def convert_it(run: Path) -> None:
    convert(run / LAST, run.parent / "out.pt")
    assert_right(torch.load(run.parent / "out.pt"), 3)


def load_by_dcp(run: Path) -> None:
    tree = {"frozen": torch.zeros(NUMBERS), "trained": torch.zeros(100), "step": 0}
    try:
        dcp.load(tree, checkpoint_id=run / LAST, no_dist=True)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
    assert_right(tree, 3)


def save_on(run: Path) -> None:
    """A save that follows it; of bytes that were changed where they lie it knows nothing, and its load finds them."""
    tc.save(run / "step_00000004", state(4), step=4, base=run / LAST)
    assert_right(tc.load(run / "step_00000004"), 4)


def train_on(run: Path) -> None:
    """A training that resumes with what loads, and cleans up."""
    with tc.Manager(run, keep=1, incremental=True, background=False, grace=0) as manager:
        manager.save(4, state(4))
    assert_right(tc.load(run / "step_00000004"), 4)


def clean(run: Path) -> None:
    RunDirectory(run).clean([Last(1)], grace=3600)


def list_it(run: Path) -> None:
    assert len(RunDirectory(run).checkpoints()) >= 1


WAYS = (
    load,
    load_into,
    load_like,
    verify,
    repair,
    rebuild,
    flatten,
    convert_it,
    load_by_dcp,
    save_on,
    train_on,
    list_it,
)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_named_or_the_bytes_are_right(whole: Path, tmp_path: Path, damage: str) -> None:
    for way in WAYS:
        place = tmp_path / way.__name__
        shutil.copytree(whole, place / "run")
        DAMAGE[damage](place / "run")
        try:
            way(place / "run")
        except tc.TreeckptError as error:
            assert damage != "nothing", error
            named = ("shard-", INDEX_NAME, HOME, LAST, "step_00000004")
            assert any(name in error.path for name in named), f"{way.__name__}: {error}"
            assert error.expected and error.found, f"{way.__name__}: {error}"
            print(way.__name__, type(error).__name__, error)
        shutil.rmtree(place)


RESEALED = ("home is itself", "home of no directory", "column home", "column part")
"""Indexes that name other files, with seals that fit: by these nothing is shared."""


@pytest.mark.parametrize("damage", [name for name in DAMAGE if name not in RESEALED])
def test_a_clean_up_beside_damage_deletes_nothing_that_is_needed(whole: Path, tmp_path: Path, damage: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    file = shared_file(run)
    DAMAGE[damage](run)
    there = file.is_file()
    report = RunDirectory(run).clean([Last(1)])
    for step in (1, 2):
        with contextlib.suppress(tc.TreeckptError):
            RunDirectory(run).delete(step)
    assert file.is_file() == there, report
