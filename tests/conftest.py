"""Hypothesis profiles, and what tests share: one S3 server, and with pytest-xdist one worker for each file.

No deadlines, which shared machines miss, and the same examples each time, so that what passes here passes elsewhere;
`--hypothesis-profile=thorough` looks much longer, and elsewhere each time.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers.s3 import S3, s3_server

# of torch, here and in processes that tests start: on a busy machine threads that wait for each other go on computing,
# and steps of small optimizers took 3 times as long
os.environ.setdefault("OMP_NUM_THREADS", "1")

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("suite", deadline=None, max_examples=60, derandomize=True, suppress_health_check=SLOW)
settings.register_profile("thorough", deadline=None, max_examples=2000, suppress_health_check=SLOW)
settings.load_profile("suite")

ROOT = Path(__file__).parent
BROWSER = "tests/browser/"
"""Files of one worker: each would else start a Chromium and servers of its own."""
LONGEST = (
    "browser/",
    "io/storage/test_mapped_read.py",  # forks, which fails in a worker that has mapped more than the machine's memory
    "saving/test_at_exit.py",
    "multirank/test_multirank.py",
    "multirank/test_training.py",
    "bench/test_bench.py",
    "demo/test_demo.py",
    "test_notebooks.py",
)
"""Files that a worker begins with, and not at the very end; and a folder."""
SHORT = ("core", "dashboard")
"""Folders of files that take a second each, which fill up the end."""
MANY = "tests/crash/test_interleavings.py::test_many"
"""Slow tests that any worker takes, one by one."""
WAITING = ("crash", "io/comm")
"""Folders whose tests wait for longer than they compute: one after the other they leave processors idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the files: the longest first, the short ones last, and those that wait spread over what is before these."""
    places = {item: item.path.relative_to(ROOT).as_posix() for item in items}

    def turn(place: str) -> int:
        long = [n for n, start in enumerate(LONGEST) if place.startswith(start)]
        return long[0] if long else len(LONGEST) + place.startswith(SHORT)

    files = dict.fromkeys(places.values())
    waiting = [place for place in files if place.startswith(WAITING)]
    computing = sorted(files.keys() - waiting, key=lambda place: (turn(place), place))
    long = [place for place in computing if not place.startswith(SHORT)]
    turns = {place: float(n) for n, place in enumerate(computing)}
    turns |= {place: 0.5 + n * len(long) / len(waiting) for n, place in enumerate(waiting)}
    items.sort(key=lambda item: turns[places[item]])


gc.disable()  # until all is collected


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Has each worker import a share of the modules before all: each is compiled by one of them, not by all of 6.

    In a fresh checkout workers that collect in the same order compile the same module at the same time.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    first, step = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    for path in sorted(ROOT.rglob("test_*.py"))[first::step]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection tells of it
            importlib.import_module(".".join(path.relative_to(ROOT.parent).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Takes modules and collected tests out of the garbage collector's passes: each took up to 1 s of a worker."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With pytest-xdist, in the order above, a file's tests on one worker, for what they share."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(MANY):
                return nodeid
            return BROWSER if nodeid.startswith(BROWSER) else super()._split_scope(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.fixture(scope="session")
def s3_process() -> Iterator[S3]:
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(s3_process: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """A server without rules, which the environment names."""
    s3_process.rules()
    for name, value in s3_process.environment().items():
        monkeypatch.setenv(name, value)
    return s3_process


@pytest.fixture(scope="session", autouse=True)
def cache_directory(tmp_path_factory):
    """The dashboard's cache, of the tests' own; and no page is shown before its runs were looked at."""
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("cache")
        patch.setenv("TREECKPT_CACHE", str(directory))
        patch.setattr("treeckpt_dashboard.store.watch.FIRST_WAIT_SECONDS", 60.0)
        yield directory


@pytest.fixture(params=["s3", "memory"])
def far_run(request: pytest.FixtureRequest, s3: S3, tmp_path: Path) -> str:
    """The URL of a run that is no directory."""
    return s3.url() if request.param == "s3" else f"memory://{tmp_path}/run"
