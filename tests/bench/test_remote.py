"""`python -m tests.bench speed --only remote`: every checkpointer beside obstore, on a server as far away as told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.bench import measure_remote, remote_checkpointers, speed
from tests.bench.plot import draw
from tests.bench.remote_checkpointers import RemoteCheckpointer
from tests.bench.results import RAW, REMOTE_PHASES, Link, summarize_all, summarize_remote, with_remote_limits
from tests.bench.show import print_remote
from tests.bench.states import SpeedTask
from tests.helpers.bench_trials import trial
from treeckpt._bench.results import BenchError
from treeckpt._bench.states import State

CONNECTIONS = {f"{RAW} {number}" for number in remote_checkpointers.CONNECTIONS}
NEAR = Link(1, 1000)


def task(directory: Path, **changes: Any) -> SpeedTask:
    return SpeedTask(
        **{"name": "remote", "directory": str(directory), "scale": 0.001, "repetitions": 1, "links": (NEAR,), **changes}
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a run in which every installed checkpointer got back what it had saved: otherwise it fails."""
    folder = tmp_path_factory.mktemp("remote")
    options = ["--only", "remote", "--link", "1/1000", "--scale", "0.01", "--repetitions", "1", "--dir", str(folder)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, threads that wait for each other take most of the time
    try:
        assert speed.main([*options, "--json", str(folder / "out.json"), "--plot", str(folder / "out.svg")]) == 0
    finally:
        torch.set_num_threads(threads)
    assert "1 ms, 1000 MB/s" in (folder / "out.svg").read_text()
    return json.loads((folder / "out.json").read_text())


def test_every_installed_checkpointer_gets_back_what_it_saved(report: dict[str, Any]) -> None:
    found = {(t["contender"], t["phase"]) for t in report["trials"] if t["scenario"] == NEAR.scenario}
    peers = {contender.name for contender in remote_checkpointers.remote_checkpointers("")} - {"treeckpt"}
    assert found == {
        *((name, phase) for name in peers | CONNECTIONS for phase in REMOTE_PHASES[:3]),
        *(("treeckpt", phase) for phase in REMOTE_PHASES),
    }


def test_the_limit_is_the_best_of_raw_and_the_server_has_one_of_its_own(report: dict[str, Any]) -> None:
    near = [t for t in report["trials"] if t["scenario"] == NEAR.scenario]
    raw = [t for t in near if t["contender"] in CONNECTIONS and t["phase"] == "load remote"]
    best = max(t["nbytes"] / t["seconds"] for t in raw)
    assert {t["limits"]["get_fresh"] for t in near} == {best}
    alone = {(t["contender"], t["phase"]) for t in report["trials"] if t["scenario"] == "remote 0/0"}
    assert alone == {(f"{RAW} 128", phase) for phase in REMOTE_PHASES[:3]}


def test_what_the_server_saw_is_counted(report: dict[str, Any]) -> None:
    for one in report["trials"]:
        assert one["requests"] > 0 and one["files_bytes"] >= one["nbytes"]
        sent = one["write_bytes"] if one["phase"] == "save remote" else one["read_bytes"]
        assert one["nbytes"] <= sent < 1.2 * one["nbytes"] + (1 << 20), one["contender"]


class OneFile(RemoteCheckpointer):
    """Keeps the state here, and gives back numbers that differ from it by `wrong`."""

    name, kinds, wrong = "one", ("save", "load"), 0

    def save(self, prefix: str, state: State) -> None:
        self.state = state
        raw = remote_checkpointers.RawObstore(self.endpoint, 1)
        raw.save(prefix, raw.prepare(state))

    def load(self, prefix: str, like: State) -> State:
        return {name: leaf + self.wrong for name, leaf in self.state.items()}


def test_a_checkpointer_that_gives_back_something_else_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_remote, "remote_checkpointers", lambda endpoint: [OneFile(endpoint)])
    assert len(list(measure_remote.run_remote(task(tmp_path)))) == 1
    monkeypatch.setattr(OneFile, "wrong", 1)
    with pytest.raises(BenchError, match=r"one: remote 1/1000: layer\.00 came back changed"):
        list(measure_remote.run_remote(task(tmp_path)))


def test_what_takes_too_long_is_cut_and_what_is_slow_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure_remote, "remote_checkpointers", lambda endpoint: [OneFile(endpoint)])
    monkeypatch.setattr(measure_remote, "PATIENCE", 0.3)
    monkeypatch.setattr(measure_remote, "SLOW", 0.2)
    measure = measure_remote.measure_work

    def measure_loads_as_quick(work: Any) -> Any:
        """On a busy machine a load, which asks the server nothing, may take longer than `PATIENCE` too."""
        usage, summed, loaded = measure(work)
        return usage if loaded is None else msgspec.structs.replace(usage, seconds=0.1), summed, loaded

    monkeypatch.setattr(measure_remote, "measure_work", measure_loads_as_quick)
    far = Link(600, 1000)
    [[save, load]] = measure_remote.run_remote(task(tmp_path, links=(far,), repetitions=2))
    assert (save.seconds, save.cut) == (0.3, True)
    assert load.cut is False
    print_remote("text", summarize_remote([save, load]))
    assert "> 0 s" in capsys.readouterr().out


def test_the_limits_are_the_best_of_raw_in_the_same_repetition() -> None:
    turns = [
        [trial(f"{RAW} 16", "save remote", 2.0), trial(f"{RAW} 16", "load remote", 4.0)],
        [trial(f"{RAW} 64", "save remote", 4.0)],
        [trial("treeckpt", "save remote", 4.0), trial("treeckpt", "restore remote", 8.0)],
    ]
    own = with_remote_limits(turns)[2]
    assert [one.limits for one in own] == [{"put": 500.0, "get_fresh": 250.0}] * 2
    assert [one.ratio for one in own] == [0.5, 0.5]


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_checkpointers, "is_installed", lambda module: module != "s3fs")
    left_out = remote_checkpointers.left_out()
    assert left_out[-1] == "fsspec safetensors is left out, without s3fs" and len(left_out) == 3
    assert not any(c.name.startswith("fsspec") for c in remote_checkpointers.remote_checkpointers(""))


def test_object_stores_have_a_picture_of_their_own(tmp_path: Path) -> None:
    remote = [trial(who, "load remote", scenario=NEAR.scenario) for who in ("treeckpt", f"{RAW} 16", "fsspec DCP")]
    cut = [trial("fsspec DCP", "save remote", 60.0, scenario=NEAR.scenario, cut=True)]
    both = draw(summarize_all([trial(), *remote, *cut]), tmp_path / "speed.svg")
    assert both == [tmp_path / "speed.svg", tmp_path / "speed-remote.svg"]
    text = both[1].read_text()
    assert "> 60 s" in text.replace("&gt;", ">") and "fsspec DCP" in text


@pytest.mark.parametrize("wrong", ["40", "-1/90", "40/0", "near/far"])
def test_a_link_is_milliseconds_and_a_rate(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        speed.main(["--only", "remote", "--link", wrong])
    assert stopped.value.code == 2
    assert "--link" in capsys.readouterr().err
