"""What one process does in an interleaving, and what it tells of it; see test_interleavings."""

from __future__ import annotations

import contextlib
import io
import threading
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

import treeckpt as tc
from treeckpt._cli.main import main as command
from treeckpt._core.format.files import checksum, is_step_name, parse_file_name, step_name, step_of
from treeckpt._core.format.shard_header import BLOCK
from treeckpt._io.storage.checkpoint import read_index
from treeckpt._io.storage.open import open_run
from treeckpt._loading.flatten import flatten_store
from treeckpt._runs.run import RunDirectory
from treeckpt.policy import All, Last

__all__ = ["Action", "act"]


FROZEN = BLOCK // 8
"""Numbers of the array that most saves do not change."""


class Action(msgspec.Struct, frozen=True):
    """What to do, to which step; `seed` makes the content of a save, and tells it from all others."""

    what: str
    step: int = 0
    seed: int = 0
    grace: float = 0.0
    base: int = 0
    """The step that an incremental save follows."""

    @property
    def words(self) -> str:
        return f"{self.what} {self.step}" if self.step else self.what


def tree_of(seed: int) -> dict[str, Any]:
    """What a save writes. `frozen`, which fills a block, is the same in all of seeds below 200."""
    return {"frozen": np.full(FROZEN, seed // 200, np.int64), "w": np.full(40, seed, np.int64), "seed": seed}


def seed_in(tree: dict[str, Any]) -> int:
    """The seed of the save that a loaded tree is of; -1 where its values are not those of one save."""
    whole = list(tree) == ["frozen", "w", "seed"] and (tree["frozen"].shape, tree["w"].shape) == ((FROZEN,), (40,))
    same = whole and bool((tree["w"] == tree["seed"]).all() and (tree["frozen"] == tree["seed"] // 200).all())
    return tree["seed"] if same else -1


def place(run: str, step: int) -> str:
    return f"{run}/{step_name(step)}"


def save(run: str, action: Action) -> dict[str, Any]:
    path, files = place(run, action.step), {"config.json": b"%d" % action.seed} if action.seed % 2 else None
    options: dict[str, Any] = {"base": place(run, action.base)} if action.base else {}
    overwrite = action.what != "save"
    report = tc.save(
        path, tree_of(action.seed), step=action.step, overwrite=overwrite, comm="alone", files=files, **options
    )
    return {"saved": [action.step, report.save_id, action.seed]}


def manage(run: str, action: Action) -> dict[str, Any]:
    """A training that saves one step and keeps one."""
    options: dict[str, Any] = {"background": False, "overwrite": True, "grace": action.grace, "comm": "alone"}
    with tc.Manager(run, keep=1, incremental=action.what == "incremental", **options) as manager:
        report = manager.save(action.step, tree_of(action.seed))
        assert isinstance(report, tc.SaveReport)
    return {"saved": [action.step, report.save_id, action.seed], "cleans": True}


def clean(run: str, action: Action) -> dict[str, Any]:
    return _told_of_clean(msgspec.to_builtins(RunDirectory(run).clean([Last(1)], grace=action.grace)))


def gc(run: str, action: Action) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()) as complained:
        code = command(["gc", run, "--keep-last", "1", "--json", "--grace", f"{action.grace}"])
    if code == 2 or not printed.getvalue():
        return {"refused": complained.getvalue()}
    return _told_of_clean(msgspec.json.decode(printed.getvalue()))


def _told_of_clean(report: dict[str, Any]) -> dict[str, Any]:
    removed = [one["save_id"] for one in report["removed"] if one["what"] == "checkpoint"]
    failed = [f"{one['name']}: {one['why']}" for one in report["failed"]]
    left = [one["name"] for one in (*report["left"], *report["failed"])]
    gone = [one["name"] for one in report["left"] if one["why"].startswith("its index is gone")]
    return {"removed": removed, "gone": gone, "left": left, "failed": failed, "cleans": True}


def delete(run: str, action: Action) -> dict[str, Any]:
    tc.Manager(run, comm="alone").delete(action.step)
    return {"deleted": action.step}


def careless(run: str, action: Action) -> dict[str, Any]:
    """A deletion that looks, and then removes an index whatever it is by then."""
    store = open_run(run).folder(step_name(action.step))
    removed = read_index(store).save_id
    store.delete("index.json")
    return {"removed": [removed]}


def flatten(run: str, action: Action) -> dict[str, Any]:
    return {"flattened": flatten_store(open_run(run).folder(step_name(action.step)))}


def repair(run: str, action: Action) -> dict[str, Any]:
    report = tc.verify(place(run, action.step), repair=True)
    return {"repaired": [str(one) for one in report.repairs], "ok": report.ok}


def rebuild(run: str, action: Action) -> dict[str, Any]:
    """Makes an index again, where there is one too if the seed is odd."""
    return {"rebuilt": tc.rebuild_index(place(run, action.step), replace=bool(action.seed % 2)).save_id}


def pin(run: str, action: Action) -> dict[str, Any]:
    RunDirectory(run).pin(action.step)
    return {"pinned": action.step}


def load(run: str, action: Action) -> dict[str, Any]:
    return {"loaded": seed_in(tc.load(place(run, action.step))), "step": action.step}


def restore(run: str, action: Action) -> dict[str, Any]:
    """A training that resumes from the newest step, if there is one."""
    manager = tc.Manager(run, comm="alone")
    tree = manager.restore() if manager.latest() is not None else None
    return {"loaded": None if tree is None else seed_in(tree), "step": manager.count}


def check(run: str, action: Action) -> dict[str, Any]:
    """What is there behind an interleaving, and what one more clean-up leaves. A quarter of them is verified too."""
    before = _contents(run, whole=True, verified=action.seed % 4 == 0)
    report = RunDirectory(run).clean([All()], grace=0)
    if any(state["save_id"] is None and _lost_index(state["others"]) for state in before.values()):
        report = RunDirectory(run).clean([All()], grace=0)  # what it shares stays until its directory has gone
    left = {str(step_of(one.name)): one.why for one in report.left}
    failed = [f"{one.name}: {one.why}" for one in report.failed]
    return {"before": before, "after": _contents(run), "left": left, "failed": failed}


def _contents(run: str, *, whole: bool = False, verified: bool = False) -> dict[str, dict[str, Any]]:
    """Each step's directory: its save, with `whole` what loads from it, and the files that are of no committed save."""
    found: dict[str, dict[str, Any]] = {}
    store, named = open_run(run), dict[str, set[str]]()
    for name in store.names():
        if not is_step_name(name):
            continue
        step, path = step_of(name), f"{run}/{name}"
        save_id, copies = None, dict[str, str]()
        state: dict[str, Any] = {"save_id": None, "seed": None, "error": None, "problems": [], "others": []}
        try:
            index = tc.inspect(path)
            save_id = state["save_id"] = index.save_id
            copies = {one.name: one.xxh3 for one in index.sidecars}
            for file in index.file_list:
                named.setdefault(file.directory or name, set()).add(file.name)
            if whole:
                state["seed"] = seed_in(tc.load(path))
            if verified:
                state["problems"] = [str(problem) for problem in tc.verify(path).problems]
        except tc.TreeckptError as error:
            state["error"] = f"{type(error).__name__}: {error}"
        folder = store.folder(name)
        names = folder.entries()
        kinds = [(file, parse_file_name(file)) for file in names]
        state["directory"] = name
        state["others"] = [
            file
            for file, kind in kinds
            if not (file in copies and checksum(folder.read(file, limit=1000)) == copies[file])
            if kind is None or save_id is None or kind.save_id not in (None, save_id) or kind.kind not in _STAYING
        ]
        state["files"] = len(names)
        found[str(step)] = state
    for state in found.values():
        state["named"] = len(needed := named.get(state.pop("directory"), set()))
        state["others"] = _unnamed(state["others"], needed)
    return found


def _lost_index(files: list[str]) -> bool:
    kinds = {kind.kind for name in files if (kind := parse_file_name(name))}
    return "shard" in kinds and not kinds & {"progress", "deleted"}


def _unnamed(files: list[str], named: set[str]) -> list[str]:
    """Those of some files that are neither named by an index nor marks of a save of which a file is."""
    saves = {kind.save_id for name in named if (kind := parse_file_name(name))}
    kinds = [(name, parse_file_name(name)) for name in files if name not in named]
    return [n for n, kind in kinds if not (kind and kind.kind in ("deleted", "shared") and kind.save_id in saves)]


_STAYING = ("index", "sidecar", "timings", "pin", "damaged", "ended", "shared")
"""Kinds of files that a committed save may have beside it for good."""

_ACTIONS: dict[str, Callable[[str, Action], dict[str, Any]]] = {
    "save": save,
    "overwrite": save,
    "follow": save,
    "manager": manage,
    "incremental": manage,
    "flatten": flatten,
    "clean": clean,
    "gc": gc,
    "delete": delete,
    "careless": careless,
    "repair": repair,
    "rebuild": rebuild,
    "pin": pin,
    "load": load,
    "restore": restore,
    "check": check,
}


def act(run: str, action: Action) -> dict[str, Any]:
    """What the action tells: what it returned, or its error."""
    try:
        told = _ACTIONS[action.what](run, action)
    except Exception as error:
        ours = isinstance(error, tc.TreeckptError)
        text = "" if ours else "".join(traceback.format_exception(error)[-6:])
        told = {"error": type(error).__name__, "ours": ours, "text": f"{error}", "trace": text}
    for thread in threading.enumerate():
        if thread.name == "treeckpt-late":
            thread.join()
    return told
